"""The gated delta net: linear attention with a forgetting, error-correcting state.

Per value head, with decay ``a = exp(g)``, key k, value v and rate beta:

  S <- a S;   delta = beta * (v - S^T k);   S <- S + k (outer) delta;   o = S^T q

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464, equation 10; operators
``com.microsoft.GatedDeltaNet`` and ``LinearAttention`` (update_rule=gated_delta).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jaxdraft.config import DeltaNetConfig
from jaxdraft.kernels import PALLAS, XLA
from jaxdraft.nn.fused import split
from jaxdraft.nn.linear import Linear, matmul
from jaxdraft.nn.norm import gated_rms_norm, l2_normalize
from jaxdraft.state import recurrent as states
from jaxdraft.state.recurrent import Capsule, Recurrent

_HIGHEST = lax.Precision.HIGHEST  # the state is float32 everywhere, GPUs included


def commit(recurrent: Recurrent, capsule: Capsule, count: jax.Array) -> Recurrent:
    """Commit rows in the implementation that made the capsule.

    See :func:`jaxdraft.state.recurrent.commit` for the arguments and the result.
    """
    if capsule.implementation == PALLAS:
        from jaxdraft.kernels import recurrent as fused_commit  # Pallas is slow to import

        plain = replace(capsule, implementation=XLA)
        return fused_commit.commit(recurrent, plain, count, xla=states.commit)
    return states.commit(recurrent, capsule, count)


def delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Compute T steps of the recurrence at once, as one unit-triangular system.

    Unrolling the recurrence with G_i = g_0 + ... + g_i gives, for the updates delta:

      delta_i + beta_i sum_{j<i} exp(G_i - G_j) (k_i . k_j) delta_j
              = beta_i (v_i - exp(G_i) S^T k_i)
      o_i     = exp(G_i) S^T q_i + sum_{j<=i} exp(G_i - G_j) (k_j . q_i) delta_j

    so the updates are the solution of a unit lower-triangular system, and everything else is a
    product. The state itself is read and never written: see :class:`Capsule`.

    Args:
      query: [B, T, Hk, Dk] float32, normalised and scaled.
      key: [B, T, Hk, Dk] float32, normalised.
      value: [B, T, Hv, Dv] float32.
      log_decay: [B, T, Hv] float32, g <= 0.
      beta: [B, T, Hv] float32.
      state: [B, Hv, Dk, Dv] float32.

    Returns:
      Outputs [B, T, Hv, Dv] and updates delta [B, T, Hv, Dv].
    """
    if key.shape[1] > _CHUNK:
        return _in_chunks(query, key, value, log_decay, beta, state)
    steps = key.shape[1]
    q, k, v, rate, seen = _by_head(query, key, value, log_decay, beta)
    # Queries and keys in one product each, so that the state is read once.
    both = jnp.concatenate([q, k], axis=2)  # [B, Hv, 2 T, Dk]
    from_state = jnp.einsum("bhtk,bhkv->bhtv", both, state, precision=_HIGHEST)
    onto_keys = jnp.einsum("bhik,bhjk->bhij", both, k, precision=_HIGHEST)
    output = seen * from_state[:, :, :steps]
    update = rate * (v - seen * from_state[:, :, steps:])
    overlap, gram = onto_keys[:, :, :steps], onto_keys[:, :, steps:]
    if steps == 1:
        output = output + overlap * update
        return jnp.swapaxes(output, 1, 2), jnp.swapaxes(update, 1, 2)
    since, system = _system(log_decay, rate, gram)
    update = solve_unit_lower(system, update)
    output = output + jnp.einsum("bhij,bhjv->bhiv", since * overlap, update, precision=_HIGHEST)
    return jnp.swapaxes(output, 1, 2), jnp.swapaxes(update, 1, 2)


_CHUNK = 128
"""Rows of one triangular system; its size grows with their square."""


