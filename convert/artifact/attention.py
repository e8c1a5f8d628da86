"""Parsers of attention, in dense and in paged graphs."""

from __future__ import annotations

import dataclasses

import numpy as np

from convert.artifact.genai_config import CONFIG
from convert.artifact.products import Io, Norm, cast, io_input, linear, rms_norm, split_into
from convert.artifact.walk import Call, Walk
from convert.errors import ArtifactError
from convert.recipes import Matrix, Plain, Recipe, Recipes, shortest
from convert.tensors import FLOAT, FLOATS, INT32, INT64, Tensor
from jaxdraft.config import FULL_ATTENTION, AttentionConfig, DeltaNetConfig

_MIXERS = ("GroupQueryAttention", "PagedAttention", "LinearAttention", "GatedDeltaNet")


def count_layers(walk: Walk, configured: int, where: str) -> None:
    """Check that the graph has as many mixers as the configuration has layers."""
    found = sum(node.op in _MIXERS for node in walk.graph.nodes)
    if found != configured:
        raise ArtifactError(
            CONFIG, f"{where}.num_hidden_layers", configured, f"{found}, the layers of {walk.file}"
        )


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
    """Return the two tables of an operator: one shape, in float32 or the body's type."""
    dtypes = tuple(FLOATS)
    first = walk.tensor(cos, f"{label}, cos_cache", shape=(None, None), dtypes=dtypes)
    second = walk.tensor(sin, f"{label}, sin_cache", shape=first.shape, dtypes=(first.data_type,))
    return Tables(first, second)


@dataclasses.dataclass(frozen=True)
class Mixer:
    """An attention or delta-net part: its input value, shape and parameters.

    ``bounded``: whether the runtime keeps only the keys inside the window.
    """

    source: str
    config: AttentionConfig | DeltaNetConfig
    recipes: Recipes
    tables: Tables | None = None
    bounded: bool = False


@dataclasses.dataclass(frozen=True)
class Core:
    """The attributes of an attention operator."""

    call: Call
    heads: int
    kv_heads: int
    window: int
    softcap: float
    rotary: bool

    def scale(self, head_dim: int) -> float:
        """Return the multiplier of q . k; zero means the usual one."""
        return shortest(self.call.attributes["scale"] or head_dim**-0.5)


def attention_core(walk: Walk, value: str) -> Core:
    """Match ``value`` as the output of an attention operator."""
    call = walk.expect_op(value, "GroupQueryAttention", "PagedAttention")
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


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """The inputs of an attention operator, followed back to the rows of the layer."""

    source: str
    matrices: list[Matrix]  # one of queries, keys and values, or three
    norms: tuple[Norm | None, Norm | None] = (None, None)  # of the heads of queries and keys
    tables: Tables | None = None  # of a rotation outside the operator


def attention(walk: Walk, value: str, io: Io, layer: int, width: int) -> Mixer:
    r"""Match ``value = o(attention(qkv(x)))``, gated by a sigmoid if the layer has gates.

    Accepted, from the value (below) up to the rows x; parts in brackets are optional:

                    x                        or          x
            /       |       \                            |
        MatMul    MatMul    MatMul                     MatMul
          |         |         |                          |
        [gate]      |         |            (queries, keys and values side by side)
        [norm]    [norm]      |                          |
        [rotate]  [rotate]    |                          |
            \       |       /                            |
           GroupQueryAttention, PagedAttention  <-- caches, lengths, [tables], [head norms]
                        |
                      [Mul]  <-- Sigmoid <-- the gate's half of the queries' product
                        |
                     MatMul = value

    The order of the rows of the input product is queries (each head's gate after it), keys,
    values, for one matrix and for three.
    """
    attended, out = linear(walk, value, None, width)
    gate = ""
    if walk.op(attended) == "Mul":
        call = walk.expect_op(attended, "Mul")
        attended = call["a"]
        gate = walk.expect_op(call["b"], "Sigmoid")["x"]
    core = attention_core(walk, attended)
    call, label = core.call, core.call.node.label
    if out.shape[1] % core.heads:
        raise ArtifactError(
            walk.file, label, f"{out.shape[1]} output channels", f"a multiple of {core.heads} heads"
        )
    head_dim = out.shape[1] // core.heads
    bounded = _attention_state(walk, call, io, layer, core.kv_heads, head_dim)
    if bounded and core.window == FULL_ATTENTION:
        raise ArtifactError(
            walk.file, f"{label}, local_window_size", "none, over a bounded cache", "a width"
        )
    if call["key"]:
        inputs = _separate_inputs(walk, core, io, head_dim, width, gate)
    else:
        inputs = _packed_inputs(walk, core, head_dim, width, gate)
    tables = inputs.tables
    if core.rotary:
        tables = rotary_tables(walk, call["cos_cache"], call["sin_cache"], label)
    check_tables(walk, tables, head_dim)
    norms = _head_norms(walk, core, inputs, head_dim)
    config = AttentionConfig(
        heads=core.heads,
        kv_heads=core.kv_heads,
        head_dim=head_dim,
        rotary_dim=tables.rotary_dim if tables else 0,
        gated=bool(gate),
        qk_norm=bool(norms),
        norm_eps=norms[0].eps if norms else 1e-6,
        window=core.window,
        scale=core.scale(head_dim),
        softcap=core.softcap,
    )
    recipes: Recipes = {
        ("qkv", "weight"): Recipe.rows(inputs.matrices),
        ("o", "weight"): Recipe.rows([out]),
    }
    for name, norm in zip(("q_norm", "k_norm"), norms, strict=False):
        recipes[name, "weight"] = norm.recipe
    return Mixer(inputs.source, config, recipes, tables, bounded)


