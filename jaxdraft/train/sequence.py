"""Differentiable forward passes over whole sequences, for training.

They use the same modules and weights as drafting and verification. Only the surroundings of a
sequence differ: no cache, no committed length, every row of a sequence at once.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdraft.base import MASKED
from jaxdraft.config import FULL_ATTENTION, AttentionConfig
from jaxdraft.nn.attention import Attention, share_of_keys
from jaxdraft.nn.chain import ChainLayer
from jaxdraft.nn.decoder import Decoder
from jaxdraft.nn.delta_net import DeltaNet, delta_rule
from jaxdraft.nn.linear import matmul, precision, soft_cap, take
from jaxdraft.nn.packed import PackedMatrix
from jaxdraft.state.recurrent import Capsule, Recurrent, commit

CHUNK = 32
"""Number of rows of the delta rule that are solved as one triangular system."""


class DecoderRows(NamedTuple):
    """Hidden states of a target for every row of some sequences."""

    aux: jax.Array | None  # [B, T, A]
    hidden: jax.Array  # [B, T, D], after the final norm


def decoder_rows(decoder: Decoder, tokens: jax.Array) -> DecoderRows:
    """Run whole sequences from an empty state, as :func:`jaxdraft.score` does, differentiably.

    Args:
      decoder: the target.
      tokens: [B, T] int32, every row full.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    turns = decoder.turns(positions)

    def mix(i: int, y: jax.Array) -> jax.Array:
        mixer = decoder.layers[i].mixer
        if not isinstance(mixer, Attention):
            return delta_net_rows(mixer, y)
        q, k, v, gate = mixer.project(y, *turns[decoder.config.layers[i]])
        return mixer.finish(causal_attention(q, k, v, mixer.config, mixer.sink_scores), gate)

    hidden, aux = decoder.through(tokens, mix)
    return DecoderRows(aux, hidden)


def head_logits(hidden: jax.Array, head: jax.Array | PackedMatrix) -> jax.Array:
    """Return logits [..., V] float32 for rows [..., D] after the final norm."""
    return matmul(hidden, head, out_dtype=jnp.float32)


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    config: AttentionConfig,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute a sequence's attention to itself, as :func:`jaxdraft.nn.attention.attend` from empty.

    Args:
      query: [B, T, N, H], rotated.
      key: [B, T, G, H], rotated.
      value: [B, T, G, H].
      config: heads, scale, window, softcap.
      sinks: [N], the scores of the sinks, or None.

    Returns:
      [B, T, N * H].
    """
    batch, steps, heads, dim = query.shape
    groups = config.kv_heads
    q = query.reshape(batch, steps, groups, heads // groups, dim)
    scores = jnp.einsum(
        "btgnh,bsgh->bgnts",
        q * jnp.asarray(config.scale, q.dtype),
        key,
        precision=precision(q.dtype),
        preferred_element_type=jnp.float32,
    )
    scores = soft_cap(scores, config.softcap)
    row, column = (
        jnp.arange(steps, dtype=jnp.int32)[:, None],
        jnp.arange(steps, dtype=jnp.int32)[None],
    )
    seen = column <= row
    if config.window != FULL_ATTENTION:
        seen = seen & (column > row - config.window)
    weights = _softmax(jnp.where(seen, scores, MASKED), sinks)
    out = jnp.einsum(
        "bgnts,bsgh->btgnh", weights.astype(value.dtype), value, precision=precision(value.dtype)
    )
    return out.reshape(batch, steps, heads * dim).astype(query.dtype)


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Return the weights of keys with the scores [B, G, N / G, T, S]; sinks take their share."""
    weights = jax.nn.softmax(scores, axis=-1)
    if sinks is None:
        return weights
    return weights * share_of_keys(jax.nn.logsumexp(scores, axis=-1), sinks)[..., None]


def delta_net_rows(mixer: DeltaNet, x: jax.Array, *, chunk: int = CHUNK) -> jax.Array:
    """Run a delta-net layer over whole sequences: [B, T, D] -> [B, T, D].

    The projections see all rows at once; the recurrence goes chunk by chunk, each a verify pass
    whose rows are all committed.
    """
    c = mixer.config
    batch, steps, _ = x.shape
    row = mixer.project(x, jnp.zeros((batch, c.conv_width - 1, c.channels), x.dtype))
    short = -steps % chunk  # zero rows: no decay, no update, and nothing follows them

    def chunks(rows: jax.Array) -> jax.Array:  # [B, T, ...] -> [T / chunk, B, chunk, ...]
        rows = jnp.pad(rows, [(0, 0), (0, short), *[(0, 0)] * (rows.ndim - 2)])
        return jnp.moveaxis(rows.reshape(batch, -1, chunk, *rows.shape[2:]), 1, 0)

    def step(state: Recurrent, rows: list[jax.Array]) -> tuple[Recurrent, jax.Array]:
        q, k, v, decay, beta = rows
        out, update = delta_rule(q, k, v, decay, beta, state.state)
        nothing = jnp.zeros((batch, chunk, 0), state.conv.dtype)  # the stream is convolved already
        capsule = Capsule(log_decay=decay, key=k, update=update, rows=nothing)
        return commit(state, capsule, jnp.full((batch,), chunk, jnp.int32)), out

    state = Recurrent.zeros(
        batch,
        value_heads=c.value_heads,
        key_dim=c.key_dim,
        value_dim=c.value_dim,
        conv_width=c.conv_width,
        channels=0,
        dtype=x.dtype,
    )
    parts = [chunks(part) for part in (row.query, row.key, row.value, row.log_decay, row.beta)]
    _, out = lax.scan(step, state, parts)
    out = jnp.moveaxis(out, 0, 1).reshape(batch, -1, c.value_heads, c.value_dim)[:, :steps]
    return mixer.finish(out.astype(x.dtype), row.gate)