def _in_chunks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Compute :func:`delta_rule` of many rows: systems all at once, then states in turn.

    The right side ``beta_i (v_i - exp(G_i) S^T k_i)`` is linear in the state S before a chunk. So
    its solution is ``U - W S``, and neither U nor W needs the state. What is left to do in turn is
    two products per chunk.

    Source: Yang et al., arXiv:2406.06484, section 3.
    """
    batch, steps = key.shape[:2]
    pieces = -(-steps // _CHUNK)

    def split(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [B * pieces, chunk, ...]
        # Rows of zeros: no decay, no update, and nothing follows them.
        x = jnp.pad(x, [(0, 0), (0, pieces * _CHUNK - steps), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(batch * pieces, _CHUNK, *x.shape[2:])

    def apart(x: jax.Array) -> jax.Array:  # [B * pieces, ...] -> [B, pieces, ...]
        return x.reshape(batch, pieces, *x.shape[1:])

    log_decay = split(log_decay)
    q, k, v, rate, seen = _by_head(split(query), split(key), split(value), log_decay, split(beta))
    onto_keys = jnp.einsum("bhik,bhjk->bhij", jnp.concatenate([q, k], 2), k, precision=_HIGHEST)
    overlap, gram = onto_keys[:, :, :_CHUNK], onto_keys[:, :, _CHUNK:]
    since, system = _system(log_decay, rate, gram)
    solved = solve_unit_lower(system, rate * jnp.concatenate([v, seen * k], axis=-1))
    alone, per_state = (apart(x) for x in jnp.split(solved, (v.shape[-1],), axis=-1))
    kept = apart(k * since[:, :, -1][..., None])  # keys, decayed to the end of their chunk
    decay = apart(seen[:, :, -1:])
    states, updates = [], []
    for i in range(pieces):
        states.append(state)
        updates.append(alone[:, i] - _product(per_state[:, i], state))
        added = jnp.einsum("bhtk,bhtv->bhkv", kept[:, i], updates[i], precision=_HIGHEST)
        state = decay[:, i] * state + added
    before, update = (
        jnp.stack(parts, axis=1).reshape(batch * pieces, *parts[0].shape[1:])
        for parts in (states, updates)
    )
    output = seen * _product(q, before) + _product(since * overlap, update)

    def whole(x: jax.Array) -> jax.Array:  # [B * pieces, Hv, chunk, Dv] -> [B, T, Hv, Dv]
        return jnp.swapaxes(x, 1, 2).reshape(batch, -1, *v.shape[1:2], v.shape[-1])[:, :steps]

    return whole(output), whole(update)


def _by_head(
    query: jax.Array, key: jax.Array, value: jax.Array, log_decay: jax.Array, beta: jax.Array
) -> tuple[jax.Array, ...]:
    """Return queries, keys and values [B, Hv, T, D], rates, and decays since before the rows."""
    shared = value.shape[2] // key.shape[2]  # consecutive value heads that share a key head

    def to_heads(x: jax.Array) -> jax.Array:  # [B, T, Hk, Dk] -> [B, Hv, T, Dk]
        return jnp.repeat(jnp.swapaxes(x, 1, 2), shared, axis=1)

    total = jnp.cumsum(jnp.swapaxes(log_decay, 1, 2), axis=-1)  # [B, Hv, T]
    rate = jnp.swapaxes(beta, 1, 2)[..., None]  # [B, Hv, T, 1]
    v = jnp.swapaxes(value, 1, 2)  # [B, Hv, T, Dv]
    return to_heads(query), to_heads(key), v, rate, jnp.exp(total)[..., None]


def _system(log_decay: jax.Array, rate: jax.Array, gram: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the decays ``exp(G_i - G_j)`` for i >= j, and the lower triangle of the system."""
    steps = gram.shape[-1]
    rows, columns = (
        jnp.arange(steps, dtype=jnp.int32)[:, None],
        jnp.arange(steps, dtype=jnp.int32)[None],
    )
    between = _between(jnp.swapaxes(log_decay, 1, 2))
    since = jnp.where(rows >= columns, jnp.exp(between), 0.0)
    return since, jnp.where(rows > columns, rate * since * gram, 0.0)


