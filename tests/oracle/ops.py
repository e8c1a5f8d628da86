"""One numpy function for each operator that the exported graphs use.

Every function takes the node's attributes and then its inputs in order, None where an optional
one is absent, and returns one array or a tuple of arrays. All floats are float32.

Letters in shapes: B requests, S positions of a padded batch, T packed rows of all requests,
D width, H query heads, G key/value heads, h head size, C convolution channels, W convolution
width, Hk and Hv key and value heads of a delta net with sizes Dk and Dv, E experts, I expert
width, N output rows and K input columns of a quantized matrix, Q quantization block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from onnx import TensorProto, helper

Array = np.ndarray
Attributes = dict[str, Any]
Operator = Callable[..., Any]

OPERATORS: dict[str, Operator] = {}


def operator(name: str) -> Callable[[Operator], Operator]:
    """Registers the decorated function under an operator name."""

    def register(function: Operator) -> Operator:
        OPERATORS[name] = function
        return function

    return register


def require(attributes: Attributes, **allowed: Any) -> None:
    """Raises NotImplementedError if an attribute is present with another value than the given."""
    for name, value in allowed.items():
        if attributes.get(name, value) != value:
            raise NotImplementedError(f"{name}={attributes[name]!r}, only {value!r} is known")


# ------------------------------------------------------------------- elementwise and reductions


def logistic(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow; small results keep their relative accuracy."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x * logistic(x)


def softplus(x: Array) -> Array:
    """log(1 + exp(x)) without overflow."""
    return np.logaddexp(np.float32(0), x)


@operator("Add")
def add(_: Attributes, x: Array, y: Array) -> Array:
    """x + y, broadcast."""
    return x + y


@operator("Sub")
def sub(_: Attributes, x: Array, y: Array) -> Array:
    """x - y, broadcast."""
    return x - y


@operator("Mul")
def mul(_: Attributes, x: Array, y: Array) -> Array:
    """x * y, broadcast."""
    return x * y


@operator("Mod")
def mod(attributes: Attributes, x: Array, y: Array) -> Array:
    """Integer remainder with the sign of the divisor (fmod=0), broadcast."""
    require(attributes, fmod=0)
    return np.mod(x, y)


@operator("Greater")
def greater(_: Attributes, x: Array, y: Array) -> Array:
    """x > y, broadcast."""
    return x > y


@operator("Sigmoid")
def sigmoid(_: Attributes, x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    return logistic(x)


@operator("Identity")
def identity(_: Attributes, x: Array) -> Array:
    """x."""
    return x


@operator("Cast")
def cast(attributes: Attributes, x: Array) -> Array:
    """x in another dtype. Every float type becomes float32, so nothing is ever rounded."""
    to = attributes["to"]
    if to in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16):
        return x.astype(np.float32)
    return x.astype(helper.tensor_dtype_to_np_dtype(to))


@operator("Constant")
def constant(attributes: Attributes) -> Array:
    """The stored value, whichever attribute holds it."""
    ((name, value),) = attributes.items()
    integers = {"value_int": np.int64, "value_ints": np.int64}
    floats = {"value_float": np.float32, "value_floats": np.float32}
    return value if name == "value" else np.array(value, (integers | floats)[name])


@operator("ReduceSum")
def reduce_sum(attributes: Attributes, x: Array, axes: Array | None = None) -> Array:
    """Sum over `axes`, or over all of them."""
    over = None if axes is None or axes.size == 0 else tuple(int(a) for a in axes)
    if over is None and attributes.get("noop_with_empty_axes", 0):
        return x
    return x.sum(axis=over, keepdims=bool(attributes.get("keepdims", 1)), dtype=x.dtype)


@operator("TopK")
def top_k(attributes: Attributes, x: Array, k: Array) -> tuple[Array, Array]:
    """The k largest values of an axis, best first, ties by lowest index, and their indices."""
    require(attributes, largest=1, sorted=1)
    axis = attributes.get("axis", -1)
    order = np.argsort(-x, axis=axis, kind="stable")
    index = np.take(order, np.arange(int(k.item())), axis=axis)
    return np.take_along_axis(x, index, axis=axis), index.astype(np.int64)


# ------------------------------------------------------------------------------------- shapes


@operator("Shape")
def shape(attributes: Attributes, x: Array) -> Array:
    """The dimensions of x from `start` to `end`."""
    return np.array(x.shape[attributes.get("start", 0) : attributes.get("end")], np.int64)


@operator("Reshape")
def reshape(attributes: Attributes, x: Array, dims: Array) -> Array:
    """x with other dimensions: 0 keeps the dimension at that place, -1 is what remains."""
    require(attributes, allowzero=0)
    return x.reshape([x.shape[i] if d == 0 else int(d) for i, d in enumerate(dims)])


@operator("Transpose")
def transpose(attributes: Attributes, x: Array) -> Array:
    """x with its axes in the order `perm`, or reversed."""
    return x.transpose(attributes.get("perm"))


@operator("Concat")
def concat(attributes: Attributes, *xs: Array) -> Array:
    """Inputs one after another along `axis`."""
    return np.concatenate(xs, axis=attributes["axis"])


@operator("Split")
def split(attributes: Attributes, x: Array, sizes: Array | None = None) -> tuple[Array, ...]:
    """Parts of x along `axis`, of the given sizes or `num_outputs` equal ones."""
    axis = attributes.get("axis", 0)
    if sizes is None:
        return tuple(np.split(x, attributes["num_outputs"], axis=axis))
    return tuple(np.split(x, np.cumsum(sizes)[:-1], axis=axis))


@operator("Slice")
def slice_(
    _: Attributes,
    x: Array,
    starts: Array,
    ends: Array,
    axes: Array | None = None,
    steps: Array | None = None,
) -> Array:
    """x[start:end:step] on each of `axes`; python's clipping is ONNX's for positive steps."""
    axes = np.arange(len(starts)) if axes is None else axes
    steps = np.ones(len(starts), np.int64) if steps is None else steps
    if (steps < 0).any():
        raise NotImplementedError(f"negative steps {steps.tolist()}")
    index = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        index[int(axis)] = slice(int(start), int(end), int(step))
    return x[tuple(index)]


@operator("Squeeze")
def squeeze(_: Attributes, x: Array, axes: Array | None = None) -> Array:
    """x without the given axes of size 1."""
    return np.squeeze(x, None if axes is None else tuple(int(a) for a in axes))


@operator("Unsqueeze")
def unsqueeze(_: Attributes, x: Array, axes: Array) -> Array:
    """x with axes of size 1 inserted; the places count in the result."""
    return np.expand_dims(x, tuple(int(a) for a in axes.reshape(-1)))


@operator("Tile")
def tile(_: Attributes, x: Array, repeats: Array) -> Array:
    """x repeated along each axis."""
    return np.tile(x, tuple(int(r) for r in repeats))


@operator("Range")
def range_(_: Attributes, start: Array, limit: Array, delta: Array) -> Array:
    """start, start + delta, ... below limit."""
    return np.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


@operator("Gather")
def gather(attributes: Attributes, x: Array, indices: Array) -> Array:
    """Slices of x along `axis`; negative indices count from the end."""
    return np.take(x, indices, axis=attributes.get("axis", 0))


# --------------------------------------------------------------------------- matrices, quantized


@operator("MatMul")
def matmul(_: Attributes, x: Array, y: Array) -> Array:
    """x @ y."""
    return x @ y


def unpack_bits(packed: Array, bits: int) -> Array:
    """uint8 [..., n] -> uint8 [..., n * 8 / bits], the lowest bits of a byte first.

    Example, 4 bits: byte 0xA3 holds 3 and then 10.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    fields = (packed[..., None] >> shifts) & np.uint8(2**bits - 1)
    return fields.reshape(*packed.shape[:-1], -1)


