"""Drafts chosen one after another from the scores of all tokens, each scored after its path.

A lattice has scores of pairs. A recurrent head scores a token after a whole path, and so has no
lattice; and the best tokens of a row by their logits alone need not be its best after the draft
before. A chain scores all tokens after the drafts that were chosen, as a language model does, at
the cost of one product with the codes of all tokens per draft.

Drafts that are drawn come from the C best tokens of their step, and their distribution over those
is reported. It depends on the drafts before, as :class:`jaxdraft.base.Support` allows, and on
nothing drawn later: so verification is exact.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxdraft.base import Draw, Guide, Support
from jaxdraft.draft.sampled import sampled_token
from jaxdraft.nn.block_drafter import BlockBackbone
from jaxdraft.ranking import best_token


@struct.dataclass
class Chain:
    """Drafts that were chosen one after another."""

    tokens: jax.Array  # [B, K] int32
    finite: jax.Array  # [B, K] bool: the best score of each step is finite
    support: Support | None  # None: each draft is the best token of its step

    @classmethod
    def zeros(cls, batch: int, drafts: int, candidates: int | None) -> Chain:
        """Return a chain of zeros; ``candidates`` None: without a support."""
        support = None
        if candidates is not None:
            wide = (batch, drafts, candidates)
            support = Support(jnp.zeros(wide, jnp.int32), jnp.zeros(wide, jnp.float32))
        return cls(jnp.zeros((batch, drafts), jnp.int32), jnp.ones((batch, drafts), bool), support)


def chain(
    backbone: BlockBackbone,
    features: jax.Array,
    logits: jax.Array,
    anchor: jax.Array,
    how: Draw | None,
    guide: Guide | None = None,
) -> Chain:
    """Choose the best token of each step, or draw it.

    Args:
      backbone: a drafter with :meth:`BlockBackbone.step_bias`.
      features: [B, K, D], rows of the block.
      logits: [B, K, V'] float32, scores before any predecessor.
      anchor: [B] int32, token before the first draft.
      how: rules and keys of drawing; None: the best token, the lowest id of equal ones.
      guide: what the rows' structures allow.
    """
    every = None if guide is None else backbone.tokens(jnp.arange(logits.shape[2], dtype=jnp.int32))

    def step(
        carry: tuple[Any, ...], here: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[Any, ...], tuple[jax.Array, jax.Array, Support | None]]:
        before, memory, guide = carry
        number, rows, scores = here
        bias, memory = backbone.step_bias(rows, backbone.predecessors(before), memory)
        scores = scores + bias
        if guide is not None:
            scores = guide.scores(scores, every)
        # The best one and not the maximum, from which XLA's CPU backend may drop a NaN.
        place = best_token(scores)
        top = jnp.take_along_axis(scores, place[:, None], axis=-1)[:, 0]
        support = None
        if how is not None:
            place, among, probs = sampled_token(scores, how, number, backbone.config.candidates)
            support = Support(backbone.tokens(among), probs)
        token = backbone.tokens(place)
        after = None if guide is None else guide.after(token)
        return (token, memory, after), (token, jnp.isfinite(top), support)

    batch, drafts = logits.shape[:2]
    numbers = jnp.arange(drafts, dtype=jnp.int32)
    steps = (numbers, jnp.swapaxes(features, 0, 1), jnp.swapaxes(logits, 0, 1))
    start = (anchor, backbone.first_memory(batch), guide)
    # Written out: a loop would end a CUDA graph.
    _, (tokens, finite, support) = lax.scan(step, start, steps, unroll=True)
    support = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), support)
    return Chain(jnp.swapaxes(tokens, 0, 1), jnp.swapaxes(finite, 0, 1), support)