def _between(decay: jax.Array) -> jax.Array:
    """Return ``G_i - G_j`` for i > j, from [..., T]: [..., T, T], zero elsewhere.

    Each is the sum of its own terms: the difference of two long sums would lose their digits.
    Example: [1 2 3] gives [[0 0 0] [2 0 0] [5 3 0]].
    """
    steps = decay.shape[-1]
    rows = np.arange(steps)
    # From the updates before row m + 1 to those at or after it.
    crosses = (rows[None] < rows[:, None])[:, None] & (rows[:, None] <= rows[None])[..., None]
    if steps <= _BLOCK:  # one sum that compilers fuse with what needs it
        terms = [
            jnp.where(jnp.asarray(crosses[m]), decay[..., m, None, None], 0.0) for m in rows[1:]
        ]
        return functools.reduce(jnp.add, terms)
    later = jnp.where(rows[:, None] > rows[None], decay[..., None], 0.0)  # [..., m, j]
    upto = jnp.asarray(rows[:, None] >= rows[None], jnp.float32)  # [i, m]
    return jnp.einsum("im,...mj->...ij", upto, later, precision=_HIGHEST)


_BLOCK = 16
"""Rows that are solved one after the other; more are solved in halves, by products."""


def solve_unit_lower(lower: jax.Array, right: jax.Array) -> jax.Array:
    """Solve ``(I + lower) x = right`` for strictly lower-triangular ``lower``.

    Up to 16 rows are substituted one by one, which compilers fuse into one loop. More rows are
    solved as two halves, whose inverses are built from diagonal blocks of 16, all at once, by
    joining neighbours:

      [A 0]^-1   [   A^-1         0  ]
      [C B]    = [-B^-1 C A^-1  B^-1 ]

    So 128 rows need seven products in turn and not 128. The worst case, equal keys without decay,
    is tested against float64 in ``tests/nn/test_delta_net.py``.

    Args:
      lower: [..., T, T] float32; entries on or above the diagonal must be zero.
      right: [..., T, X] float32.

    Returns:
      [..., T, X].
    """
    steps = lower.shape[-1]
    if steps <= _BLOCK:
        return _substitute(lower, right)
    half = _BLOCK
    while 2 * half < steps:
        half *= 2
    short = 2 * half - steps
    if short:  # rows of zeros solve to zeros and disturb nothing above them
        pad = [(0, 0)] * (lower.ndim - 2)
        lower = jnp.pad(lower, [*pad, (0, short), (0, short)])
        right = jnp.pad(right, [*pad, (0, short), (0, 0)])
    inverses = _inverses(lower, half)
    first = _product(inverses[..., 0, :, :], right[..., :half, :])
    known = right[..., half:, :] - _product(lower[..., half:, :half], first)
    second = _product(inverses[..., 1, :, :], known)
    return jnp.concatenate([first, second], axis=-2)[..., :steps, :]


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=_HIGHEST)


def _substitute(lower: jax.Array, right: jax.Array) -> jax.Array:
    """Return the solution row by row, with no product of matrices."""
    solved: list[jax.Array] = []
    for i in range(lower.shape[-1]):
        row = right[..., i, :]
        for j, before in enumerate(solved):
            row = row - lower[..., i, j, None] * before
        solved.append(row)
    return jnp.stack(solved, axis=-2)


def _inverses(lower: jax.Array, size: int) -> jax.Array:
    """Return inverses of the diagonal blocks of ``I + lower``: [..., T / size, size, size]."""

    def blocks(size: int, row: int, stride: int) -> jax.Array:
        """Blocks (row, 0), (row + stride, stride), ...: [..., n, size, size]."""
        corners = range(0, lower.shape[-1], stride * size)
        return jnp.stack(
            [lower[..., c + row * size :, c:][..., :size, :size] for c in corners], axis=-3
        )

    diagonal = blocks(_BLOCK, 0, 1)
    identity = jnp.broadcast_to(jnp.eye(_BLOCK, dtype=lower.dtype), diagonal.shape)
    inverse = _substitute(diagonal, identity)
    joined = _BLOCK
    while joined < size:
        above, below = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        between = -_product(below, _product(blocks(joined, 1, 2), above))
        nothing = jnp.zeros_like(above)
        inverse = jnp.concatenate(
            [
                jnp.concatenate([above, nothing], axis=-1),
                jnp.concatenate([between, below], axis=-1),
            ],
            axis=-2,
        )
        joined *= 2
    return inverse


