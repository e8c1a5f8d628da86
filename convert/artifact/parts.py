"""The parts that graphs share: products, norms, embeddings, feed-forward, attention, delta net.

Each function is given a value and says what computes it: which values that came from, which
tensors it uses, and what the configuration of the module is. Together they are a recursive-descent
parser over the edges of the graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

import numpy as np

from convert.artifact.dequantize import Blocks
from convert.artifact.genai_config import CONFIG, Names
from convert.artifact.graph import (
    FLOAT,
    FLOATS,
    INT4,
    INT32,
    INT64,
    UINT4,
    UINT8,
    Tensor,
)
from convert.artifact.walk import Call, Walk, axis_of
from convert.errors import ArtifactError
from convert.recipes import (
    Dense,
    Experts,
    Matrix,
    NegativeExponential,
    Plain,
    Quantized,
    Recipe,
)
from jaxdraft.config import FULL_ATTENTION, AttentionConfig, DeltaNetConfig, MlpConfig, MoeConfig

T = TypeVar("T")

Layout = Literal["dense", "paged"]
Recipes = dict[tuple[str | int, ...], Recipe]


def shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 9.99999997e-07 -> 1e-06."""
    return float(str(np.float32(value)))


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


# Products.


def linear(
    walk: Walk, value: str, inputs: int | None, outputs: int | None, *, quantized: bool = True
) -> tuple[str, Matrix]:
    """``value = x @ W.T``: (x, W [outputs, inputs]). None: any width."""
    if not quantized or walk.op(value) != "MatMulNBits":
        call = walk.take(value, "MatMul")
        tensor = walk.weight(call["b"], f"{call.node.label}, weight", (inputs, outputs))
        return call["a"], Dense.of(tensor, transposed=True)
    call = walk.take(value, "MatMulNBits")
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
    """Packed (uint8) or plain (float) zero points; an absent input means the implied one."""
    if not name:
        return None
    where = f"{label}, zero_points"
    stored = walk.graph.initializers.get(name)
    if stored is None:
        raise ArtifactError(
            walk.file, where, f"{name!r}, which is no initializer", "an initializer"
        )
    columns = blocks.zero_bytes if stored.data_type == UINT8 else blocks.count
    shape = (rows * columns,) if len(stored.shape) == 1 else (rows, columns)
    return walk.tensor(name, where, shape=shape, dtypes=(UINT8, scales.data_type))


# Embeddings.


def embedding(walk: Walk, value: str, ids: str, vocab: int, width: int) -> Matrix:
    """``value = table[ids]``: the table [V, D], in whichever form the graph keeps it."""
    if walk.op(value) == "Slice":  # the rows of a quantized head are padded to whole blocks
        call = walk.take(value, "Slice")
        walk.expect(call, "starts", [0])
        walk.expect(call, "ends", [width])
        walk.expect(call, "axes", [-1])
        value = call["data"]
    call = walk.take(value, "Gather", "GatherBlockQuantized")
    walk.same(f"{call.node.label}, indices", call["indices"], ids)
    if call.node.op == "GatherBlockQuantized":
        return _gather_quantized(walk, call, vocab, width)
    if axis_of(call, 2) != 0:
        raise ArtifactError(walk.file, f"{call.node.label}, axis", call.attributes["axis"], 0)
    where = f"{call.node.label}, table"
    if walk.op(call["data"]) == "Transpose":  # the head of a tied model, [D, V]
        turned = walk.take(call["data"], "Transpose")
        _perm(walk, turned, (1, 0))
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
        reshape = walk.take(name, "Reshape")
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
            raise ArtifactError(walk.file, where, f"{width} values a row", "whole bytes a row")
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


def _perm(walk: Walk, call: Call, perm: tuple[int, ...]) -> None:
    found = call.attributes["perm"] or tuple(reversed(range(len(perm))))  # the default
    if found != perm:
        raise ArtifactError(walk.file, f"{call.node.label}, perm", list(found), list(perm))


# Norms.