def scale_blocks(values: Array, scales: Array) -> Array:
    """[..., n] values times [..., n / Q] scales, each scale for Q consecutive values."""
    block = values.shape[-1] // scales.shape[-1]
    return values.astype(np.float32) * np.repeat(scales, block, axis=-1)


def dequantize(packed: Array, scales: Array, bits: int) -> Array:
    """Unsigned packed values with the implied zero point 2**(bits - 1).

    Args:
        packed: uint8 [..., K * bits / 8].
        scales: [..., K / Q], of either sign.
        bits: 2, 4 or 8.

    Returns:
        float32 [..., K].
    """
    unsigned = unpack_bits(packed, bits).astype(np.int16)
    return scale_blocks(unsigned - 2 ** (bits - 1), scales)


def matrix_of_nbits(packed: Array, scales: Array, bits: int) -> Array:
    """The [N, K] matrix of a MatMulNBits node: packed [N, K/Q, Q*bits/8], scales [N, K/Q]."""
    rows = packed.shape[0]
    return dequantize(packed.reshape(rows, -1), scales.reshape(rows, -1), bits)


@operator("MatMulNBits")
def matmul_nbits(attributes: Attributes, x: Array, packed: Array, scales: Array) -> Array:
    """x [..., K] @ dequantized [N, K] transposed. accuracy_level is ignored: activations stay f32.

    Spec: (nibble - 8) * scale, (byte - 128) * scale, (v - 2) * scale for 4, 8 and 2 bits.
    """
    matrix = matrix_of_nbits(packed, scales, attributes["bits"])
    expected = attributes["N"], attributes["K"]
    if matrix.shape != expected:
        raise ValueError(f"quantized matrix is {matrix.shape}, the node says {expected}")
    return x @ matrix.T