def check_tables(walk: Walk, tables: Tables | None, head_dim: int) -> None:
    """Check that tables rotate no more channels than a head has."""
    if tables and tables.rotary_dim > head_dim:
        raise ArtifactError(
            walk.file,
            f"initializer {tables.cos.name}",
            tables.rotary_dim // 2,
            f"{head_dim // 2} at most",
        )


def _packed_inputs(walk: Walk, core: Core, head_dim: int, width: int, gate: str) -> _Inputs:
    """Return rows of queries, keys and values, side by side."""
    if gate:
        raise ArtifactError(
            walk.file, core.call.node.label, "packed rows and a gate", "one or the other"
        )
    rows = (core.heads + 2 * core.kv_heads) * head_dim
    source, qkv = linear(walk, core.call["query"], width, rows)
    return _Inputs(source, [qkv])


def _separate_inputs(
    walk: Walk, core: Core, io: Io, head_dim: int, width: int, gate: str
) -> _Inputs:
    """Return queries, keys and values from three separate inputs."""
    call, label = core.call, core.call.node.label
    q, q_norm, q_tables = _heads(walk, call["query"], io, core.heads, head_dim)
    k, k_norm, k_tables = _heads(walk, call["key"], io, core.kv_heads, head_dim)
    if (q_tables is None) != (k_tables is None) or (q_tables and core.rotary):
        found = "rotary embedding applied twice, or to only one of queries and keys"
        raise ArtifactError(walk.file, label, found, "once, to both")
    tables = _same_tables(walk, q_tables, k_tables, label)
    if gate:
        q = _gated(walk, q, gate, io, core.heads, head_dim)
    rows = (core.heads * head_dim * (2 if gate else 1), core.kv_heads * head_dim)
    source, matrices = _projections(walk, label, (q, k, call["value"]), rows, width)
    return _Inputs(source, matrices, (q_norm, k_norm), tables)


def _head_norms(
    walk: Walk, core: Core, inputs: _Inputs, head_dim: int
) -> tuple[Norm, Norm] | tuple[()]:
    """Return the norms of queries and keys, before the operator or inside it: both or neither."""
    call, label = core.call, core.call.node.label
    q_norm, k_norm = inputs.norms
    inside = (call["q_norm_weight"], call["k_norm_weight"])
    if any(inside):
        if q_norm or k_norm or not all(inside):
            raise ArtifactError(walk.file, label, "some of the head norms", "both, once")
        eps = shortest(call.attributes["qk_norm_epsilon"])
        q_norm, k_norm = (
            Norm("", "", "", walk.weight(name, f"{label}, head norm", (head_dim,)), eps)
            for name in inside
        )
    if q_norm is None and k_norm is None:
        return ()
    if q_norm is None or k_norm is None or q_norm.eps != k_norm.eps:
        raise ArtifactError(walk.file, label, "different head norms", "one kind for both")
    return q_norm, k_norm


def _projections(
    walk: Walk,
    label: str,
    parts: tuple[str, str, str],
    rows: tuple[int, int],
    width: int,
) -> tuple[str, list[Matrix]]:
    """Return queries, keys and values, from one product or three of the same input."""
    query_rows, kv_rows = rows
    sizes = [query_rows, kv_rows, kv_rows]
    if walk.op(parts[1]) == "Split":
        cut = [split_into(walk, value, sizes, i) for i, value in enumerate(parts)]
        for other in cut[1:]:
            walk.expect_same(f"{label}, queries, keys and values", other, cut[0])
        source, qkv = linear(walk, cut[0], width, sum(sizes))
        return source, [qkv]
    pairs = [linear(walk, value, width, n) for value, n in zip(parts, sizes, strict=True)]
    for other, _ in pairs[1:]:
        walk.expect_same(f"{label}, queries, keys and values", other, pairs[0][0])
    return pairs[0][0], [matrix for _, matrix in pairs]


