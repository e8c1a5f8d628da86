"""Softmax attention over pages, in one pass over the keys in use."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jaxdraft.base import MASKED
from jaxdraft.config import FULL_ATTENTION, AttentionConfig
from jaxdraft.kernels import PALLAS, XLA
from jaxdraft.kernels import attention as fused
from jaxdraft.nn.linear import Linear, precision
from jaxdraft.nn.norm import RMSNorm
from jaxdraft.nn.rope import rotate
from jaxdraft.state.paged import Chunk, Source

_Running = tuple[jax.Array, jax.Array, jax.Array]  # maximum, mass, weighted sum of values


def attend(
    query: jax.Array,
    positions: jax.Array,
    source: Source,
    config: AttentionConfig,
    *,
    causal: bool,
    beside: Chunk | None = None,
    implementation: str = XLA,
) -> jax.Array:
    """Softmax attention with a running maximum, chunk by chunk.

    Only the chunks that hold keys in use are read, so the cost follows the lengths and not the
    capacity, and no copy of a row's whole cache exists.

    A key at position k is visible to a query at position q if the slot holds a key, ``k <= q`` when
    ``causal``, and ``k > q - window`` when there is a window. A query that sees no key gives zeros.

    Source: ``com.microsoft.PagedAttention`` and ``GroupQueryAttention``; the running softmax is
    Milakov and Gimelshein, arXiv:1805.02867.

    Args:
      query: [B, T, N, H], rotated.
      positions: [B, T] int32, of the queries.
      source: cached keys and values.
      config: heads, scale, window, softcap.
      causal: hide keys after the query.
      beside: further keys that are in no cache (a drafter's own block).
      implementation: "xla", or "pallas" for a kernel where there is one; see
        :mod:`jaxdraft.kernels`.

    Returns:
      [B, T, N * H].
    """
    if implementation == PALLAS and fused.serves(query, source):
        return fused.attend(query, positions, source, config, causal=causal, beside=beside)
    batch, steps, heads, dim = query.shape
    groups = config.kv_heads
    share = heads // groups
    # [B, T, G, share, H] -> [B, G, share * T, H]: one matrix of queries for every key head.
    q = query.reshape(batch, steps, groups, share, dim).transpose(0, 2, 3, 1, 4)
    q = (q * jnp.asarray(config.scale, q.dtype)).reshape(batch, groups, share * steps, dim)

    def visible(key_positions: jax.Array) -> jax.Array:  # [B, C, S] -> [B, C, 1, 1, T, S]
        key = key_positions[:, :, None, :]
        at = positions[:, None, :, None]
        seen = key >= 0
        if causal:
            seen = seen & (key <= at)
        if config.window != FULL_ATTENTION:
            seen = seen & (key > at - config.window)
        return jnp.broadcast_to(seen, (*key.shape[:2], steps, key.shape[3]))[:, :, None, None]

    def absorb(running: _Running, chunk: Chunk) -> _Running:
        maximum, mass, total = running
        pages, slots = chunk.keys.shape[1], chunk.keys.shape[3]
        many = jnp.broadcast_to(q[:, None], (batch, pages, *q.shape[1:]))
        scores = lax.dot_general(
            many,
            chunk.keys.astype(q.dtype),
            (((4,), (4,)), ((0, 1, 2), (0, 1, 2))),
            precision=precision(q.dtype),
            preferred_element_type=jnp.float32,
        )  # [B, C, G, share * T, S]
        if config.softcap:
            scores = config.softcap * jnp.tanh(scores / config.softcap)
        shape = (batch, pages, groups, share, steps, slots)
        seen = jnp.broadcast_to(visible(chunk.positions), shape).reshape(scores.shape)
        scores = jnp.where(seen, scores, MASKED)
        peak = jnp.maximum(maximum, jnp.max(scores, axis=(1, 4)))
        weights = jnp.where(seen, jnp.exp(scores - peak[:, None, :, :, None]), 0.0)
        keep = jnp.exp(maximum - peak)
        added = lax.dot_general(
            weights.astype(chunk.values.dtype),
            chunk.values,
            (((4,), (3,)), ((0, 1, 2), (0, 1, 2))),
            precision=precision(chunk.values.dtype),
            preferred_element_type=jnp.float32,
        )  # [B, C, G, share * T, H]
        return (
            peak,
            mass * keep + jnp.sum(weights, axis=(1, 4)),
            total * keep[..., None] + jnp.sum(added, axis=1),
        )

    running = (
        jnp.full(q.shape[:3], MASKED, jnp.float32),
        jnp.zeros(q.shape[:3], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    if beside is not None:
        running = absorb(running, beside)
    if source.chunks == 1:
        running = absorb(running, source.read(jnp.asarray(0, jnp.int32)))
    elif source.chunks > 1:
        running = lax.fori_loop(
            0, source.used, lambda i, carry: absorb(carry, source.read(i)), running
        )
    _, mass, total = running
    out = total / jnp.where(mass > 0, mass, 1.0)[..., None]
    out = out.reshape(batch, groups, share, steps, dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, steps, heads * dim).astype(query.dtype)


class Attention(nnx.Module):
    """The projections around :func:`attend` in a decoder layer, causal, one fused input product."""

    implementation = XLA

    def __init__(self, width: int, config: AttentionConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        rows = config.query_rows + 2 * config.kv_rows
        self.qkv = Linear(width, rows, dtype=dtype, rngs=rngs)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps, dtype=dtype)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps, dtype=dtype)
        self.o = Linear(config.heads * config.head_dim, width, dtype=dtype, rngs=rngs)

    def project(
        self, x: jax.Array, cos: jax.Array | None, sin: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Queries [B, T, N, H], keys and values [B, T, G, H], gate [B, T, N * H] or None."""
        c = self.config
        batch, steps, _ = x.shape
        mixed = self.qkv(x)
        q, k, v = jnp.split(mixed, (c.query_rows, c.query_rows + c.kv_rows), axis=-1)
        gate = None
        q = q.reshape(batch, steps, c.heads, -1)
        if c.gated:  # every head's rows are [query, gate]
            gate = q[..., c.head_dim :].reshape(batch, steps, -1)
            q = q[..., : c.head_dim]
        k = k.reshape(batch, steps, c.kv_heads, c.head_dim)
        v = v.reshape(batch, steps, c.kv_heads, c.head_dim)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if c.rotary_dim:
            assert cos is not None and sin is not None
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k, v, gate

    def finish(self, attended: jax.Array, gate: jax.Array | None) -> jax.Array:
        """The output projection, gated if the layer is: [B, T, N * H] -> [B, T, D]."""
        if gate is not None:
            attended = attended * jax.nn.sigmoid(gate)
        return self.o(attended)
