"""Logits and a proposal -> how many drafts stand, and the token that follows them."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from flax import struct

from jaxdraft.base import Proposal


@struct.dataclass
class Verdict:
    """What the target says about a proposal."""

    accepted: jax.Array  # [B] int32, length of the accepted prefix
    next_token: jax.Array  # [B] int32: a correction, or the bonus after a full acceptance
    finite: jax.Array  # [B] bool: ``next_token`` came from finite logits


def greedy(logits: jax.Array, proposal: Proposal) -> Verdict:
    """Accept the drafts that are the target's own best tokens.

    Row i of the window predicts draft i, so row ``accepted`` gives the next token: a correction,
    or, when all drafts stand, the bonus::

      drafts      [4 7 9]         length 3
      best        [4 7 8 1]       rows 0..3
      accepted    2               next_token 8 (row 2)

    Ties go to the lowest id. A row of logits with a NaN or without a finite maximum predicts
    nothing: the drafts it would judge are rejected and ``finite`` is false if it is the last.

    Args:
      logits: [B, 1 + K, V] float32.
      proposal: [B, K] tokens.
    """
    batch, rows, _ = logits.shape
    chex.assert_shape(proposal.tokens, (batch, rows - 1))
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)  # a NaN counts as the largest
    finite = jnp.isfinite(jnp.take_along_axis(logits, best[..., None], axis=-1)[..., 0])
    proposed = jnp.arange(rows - 1)[None] < proposal.length[:, None]
    match = (proposal.tokens == best[:, :-1]) & finite[:, :-1] & proposed
    accepted = jnp.sum(jnp.cumprod(match.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)

    def last(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, accepted[:, None], axis=1)[:, 0]

    return Verdict(accepted, last(best), last(finite))