def chain_rows(
    layer: ChainLayer,
    embedding: jax.Array | PackedMatrix,
    hidden: jax.Array,
    tokens: jax.Array,
    links: int,
) -> list[jax.Array]:
    """Chain a head ``links`` times from every row of a sequence, fed with the true tokens.

    Link j of row p reads the row of the link before (link 0: what is made of the target's own row)
    and token p + 1 + j, has position p + j, and predicts token p + 2 + j. It attends to the same
    rows as in the drafter's cache and scratch: link 0 of rows up to p, then its own chain.

    Args:
      layer: the head.
      embedding: [V, D], the one that the head reads.
      hidden: [B, T, D], rows of the target: after its final norm for an MTP head, fused
        (:meth:`jaxdraft.nn.eagle3.Eagle3.fuse`) for an EAGLE-3 head.
      tokens: [B, T] int32. Past the end it reads token 0: the results of
        links that need those tokens, at the last rows, are meaningless.
      links: number of times the head is applied.

    Returns:
      For each link the rows [B, T, D] that the next link reads.
    """
    batch, steps = tokens.shape
    mixer = layer.mixer
    padded = jnp.pad(tokens, ((0, 0), (0, links)))
    keys: list[jax.Array] = []
    values: list[jax.Array] = []
    outputs: list[jax.Array] = []
    for link in range(links):
        following = padded[:, 1 + link : 1 + link + steps]
        embedded = take(embedding, following).astype(hidden.dtype)
        residual, rows = layer.enter(embedded, hidden)
        positions = jnp.arange(steps, dtype=jnp.int32)[None] + link
        cos, sin = layer.rotary.at(jnp.broadcast_to(positions, (batch, steps)))
        q, k, v, gate = mixer.project(rows, cos, sin)
        keys.append(k)
        values.append(v)
        attended = _chain_attention(q, keys, values, mixer.config, mixer.sink_scores)
        hidden = layer.leave(residual, mixer.finish(attended, gate))
        outputs.append(hidden)
    return outputs


def _chain_attention(
    query: jax.Array,
    keys: list[jax.Array],
    values: list[jax.Array],
    config: AttentionConfig,
    sinks: jax.Array | None,
) -> jax.Array:
    """Compute causal attention to the first link's keys, and to a row's own keys of later links.

    Args:
      query: [B, T, N, H], query of the last link.
      keys: for each link so far [B, T, G, H].
      values: likewise.
      config: heads, scale.
      sinks: [N], the scores of the sinks, or None.

    Returns:
      [B, T, N * H].
    """
    batch, steps, heads, dim = query.shape
    groups = config.kv_heads
    exact = precision(query.dtype)
    q = query.reshape(batch, steps, groups, heads // groups, dim)
    q = q * jnp.asarray(config.scale, q.dtype)
    cached = jnp.einsum("btgnh,bsgh->bgnts", q, keys[0], precision=exact)
    row, column = (
        jnp.arange(steps, dtype=jnp.int32)[:, None],
        jnp.arange(steps, dtype=jnp.int32)[None],
    )
    cached = jnp.where(column <= row, cached.astype(jnp.float32), MASKED)
    own = [jnp.einsum("btgnh,btgh->bgnt", q, k, precision=exact)[..., None] for k in keys[1:]]
    scores = jnp.concatenate([cached, *[s.astype(jnp.float32) for s in own]], axis=-1)
    weights = _softmax(scores, sinks).astype(query.dtype)
    out = jnp.einsum("bgnts,bsgh->btgnh", weights[..., :steps], values[0], precision=exact)
    for link, value in enumerate(values[1:]):
        weight = jnp.transpose(weights[..., steps + link], (0, 3, 1, 2))  # [B, T, G, N / G]
        out = out + weight[..., None] * value[:, :, :, None]
    return out.reshape(batch, steps, heads * dim)