def table_of_block_quantized(data: Array, scales: Array, bits: int) -> Array:
    """The whole [V, D] table of a GatherBlockQuantized node.

    Two stored forms: signed int4 (here int8 [V, D], already one value each, no zero point), and
    uint8 [V, D * bits / 8] with the implied zero point 2**(bits - 1).
    """
    if data.dtype == np.int8:
        return scale_blocks(data, scales)
    return dequantize(data, scales, bits)


@operator("GatherBlockQuantized")
def gather_block_quantized(
    attributes: Attributes, data: Array, indices: Array, scales: Array
) -> Array:
    """Dequantized rows: indices [...] -> [..., D], blocks along the last axis."""
    require(attributes, gather_axis=0, quantize_axis=1)
    rows = np.take(data, indices, axis=0)
    return table_of_block_quantized(
        rows, np.take(scales, indices, axis=0), attributes.get("bits", 4)
    )


# ------------------------------------------------------------------------------- normalizations


def rms_norm(x: Array, scale: Array, epsilon: float) -> Array:
    """x / sqrt(mean(x^2) + epsilon) * scale over the last axis."""
    mean = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(mean + np.float32(epsilon)) * scale


@operator("SimplifiedLayerNormalization")
def simplified_layer_normalization(attributes: Attributes, x: Array, scale: Array) -> Array:
    """RMSNorm in float32 times scale: x [..., D], scale [D]."""
    require(attributes, axis=-1, stash_type=1)
    return rms_norm(x, scale, attributes["epsilon"])


@operator("SkipSimplifiedLayerNormalization")
def skip_simplified_layer_normalization(
    attributes: Attributes, x: Array, skip: Array, gamma: Array, bias: Array | None = None
) -> tuple[Array, None, None, Array]:
    """RMSNorm(x + skip) * gamma and, as output 3, x + skip. Outputs 1 and 2 are never used."""
    total = x + skip if bias is None else x + skip + bias
    return rms_norm(total, gamma, attributes["epsilon"]), None, None, total


@operator("GatedRMSNorm")
def gated_rms_norm(attributes: Attributes, x: Array, scale: Array, gate: Array) -> Array:
    """Per value head RMSNorm(x) * scale * silu(gate): x and gate [..., Hv * Dv], scale [Dv]."""
    heads = x.reshape(*x.shape[:-1], -1, scale.shape[0])
    return rms_norm(heads, scale, attributes["epsilon"]).reshape(x.shape) * silu(gate)


def l2_normalize(x: Array) -> Array:
    """x / |x| over the last axis without an epsilon; a zero vector stays zero."""
    norm = np.sqrt(np.sum(x * x, axis=-1, keepdims=True))
    return x / np.where(norm == 0, np.float32(1), norm)


@operator("LpNormalization")
def lp_normalization(attributes: Attributes, x: Array) -> Array:
    """l2 norm of q and k per head, no eps."""
    require(attributes, axis=-1, p=2)
    return l2_normalize(x)