@dataclasses.dataclass(frozen=True)
class Norm:
    """An RMSNorm: its input, weight and epsilon. ``skip`` is what was added to the input first."""

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
    """``value = norm(x)`` or ``value = norm(x + skip)``."""
    call = walk.take(value, "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
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


def agree(walk: Walk, what: str, values: Sequence[T]) -> T:
    """The one value that all layers have; the module has one description for all of them."""
    for i, value in enumerate(values):
        if value != values[0]:
            raise ArtifactError(
                walk.file, what, f"{value} (number {i})", f"{values[0]}, as the first"
            )
    return values[0]


def lone(walk: Walk, norm: Norm) -> str:
    """The input of a norm to which nothing was added."""
    if norm.skip:
        raise ArtifactError(
            walk.file,
            f"initializer {norm.weight.name}",
            "a norm of a sum",
            "one of its input alone",
        )
    return norm.source


# Feed-forward.


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """A feed-forward part: the value it reads, its shape, its parameters."""

    source: str
    config: MlpConfig | MoeConfig
    recipes: Recipes


def feed_forward(walk: Walk, value: str, io: Io, width: int) -> FeedForward:
    """``value = mlp(x)``, routed experts, or routed experts beside a gated shared one."""
    op = walk.op(value)
    if op in ("MoE", "QMoE"):
        return _experts(walk, value, width)
    if op != "GatedAdd":
        return mlp(walk, value, width)
    call = walk.take(value, "GatedAdd")
    routed = _experts(walk, call["x"], width)
    shared = mlp(walk, call["y"], width)
    gate = walk.take(call["gate"], "Sigmoid")
    source, weight = linear(walk, gate["x"], width, 1)
    walk.same(f"{call.node.label}, the shared expert", shared.source, routed.source)
    walk.same(f"{call.node.label}, the gate", source, routed.source)
    assert isinstance(routed.config, MoeConfig) and isinstance(shared.config, MlpConfig)
    config = dataclasses.replace(routed.config, shared_hidden=shared.config.hidden)
    recipes = {
        **routed.recipes,
        **{("shared", *path): recipe for path, recipe in shared.recipes.items()},
        ("shared_gate", "weight"): Recipe.rows([weight]),
    }
    return FeedForward(routed.source, config, recipes)


def mlp(walk: Walk, value: str, width: int) -> FeedForward:
    """``value = down(silu(gate(x)) * up(x))``."""
    product, down = linear(walk, value, None, width)
    hidden = down.shape[1]
    call = walk.take(product, "Mul")
    silu = walk.take(call["a"], "Mul")
    sigmoid = walk.take(silu["b"], "Sigmoid")
    walk.same(f"{sigmoid.node.label}, input", sigmoid["x"], silu["a"])
    gate, up = silu["a"], call["b"]
    if walk.op(gate) == "Split":
        split = split_into(walk, gate, [hidden, hidden], 0)
        walk.same(f"{call.node.label}, up", split_into(walk, up, [hidden, hidden], 1), split)
        source, both = linear(walk, split, width, 2 * hidden)
        recipe = Recipe.rows([both])
    else:
        source, gate_weight = linear(walk, gate, width, hidden)
        other, up_weight = linear(walk, up, width, hidden)
        walk.same(f"{call.node.label}, up", other, source)
        recipe = Recipe.rows([gate_weight, up_weight])
    recipes: Recipes = {
        ("gate_up", "weight"): recipe,
        ("down", "weight"): Recipe.rows([down]),
    }
    return FeedForward(source, MlpConfig(hidden=hidden), recipes)


def split_into(walk: Walk, value: str, sizes: list[int], output: int) -> str:
    """``value`` is part ``output`` of the last axis, cut into ``sizes``: what is cut."""
    call = walk.take(value, "Split", output=output)
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


def _experts(walk: Walk, value: str, width: int) -> FeedForward:
    call = walk.take(value, "MoE", "QMoE")
    label, source = call.node.label, call["x"]
    reshape = walk.take(call["router"], "Reshape")
    router_source, router = linear(walk, reshape["data"], width, None)
    experts = router.shape[0]
    walk.expect(reshape, "shape", [-1, experts])
    walk.same(f"{label}, the router", router_source, source)
    if not 1 <= call.attributes["k"] <= experts:
        raise ArtifactError(walk.file, f"{label}, k", call.attributes["k"], f"1..{experts}")
    if call.node.op == "MoE":
        fc1 = Dense.of(
            walk.weight(call["fc1"], f"{label}, fc1", (experts, None, width)), transposed=False
        )
        hidden = fc1.shape[0] // experts // 2
        fc2 = Dense.of(
            walk.weight(call["fc2"], f"{label}, fc2", (experts, width, hidden)), transposed=False
        )
    else:
        fc1 = _quantized_experts(walk, call, "fc1", experts, None, width)
        hidden = fc1.shape[0] // experts // 2
        fc2 = _quantized_experts(walk, call, "fc2", experts, width, hidden)
    if fc1.shape[0] != experts * 2 * hidden:
        raise ArtifactError(walk.file, f"{label}, fc1", f"{fc1.shape[0]} rows", "an even number")
    for role, rows in (("fc1_bias", 2 * hidden), ("fc2_bias", width)):
        _zero_bias(walk, call[role], f"{label}, {role}", (experts, rows))
    config = MoeConfig(experts=experts, active=call.attributes["k"], hidden=hidden, shared_hidden=0)
    recipes: Recipes = {
        ("router", "weight"): Recipe.rows([router]),
        ("gate_up",): Recipe.of(Experts(fc1, experts, interleaved=True)),
        ("down",): Recipe.of(Experts(fc2, experts, interleaved=False)),
    }
    return FeedForward(source, config, recipes)


def _quantized_experts(
    walk: Walk, call: Call, role: str, experts: int, rows: int | None, width: int
) -> Quantized:
    label, bits = call.node.label, call.attributes["expert_weight_bits"]
    block = call.attributes["block_size"] or width
    if width * bits % 8 or width % block or block * bits % 8:
        raise ArtifactError(
            walk.file,
            f"{label}, {role}",
            f"{width} values a row in blocks of {block}",
            "whole blocks",
        )
    blocks = Blocks(bits, block, width, zero=1 << (bits - 1))
    packed = walk.tensor(
        call[role], f"{label}, {role}", shape=(experts, rows, width * bits // 8), dtypes=(UINT8,)
    )
    rows = packed.shape[1]
    stored = walk.graph.initializers.get(call[f"{role}_scales"])
    flat = stored is not None and len(stored.shape) == 2 and blocks.count == 1
    shape = (experts, rows) if flat else (experts, rows, blocks.count)
    dtypes = tuple(FLOATS) if walk.dtype is None else (walk.dtype, FLOAT)
    scales = walk.tensor(
        call[f"{role}_scales"], f"{label}, {role}_scales", shape=shape, dtypes=dtypes
    )
    return Quantized(packed, scales, None, blocks, experts * rows, 0, experts * rows)


def _zero_bias(walk: Walk, name: str, where: str, shape: tuple[int, int]) -> None:
    if name:
        bias = walk.weight(name, where, shape)
        if np.any(bias.read()):
            raise ArtifactError(walk.file, where, "numbers that are not zero", "zeros, or no bias")
        bias.release()


_MIXERS = ("GroupQueryAttention", "PagedAttention", "LinearAttention", "GatedDeltaNet")


def count_layers(walk: Walk, configured: int, where: str) -> None:
    """The graph has as many layers as the configuration says: one mixer each."""
    found = sum(node.op in _MIXERS for node in walk.graph.nodes)
    if found != configured:
        raise ArtifactError(
            CONFIG, f"{where}.num_hidden_layers", configured, f"{found}, the layers of {walk.file}"
        )


# Attention.


@dataclasses.dataclass(frozen=True)
class Tables:
    """The rotary tables [positions, rotary_dim / 2] that a graph uses."""

    cos: Tensor
    sin: Tensor

    @property
    def positions(self) -> int:
        return self.cos.shape[0]

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[1]

    @property
    def recipes(self) -> Recipes:
        return {
            ("rotary", "cos"): Recipe.of(Plain(self.cos, self.cos.shape)),
            ("rotary", "sin"): Recipe.of(Plain(self.sin, self.sin.shape)),
        }


def rotary_tables(walk: Walk, cos: str, sin: str, label: str) -> Tables:
    """Two tables of one shape. They may be stored in float32 beside a narrower body."""
    dtypes = tuple(FLOATS)
    first = walk.tensor(cos, f"{label}, cos_cache", shape=(None, None), dtypes=dtypes)
    second = walk.tensor(sin, f"{label}, sin_cache", shape=first.shape, dtypes=(first.data_type,))
    return Tables(first, second)


@dataclasses.dataclass(frozen=True)
class Mixer:
    """An attention or delta-net part: the value it reads, its shape, its parameters.

    ``bounded``: the runtime keeps no more of its keys than the window shows.
    """

    source: str
    config: AttentionConfig | DeltaNetConfig
    recipes: Recipes
    tables: Tables | None = None
    bounded: bool = False


@dataclasses.dataclass(frozen=True)
class Core:
    """What an attention operator says about itself."""

    call: Call
    heads: int
    kv_heads: int
    window: int
    softcap: float
    rotary: bool

    def scale(self, head_dim: int) -> float:
        """The multiplier of q . k; zero stands for the usual one."""
        return shortest(self.call.attributes["scale"] or head_dim**-0.5)


def attention_core(walk: Walk, value: str) -> Core:
    """``value`` as the output of an attention operator."""
    call = walk.take(value, "GroupQueryAttention", "PagedAttention")
    label, a = call.node.label, call.attributes
    heads, kv_heads = a["num_heads"], a["kv_num_heads"]
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ArtifactError(
            walk.file, label, f"{heads} heads over {kv_heads}", "a positive multiple"
        )
    window = a["local_window_size"]
    if window != FULL_ATTENTION and window < 1:
        raise ArtifactError(walk.file, f"{label}, local_window_size", window, "-1 or a width")
    for name in ("scale", "softcap"):
        if not (a[name] >= 0 and np.isfinite(a[name])):
            raise ArtifactError(walk.file, f"{label}, {name}", a[name], "zero or more")
    if bool(call["cos_cache"]) != bool(a["do_rotary"]) or bool(call["sin_cache"]) != bool(
        call["cos_cache"]
    ):
        raise ArtifactError(
            walk.file,
            f"{label}, do_rotary",
            f"{a['do_rotary']} with tables {call['cos_cache']!r} and {call['sin_cache']!r}",
            "1 with both tables, or 0 without",
        )
    if bool(call["key"]) != bool(call["value"]):
        raise ArtifactError(walk.file, label, "a key or a value alone", "both or neither")
    return Core(call, heads, kv_heads, window, shortest(a["softcap"]), bool(a["do_rotary"]))


def attention(walk: Walk, value: str, io: Io, layer: int, width: int) -> Mixer:
    """``value = o(attention(qkv(x)))``, its output gated by a sigmoid if the layer has gates.

    The order of the rows of the input product is queries (each head's gate after it), keys,
    values; whether the graph keeps one matrix or three.
    """
    attended, out = linear(walk, value, None, width)
    gate = ""
    if walk.op(attended) == "Mul":
        call = walk.take(attended, "Mul")
        attended = call["a"]
        gate = walk.take(call["b"], "Sigmoid")["x"]
    core = attention_core(walk, attended)
    call, label = core.call, core.call.node.label
    if out.shape[1] % core.heads:
        raise ArtifactError(
            walk.file, label, f"{out.shape[1]} output channels", f"a multiple of {core.heads} heads"
        )
    head_dim = out.shape[1] // core.heads
    query_rows = core.heads * head_dim * (2 if gate else 1)
    kv_rows = core.kv_heads * head_dim
    bounded = _attention_state(walk, call, io, layer, core.kv_heads, head_dim)
    if bounded and core.window == FULL_ATTENTION:
        raise ArtifactError(
            walk.file, f"{label}, local_window_size", "none, over a bounded cache", "a width"
        )
    tables = (
        rotary_tables(walk, call["cos_cache"], call["sin_cache"], label) if core.rotary else None
    )

    if not call["key"]:  # rows of queries, keys and values, side by side
        if gate:
            raise ArtifactError(walk.file, label, "packed rows and a gate", "one or the other")
        source, qkv = linear(walk, call["query"], width, query_rows + 2 * kv_rows)
        q_norm = k_norm = None
        matrices = [qkv]
    else:
        q, q_norm, q_tables = _heads(walk, call["query"], io, core.heads, head_dim)
        k, k_norm, k_tables = _heads(walk, call["key"], io, core.kv_heads, head_dim)
        v = call["value"]
        if (q_tables is None) != (k_tables is None) or (q_tables and core.rotary):
            raise ArtifactError(walk.file, label, "rotation of some kind twice or once", "one kind")
        tables = tables or _same_tables(walk, q_tables, k_tables, label)
        if gate:
            q = _gated(walk, q, gate, io, core.heads, head_dim)
        source, matrices = _projections(walk, label, (q, k, v), (query_rows, kv_rows), width)

    in_op = (call["q_norm_weight"], call["k_norm_weight"])
    if any(in_op):
        if q_norm or k_norm or not all(in_op):
            raise ArtifactError(walk.file, label, "some of the head norms", "both, once")
        eps = shortest(call.attributes["qk_norm_epsilon"])
        q_norm, k_norm = (
            Norm("", "", "", walk.weight(name, f"{label}, head norm", (head_dim,)), eps)
            for name in in_op
        )
    if (q_norm is None) != (k_norm is None) or (q_norm and k_norm and q_norm.eps != k_norm.eps):
        raise ArtifactError(walk.file, label, "different head norms", "one kind for both")
    if tables and tables.rotary_dim > head_dim:
        raise ArtifactError(
            walk.file,
            f"initializer {tables.cos.name}",
            tables.rotary_dim // 2,
            f"{head_dim // 2} at most",
        )

    config = AttentionConfig(
        heads=core.heads,
        kv_heads=core.kv_heads,
        head_dim=head_dim,
        rotary_dim=tables.rotary_dim if tables else 0,
        gated=bool(gate),
        qk_norm=q_norm is not None,
        norm_eps=q_norm.eps if q_norm else 1e-6,
        window=core.window,
        scale=core.scale(head_dim),
        softcap=core.softcap,
    )
    recipes: Recipes = {
        ("qkv", "weight"): Recipe.rows(matrices),
        ("o", "weight"): Recipe.rows([out]),
    }
    if q_norm is not None and k_norm is not None:
        recipes["q_norm", "weight"] = q_norm.recipe
        recipes["k_norm", "weight"] = k_norm.recipe
    return Mixer(source, config, recipes, tables, bounded)


def _projections(
    walk: Walk,
    label: str,
    parts: tuple[str, str, str],
    rows: tuple[int, int],
    width: int,
) -> tuple[str, list[Matrix]]:
    """Queries, keys and values as parts of one product, or as three products of one input."""
    query_rows, kv_rows = rows
    sizes = [query_rows, kv_rows, kv_rows]
    if walk.op(parts[1]) == "Split":
        cut = [split_into(walk, value, sizes, i) for i, value in enumerate(parts)]
        for other in cut[1:]:
            walk.same(f"{label}, queries, keys and values", other, cut[0])
        source, qkv = linear(walk, cut[0], width, sum(sizes))
        return source, [qkv]
    pairs = [linear(walk, value, width, n) for value, n in zip(parts, sizes, strict=True)]
    for other, _ in pairs[1:]:
        walk.same(f"{label}, queries, keys and values", other, pairs[0][0])
    return pairs[0][0], [matrix for _, matrix in pairs]


def _heads(
    walk: Walk, value: str, io: Io, heads: int, head_dim: int
) -> tuple[str, Norm | None, Tables | None]:
    """Undo what stands between a projection and the operator: rotation, and before it a norm."""
    value, tables = _rotation(walk, value, io, heads, head_dim)
    if walk.op(value) != "Reshape":
        return value, None, tables
    outer = walk.take(value, "Reshape")
    if walk.op(outer["data"]) != "SimplifiedLayerNormalization":
        return value, None, tables
    rows = heads * head_dim
    walk.expect(outer, "shape", [0, -1, rows], [-1, rows])
    norm = rms_norm(walk, outer["data"], head_dim)
    inner = walk.take(norm.source, "Reshape")
    walk.expect(inner, "shape", [0, -1, head_dim])
    return inner["data"], norm, tables


def _rotation(
    walk: Walk, value: str, io: Io, heads: int, head_dim: int
) -> tuple[str, Tables | None]:
    """``value = rotate(x)`` in an operator of its own, between casts and a batch axis of one."""
    if walk.op(value) not in ("Cast", "Squeeze", "MRotaryEmbedding", "RotaryEmbedding"):
        return value, None
    narrowed = walk.op(value) == "Cast"
    if narrowed:
        value = cast(walk, value, walk.dtype)
    squeezed = walk.op(value) == "Squeeze"
    if squeezed:
        call = walk.take(value, "Squeeze")
        walk.expect(call, "axes", [0])
        value = call["data"]
    call = walk.take(value, "MRotaryEmbedding", "RotaryEmbedding")
    label, a = call.node.label, call.attributes
    sections = call.node.op == "MRotaryEmbedding"
    tables = rotary_tables(walk, call["cos_cache"], call["sin_cache"], label)
    positions, source = call["position_ids"], call["x"]
    if squeezed:
        source = _unsqueezed(walk, source, [0])
        positions = _unsqueezed(walk, positions, [1] if sections else [0])
    if narrowed:
        source = cast(walk, source, FLOAT)
    rows = (3, *io.rows) if sections else io.rows
    walk.same(f"{label}, position_ids", positions, io_input(walk, io, "position_ids", INT64, rows))
    _check_rotation(walk, call, tables, heads, head_dim)
    # Text positions are equal in all sections, so only their sum matters.
    if sections and sum(a["mrope_section"]) * 2 != tables.rotary_dim:
        raise ArtifactError(
            walk.file,
            f"{label}, mrope_section",
            a["mrope_section"],
            f"a sum of {tables.cos.shape[1]}",
        )
    if bool(a["is_packed_batching"]) != (io.layout == "paged"):
        raise ArtifactError(
            walk.file, f"{label}, is_packed_batching", a["is_packed_batching"], io.layout
        )
    return source, tables


def _check_rotation(walk: Walk, call: Call, tables: Tables, heads: int, head_dim: int) -> None:
    """As many channels as the tables have are rotated, in every head.

    Zero channels stand for the whole head. The number of heads then follows from the width, and
    zero stands for that.
    """
    a = call.attributes
    whole = a["rotary_embedding_dim"] == 0
    channels = head_dim if whole else a["rotary_embedding_dim"]
    if channels != tables.rotary_dim or not (
        a["num_heads"] == heads or whole and not a["num_heads"]
    ):
        raise ArtifactError(
            walk.file,
            call.node.label,
            f"{a['num_heads']} heads, {channels} channels rotated",
            f"{heads} heads, {tables.rotary_dim} channels as in the tables",
        )


def _unsqueezed(walk: Walk, value: str, axes: list[int]) -> str:
    call = walk.take(value, "Unsqueeze")
    walk.expect(call, "axes", axes)
    return call["data"]


def _same_tables(
    walk: Walk, first: Tables | None, second: Tables | None, label: str
) -> Tables | None:
    if (
        first
        and second
        and first.cos is not second.cos
        or (first and second and first.sin is not second.sin)
    ):
        raise ArtifactError(walk.file, label, "different tables for queries and keys", "one pair")
    return first


def _gated(walk: Walk, query: str, gate: str, io: Io, heads: int, head_dim: int) -> str:
    """Queries and gates are the halves of every head's rows: what both come from."""
    sources = []
    for value, part in ((query, 0), (gate, 1)):
        flat = walk.take(value, "Reshape")
        walk.expect(flat, "shape", [*io.kept, heads * head_dim])
        whole = split_into(walk, flat["data"], [head_dim, head_dim], part)
        outer = walk.take(whole, "Reshape")
        walk.expect(outer, "shape", [*io.kept, heads, 2 * head_dim])
        sources.append(outer["data"])
    walk.same("the gate", sources[1], sources[0])
    return sources[0]


def cast(walk: Walk, value: str, data_type: int | None) -> str:
    """``value = x`` in another type: x."""
    call = walk.take(value, "Cast")
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
    """The graph input that plays ``role``."""
    if role not in io.inputs:
        raise ArtifactError(
            walk.file, f"input for {role}", "no name in the configuration", f"inputs.{role}"
        )
    return walk.input(io.inputs[role], f"the input for {role}", data_type, shape)


def _attention_state(
    walk: Walk, call: Call, io: Io, layer: int, kv_heads: int, head_dim: int
) -> bool:
    """Cache, lengths and outputs of an attention operator: all where they should be.

    Returns:
      Whether the cache is bounded: a buffer as long as the window, or pages of the windowed table.
    """
    label = call.node.label
    keys = (
        ("past_key", "past_value")
        if call.node.op == "GroupQueryAttention"
        else (
            "key_cache",
            "value_cache",
        )
    )
    if (call.node.op == "PagedAttention") != (io.layout == "paged"):
        raise ArtifactError(walk.file, label, call.node.op, f"the operator of a {io.layout} graph")
    shape: tuple[int | str | None, ...] = ("pages", None, kv_heads, head_dim)
    if io.layout == "dense":
        shape = ("batch", kv_heads, "past", None)
    for role, name_role in zip(keys, ("past_key_names", "past_value_names"), strict=True):
        if name_role not in io.inputs:
            raise ArtifactError(walk.file, label, f"no inputs.{name_role}", "a name")
        name = io.inputs.layer(name_role, layer)
        walk.same(f"{label}, {role}", call[role], name)
        walk.input(name, f"the cache of layer {layer}", walk.dtype, shape)
    names = [call.node.outputs[0]]
    for name_role in ("present_key_names", "present_value_names"):
        if name_role not in io.outputs:
            raise ArtifactError(walk.file, label, f"no outputs.{name_role}", "a name")
        name = io.outputs.layer(name_role, layer)
        names.append(walk.output(name, f"the cache of layer {layer}", walk.dtype, shape))
    walk.outputs(call, names)
    if io.layout == "paged":
        windowed = "block_table_windowed"
        bounded = windowed in io.inputs and call["block_table"] == io.inputs[windowed]
        paged_lengths(walk, call, io, windowed if bounded else "block_table")
        if not call.attributes["is_causal"]:
            raise ArtifactError(walk.file, f"{label}, is_causal", 0, 1)
        return bounded
    _dense_lengths(walk, call, io)
    return bool(call.attributes["sliding_window_cache"])


def paged_lengths(walk: Walk, call: Call, io: Io, table: str = "block_table") -> None:
    """Lengths and page table of PagedAttention; ``table``: which of the page tables it is."""
    label = call.node.label
    for role, name_role, shape in (
        ("cumulative_sequence_length", "cumulative_sequence_lengths", ("batch + 1",)),
        ("past_seqlens", "past_sequence_lengths", ("batch",)),
        ("block_table", table, ("batch", "pages")),
        ("attention_metadata", "attention_metadata", (3,)),
    ):
        if role == "attention_metadata" and not call[role]:
            continue
        name = io_input(walk, io, name_role, INT32, shape)
        walk.same(f"{label}, {role}", call[role], name)


def _dense_lengths(walk: Walk, call: Call, io: Io) -> None:
    """seqlens_k = sum(mask) - 1 and the mask's width, both int32."""
    mask = io_input(walk, io, "attention_mask", INT64, ("batch", "total"))
    less = walk.take(cast(walk, call["seqlens_k"], INT32), "Sub")
    walk.expect(less, "b", [1])
    total = walk.take(less["a"], "ReduceSum")
    walk.expect(total, "axes", [1])
    if total.attributes["keepdims"]:
        raise ArtifactError(walk.file, f"{total.node.label}, keepdims", 1, 0)
    walk.same(f"{total.node.label}, data", total["data"], mask)
    width = walk.take(cast(walk, call["total_sequence_length"], INT32), "Gather")
    walk.expect(width, "indices", 1)
    shape = walk.take(width["data"], "Shape")
    walk.same(f"{shape.node.label}, data", shape["data"], mask)


# Delta net.


def delta_net(walk: Walk, value: str, io: Io, layer: int, width: int) -> Mixer:
    """``value = out(gated_norm(delta_rule(conv(qkv(x))), z(x)))``, in either form."""
    normed, out = linear(walk, value, None, width)
    gated = walk.take(normed, "GatedRMSNorm")
    norm = walk.weight(gated["scale"], f"{gated.node.label}, scale", (None,))
    value_dim, rows = norm.shape[0], out.shape[1]
    value_heads = rows // value_dim
    if value_heads * value_dim != rows:
        raise ArtifactError(
            walk.file, f"initializer {norm.name}", f"{value_dim} channels", f"a divisor of {rows}"
        )
    source, z = linear(walk, gated["gate"], width, rows)
    form = _paged_rule if io.layout == "paged" else _dense_rule
    rule = form(walk, gated["x"], io, layer, value_heads, value_dim)

    channels = 2 * rule.key_heads * rule.key_dim + rows
    mixed, conv_weight, conv_bias = _convolution(walk, rule.mixed, io, layer, channels, rule)
    x, qkv = linear(walk, mixed, width, channels)
    products = {"qkv": x}
    gates: dict[str, Matrix] = {}
    for name, gate in (("b", rule.b), ("a", rule.a)):
        products[name], gates[name] = linear(walk, gate, width, value_heads)
    for name, other in products.items():
        walk.same(f"{gated.node.label}, {name}", other, source)

    config = DeltaNetConfig(
        key_heads=rule.key_heads,
        value_heads=value_heads,
        key_dim=rule.key_dim,
        value_dim=value_dim,
        conv_width=conv_weight.shape[2],
        norm_eps=shortest(gated.attributes["epsilon"]),
    )
    recipes: Recipes = {
        ("qkvz", "weight"): Recipe.rows([qkv, z]),
        ("ba", "weight"): Recipe.rows([gates["b"], gates["a"]]),
        ("conv_weight",): Recipe.of(Plain(conv_weight, (channels, conv_weight.shape[2]))),
        ("conv_bias",): Recipe.of(Plain(conv_bias, (channels,))),
        ("decay_scale",): rule.decay,
        ("dt_bias",): Recipe.of(Plain(rule.dt_bias, (value_heads,))),
        ("norm_weight",): Recipe.of(Plain(norm, (value_dim,))),
        ("out", "weight"): Recipe.rows([out]),
    }
    return Mixer(source, config, recipes)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The recurrence: where its rows come from and its own parameters."""

    mixed: str  # rows of queries, keys, values after the convolution
    a: str
    b: str
    key_heads: int
    key_dim: int
    decay: Recipe
    dt_bias: Tensor
    capacity: int  # rows that can be captured; 0: none


def _heads_of(
    walk: Walk, call: Call, reshape: Call, kept: list[int], where: str
) -> tuple[int, int]:
    """Heads and head width that a Reshape cuts rows into."""
    shape = walk.constant(reshape["shape"]).tolist()
    good = (
        isinstance(shape, list)
        and len(shape) == len(kept) + 2
        and shape[: len(kept)] == kept
        and min(shape[-2:]) > 0
    )
    if not good:
        raise ArtifactError(
            walk.file, f"{call.node.label}, {where}", shape, [*kept, "heads", "width"]
        )
    return shape[-2], shape[-1]


def _paged_rule(
    walk: Walk, value: str, io: Io, layer: int, value_heads: int, value_dim: int
) -> _Rule:
    flat = walk.take(value, "Reshape")
    walk.expect(flat, "shape", [0, value_heads * value_dim])
    call = walk.take(flat["data"], "GatedDeltaNet")
    label = call.node.label
    q = walk.take(call["query"], "Reshape")
    key_heads, key_dim = _heads_of(walk, call, q, [0], "query")
    k = walk.take(call["key"], "Reshape")
    walk.expect(k, "shape", [0, key_heads, key_dim])
    v = walk.take(call["value"], "Reshape")
    walk.expect(v, "shape", [0, value_heads, value_dim])
    _check_scale(walk, call, call.attributes["scale"] or key_dim**-0.5, key_dim)
    _check_sharing(walk, call, key_heads, value_heads)
    mixed = _split_qkv(
        walk, label, (q["data"], k["data"], v["data"]), key_heads * key_dim, value_heads * value_dim
    )
    cumulative = io_input(walk, io, "cumulative_sequence_lengths", INT32, ("batch + 1",))
    walk.same(f"{label}, cu_seqlens", call["cu_seqlens"], cumulative)

    def gate(role: str) -> str:
        inner = call[role]
        return cast(walk, inner, FLOAT) if walk.op(inner) == "Cast" else inner

    state = ("batch", value_heads, value_dim, key_dim)
    outputs = [call.node.outputs[0], _state(walk, call, io, layer, "recurrent", FLOAT, state)]
    capacity = call.attributes["state_update_capacity"]
    if capacity:
        planes = value_heads + key_heads * key_dim + value_heads * value_dim
        name = _layer_output(walk, io, "state_update_recurrent_capsule_names", layer)
        outputs.append(walk.output(name, "the capsules", FLOAT, ("batch", capacity * planes)))
    _capture(walk, call, io, capacity, ("capture_count", "active"))
    walk.outputs(call, outputs)
    a_log = walk.tensor(call["A_log"], f"{label}, A_log", shape=(value_heads,), dtypes=(FLOAT,))
    dt_bias = walk.tensor(
        call["dt_bias"], f"{label}, dt_bias", shape=(value_heads,), dtypes=(FLOAT,)
    )
    decay = Recipe.of(NegativeExponential(a_log))
    return _Rule(mixed, gate("a"), gate("b"), key_heads, key_dim, decay, dt_bias, capacity)


def _dense_rule(
    walk: Walk, value: str, io: Io, layer: int, value_heads: int, value_dim: int
) -> _Rule:
    call = walk.take(value, "LinearAttention")
    label, a = call.node.label, call.attributes
    key_heads = a["q_num_heads"]
    if a["kv_num_heads"] != value_heads:
        raise ArtifactError(walk.file, f"{label}, kv_num_heads", a["kv_num_heads"], value_heads)
    _check_sharing(walk, call, key_heads, value_heads)
    query, factor = _scaled(walk, call["query"])
    q, key_dim = _l2_normalized(walk, query, key_heads, None)
    k, _ = _l2_normalized(walk, call["key"], key_heads, key_dim)
    _check_scale(walk, call, factor * (a["scale"] or key_dim**-0.5), key_dim)
    mixed = _split_qkv(
        walk, label, (q, k, call["value"]), key_heads * key_dim, value_heads * value_dim
    )
    gates = walk.take(call["decay"], "LinearAttentionGate", output=0)
    walk.take(call["beta"], "LinearAttentionGate", output=1)
    walk.outputs(gates, [call["decay"], call["beta"]])
    where = gates.node.label
    decay = walk.tensor(
        gates["decay_scale"], f"{where}, decay_scale", shape=(value_heads,), dtypes=(FLOAT,)
    )
    dt_bias = walk.tensor(
        gates["dt_bias"], f"{where}, dt_bias", shape=(value_heads,), dtypes=(FLOAT,)
    )
    state = ("batch", value_heads, key_dim, value_dim)
    present = _state(walk, call, io, layer, "recurrent", walk.dtype, state)
    walk.outputs(call, [value, present])
    recipe = Recipe.of(Plain(decay, (value_heads,)))
    return _Rule(mixed, gates["a"], gates["b"], key_heads, key_dim, recipe, dt_bias, 0)


def _scaled(walk: Walk, value: str) -> tuple[str, float]:
    """``value = x * factor``, or ``value`` itself and 1."""
    if walk.op(value) != "Mul":
        return value, 1.0
    call = walk.take(value, "Mul")
    factor = walk.constant(call["b"])
    if factor.size != 1 or factor.dtype not in FLOATS.values():
        raise ArtifactError(walk.file, call.node.label, factor.tolist(), "one number")
    return call["a"], float(factor.reshape(()))


def _check_scale(walk: Walk, call: Call, scale: float, key_dim: int) -> None:
    # The constant is stored in the body's type: a half precision one is off by its rounding.
    if abs(scale - key_dim**-0.5) > 4e-3 * key_dim**-0.5:
        raise ArtifactError(walk.file, f"{call.node.label}, scale", scale, key_dim**-0.5)


def _check_sharing(walk: Walk, call: Call, key_heads: int, value_heads: int) -> None:
    if key_heads < 1 or value_heads % key_heads:
        raise ArtifactError(
            walk.file, call.node.label, f"{value_heads} value heads over {key_heads}", "a multiple"
        )


def _split_qkv(
    walk: Walk, label: str, parts: tuple[str, str, str], key_rows: int, value_rows: int
) -> str:
    sizes = [key_rows, key_rows, value_rows]
    cut = [split_into(walk, value, sizes, i) for i, value in enumerate(parts)]
    for other in cut[1:]:
        walk.same(f"{label}, queries, keys and values", other, cut[0])
    return cut[0]


def _l2_normalized(walk: Walk, value: str, heads: int, head_dim: int | None) -> tuple[str, int]:
    """``value = x / |x|`` per head: (x, head width)."""
    outer = walk.take(value, "Reshape")
    norm = walk.take(outer["data"], "LpNormalization")
    inner = walk.take(norm["x"], "Reshape")
    found, width = _heads_of(walk, norm, inner, [0, 0], "shape")
    if found != heads or (head_dim is not None and width != head_dim):
        raise ArtifactError(
            walk.file, inner.node.label, f"{found} heads of {width}", f"{heads} heads of {head_dim}"
        )
    walk.expect(outer, "shape", [0, 0, heads * width])
    return inner["data"], width


def _convolution(
    walk: Walk, value: str, io: Io, layer: int, channels: int, rule: _Rule
) -> tuple[str, Tensor, Tensor]:
    """The causal convolution: (rows before it, weight [C, 1, W], bias [C])."""
    if io.layout == "dense":
        turned = walk.take(value, "Transpose")
        _perm(walk, turned, (0, 2, 1))
        value = turned["data"]
    op = "CausalConvWithState" if io.layout == "dense" else "VarlenCausalConvWithState"
    call = walk.take(value, op)
    label = call.node.label
    weight = walk.weight(call["weight"], f"{label}, weight", (channels, 1, None))
    bias = walk.weight(call["bias"], f"{label}, bias", (channels,))
    state = ("batch", channels, weight.shape[2] - 1)
    outputs = [value, _state(walk, call, io, layer, "conv", walk.dtype, state)]
    source = call["x"]
    if io.layout == "dense":
        turned = walk.take(source, "Transpose")
        _perm(walk, turned, (0, 2, 1))
        source = turned["data"]
    else:
        cumulative = io_input(walk, io, "cumulative_sequence_lengths", INT32, ("batch + 1",))
        walk.same(f"{label}, cu_seqlens", call["cu_seqlens"], cumulative)
        capacity = call.attributes["state_update_capacity"]
        if capacity != rule.capacity:
            raise ArtifactError(
                walk.file, f"{label}, state_update_capacity", capacity, rule.capacity
            )
        if capacity:
            name = _layer_output(walk, io, "state_update_conv_value_names", layer)
            shape = ("batch", capacity, channels)
            outputs.append(walk.output(name, "the captured rows", walk.dtype, shape))
        _capture(walk, call, io, capacity, ("capture_count",))
    walk.outputs(call, outputs)
    return source, weight, bias


def _state(
    walk: Walk,
    call: Call,
    io: Io,
    layer: int,
    kind: str,
    data_type: int | None,
    shape: tuple[int | str | None, ...],
) -> str:
    """Past and present of a fixed state: the name of the present one."""
    role = "past" if kind == "conv" and io.layout == "dense" else "state"
    past_role, present_role = f"past_{kind}_names", f"present_{kind}_names"
    if past_role not in io.inputs:
        raise ArtifactError(walk.file, call.node.label, f"no inputs.{past_role}", "a name")
    past = io.inputs.layer(past_role, layer)
    walk.same(f"{call.node.label}, {role}", call[role], past)
    walk.input(past, f"the {kind} state of layer {layer}", data_type, shape)
    present = _layer_output(walk, io, present_role, layer)
    return walk.output(present, f"the {kind} state of layer {layer}", data_type, shape)


def _layer_output(walk: Walk, io: Io, role: str, layer: int) -> str:
    if role not in io.outputs:
        raise ArtifactError(walk.file, f"layer {layer}", f"no outputs.{role}", "a name")
    return io.outputs.layer(role, layer)


_CAPTURE: Mapping[str, tuple[str, tuple[int | str, ...]]] = {
    "capture_count": ("state_update_capture_count", ("batch",)),
    "active": ("state_update_active", (1,)),
}


def _capture(walk: Walk, call: Call, io: Io, capacity: int, roles: tuple[str, ...]) -> None:
    for role in roles:
        if not capacity:
            if call[role]:
                raise ArtifactError(walk.file, f"{call.node.label}, {role}", "an input", "none")
            continue
        name_role, shape = _CAPTURE[role]
        walk.same(
            f"{call.node.label}, {role}", call[role], io_input(walk, io, name_role, INT32, shape)
        )
