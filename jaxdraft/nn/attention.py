"""Softmax attention over pages, in one pass over the keys in use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jaxdraft.base import MASKED
from jaxdraft.config import FULL_ATTENTION, AttentionConfig
from jaxdraft.kernels import PALLAS, XLA
from jaxdraft.nn.fused import split
from jaxdraft.nn.linear import Linear, along_last, precision, soft_cap
from jaxdraft.nn.norm import RMSNorm
from jaxdraft.nn.rope import rotate
from jaxdraft.state.paged import Chunk, Source

_Running = tuple[jax.Array, jax.Array, jax.Array]  # maximum, mass, weighted sum of values

_Average = tuple[jax.Array, jax.Array]  # average of values, log of the sum of exp(score)

_SCORES = 2**28
"""Bytes of the scores of one pass on a GPU."""

_PASSES = 16
"""Number of passes that are written out on a GPU. More are a loop, and the host waits for each."""


def attend(
    query: jax.Array,
    positions: jax.Array,
    source: Source,
    config: AttentionConfig,
    *,
    causal: bool,
    block_keys: Chunk | None = None,
    sinks: jax.Array | None = None,
    implementation: str = XLA,
) -> jax.Array:
    """Compute softmax attention with a running maximum, chunk by chunk.

    Only the chunks that hold keys in use are read, so the cost follows the lengths and not the
    capacity, and no copy of a row's whole cache exists.

    Differentiable any number of times, in forward and in reverse mode: see :func:`_softmax_jvp`.

    A key at position k is visible to a query at position q if the slot holds a key, ``k <= q`` when
    ``causal``, and ``k > q - window`` when there is a window. A query that sees no key gives zeros.

    A sink is one more score in the softmax of every query of its head, and its value is zero.

    Source: ``com.microsoft.PagedAttention`` and ``GroupQueryAttention``; the running softmax is
    Milakov and Gimelshein, arXiv:1805.02867; sinks are those of gpt-oss.

    Args:
      query: [B, T, N, H], rotated.
      positions: [B, T] int32, positions of the queries.
      source: cached keys and values.
      config: heads, scale, window, softcap.
      causal: hide keys after the query.
      block_keys: further keys outside the cache (a drafter's own block).
      sinks: [N], the scores of the sinks, of any float dtype; None: there are none.
      implementation: "xla", or "pallas" for a kernel where there is one; see
        :mod:`jaxdraft.kernels`. With sinks there is none.

    Returns:
      [B, T, N * H].
    """
    if implementation == PALLAS and sinks is None:
        from jaxdraft.kernels import attention as fused  # Pallas is slow to import

        if fused.serves(query, source):
            return fused.attend(
                query, positions, source, config, causal=causal, block_keys=block_keys, xla=attend
            )
    batch, steps, heads, dim = query.shape
    groups = config.kv_heads
    share = heads // groups
    # [B, T, G, share, H] -> [B, G, share * T, H]: one matrix of queries for every key head.
    q = query.reshape(batch, steps, groups, share, dim).transpose(0, 2, 3, 1, 4)
    q = (q * jnp.asarray(config.scale, q.dtype)).reshape(batch, groups, share * steps, dim)
    form = _Form(config, causal, source.read, source.whole, source.chunks)
    out, log_mass = _softmax(form, q, positions, _Keys(source.data, source.used, block_keys))
    out = out.reshape(batch, groups, share, steps, dim)
    if sinks is not None:
        out = out * share_of_keys(log_mass.reshape(out.shape[:-1]), sinks)[..., None]
    out = out.transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, steps, heads * dim).astype(query.dtype)


def share_of_keys(log_mass: jax.Array, sinks: jax.Array) -> jax.Array:
    """Return the share of the softmax that falls to keys and not to the sink.

    ``sum exp(score) / (sum exp(score) + exp(sink))``, which scales the average over the keys. It is
    zero for a query that sees no key.

    Args:
      log_mass: [B, G, N / G, T] float32, ``log sum exp(score)``.
      sinks: [N], the scores of the sinks.
    """
    heads = sinks.astype(jnp.float32).reshape(1, *log_mass.shape[1:3], 1)
    return jax.nn.sigmoid(log_mass - heads)


class _Form(NamedTuple):
    """The static arguments."""

    config: AttentionConfig
    causal: bool
    read: Callable[[Any, jax.Array, int], Chunk]
    whole: Callable[[Any], Chunk] | None
    chunks: int


class _Keys(NamedTuple):
    """The arrays of a :class:`Source`, and the chunk beside it."""

    data: Any
    used: jax.Array  # [] int32
    block_keys: Chunk | None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _softmax(
    form: _Form, q: jax.Array, positions: jax.Array, keys: _Keys
) -> tuple[jax.Array, jax.Array]:
    """Average the values, weighted by the softmax of the scores.

    Args:
      form: static arguments.
      q: [B, G, share * T, H], scaled queries.
      positions: [B, T] int32, positions of the queries.
      keys: the keys and values.

    Returns:
      The averages [B, G, share * T, H], and the log of the sum of ``exp(score)``
      [B, G, share * T], MASKED where a query sees no key; both float32.
    """

    # On CPUs a loop over small chunks keeps what it works on in the caches. On GPUs the host would
    # wait for the end of each of its passes.
    return lax.platform_dependent(
        q,
        positions,
        keys,
        cpu=functools.partial(_in_passes, form, 1),
        default=functools.partial(_at_once, form),
    )


def _absorb(
    form: _Form, q: jax.Array, positions: jax.Array, running: _Running, chunk: Chunk
) -> _Running:
    """Add a chunk's keys to the running softmax."""
    maximum, mass, total = running
    scores, seen = _scores(form, q, positions, chunk)
    scores = jnp.where(seen, scores, MASKED)
    peak = jnp.maximum(maximum, jnp.max(scores, axis=(1, 4)))
    weights = jnp.where(seen, jnp.exp(scores - peak[:, None, :, :, None]), 0.0)
    keep = jnp.exp(maximum - peak)
    return (
        peak,
        mass * keep + jnp.sum(weights, axis=(1, 4)),
        total * keep[..., None] + _weigh(weights, chunk.values),
    )


def _in_passes(
    form: _Form, width: int, q: jax.Array, positions: jax.Array, keys: _Keys
) -> tuple[jax.Array, jax.Array]:
    """Compute :func:`_softmax` from the chunks in use alone, ``width`` per pass."""

    def step(index: jax.Array, running: _Running) -> _Running:
        if width == 1:
            return _absorb(form, q, positions, running, form.read(keys.data, index, 1))
        # The last pass starts earlier, so that it ends with the last chunk; what the pass before
        # has taken in is hidden from it. Example, 5 chunks, width 2: 0 1, 2 3, then 3 4 without 3.
        first = jnp.minimum(index * width, form.chunks - width)
        chunk = form.read(keys.data, first, width)
        slots = chunk.positions.shape[1] * chunk.positions.shape[2]
        slot = jnp.arange(slots, dtype=jnp.int32).reshape(1, *chunk.positions.shape[1:])
        new = slot >= (index * width - first) * (slots // width)
        hidden = chunk._replace(positions=jnp.where(new, chunk.positions, -1))
        return _absorb(form, q, positions, running, hidden)

    running = (
        jnp.full(q.shape[:3], MASKED, jnp.float32),
        jnp.zeros(q.shape[:3], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    if keys.block_keys is not None:
        running = _absorb(form, q, positions, running, keys.block_keys)
    if form.chunks == 1:
        running = step(jnp.asarray(0, jnp.int32), running)
    elif form.chunks > 1:
        most = -(-form.chunks // width)
        passes = keys.used if width == 1 else -(-keys.used // width)
        if width == 1 or most > _PASSES:
            running = lax.fori_loop(0, passes, step, running)
        else:  # written out; the device leaves out the passes that are not needed
            for index in range(most):
                take = functools.partial(step, jnp.asarray(index, jnp.int32))
                running = lax.cond(index < passes, take, lambda same: same, running)
    maximum, mass, total = running
    mass = jnp.where(mass > 0, mass, 1.0)
    return total / mass[..., None], maximum + jnp.log(mass)


@functools.partial(jax.jit, static_argnums=0)  # traced once for all layers of a shape
def _at_once(
    form: _Form, q: jax.Array, positions: jax.Array, keys: _Keys
) -> tuple[jax.Array, jax.Array]:
    """Compute :func:`_softmax` in one pass, one of a few that read different numbers of chunks.

    A branch on the device is part of a CUDA graph; a loop of unknown length is not, and the host
    waits for each of its passes. Scores of all keys are in memory at once: where that would be
    more than ``_SCORES`` bytes (a prompt's rows over a long text), there are passes.
    """
    bytes_per_chunk = 4 * q.shape[0] * q.shape[1] * q.shape[2] * _slots(form, keys.data)
    width = max(1, _SCORES // bytes_per_chunk)
    if width < form.chunks:
        return _in_passes(form, width, q, positions, keys)
    lengths = reaches(form.chunks, form.whole is not None)

    def first(length: int) -> Callable[[], _Average]:
        def read() -> _Average:
            chunk = form.read(keys.data, jnp.asarray(0, jnp.int32), length)
            return _average(form, q, positions, chunk)

        return read

    branches = [first(length) for length in lengths]
    if form.whole is not None:
        branches[-1] = functools.partial(_everything, form, q, positions, keys.data, branches[-1])
    index = sum((keys.used > length).astype(jnp.int32) for length in lengths[:-1])
    found = lax.switch(jnp.asarray(index, jnp.int32), branches)
    if keys.block_keys is None:
        return found
    return _join(found, _average(form, q, positions, keys.block_keys))


def _everything(
    form: _Form,
    q: jax.Array,
    positions: jax.Array,
    data: Any,
    hidden: Callable[[], _Average],
) -> _Average:
    """Read all chunks in place, and again with ``hidden`` if an unseen value is not finite.

    Zero times NaN is NaN, so a hidden value that is not finite shows in an average.
    """
    assert form.whole is not None
    found = _average(form, q, positions, form.whole(data))
    return lax.cond(jnp.all(jnp.isfinite(found[0])), lambda: found, hidden)


def _average(form: _Form, q: jax.Array, positions: jax.Array, chunk: Chunk) -> _Average:
    """Compute :func:`_softmax` over one chunk, in a form that XLA compiles to few GPU launches."""
    batch, _, groups, _, dim = chunk.keys.shape
    keys, values = (
        jnp.swapaxes(x, 1, 2).reshape(batch, 1, groups, -1, dim) for x in (chunk.keys, chunk.values)
    )
    flat = Chunk(keys, values, chunk.positions.reshape(batch, 1, -1))
    scores, seen = (x[:, 0] for x in _scores(form, q, positions, flat))  # [B, G, share * T, S]
    scores = jnp.where(seen, scores, MASKED)
    peak = jnp.max(scores, axis=3)
    weights = jnp.where(seen, jnp.exp(scores - peak[..., None]), 0.0).astype(values.dtype)
    # The sum of what was rounded, so that the average divides by just what it has multiplied with.
    # Without the barrier XLA would sum them before rounding, and write them twice.
    weights = lax.optimization_barrier(weights)
    mass = jnp.sum(weights.astype(jnp.float32), axis=3)
    mass = jnp.where(mass > 0, mass, 1.0)
    return _weigh(weights[:, None], values) / mass[..., None], peak + jnp.log(mass)


def _join(one: _Average, other: _Average) -> _Average:
    """Average over the keys of both."""
    log_mass = jnp.logaddexp(one[1], other[1])
    shares = [jnp.exp(part[1] - log_mass)[..., None] for part in (one, other)]
    return one[0] * shares[0] + other[0] * shares[1], log_mass


def _slots(form: _Form, data: Any) -> int:
    """Return the slots of one chunk."""
    chunk = jax.eval_shape(lambda data: form.read(data, jnp.asarray(0, jnp.int32), 1), data)
    return chunk.positions.shape[1] * chunk.positions.shape[2]


def reaches(chunks: int, whole: bool) -> list[int]:
    """Return the numbers of chunks that one pass may read, ascending; the last is all of them.

    XLA copies the keys and values of a part before it multiplies them, but not those of all
    chunks where these can be read in place. So a part costs three times as much per chunk, and
    parts that are more than a third of everything are left out.

    Two numbers in every octave, and one chunk more, for a window after a round number of positions.

    Example, 73 chunks that can be read in place: 5, 7, 9, 13, 17, 73.

    Args:
      chunks: number of chunks of the source.
      whole: whether they can be read in place.
    """
    found: list[int] = []
    size = 4
    while 3 * size < chunks if whole else size + 1 < chunks:
        found += [size + 1, 3 * size // 2 + 1]
        size *= 2
    limit = -(-chunks // 3) if whole else chunks
    return [length for length in found if length < limit] + [chunks]


@_softmax.defjvp
def _softmax_jvp(
    form: _Form, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Differentiate :func:`_softmax`, chunk by chunk.

    With weights ``w = exp(score - log_mass)``, which sum to one:

    * ``d log_mass = sum w d score``
    * ``d out = sum w (d score) value + sum w d value - out * d log_mass``

    Every term is a sum over keys. So it takes no running maximum, its transpose is a loop of the
    same kind, and nothing of the size [queries, keys] is kept for that: a chunk's weights are
    computed again. The loop of the value has a dynamic end, which reverse mode does not allow; this
    one covers the capacity and skips unused chunks.

    Source: Dao et al., arXiv:2205.14135, appendix B.4.
    """
    q, positions, keys = primals
    dq, _, dkeys = tangents
    out, log_mass = _softmax(form, q, positions, keys)
    Sums = tuple[jax.Array, jax.Array]

    def sums(q: jax.Array, pair: tuple[jax.Array, jax.Array], places: jax.Array) -> Sums:
        # A hidden key may be anything, even NaN, and its score has the gradient zero: the product
        # of the two must not arise.
        held = (places >= 0)[:, :, None, :, None]
        k, v = (jnp.where(held, x, jnp.zeros((), x.dtype)) for x in pair)
        scores, seen = _scores(form, q, positions, Chunk(k, v, places))
        scores = jnp.where(seen, scores - log_mass[:, None, :, :, None], MASKED)
        weights = jnp.exp(scores)  # exp(MASKED) is zero
        return _weigh(weights, v), jnp.sum(weights, axis=(1, 4))

    def tangent(pair: Sums, dpair: Sums, places: jax.Array) -> Sums:
        return jax.jvp(lambda q, pair: sums(q, pair, places), (q, pair), (dq, dpair))[1]

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(total: Sums, here: tuple[jax.Array, Sums, Sums, jax.Array]) -> tuple[Sums, None]:
        index, *chunk = here
        added = lax.cond(index < keys.used, tangent, lambda *_: nothing, *chunk)
        return jax.tree.map(jnp.add, total, added), None

    nothing = (jnp.zeros(out.shape, jnp.float32), jnp.zeros(log_mass.shape, jnp.float32))
    total = nothing
    if keys.block_keys is not None:
        total = tangent(keys.block_keys[:2], dkeys.block_keys[:2], keys.block_keys.positions)
    indices = jnp.arange(form.chunks, dtype=jnp.int32)
    pairs, dpairs, places = jax.jvp(
        functools.partial(_read_all, form, indices), (keys.data,), (dkeys.data,), has_aux=True
    )
    if form.chunks == 1:  # few keys: their weights are kept, not computed again
        one = jax.tree.map(lambda x: x[0], (pairs, dpairs, places))
        total = jax.tree.map(jnp.add, total, tangent(*one))
    else:
        total, _ = lax.scan(step, total, (indices, pairs, dpairs, places))
    dout, dmass = total
    return (out, log_mass), (dout - out * dmass[..., None], dmass)


def _read_all(
    form: _Form, indices: jax.Array, data: Any
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Return keys and values of all chunks [chunks, B, C, G, S, H], and their positions."""
    chunks = jax.vmap(lambda index: form.read(data, index, 1))(indices)
    return (chunks.keys, chunks.values), chunks.positions


def _scores(
    form: _Form, q: jax.Array, positions: jax.Array, chunk: Chunk
) -> tuple[jax.Array, jax.Array]:
    """Return scores of a chunk's keys, and their visibility, [B, C, G, share * T, S] each."""
    config = form.config
    pages, slots = chunk.keys.shape[1], chunk.keys.shape[3]
    scores = lax.dot_general(
        jnp.broadcast_to(q[:, None], (q.shape[0], pages, *q.shape[1:])),
        chunk.keys.astype(q.dtype),
        (((4,), (4,)), ((0, 1, 2), (0, 1, 2))),
        precision=precision(q.dtype),
        preferred_element_type=jnp.float32,
    )
    scores = soft_cap(scores, config.softcap)
    key = chunk.positions[:, :, None, :]
    at = positions[:, None, :, None]
    seen = key >= 0
    if form.causal:
        seen = seen & (key <= at)
    if config.window != FULL_ATTENTION:
        seen = seen & (key > at - config.window)
    batch, steps = positions.shape
    seen = jnp.broadcast_to(seen, (batch, pages, steps, slots))[:, :, None, None]
    shape = (batch, pages, q.shape[1], q.shape[2] // steps, steps, slots)
    return scores, jnp.broadcast_to(seen, shape).reshape(scores.shape)


def _weigh(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Sum the values of a chunk: [B, C, G, X, S] x [B, C, G, S, H] -> [B, G, X, H] float32."""
    added = lax.dot_general(
        weights.astype(values.dtype),
        values,
        (((4,), (3,)), ((0, 1, 2), (0, 1, 2))),
        precision=precision(values.dtype),
        preferred_element_type=jnp.float32,
    )
    return jnp.sum(added, axis=1)


class Attention(nnx.Module):
    """The projections around :func:`attend` in a decoder layer, causal, one fused input product."""

    implementation = XLA
    shards = 1
    """Number of devices that the heads are divided over; see :mod:`jaxdraft.nn.fused`."""
    copies = 1
    """Number of copies of every key/value head, for devices that share one."""

    def __init__(
        self,
        width: int,
        config: AttentionConfig,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        inputs: int | None = None,
    ):
        """width: D. inputs: width of the rows that are projected, if it is not D."""
        self.config = config
        rows = config.query_rows + 2 * config.kv_rows
        self.qkv = Linear(width if inputs is None else inputs, rows, dtype=dtype, rngs=rngs)
        if config.bias:  # beside the matrix: every form of matrix can have one
            self.qkv_bias = nnx.Param(jnp.zeros((rows,), dtype))
        if config.qk_norm:
            whole = config.norm_whole
            q, k = (config.heads, config.kv_heads) if whole else (1, 1)
            self.q_norm = RMSNorm(q * config.head_dim, config.norm_eps, dtype=dtype)
            self.k_norm = RMSNorm(k * config.head_dim, config.norm_eps, dtype=dtype)
        self.o = Linear(config.heads * config.head_dim, width, dtype=dtype, rngs=rngs)
        if config.out_bias:
            self.o_bias = nnx.Param(jnp.zeros((width,), dtype))
        if config.sinks:
            self.sinks = nnx.Param(jax.random.normal(rngs.params(), (config.heads,)).astype(dtype))

    @property
    def sink_scores(self) -> jax.Array | None:
        """[N], the scores of the sinks, or None."""
        return self.sinks[...] if self.config.sinks else None

    def project(
        self, x: jax.Array, cos: jax.Array | None, sin: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Return queries [B, T, N, H], keys and values [B, T, G, H], gate [B, T, N * H] or None."""
        c = self.config
        batch, steps, _ = x.shape
        mixed = self.qkv(x)
        if c.bias:
            mixed = mixed + along_last(self.qkv_bias[...], mixed)
        q, k, v = split(mixed, (c.query_rows, c.kv_rows, c.kv_rows), self.shards)
        gate = None
        q = q.reshape(batch, steps, c.heads, -1)
        if c.gated:  # every head's rows are [query, gate]
            gate = q[..., c.head_dim :].reshape(batch, steps, -1)
            q = q[..., : c.head_dim]
        k = k.reshape(batch, steps, c.kv_heads, c.head_dim)
        v = v.reshape(batch, steps, c.kv_heads, c.head_dim)
        if c.qk_norm and c.norm_whole:
            q = self.q_norm(q.reshape(batch, steps, -1)).reshape(q.shape)
            k = self.k_norm(k.reshape(batch, steps, -1)).reshape(k.shape)
        elif c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if c.rotary_dim:
            assert cos is not None and sin is not None
            q, k = (rotate(x, cos, sin, interleaved=c.interleaved) for x in (q, k))
        return q, k, v, gate

    def finish(self, attended: jax.Array, gate: jax.Array | None) -> jax.Array:
        """The output projection, gated if the layer is: [B, T, N * H] -> [B, T, D]."""
        if gate is not None:
            attended = attended * jax.nn.sigmoid(gate)
        y = self.o(attended)
        return y + along_last(self.o_bias[...], y) if self.config.out_bias else y