# ------------------------------------------------------------------------------------ attention


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Half-split rotation of the first 2r channels of each head.

    Args:
        x: [..., heads, h] with 2r <= h.
        cos: [..., r], one row for each position, the same for all heads.
        sin: [..., r].

    Returns:
        [..., heads, h]; channels from 2r on are passed through.
    """
    r = cos.shape[-1]
    c, s = cos[..., None, :], sin[..., None, :]
    first, second, rest = x[..., :r], x[..., r : 2 * r], x[..., 2 * r :]
    return np.concatenate([first * c - second * s, second * c + first * s, rest], axis=-1)


def section_of_channel(sections: list[int], layout: int) -> Array:
    """[r] which of the three position rows turns each rotary channel.

    Layout 0 is consecutive sections. Layout 1 interleaves: channel i belongs to row i % 3 as long
    as that row's section lasts, and to row 0 otherwise.
    Example, sections [4, 2, 2]: layout 0 is 00001122, layout 1 is 01201200.
    """
    if layout == 0:
        return np.repeat(np.arange(len(sections)), sections)
    channel = np.arange(sum(sections))
    row = channel % 3
    return np.where(channel < 3 * np.array(sections)[row], row, 0)


@operator("MRotaryEmbedding")
def m_rotary_embedding(
    attributes: Attributes, x: Array, position_ids: Array, cos: Array, sin: Array
) -> Array:
    """Rotates the first rotary_embedding_dim of each head, half-split.

    x [B, S, heads * h] with position_ids [3, B, S], or packed x [T, heads * h] with [3, T];
    cos and sin [context, rotary_embedding_dim / 2].
    """
    require(attributes, interleaved=0, rotary_embedding_dim=2 * cos.shape[-1])
    row = section_of_channel(attributes["mrope_section"], attributes["mrope_layout"])
    channel = np.arange(cos.shape[-1])
    # position[..., i] is the position that channel i turns by.
    position = np.moveaxis(position_ids, 0, -1)[..., row]
    heads = x.reshape(*x.shape[:-1], attributes["num_heads"], -1)
    return rotate(heads, cos[position, channel], sin[position, channel]).reshape(x.shape)


def attend(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    *,
    scale: float,
    softcap: float = 0.0,
    sink: Array | None = None,
    bias: Array | None = None,
) -> Array:
    """Softmax attention of one request.

    Args:
        q: [n, H, h] queries.
        k: [L, G, h] keys; each serves H / G consecutive query heads.
        v: [L, G, h] values.
        visible: bool [n, L], at least one key for each query.
        scale: multiplies the scores.
        softcap: if positive, scores become softcap * tanh(score / softcap).
        sink: [H] one more score for each head, which takes weight but has no value.
        bias: [H, n, L] added to the scores.

    Returns:
        [n, H, h].
    """
    groups = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    scores = np.einsum("nhd,lhd->hnl", q, k, optimize=True) * np.float32(scale)
    if softcap > 0:
        scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
    if bias is not None:
        scores = scores + bias
    scores = np.where(visible[None], scores, np.float32(-np.inf))
    best = scores.max(axis=-1, keepdims=True)
    if sink is not None:
        best = np.maximum(best, sink[:, None, None])
    weights = np.exp(scores - best)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink[:, None, None] - best)
    return np.einsum("hnl,lhd->nhd", weights / total, v, optimize=True)


def visible_keys(query: Array, length: int, *, causal: bool, window: int) -> Array:
    """bool [n, length]: which key positions 0..length-1 each query position may see.

    A window hides keys at or before query - window; it says nothing about later ones.
    Example, causal, window 2, query position 3: keys 2 and 3.
    """
    key = np.arange(length)[None, :]
    mask = np.ones((len(query), length), bool)
    if causal:
        mask &= key <= query[:, None]
    if window > 0:
        mask &= key > query[:, None] - window
    return mask


def attention_options(attributes: Attributes, head_size: int) -> dict[str, float]:
    """`attend` options of a node; a scale of 0 or none means 1 / sqrt(head size)."""
    require(attributes, rotary_interleaved=0)
    return {
        "scale": attributes.get("scale", 0.0) or head_size**-0.5,
        "softcap": attributes.get("softcap", 0.0),
    }


@operator("GroupQueryAttention")
def group_query_attention(
    attributes: Attributes,
    query: Array,
    key: Array,
    value: Array,
    past_key: Array,
    past_value: Array,
    seqlens_k: Array,
    total_sequence_length: Array,
    cos: Array | None = None,
    sin: Array | None = None,
    position_ids: Array | None = None,
    attention_bias: Array | None = None,
    head_sink: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Causal attention over the appended cache; do_rotary=1 turns q and k by the given tables.

    query [B, S, H*h], key and value [B, S, G*h], past_* [B, G, past, h], seqlens_k [B] is the
    length after appending minus 1. Returns [B, S, H*h] and present_* [B, G, past + S, h].
    Requests of one batch have the same length here, as the tests never pad.
    """
    batch, steps, _ = query.shape
    past = past_key.shape[2]
    length = past + steps
    if (seqlens_k != length - 1).any() or total_sequence_length.item() != length:
        raise NotImplementedError(f"padded batch: seqlens_k {seqlens_k.tolist()}, cache {length}")
    q, k, v = (
        x.reshape(batch, steps, heads, -1)
        for x, heads in (
            (query, attributes["num_heads"]),
            (key, attributes["kv_num_heads"]),
            (value, attributes["kv_num_heads"]),
        )
    )
    position = np.arange(past, length)
    if attributes.get("do_rotary", 0):
        turn = np.broadcast_to(position, (batch, steps)) if position_ids is None else position_ids
        q, k = rotate(q, cos[turn], sin[turn]), rotate(k, cos[turn], sin[turn])
    present_key = np.concatenate([past_key, k.transpose(0, 2, 1, 3)], axis=2)
    present_value = np.concatenate([past_value, v.transpose(0, 2, 1, 3)], axis=2)
    visible = visible_keys(
        position, length, causal=True, window=attributes.get("local_window_size", -1)
    )
    options = attention_options(attributes, q.shape[-1])
    out = [
        attend(
            q[b],
            present_key[b].swapaxes(0, 1),
            present_value[b].swapaxes(0, 1),
            visible,
            sink=head_sink,
            bias=None if attention_bias is None else attention_bias[b % len(attention_bias)],
            **options,
        )
        for b in range(batch)
    ]
    return np.stack(out).reshape(query.shape), present_key, present_value