class DeltaRows(NamedTuple):
    """Inputs of the recurrence for T rows."""

    query: jax.Array  # [B, T, Hk, Dk] float32, normalised and scaled
    key: jax.Array  # [B, T, Hk, Dk] float32, normalised
    value: jax.Array  # [B, T, Hv, Dv] float32
    log_decay: jax.Array  # [B, T, Hv] float32, g <= 0
    beta: jax.Array  # [B, T, Hv] float32
    gate: jax.Array  # [B, T, Hv, Dv], of the norm after it
    stream: jax.Array  # [B, T, channels], pre-convolution


class Weights(NamedTuple):
    """The arrays between the projections."""

    conv_weight: jax.Array  # [channels, W]
    conv_bias: jax.Array  # [channels]
    decay_scale: jax.Array  # [Hv] float32, negative
    dt_bias: jax.Array  # [Hv] float32
    norm_weight: jax.Array  # [Dv]


def prepare(
    config: DeltaNetConfig,
    weights: Weights,
    mixed: jax.Array,
    ba: jax.Array,
    conv: jax.Array,
    shards: int = 1,
) -> DeltaRows:
    """Convolve, normalise and gate: compute all inputs of the recurrence of a :func:`window`."""
    c = config
    batch, steps, _ = mixed.shape
    stream, z = split(mixed, (c.channels, c.value_rows), shards)
    b, a = split(ba.astype(jnp.float32), (c.value_heads, c.value_heads), shards)
    row = (1, 1, c.value_heads)
    decay = weights.decay_scale.reshape(row) * jax.nn.softplus(a + weights.dt_bias.reshape(row))
    both, v = split(_convolve(weights, conv, stream), (2 * c.key_rows, c.value_rows), shards)
    # Queries and keys in one, since that is one launch on GPUs.
    both = l2_normalize(both.reshape(batch, steps, 2 * c.key_heads, c.key_dim))
    q, k = split(both, (c.key_heads, c.key_heads), shards, axis=2)
    q = q * c.key_dim**-0.5
    v = v.reshape(batch, steps, c.value_heads, c.value_dim).astype(jnp.float32)
    gate = z.reshape(batch, steps, c.value_heads, c.value_dim)
    return DeltaRows(q, k, v, decay, jax.nn.sigmoid(b), gate, stream)


def window(
    config: DeltaNetConfig,
    weights: Weights,
    mixed: jax.Array,
    ba: jax.Array,
    conv: jax.Array,
    state: jax.Array,
    shards: int = 1,
) -> tuple[jax.Array, Capsule]:
    """Run T rows from the input projections to the gated norm.

    Args:
      config: the layer's shape.
      weights: its small arrays.
      mixed: [B, T, channels + Hv * Dv], queries, keys, values and gates.
      ba: [B, T, 2 * Hv], rates and decays.
      conv: [B, W - 1, channels], the last committed pre-convolution rows, oldest first.
      state: [B, Hv, Dk, Dv] float32.
      shards: number of devices for which rows and channels are ordered.

    Returns:
      [B, T, Hv * Dv], and the capsule from which any prefix of the rows can be committed.
    """
    row = prepare(config, weights, mixed, ba, conv, shards)
    out, update = delta_rule(row.query, row.key, row.value, row.log_decay, row.beta, state)
    out = gated_rms_norm(out.astype(mixed.dtype), weights.norm_weight, row.gate, config.norm_eps)
    return out.reshape(*out.shape[:2], config.value_rows), Capsule(
        log_decay=row.log_decay, key=row.key, update=update, rows=row.stream
    )


def _window_of_rates(
    config: DeltaNetConfig,
    weights: Weights,
    mixed: jax.Array,
    rates: tuple[jax.Array, ...],
    conv: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, Capsule]:
    """Call :func:`window` with rates and decays, or with the two factors of their product."""
    ba = rates[0] if len(rates) == 1 else matmul(*rates)
    return window(config, weights, mixed, ba, conv, state)


