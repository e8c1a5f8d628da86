"""Many blocks of one sequence at once, under the mask that drafting sees.

A block with its anchor at position p has the inputs of a drafter after p rows: auxiliary
states of positions below p, the anchor's embedding, and masks. The context path runs once per
sequence; every block then reads its keys through :meth:`BlockBackbone.block`, the very function
that drafts, with its own view of which of them exist. No block sees another.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxdraft.config import FULL_ATTENTION
from jaxdraft.nn.block_drafter import BlockBackbone
from jaxdraft.nn.linear import take
from jaxdraft.nn.packed import PackedMatrix
from jaxdraft.state.paged import Chunk, Source


def block_features(
    backbone: BlockBackbone,
    embedding: jax.Array | PackedMatrix,
    aux: jax.Array,
    tokens: jax.Array,
    anchors: jax.Array,
) -> jax.Array:
    """Return the final-normed rows of one block after each anchor.

    Args:
      backbone: the drafter.
      embedding: [V, D], the target's.
      aux: [B, T, A], the target's auxiliary states.
      tokens: [B, T] int32.
      anchors: [B, n] int32, positions; their blocks read rows before them and no later one.

    Returns:
      [B, n, K, D]: row k predicts the token at ``anchor + 1 + k``.
    """
    config = backbone.config
    batch, steps = tokens.shape
    count = anchors.shape[1]
    positions = jnp.broadcast_to(jnp.arange(steps, dtype=jnp.int32)[None], (batch, steps))
    keys, values = backbone.context(aux, positions)
    first = anchors.reshape(-1).astype(jnp.int32)
    row = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), count)[:, None]

    def places(window: int) -> jax.Array:
        # A window of w positions ends at the query; from the anchor on none reaches further back.
        reach = steps if window == FULL_ATTENTION else min(window, steps)
        at = jnp.arange(steps, dtype=jnp.int32)[None]
        if reach < steps:
            at = first[:, None] - reach + jnp.arange(reach, dtype=jnp.int32)[None]
        return jnp.broadcast_to(at, (batch * count, reach))

    def context(layer: int) -> Source:
        at = places(config.window(layer))
        exists = (at >= 0) & (at < first[:, None])

        def gather(rows: jax.Array) -> jax.Array:  # [B, T, G, H] -> [B * n, 1, G, S, H]
            taken = rows[row, jnp.clip(at, 0, steps - 1)]
            return jnp.swapaxes(taken, 1, 2)[:, None]

        held = jnp.where(exists, at, -1)[:, None]
        chunk = Chunk(gather(keys[layer]), gather(values[layer]), held)
        return Source(_only, chunk, jnp.asarray(1, jnp.int32), 1)

    anchor = jnp.take_along_axis(tokens, anchors, axis=1).reshape(-1, 1)
    masks = jnp.full((batch * count, config.block_size - 1), config.mask_token, tokens.dtype)
    embedded = take(embedding, jnp.concatenate([anchor, masks], axis=1))
    rows = backbone.block(embedded, first, context)
    return rows.reshape(batch, count, config.draft_tokens, config.width)


def _only(chunk: Chunk, index: jax.Array, chunks: int) -> Chunk:
    """Read the one chunk there is."""
    del index, chunks
    return chunk


def following(rows: jax.Array, anchors: jax.Array, count: int, *, offset: int) -> jax.Array:
    """Entries at ``anchor + offset + k``: [B, T, ...], [B, n] -> [B, n, count, ...].

    Example: offset 1 gives the tokens that the drafts of a block should be, offset 0 their
    predecessors and the rows of the target that predict them.
    """
    at = anchors[..., None] + offset + jnp.arange(count, dtype=anchors.dtype)[None, None]
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None, None]
    return rows[row, at]
