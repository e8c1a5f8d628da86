"""Quantized matrices of files in one layout: dequantized on load, or kept packed in memory.

A :class:`Source` gives the arrays of :mod:`jaxdraft.nn.packed` for any rows of a stored matrix, one
array at a time, so that the host holds little. Each format is a few functions that make them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from convert.build import Path
from convert.recipes import Piece, Recipe, as_float32, convert_into
from convert.tensors import Array, Tensor
from jaxdraft.nn.experts import PackedExperts
from jaxdraft.nn.linear import Embedding, Linear
from jaxdraft.nn.mlp import Moe
from jaxdraft.nn.packed import PARTS, PackedEmbedding, PackedLinear, PackedRows

_CHUNK = 1 << 20
"""Number of values that are processed at once."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A quantized matrix [out, in] of a file.

    Attributes:
      outputs, inputs: its shape.
      bits, block, values, rows, fine: as in :class:`jaxdraft.nn.packed.PackedLinear`.
      types: data types of its arrays, by name.
      read: function of an array's name, and the first and the end row. It returns that array for
        these rows; the first is a multiple of ``rows``.
      loose: whether these arrays are larger than the floats, so that the matrix is not kept packed.
      tensors: stored tensors that ``read`` uses, by the array's name.
    """

    outputs: int
    inputs: int
    bits: int
    block: int
    types: Mapping[str, np.dtype]
    read: Callable[[str, int, int], Array]
    tensors: Mapping[str, tuple[Tensor, ...]]
    values: str = "integer"
    rows: int = 1
    fine: int = 0
    loose: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return tuple(name for name in PARTS if name in self.types)

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.inputs // self.block)

    @functools.cached_property
    def order(self) -> Array | None:
        """Input that each stored column belongs to, or None."""
        return self.read("order", 0, self.outputs) if "order" in self.types else None


class QuantizedTensor(Tensor):
    """A stored tensor that is a whole quantized matrix (others consist of several tensors)."""

    def source(self) -> Source:
        """Return the numbers."""
        raise NotImplementedError


def pack_values(values: Array, bits: int) -> Array:
    """Put values into bytes, low bits first: uint8 [n, k] -> [n, k * bits / 8].

    Rows are padded with zeros. Example, 4 bits: 1 2 3 is 21 03.
    """
    per = 8 // bits
    if per == 1:
        return values
    values = np.pad(values, ((0, 0), (0, -values.shape[1] % per)))
    places = np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(values.reshape(len(values), -1, per) << places, axis=2)


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized matrix as a piece of a parameter: its numbers, rounded once from float32."""

    source: Source

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.outputs, self.source.inputs

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        every = (tensor for each in self.source.tensors.values() for tensor in each)
        return tuple(dict.fromkeys(every))

    def write(self, out: Array) -> None:
        source = self.source
        step = max(1, _CHUNK // source.inputs // source.rows) * source.rows
        for start in range(0, source.outputs, step):
            stop = min(start + step, source.outputs)
            names = [name for name in source.parts if name != "order"]
            arrays = {name: source.read(name, start, stop) for name in names}
            wide = dequantize(source, arrays)
            if source.order is None:
                convert_into(out[start:stop], wide)
            else:
                out[start:stop, source.order] = wide


def dequantize(source: Source, arrays: Mapping[str, Array]) -> Array:
    """Return the numbers of some rows, [n, in] float32, with the columns in stored order."""
    raw = arrays["weight_q"].reshape(len(arrays["weight_q"]), -1)
    values = _table(source.bits, source.values)[raw]  # [n, bytes, values of a byte]
    grouped = values.reshape(len(raw), source.blocks, source.block)

    def spread(name: str, coarse: str) -> Array:
        each = as_float32(arrays[name])
        if coarse in arrays:
            factors = np.repeat(as_float32(arrays[coarse]), source.fine, axis=1)
            each = each * factors[:, : each.shape[1]]
        return np.repeat(each, source.rows, axis=0)[: len(raw), :, None]

    if "zeros" in arrays:
        grouped = grouped - spread("zeros", "")
    elif "minima" not in arrays and source.values == "integer":
        grouped = grouped - np.float32(1 << (source.bits - 1))
    grouped = grouped * spread("scales", "coarse")
    if "minima" in arrays:
        grouped = grouped + spread("minima", "coarse_minima")
    return grouped.reshape(len(raw), -1)[:, : source.inputs]


@functools.cache
def _table(bits: int, values: str) -> Array:
    """Return the values of each byte, [256, 8 / bits] float32."""
    byte = np.arange(256, dtype=np.uint8)
    if values == "e4m3":
        return byte.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[:, None]
    each = byte[:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8((1 << bits) - 1)
    if values == "e2m1":
        return each.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return each.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class _Part:
    """An array of a packed matrix as a piece of a parameter.

    ``rows`` outputs share their scales in memory: a divisor of the number that do in the file.
    """

    source: Source
    name: str
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        source = self.source
        if self.name == "order":
            return (source.inputs,)
        if self.name == "weight_q":
            return source.outputs, source.blocks, source.block * source.bits // 8
        each = source.blocks
        if self.name.startswith("coarse"):
            each = -(-each // source.fine)
        return -(-source.outputs // self.rows), each

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.source.tensors[self.name]

    def write(self, out: Array) -> None:
        source = self.source
        if self.name == "order":
            out[...] = source.order
            return
        step = max(1, _CHUNK // source.inputs // source.rows) * source.rows
        for start in range(0, source.outputs, step):
            found = source.read(self.name, start, min(start + step, source.outputs))
            if self.name == "weight_q":
                out[start : start + len(found)] = found
                continue
            found = np.repeat(found, source.rows // self.rows, axis=0)
            first = start // self.rows
            out[first : first + len(found)] = found[: len(out) - first]


def pack(
    module: nnx.Module,
    recipes: Mapping[Path, Recipe],
    dtype: DTypeLike,
    kinds: Collection[str] | None = None,
) -> dict[Path, Recipe]:
    """Keep matrices packed wherever ``module`` has one whose pieces are all quantized.

    Pieces that are stored alike become one :class:`~jaxdraft.nn.packed.PackedLinear`. Others, as
    queries in four bits beside values in six, become a :class:`~jaxdraft.nn.packed.PackedRows` of
    several. Embeddings become a :class:`~jaxdraft.nn.packed.PackedEmbedding`, and experts that are
    all stored alike :class:`~jaxdraft.nn.experts.PackedExperts`.

    Args:
      module: an abstract module; changed in place.
      recipes: recipes of its parameters.
      dtype: type of its products.
      kinds: kinds of values that stay packed. Default: all.

    Returns:
      The recipes of the changed module.
    """
    made: dict[Path, Recipe] = {}
    for path, recipe in recipes.items():
        pieces = [piece.source for piece in recipe.pieces if isinstance(piece, Quantized)]
        loose = len(pieces) < len(recipe.pieces) or not all(
            not source.loose and (kinds is None or source.values in kinds) for source in pieces
        )
        if loose:
            made[path] = recipe
            continue
        experts = _pack_experts(module, path, recipe, pieces, dtype)
        place = _place(module, path)
        if place is None:
            made |= {path: recipe} if experts is None else experts
            continue
        parent, name, old = place
        runs = _runs(pieces)
        kind = PackedEmbedding if isinstance(old, Embedding) else PackedLinear
        built = [_build(kind, run, dtype) for run in runs]
        if len(built) == 1:
            new, parts = built[0]
            made |= {(*path[:-1], part): each for part, each in parts.items()}
        else:
            new = PackedRows([each for each, _ in built])
            for i, (_, parts) in enumerate(built):
                made |= {(*path[:-1], "below", i, part): each for part, each in parts.items()}
        setattr(parent, name, new)
    return made


def _pack_experts(
    module: nnx.Module, path: Path, recipe: Recipe, pieces: Sequence[Source], dtype: DTypeLike
) -> dict[Path, Recipe] | None:
    """Put packed matrices of experts into ``module``, and return the recipes of their arrays.

    None: the parameter holds no experts, or they are not all stored alike.
    """
    if not pieces or len(recipe.shape) != 3 or len(path) < 2:
        return None
    parent = _at(module, path[:-1])
    ordered = any(source.order is not None for source in pieces)
    if not isinstance(parent, Moe) or ordered or len(_runs(pieces)) > 1:
        return None
    count, outputs, _ = recipe.shape
    packed, parts = _build(PackedLinear, pieces, dtype)
    parts = {
        name: Recipe.stack((count, part.shape[0] // count, *part.shape[1:]), part.pieces)
        for name, part in parts.items()
    }
    arrays = {
        name: jax.ShapeDtypeStruct(part.shape, pieces[0].types[name])
        for name, part in parts.items()
    }
    form = dataclasses.replace(packed.form, outputs=outputs)
    setattr(parent, str(path[-1]), PackedExperts(arrays, form))
    return {(*path, name): part for name, part in parts.items()}


def _at(module: nnx.Module, path: Path) -> Any:
    parent: Any = module
    for key in path:
        parent = parent[key] if isinstance(key, int) else getattr(parent, key)
    return parent


def _place(module: nnx.Module, path: Path) -> tuple[Any, str, Any] | None:
    """Return the module that owns a matrix, the matrix's name in it, and its present module."""
    if path[-1] != "weight" or len(path) < 2:
        return None
    parent = _at(module, path[:-2])
    name = str(path[-2])
    old = getattr(parent, name, None)
    return (parent, name, old) if type(old) in (Linear, Embedding) else None


def _runs(sources: Sequence[Source]) -> list[list[Source]]:
    """Group neighbours that can be concatenated in one packed matrix."""
    runs: list[list[Source]] = []
    for source in sources:
        if runs and _alike(runs[-1][-1], source):
            runs[-1].append(source)
        else:
            runs.append([source])
    return runs


def _alike(first: Source, second: Source) -> bool:
    keys = ("inputs", "bits", "block", "values", "fine", "parts", "types")
    if any(getattr(first, key) != getattr(second, key) for key in keys):
        return False
    ours, theirs = first.order, second.order
    return ours is None or theirs is None or np.array_equal(ours, theirs)


def _build(
    kind: type[PackedLinear], run: Sequence[Source], dtype: DTypeLike
) -> tuple[PackedLinear, dict[str, Recipe]]:
    """Return a packed module without numbers, and the recipes of its arrays."""
    first = run[0]
    # A group of outputs must not reach into the next matrix.
    rows = math.gcd(*(s.rows for s in run), *(s.outputs for s in run[:-1]))
    parts: dict[str, Recipe] = {}
    for name in first.parts:
        pieces: list[Piece] = [_Part(source, name, rows) for source in run]
        if name == "order":
            parts[name] = Recipe.of(pieces[0])
            continue
        height = sum(piece.shape[0] for piece in pieces)
        parts[name] = Recipe.stack((height, *pieces[0].shape[1:]), pieces)
    arrays: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(recipe.shape, first.types[name])
        for name, recipe in parts.items()
    }
    module = kind(
        **arrays,
        bits=first.bits,
        block=first.block,
        inputs=first.inputs,
        dtype=dtype,
        values=first.values,
        rows=rows,
        fine=first.fine,
    )
    return module, parts