def packed_heads(
    attributes: Attributes, query: Array, key: Array | None, value: Array | None
) -> tuple[Array, Array, Array]:
    """Splits rows into q [T, H, h], k and v [T, G, h]; without key, query holds all three."""
    heads, groups = attributes["num_heads"], attributes["kv_num_heads"]
    if key is None or value is None:
        size = query.shape[-1] // (heads + 2 * groups)
        query, key, value = np.split(query, [heads * size, (heads + groups) * size], axis=-1)
    rows = query.shape[0]
    return (
        query.reshape(rows, heads, -1),
        key.reshape(rows, groups, -1),
        value.reshape(rows, groups, -1),
    )


def sequences(cumulative: Array) -> Iterator[tuple[int, slice]]:
    """Yields (request, its packed rows). Example: [0, 2, 5] gives rows 0..1 and 2..4."""
    for request, (start, end) in enumerate(zip(cumulative[:-1], cumulative[1:], strict=True)):
        yield request, slice(int(start), int(end))


@operator("PagedAttention")
def paged_attention(
    attributes: Attributes,
    query: Array,
    key: Array | None,
    value: Array | None,
    key_cache: Array,
    value_cache: Array,
    cumulative_sequence_length: Array,
    past_seqlens: Array,
    block_table: Array,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    slot_mapping: Array | None = None,
    head_sink: Array | None = None,
    q_norm_weight: Array | None = None,
    k_norm_weight: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    attention_metadata: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Writes the new keys and values at positions past + j, then attends over the pages.

    query [T, H*h] or packed [T, (H + 2G)*h], key and value [T, G*h] or absent, caches
    [pages, page, G, h], cumulative_sequence_length [B + 1], past_seqlens [B],
    block_table [B, M] with the page of each run of `page` positions, tables [context, h / 2],
    slot_mapping [T] flat slots (page index * page + offset) to write to in place of the block
    table's, head_sink [H], norm weights [h]. No golden covers slot_mapping and head_sink.
    q and k are normalized, then rotated, and keys are cached in that form. A bidirectional node
    (is_causal=0) sees all past and all new rows of its request. attention_metadata holds sizes
    for kernels and changes no value.
    Returns [T, H*h] and both caches, as copies.
    """
    if k_scale is not None or v_scale is not None:
        raise NotImplementedError("quantized caches (k_scale, v_scale)")
    q, k, v = packed_heads(attributes, query, key, value)
    epsilon = attributes.get("qk_norm_epsilon", 1e-6)
    q = q if q_norm_weight is None else rms_norm(q, q_norm_weight, epsilon)
    k = k if k_norm_weight is None else rms_norm(k, k_norm_weight, epsilon)
    key_cache, value_cache, page = key_cache.copy(), value_cache.copy(), key_cache.shape[1]
    options = attention_options(attributes, q.shape[-1])
    out = np.zeros_like(q)
    for b, rows in sequences(cumulative_sequence_length):
        past, length = int(past_seqlens[b]), int(past_seqlens[b]) + rows.stop - rows.start
        new, every = np.arange(past, length), np.arange(length)
        q_new, k_new = q[rows], k[rows]
        if attributes.get("do_rotary", 0):
            q_new = rotate(q_new, cos_cache[new], sin_cache[new])
            k_new = rotate(k_new, cos_cache[new], sin_cache[new])
        slot = block_table[b, every // page] * page + every % page
        written = slot[past:] if slot_mapping is None else slot_mapping[rows]
        key_cache[written // page, written % page] = k_new
        value_cache[written // page, written % page] = v[rows]
        visible = visible_keys(
            new,
            length,
            causal=bool(attributes.get("is_causal", 1)),
            window=attributes.get("local_window_size", -1),
        )
        keys, values = (c[slot // page, slot % page] for c in (key_cache, value_cache))
        out[rows] = attend(q_new, keys, values, visible, sink=head_sink, **options)
    return out.reshape(out.shape[0], -1), key_cache, value_cache


# ---------------------------------------------------------------------- convolution, delta rule


def causal_convolution(
    x: Array, weight: Array, bias: Array | None, state: Array
) -> tuple[Array, Array]:
    """Depthwise causal convolution of one request, then SiLU.

    Args:
        x: [n, C] new rows.
        weight: [C, 1, W], the last tap for the current row.
        bias: [C].
        state: [C, W - 1] the rows before x, oldest first.

    Returns:
        [n, C] and the next state, which holds rows before the convolution.
    """
    width = weight.shape[-1]
    rows = np.concatenate([state.T, x])
    taps = [rows[w : w + len(x)] * weight[:, 0, w] for w in range(width)]
    total = np.sum(taps, axis=0, dtype=np.float32)
    return silu(total if bias is None else total + bias), rows[len(rows) - width + 1 :].T


@operator("CausalConvWithState")
def causal_conv_with_state(
    attributes: Attributes, x: Array, weight: Array, bias: Array | None, past: Array
) -> tuple[Array, Array]:
    """Depthwise causal convolution, then SiLU: x [B, C, S], weight [C, 1, W], past [B, C, W-1]."""
    require(attributes, ndim=1, activation="silu", state_window=0)
    results = [causal_convolution(x[b].T, weight, bias, past[b]) for b in range(len(x))]
    return np.stack([y.T for y, _ in results]), np.stack([s for _, s in results])


def capture(rows: Array, count: int, capacity: int) -> Array:
    """The first `count` of rows [n, ...] in an array [capacity, ...] that is zero elsewhere."""
    out = np.zeros((capacity, *rows.shape[1:]), np.float32)
    kept = rows[: min(int(count), capacity)]
    out[: len(kept)] = kept
    return out


@operator("VarlenCausalConvWithState")
def varlen_causal_conv_with_state(
    attributes: Attributes,
    x: Array,
    weight: Array,
    cumulative: Array,
    bias: Array | None,
    state: Array,
    capture_count: Array | None = None,
) -> tuple[Array, Array, Array]:
    """The same on packed rows: x [T, C], cumulative [B + 1], state [B, C, W-1].

    Output 2, [B, state_update_capacity, C], holds the first capture_count[b] rows of x of each
    request, before the convolution.
    """
    require(attributes, activation="silu")
    capacity = attributes.get("state_update_capacity", 0)
    counts = np.zeros(len(state), np.int32) if capture_count is None else capture_count
    out, next_state = np.zeros_like(x), np.zeros_like(state)
    captured = np.zeros((len(state), capacity, x.shape[-1]), np.float32)
    for b, rows in sequences(cumulative):
        out[rows], next_state[b] = causal_convolution(x[rows], weight, bias, state[b])
        captured[b] = capture(x[rows], counts[b], capacity)
    return out, next_state, captured


@operator("LinearAttentionGate")
def linear_attention_gate(
    _: Attributes, a: Array, dt_bias: Array, decay_scale: Array, b: Array
) -> tuple[Array, Array]:
    """decay = decay_scale * softplus(a + dt_bias) (log domain), beta = sigmoid(b).

    a and b [..., Hv], dt_bias and decay_scale [Hv].
    """
    return decay_scale * softplus(a + dt_bias), logistic(b)


def delta_rule(
    q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array
) -> tuple[Array, Array, Array]:
    """The gated delta rule of one request, row by row.

    S = decay * S, delta = beta * (v - S^T k), S += k (outer) delta, out = S^T q.

    Args:
        q: [n, Hk, Dk], already scaled.
        k: [n, Hk, Dk]; a key head serves Hv / Hk consecutive value heads.
        v: [n, Hv, Dv].
        decay: [n, Hv], the factor itself and not its logarithm.
        beta: [n, Hv].
        state: [Hv, Dk, Dv].

    Returns:
        out [n, Hv, Dv], the next state, delta [n, Hv, Dv].
    """
    served = v.shape[1] // k.shape[1]
    q, k = np.repeat(q, served, axis=1), np.repeat(k, served, axis=1)
    out, deltas = np.zeros_like(v), np.zeros_like(v)
    for i in range(len(v)):
        state = state * decay[i, :, None, None]
        deltas[i] = beta[i, :, None] * (v[i] - np.einsum("hkv,hk->hv", state, k[i]))
        state = state + k[i, :, :, None] * deltas[i, :, None, :]
        out[i] = np.einsum("hkv,hk->hv", state, q[i])
    return out, state, deltas


@operator("LinearAttention")
def linear_attention(
    attributes: Attributes,
    q: Array,
    k: Array,
    v: Array,
    state: Array,
    decay: Array,
    beta: Array,
) -> tuple[Array, Array]:
    """S = exp(decay) S; S += k (outer) beta (v - S^T k); o = S^T q.

    q and k [B, S, Hk*Dk], v [B, S, Hv*Dv], state [B, Hv, Dk, Dv], decay and beta [B, S, Hv].
    q is scaled outside, so scale=1.
    """
    require(attributes, update_rule="gated_delta", scale=1.0, state_window=0)
    key_heads, value_heads = attributes["q_num_heads"], attributes["kv_num_heads"]
    batch, steps, _ = q.shape
    results = [
        delta_rule(
            q[b].reshape(steps, key_heads, -1),
            k[b].reshape(steps, key_heads, -1),
            v[b].reshape(steps, value_heads, -1),
            np.exp(decay[b]),
            beta[b],
            state[b],
        )
        for b in range(batch)
    ]
    out = np.stack([r[0] for r in results]).reshape(v.shape)
    return out, np.stack([r[1] for r in results])


def pack_capsule(decay: Array, key: Array, delta: Array, count: int, capacity: int) -> Array:
    """[N*(Hv + Hk*Dk + Hv*Dv)]: planes decay, key and delta, each with room for N rows."""
    planes = [capture(rows, count, capacity).reshape(-1) for rows in (decay, key, delta)]
    return np.concatenate(planes)


@operator("GatedDeltaNet")
def gated_delta_net(
    attributes: Attributes,
    q: Array,
    k: Array,
    v: Array,
    cumulative: Array,
    a: Array,
    b: Array,
    state: Array,
    a_log: Array,
    dt_bias: Array,
    capture_count: Array | None = None,
    active: Array | None = None,
) -> tuple[Array, Array, Array]:
    """The same rule on packed rows with gates, l2 norm and scale inside.

    q and k [T, Hk, Dk], v [T, Hv, Dv], a and b [T, Hv], a_log and dt_bias [Hv], state
    [B, Hv, Dv, Dk]: **transposed** against LinearAttention. g = -exp(A_log) softplus(a + dt_bias),
    beta = sigmoid(b), scale 0 means 1 / sqrt(Dk). Output 2 is the capsule of each request's first
    capture_count rows, all zero unless active.
    """
    require(
        attributes,
        update_rule="gated_delta",
        gate_activation="qwen",
        beta_activation="sigmoid",
        qk_l2_norm=1,
    )
    scale = attributes.get("scale", 0.0) or q.shape[-1] ** -0.5
    capacity = attributes.get("state_update_capacity", 0)
    counts = np.zeros(len(state), np.int32) if capture_count is None else capture_count
    capturing = active is None or bool(active.item())
    q, k = l2_normalize(q) * np.float32(scale), l2_normalize(k)
    decay, beta = np.exp(-np.exp(a_log) * softplus(a + dt_bias)), logistic(b)
    out, next_state, capsules = np.zeros_like(v), np.zeros_like(state), []
    for i, rows in sequences(cumulative):
        out[rows], new, delta = delta_rule(
            q[rows], k[rows], v[rows], decay[rows], beta[rows], state[i].swapaxes(1, 2)
        )
        next_state[i] = new.swapaxes(1, 2)
        count = counts[i] if capturing else 0
        capsules.append(pack_capsule(decay[rows], k[rows], delta, count, capacity))
    return out, next_state, np.stack(capsules)


# -------------------------------------------------------------------------------------- experts


def expert_weights(logits: Array, k: int) -> Array:
    """Raw router logits [T, E] -> weights [T, E]: softmax, top k, divided by their sum."""
    exponent = np.exp(logits - logits.max(axis=-1, keepdims=True))
    chosen = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    kept = np.zeros_like(exponent)
    np.put_along_axis(kept, chosen, np.take_along_axis(exponent, chosen, axis=-1), axis=-1)
    return kept / kept.sum(axis=-1, keepdims=True)


def run_experts(
    attributes: Attributes,
    x: Array,
    router: Array,
    gate_up: Array,
    gate_up_bias: Array | None,
    down: Array,
    down_bias: Array | None,
) -> Array:
    """Weighted sum of the chosen experts' silu(gate) * up MLPs.

    x [..., D], router [T, E], gate_up [E, 2I, D] with rows g0, u0, g1, u1, down [E, D, I].
    """
    require(
        attributes,
        activation_type="swiglu",
        activation_alpha=1.0,
        activation_beta=0.0,
        swiglu_fusion=1,
        normalize_routing_weights=1,
        use_sparse_mixer=0,
    )
    rows = x.reshape(-1, x.shape[-1])
    weights = expert_weights(router, attributes["k"])
    out = np.zeros_like(rows)
    for e in range(len(gate_up)):
        hidden = rows @ gate_up[e].T
        hidden = hidden if gate_up_bias is None else hidden + gate_up_bias[e]
        result = (silu(hidden[:, 0::2]) * hidden[:, 1::2]) @ down[e].T
        result = result if down_bias is None else result + down_bias[e]
        out += weights[:, e : e + 1] * result
    return out.reshape(x.shape)


@operator("MoE")
def moe(
    attributes: Attributes,
    x: Array,
    router: Array,
    gate_up: Array,
    gate_up_bias: Array | None,
    down: Array,
    down_bias: Array | None,
    *unused: Array | None,
) -> Array:
    """Experts with float weights; see `run_experts`."""
    refuse_present(unused)
    return run_experts(attributes, x, router, gate_up, gate_up_bias, down, down_bias)


@operator("QMoE")
def q_moe(
    attributes: Attributes,
    x: Array,
    router: Array,
    gate_up: Array,
    gate_up_scales: Array,
    gate_up_bias: Array | None,
    down: Array,
    down_scales: Array,
    down_bias: Array | None,
    *unused: Array | None,
) -> Array:
    """As MoE with packed weights uint8 [E, N, K * bits / 8] and scales [E, N, K / Q]."""
    refuse_present(unused)
    bits = attributes["expert_weight_bits"]
    return run_experts(
        attributes,
        x,
        router,
        dequantize(gate_up, gate_up_scales, bits),
        gate_up_bias,
        dequantize(down, down_scales, bits),
        down_bias,
    )


def refuse_present(inputs: tuple[Array | None, ...]) -> None:
    """Raises NotImplementedError if an input that no known graph uses is there after all."""
    present = [i for i, x in enumerate(inputs) if x is not None]
    if present:
        raise NotImplementedError(f"optional inputs at places {present} after the known ones")


@operator("GatedAdd")
def gated_add(_: Attributes, x: Array, y: Array, gate: Array) -> Array:
    """x + y * gate: routed experts + shared expert * sigmoid(shared gate), gate [..., 1]."""
    return x + y * gate
