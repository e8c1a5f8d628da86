"""Parsers of delta nets, in dense and in paged graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from convert.artifact.attention import Mixer
from convert.artifact.products import Io, cast, check_perm, io_input, linear, split_into
from convert.artifact.walk import Call, Walk
from convert.errors import ArtifactError
from convert.recipes import Decoded, Matrix, Plain, Recipe, Recipes, shortest
from convert.tensors import FLOAT, FLOATS, INT32, Tensor
from jaxdraft.checkpoint.forms import Form
from jaxdraft.config import DeltaNetConfig


def delta_net(walk: Walk, value: str, io: Io, layer: int, width: int) -> Mixer:
    """Match ``value = out(gated_norm(delta_rule(conv(qkv(x))), z(x)))``, in either form.

    x --> MatMul qkv -> convolution --> delta rule --> GatedRMSNorm -> MatMul out = value
      |                                  |  |              |
       --> MatMul b ---------------------   |              |
      |                                     |              |
       --> MatMul a ------------------------               |
      |                                                    |
       --> MatMul z ---------------------------------------
    """
    normed, out = linear(walk, value, None, width)
    gated = walk.expect_op(normed, "GatedRMSNorm")
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
        walk.expect_same(f"{gated.node.label}, {name}", other, source)

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
    """The recurrence: the source of its rows, and its parameters."""

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
    """Return the number of heads and the head width that a Reshape cuts rows into."""
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
    """Return the rule over packed rows.

    mixed -> Split --> Reshape [heads, channels] = q --> GatedDeltaNet -> Reshape = value
                   --> Reshape = k ------------------>      |  <-- A_log, dt_bias
                   --> Reshape = v ------------------>      |  <-- lengths, state
    a, b -> [Cast] ---------------------------------->      --> the state, [capsules]
    """
    flat = walk.expect_op(value, "Reshape")
    walk.expect(flat, "shape", [0, value_heads * value_dim])
    call = walk.expect_op(flat["data"], "GatedDeltaNet")
    label = call.node.label
    q = walk.expect_op(call["query"], "Reshape")
    key_heads, key_dim = _heads_of(walk, call, q, [0], "query")
    k = walk.expect_op(call["key"], "Reshape")
    walk.expect(k, "shape", [0, key_heads, key_dim])
    v = walk.expect_op(call["value"], "Reshape")
    walk.expect(v, "shape", [0, value_heads, value_dim])
    _check_scale(walk, call, call.attributes["scale"] or key_dim**-0.5, key_dim)
    _check_sharing(walk, call, key_heads, value_heads)
    mixed = _split_qkv(
        walk, label, (q["data"], k["data"], v["data"]), key_heads * key_dim, value_heads * value_dim
    )
    cumulative = io_input(walk, io, "cumulative_sequence_lengths", INT32, ("batch + 1",))
    walk.expect_same(f"{label}, cu_seqlens", call["cu_seqlens"], cumulative)

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
    decay = Recipe.of(Decoded(a_log, Form.LOG))
    return _Rule(mixed, gate("a"), gate("b"), key_heads, key_dim, decay, dt_bias, capacity)


def _dense_rule(
    walk: Walk, value: str, io: Io, layer: int, value_heads: int, value_dim: int
) -> _Rule:
    """Return the rule over [batch, sequence] rows.

    mixed -> Split --> q / |q| --> [Mul channels^-1/2] --> LinearAttention = value
                   --> k / |k| -------------------------->    |   <-- the past state
                   --> v -------------------------------->    |   --> the present state
    a, b -> LinearAttentionGate --> decay, beta ---------->    |
    """
    call = walk.expect_op(value, "LinearAttention")
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
    gates = walk.expect_op(call["decay"], "LinearAttentionGate", output=0)
    walk.expect_op(call["beta"], "LinearAttentionGate", output=1)
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
    """Match ``value = x * factor``, or ``value`` itself and 1."""
    if walk.op(value) != "Mul":
        return value, 1.0
    call = walk.expect_op(value, "Mul")
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
        walk.expect_same(f"{label}, queries, keys and values", other, cut[0])
    return cut[0]


def _l2_normalized(walk: Walk, value: str, heads: int, head_dim: int | None) -> tuple[str, int]:
    """Match ``value = x / |x|`` per head: (x, head width).

    x -> Reshape [heads, channels] -> LpNormalization -> Reshape = value
    """
    outer = walk.expect_op(value, "Reshape")
    norm = walk.expect_op(outer["data"], "LpNormalization")
    inner = walk.expect_op(norm["x"], "Reshape")
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
    """Return the causal convolution: (rows before it, weight [C, 1, W], bias [C]).

    dense: x -> Transpose -> CausalConvWithState -> Transpose = value    <-- past, --> present
    paged: x ---------> VarlenCausalConvWithState = value    <-- lengths, state, --> [captured]
    """
    if io.layout == "dense":
        turned = walk.expect_op(value, "Transpose")
        check_perm(walk, turned, (0, 2, 1))
        value = turned["data"]
    op = "CausalConvWithState" if io.layout == "dense" else "VarlenCausalConvWithState"
    call = walk.expect_op(value, op)
    label = call.node.label
    weight = walk.weight(call["weight"], f"{label}, weight", (channels, 1, None))
    bias = walk.weight(call["bias"], f"{label}, bias", (channels,))
    state = ("batch", channels, weight.shape[2] - 1)
    outputs = [value, _state(walk, call, io, layer, "conv", walk.dtype, state)]
    source = call["x"]
    if io.layout == "dense":
        turned = walk.expect_op(source, "Transpose")
        check_perm(walk, turned, (0, 2, 1))
        source = turned["data"]
    else:
        cumulative = io_input(walk, io, "cumulative_sequence_lengths", INT32, ("batch + 1",))
        walk.expect_same(f"{label}, cu_seqlens", call["cu_seqlens"], cumulative)
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
    """Check the past and present of a state and return the name of the present one."""
    role = "past" if kind == "conv" and io.layout == "dense" else "state"
    past_role, present_role = f"past_{kind}_names", f"present_{kind}_names"
    if past_role not in io.inputs:
        raise ArtifactError(walk.file, call.node.label, f"no inputs.{past_role}", "a name")
    past = io.inputs.layer(past_role, layer)
    walk.expect_same(f"{call.node.label}, {role}", call[role], past)
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
        walk.expect_same(
            f"{call.node.label}, {role}", call[role], io_input(walk, io, name_role, INT32, shape)
        )
