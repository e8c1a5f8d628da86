"""Parsers of products, embeddings and norms, which all parts of a graph contain.

Each function takes a value and returns its computation: the source values, the tensors in use
and the configuration of the module. Together with attention.py,
delta_net.py and feed_forward.py they are a recursive-descent parser over the edges of a graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeVar

from convert.artifact.genai_config import Names
from convert.artifact.quantized import Blocks, Quantized
from convert.artifact.walk import Call, Walk, axis_of
from convert.errors import ArtifactError
from convert.recipes import Dense, Matrix, Plain, Recipe, shortest
from convert.tensors import FLOATS, INT4, UINT4, UINT8, Tensor

T = TypeVar("T")

Layout = Literal["dense", "paged"]


@dataclasses.dataclass(frozen=True)
class Io:
    """Names of a graph's inputs and outputs, and how it lays rows out.

    ``dense`` graphs have [batch, sequence] rows, ``paged`` graphs one axis of packed rows.
    """

    inputs: Names
    outputs: Names
    layout: Layout

    @property
    def kept(self) -> list[int]:
        """The leading zeros of a Reshape that keeps the row axes."""
        return [0] if self.layout == "paged" else [0, 0]

    @property
    def rows(self) -> tuple[str, ...]:
        """The dynamic row axes."""
        return ("rows",) if self.layout == "paged" else ("batch", "sequence")


def linear(
    walk: Walk, value: str, inputs: int | None, outputs: int | None, *, quantized: bool = True
) -> tuple[str, Matrix]:
    """Match ``value = x @ W.T``: (x, W [outputs, inputs]). None: any width.

    x --> MatMul      = value      <-- W.T [inputs, outputs]
    x --> MatMulNBits = value      <-- packed W, scales, [zero points]
    """
    if not quantized or walk.op(value) != "MatMulNBits":
        call = walk.expect_op(value, "MatMul")
        tensor = walk.weight(call["b"], f"{call.node.label}, weight", (inputs, outputs))
        return call["a"], Dense.of(tensor, transposed=True)
    call = walk.expect_op(value, "MatMulNBits")
    return call["a"], _matmul_nbits(walk, call, inputs, outputs)


def _matmul_nbits(walk: Walk, call: Call, inputs: int | None, outputs: int | None) -> Quantized:
    label, a = call.node.label, call.attributes
    bits, block, width, rows = a["bits"], a["block_size"], a["K"], a["N"]
    for what, have, want in (("K", width, inputs), ("N", rows, outputs)):
        if have <= 0 or (want is not None and have != want):
            raise ArtifactError(walk.file, f"{label}, {what}", have, want or "a positive width")
    _check_block(walk, label, block, bits)
    blocks = Blocks(bits, block, width, zero=1 << (bits - 1))
    packed = walk.tensor(
        call["b"],
        f"{label}, weight",
        shape=(rows, blocks.count, block * bits // 8),
        dtypes=(UINT8,),
    )
    scales = _scales(walk, call["scales"], label, rows, blocks)
    zeros = _zero_points(walk, call["zero_points"], label, rows, blocks, scales)
    return Quantized(packed, scales, zeros, blocks, rows, 0, rows)


def _check_block(walk: Walk, label: str, block: int, bits: int) -> None:
    if block < 8 or block & (block - 1) or block * bits % 8:
        raise ArtifactError(walk.file, f"{label}, block_size", block, "a power of two, 8 or more")


def _scales(walk: Walk, name: str, label: str, rows: int, blocks: Blocks) -> Tensor:
    stored = walk.graph.initializers.get(name)
    flat = stored is not None and len(stored.shape) == 1
    shape = (rows * blocks.count,) if flat else (rows, blocks.count)
    dtypes = tuple(FLOATS) if walk.dtype is None else (walk.dtype,)
    return walk.tensor(name, f"{label}, scales", shape=shape, dtypes=dtypes)


def _zero_points(
    walk: Walk, name: str, label: str, rows: int, blocks: Blocks, scales: Tensor
) -> Tensor | None:
    """Return packed (uint8) or plain (float) zero points, or None for the implied one."""
    if not name:
        return None
    where = f"{label}, zero_points"
    stored = walk.graph.initializers.get(name)
    if stored is None:
        raise ArtifactError(
            walk.file, where, f"{name!r}, which is not an initializer", "an initializer"
        )
    columns = blocks.zero_bytes if stored.data_type == UINT8 else blocks.count
    shape = (rows * columns,) if len(stored.shape) == 1 else (rows, columns)
    return walk.tensor(name, where, shape=shape, dtypes=(UINT8, scales.data_type))


def embedding(walk: Walk, value: str, ids: str, vocab: int, width: int) -> Matrix:
    """Match ``value = table[ids]``: the table [V, D], in any of its stored forms.

    table [V, D] ----------------------------------> Gather = value
    head [D, V] (tied) -> Transpose ---------------> Gather = value
    packed table, scales --------------------------> GatherBlockQuantized -> [Slice] = value
    head [V, blocks, bytes] (tied) -> Reshape -----> GatherBlockQuantized -> [Slice] = value
    """
    if walk.op(value) == "Slice":  # the rows of a quantized head are padded to whole blocks
        call = walk.expect_op(value, "Slice")
        walk.expect(call, "starts", [0])
        walk.expect(call, "ends", [width])
        walk.expect(call, "axes", [-1])
        value = call["data"]
    call = walk.expect_op(value, "Gather", "GatherBlockQuantized")
    walk.expect_same(f"{call.node.label}, indices", call["indices"], ids)
    if call.node.op == "GatherBlockQuantized":
        return _gather_quantized(walk, call, vocab, width)
    if axis_of(call, 2) != 0:
        raise ArtifactError(walk.file, f"{call.node.label}, axis", call.attributes["axis"], 0)
    where = f"{call.node.label}, table"
    if walk.op(call["data"]) == "Transpose":  # the head of a tied model, [D, V]
        turned = walk.expect_op(call["data"], "Transpose")
        check_perm(walk, turned, (1, 0))
        tensor = walk.weight(turned["data"], where, (width, vocab))
        return Dense.of(tensor, transposed=True)
    return Dense.of(walk.weight(call["data"], where, (vocab, width)), transposed=False)


def _gather_quantized(walk: Walk, call: Call, vocab: int, width: int) -> Quantized:
    label, block = call.node.label, call.attributes["block_size"]
    name, where = call["data"], f"{call.node.label}, table"
    if walk.op(name) == "Reshape":  # the head of a tied model, [V, blocks, bytes]
        bits = call.attributes["bits"]
        _check_block(walk, label, block, bits)
        blocks = Blocks(bits, block, width, zero=1 << (bits - 1))
        reshape = walk.expect_op(name, "Reshape")
        walk.expect(reshape, "shape", [vocab, blocks.row_bytes])
        shape = (vocab, blocks.count, block * bits // 8)
        packed = walk.tensor(reshape["data"], where, shape=shape, dtypes=(UINT8,))
    else:
        stored = walk.graph.initializers.get(name)
        data_type = stored.data_type if stored else UINT8
        typed = data_type in (INT4, UINT4)
        bits = 4 if typed else call.attributes["bits"]
        _check_block(walk, label, block, bits)
        signed = data_type == INT4
        # A typed table has no implied zero point; a table of bytes has the middle of its range.
        zero = 0 if typed else 1 << (bits - 1)
        blocks = Blocks(bits, block, width, zero=zero, signed=signed)
        if width * bits % 8:
            raise ArtifactError(walk.file, where, f"{width} values per row", "whole bytes per row")
        columns = width if typed else width * bits // 8
        packed = walk.tensor(name, where, shape=(vocab, columns), dtypes=(INT4, UINT4, UINT8))
    scales = _scales(walk, call["scales"], label, vocab, blocks)
    zeros = None
    if call["zero_points"]:
        if packed.data_type != UINT8:
            raise ArtifactError(
                walk.file, f"{label}, zero_points", "zero points of a typed table", "none"
            )
        zeros = _zero_points(walk, call["zero_points"], label, vocab, blocks, scales)
    return Quantized(packed, scales, zeros, blocks, vocab, 0, vocab)


def check_perm(walk: Walk, call: Call, perm: tuple[int, ...]) -> None:
    found = call.attributes["perm"] or tuple(reversed(range(len(perm))))  # the default
    if found != perm:
        raise ArtifactError(walk.file, f"{call.node.label}, perm", list(found), list(perm))


@dataclasses.dataclass(frozen=True)
class Norm:
    """An RMSNorm: its input, weight and epsilon. ``skip`` is the value added to the input first."""

    source: str
    skip: str  # empty: nothing
    sum: str  # the sum, where the graph uses it; without a skip, the input itself
    weight: Tensor
    eps: float

    @property
    def recipe(self) -> Recipe:
        """The weight."""
        return Recipe.of(Plain(self.weight, self.weight.shape))


def rms_norm(walk: Walk, value: str, width: int | None) -> Norm:
    """Match ``value = norm(x)`` or ``value = norm(x + skip)``.

    x ---------> SimplifiedLayerNormalization = value
    x, skip ---> SkipSimplifiedLayerNormalization = value, and the sum as fourth output
    """
    call = walk.expect_op(value, "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
    where = f"{call.node.label}, scale"
    eps = shortest(call.attributes["epsilon"])
    if not 0 < eps < 1:
        raise ArtifactError(
            walk.file, f"{call.node.label}, epsilon", eps, "a small positive number"
        )
    if call.node.op == "SimplifiedLayerNormalization":
        walk.outputs(call, [value])
        return Norm(call["x"], "", call["x"], walk.weight(call["scale"], where, (width,)), eps)
    total = call.output(3)
    walk.outputs(call, [value, "", "", total] if total else [value])
    weight = walk.weight(call["gamma"], where, (width,))
    return Norm(call["input"], call["skip"], total, weight, eps)


def all_equal(walk: Walk, what: str, values: Sequence[T]) -> T:
    """Return the one value that all layers have; the module has one description for all of them."""
    for i, value in enumerate(values):
        if value != values[0]:
            raise ArtifactError(
                walk.file, what, f"{value} (number {i})", f"{values[0]}, as the first"
            )
    return values[0]


def unskipped(walk: Walk, norm: Norm) -> str:
    """Return the input of a norm to which nothing was added."""
    if norm.skip:
        raise ArtifactError(
            walk.file,
            f"initializer {norm.weight.name}",
            "a norm of a sum",
            "one of its input alone",
        )
    return norm.source


def split_into(walk: Walk, value: str, sizes: list[int], output: int) -> str:
    """Match ``value`` as one part of a last axis cut into ``sizes``; return the uncut value."""
    call = walk.expect_op(value, "Split", output=output)
    walk.expect(call, "split", sizes)
    if call.attributes["axis"] != -1 or len(call.node.outputs) != len(sizes):
        raise ArtifactError(
            walk.file,
            call.node.label,
            f"{len(call.node.outputs)} parts of axis {call.attributes['axis']}",
            f"{len(sizes)} parts of axis -1",
        )
    if call.attributes["num_outputs"] not in (0, len(sizes)):
        raise ArtifactError(
            walk.file, f"{call.node.label}, num_outputs", call.attributes["num_outputs"], len(sizes)
        )
    return call["data"]


def cast(walk: Walk, value: str, data_type: int | None) -> str:
    """Match ``value = x`` in another type: x."""
    call = walk.expect_op(value, "Cast")
    if data_type is not None and call.attributes["to"] != data_type:
        raise ArtifactError(
            walk.file,
            f"{call.node.label}, to",
            f"type {call.attributes['to']}",
            f"type {data_type}",
        )
    return call["x"]


def io_input(
    walk: Walk, io: Io, role: str, data_type: int, shape: tuple[int | str | None, ...]
) -> str:
    """Return the graph input that plays ``role``."""
    if role not in io.inputs:
        raise ArtifactError(
            walk.file, f"input for {role}", "no name in the configuration", f"inputs.{role}"
        )
    return walk.input(io.inputs[role], f"the input for {role}", data_type, shape)