def _convolve(weights: Weights, conv: jax.Array, rows: jax.Array) -> jax.Array:
    """Depthwise causal convolution, then SiLU: [B, T, channels].

    Source: ``CausalConvWithState``. Row t sees rows t - W + 1 .. t; those before the first come
    from ``conv``.
    """
    width, steps = weights.conv_weight.shape[1], rows.shape[1]
    stream = jnp.concatenate([conv.astype(rows.dtype), rows], axis=1).astype(jnp.float32)
    weight = weights.conv_weight.astype(jnp.float32)
    total = weights.conv_bias.astype(jnp.float32).reshape(1, 1, -1)
    for tap in range(width):
        total = total + stream[:, tap : tap + steps] * weight[:, tap].reshape(1, 1, -1)
    return jax.nn.silu(total).astype(rows.dtype)


class DeltaNet(nnx.Module):
    """A gated delta-net layer over T rows: projections, convolution, recurrence, gated norm."""

    implementation = XLA
    shards = 1
    """Number of devices that the heads are divided over; see :mod:`jaxdraft.nn.fused`."""

    def __init__(self, width: int, config: DeltaNetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.qkvz = Linear(width, config.channels + config.value_rows, dtype=dtype, rngs=rngs)
        self.ba = Linear(width, 2 * config.value_heads, dtype=dtype, rngs=rngs)
        shape = (config.channels, config.conv_width)
        self.conv_weight = nnx.Param(
            (jax.random.normal(rngs.params(), shape, jnp.float32) * config.conv_width**-0.5).astype(
                dtype
            )
        )
        self.conv_bias = nnx.Param(jnp.zeros((config.channels,), dtype))
        self.decay_scale = nnx.Param(-jnp.ones((config.value_heads,), jnp.float32))
        self.dt_bias = nnx.Param(jnp.zeros((config.value_heads,), jnp.float32))
        self.norm_weight = nnx.Param(jnp.ones((config.value_dim,), dtype))
        self.out = Linear(config.value_rows, width, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: jax.Array, conv: jax.Array, state: jax.Array
    ) -> tuple[jax.Array, Capsule]:
        """Run T rows after the committed ones.

        Args:
          x: [B, T, D].
          conv: [B, W - 1, channels], the last committed pre-convolution rows, oldest first.
          state: [B, Hv, Dk, Dv] float32.

        Returns:
          [B, T, D], and the capsule from which any prefix of the rows can be committed.
        """
        mixed, weights = self.qkvz(x), self.weights
        if self.implementation == PALLAS:
            from jaxdraft.kernels import delta_net as fused  # Pallas is slow to import

            if fused.serves(self.config, x):
                plain = isinstance(self.ba, Linear)
                rates = (x, self.ba.weight[...]) if plain else (self.ba(x),)
                out, capsule = fused.window(
                    self.config, weights, mixed, rates, conv, state, xla=_window_of_rates
                )
                return self.out(out), capsule
        out, capsule = window(self.config, weights, mixed, self.ba(x), conv, state, self.shards)
        return self.out(out), capsule

    @property
    def weights(self) -> Weights:
        """The arrays between the projections."""
        return Weights(
            conv_weight=self.conv_weight[...],
            conv_bias=self.conv_bias[...],
            decay_scale=self.decay_scale[...],
            dt_bias=self.dt_bias[...],
            norm_weight=self.norm_weight[...],
        )

    def project(self, x: jax.Array, conv: jax.Array) -> DeltaRows:
        """Return all inputs of the recurrence for rows [B, T, D]; see :meth:`__call__`."""
        return prepare(self.config, self.weights, self.qkvz(x), self.ba(x), conv, self.shards)

    def finish(self, out: jax.Array, gate: jax.Array) -> jax.Array:
        """Gated norm and output projection: [B, T, Hv, Dv] -> [B, T, D]."""
        c = self.config
        out = gated_rms_norm(out, self.norm_weight[...], gate, c.norm_eps)
        return self.out(out.reshape(*out.shape[:2], c.value_rows))