def _heads(
    walk: Walk, value: str, io: Io, heads: int, head_dim: int
) -> tuple[str, Norm | None, Tables | None]:
    """Follow a value through rotation, and the norm before it, back to its projection.

    x -> Reshape [heads, channels] -> SimplifiedLayerNormalization -> Reshape -> rotate = value
    x -> rotate = value
    x = value
    """
    value, tables = _rotation(walk, value, io, heads, head_dim)
    if walk.op(value) != "Reshape":
        return value, None, tables
    outer = walk.expect_op(value, "Reshape")
    if walk.op(outer["data"]) != "SimplifiedLayerNormalization":
        return value, None, tables
    rows = heads * head_dim
    walk.expect(outer, "shape", [0, -1, rows], [-1, rows])
    norm = rms_norm(walk, outer["data"], head_dim)
    inner = walk.expect_op(norm.source, "Reshape")
    walk.expect(inner, "shape", [0, -1, head_dim])
    return inner["data"], norm, tables


def _rotation(
    walk: Walk, value: str, io: Io, heads: int, head_dim: int
) -> tuple[str, Tables | None]:
    """Match ``value = rotate(x)`` as a separate operator, between casts and a batch axis of one.

        x -> [Cast] -> [Unsqueeze 0] --> MRotaryEmbedding --> [Squeeze 0] -> [Cast] = value
                                     |   RotaryEmbedding
        position_ids -> [Unsqueeze] --   <-- tables of cosines and sines

    Position ids are [3, rows] for MRotaryEmbedding and [rows] for RotaryEmbedding.
    """
    if walk.op(value) not in ("Cast", "Squeeze", "MRotaryEmbedding", "RotaryEmbedding"):
        return value, None
    narrowed = walk.op(value) == "Cast"
    if narrowed:
        value = cast(walk, value, walk.dtype)
    squeezed = walk.op(value) == "Squeeze"
    if squeezed:
        call = walk.expect_op(value, "Squeeze")
        walk.expect(call, "axes", [0])
        value = call["data"]
    call = walk.expect_op(value, "MRotaryEmbedding", "RotaryEmbedding")
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
    walk.expect_same(
        f"{label}, position_ids", positions, io_input(walk, io, "position_ids", INT64, rows)
    )
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
    """Check that every head rotates as many channels as the tables have.

    Zero channels mean the whole head. The number of heads then follows from the width, and its
    attribute is zero.
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
    call = walk.expect_op(value, "Unsqueeze")
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
    """Match queries and gates as the two halves of every head's rows; return their common source.

    x -> Reshape [heads, 2 head_dim] -> Split --> Reshape = query
                                              --> Reshape = gate
    """
    sources = []
    for value, part in ((query, 0), (gate, 1)):
        flat = walk.expect_op(value, "Reshape")
        walk.expect(flat, "shape", [*io.kept, heads * head_dim])
        whole = split_into(walk, flat["data"], [head_dim, head_dim], part)
        outer = walk.expect_op(whole, "Reshape")
        walk.expect(outer, "shape", [*io.kept, heads, 2 * head_dim])
        sources.append(outer["data"])
    walk.expect_same("the gate", sources[1], sources[0])
    return sources[0]


def _attention_state(
    walk: Walk, call: Call, io: Io, layer: int, kv_heads: int, head_dim: int
) -> bool:
    """Check cache, lengths and outputs of an attention operator against the configuration.

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
        walk.expect_same(f"{label}, {role}", call[role], name)
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
    """Check lengths and page table of PagedAttention; ``table`` is the role of the page table."""
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
        walk.expect_same(f"{label}, {role}", call[role], name)


def _dense_lengths(walk: Walk, call: Call, io: Io) -> None:
    """Match seqlens_k = sum(mask) - 1 and the width of the mask, both int32.

    attention_mask --> ReduceSum -> Sub 1 -> Cast = seqlens_k
                   --> Shape -> Gather 1 -> Cast = total_sequence_length
    """
    mask = io_input(walk, io, "attention_mask", INT64, ("batch", "total"))
    less = walk.expect_op(cast(walk, call["seqlens_k"], INT32), "Sub")
    walk.expect(less, "b", [1])
    total = walk.expect_op(less["a"], "ReduceSum")
    walk.expect(total, "axes", [1])
    if total.attributes["keepdims"]:
        raise ArtifactError(walk.file, f"{total.node.label}, keepdims", 1, 0)
    walk.expect_same(f"{total.node.label}, data", total["data"], mask)
    width = walk.expect_op(cast(walk, call["total_sequence_length"], INT32), "Gather")
    walk.expect(width, "indices", 1)
    shape = walk.expect_op(width["data"], "Shape")
    walk.expect_same(f"{shape.node.label}, data", shape["data"], mask)
