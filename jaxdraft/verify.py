"""Logits and a proposal -> how many drafts stand, and the token that follows them."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxdraft.base import MASKED, Proposal, Truncation
from jaxdraft.keys import draw_keys
from jaxdraft.ranking import best_token
from jaxdraft.sampling import distribution, draw


@struct.dataclass
class Verdict:
    """What the target says about a proposal."""

    accepted: jax.Array  # [B] int32, length of the accepted prefix
    next_token: jax.Array  # [B] int32: a correction, or the bonus after a full acceptance
    finite: jax.Array  # [B] bool: ``next_token`` came from finite logits


def greedy(logits: jax.Array, proposal: Proposal) -> Verdict:
    """Accept the drafts that are the target's own best tokens.

    Row i of the window predicts draft i, so row ``accepted`` gives the next token: a correction,
    or, when all drafts stand, the bonus:

      drafts      [4 7 9]         length 3
      best        [4 7 8 1]       rows 0..3
      accepted    2               next_token 8 (row 2)

    Ties go to the lowest id. A row of logits with a NaN, without a finite maximum, or with every
    token banned predicts nothing: the drafts it would judge are rejected and ``finite`` is false if
    it is the last.

    Args:
      logits: [B, 1 + K, V] float32.
      proposal: [B, K] tokens.
    """
    batch, rows, _ = logits.shape
    chex.assert_shape(proposal.tokens, (batch, rows - 1))
    best = best_token(logits)
    finite = _speaks(logits, best)
    proposed = jnp.arange(rows - 1, dtype=jnp.int32)[None] < proposal.length[:, None]
    match = (proposal.tokens == best[:, :-1]) & finite[:, :-1] & proposed
    accepted = jnp.sum(jnp.cumprod(match.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)

    def last(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, accepted[:, None], axis=1)[:, 0]

    return Verdict(accepted, last(best), last(finite))


def sampled(
    logits: jax.Array, proposal: Proposal, truncation: Truncation, streams: jax.Array, at: jax.Array
) -> Verdict:
    """Accept drafts so that what is emitted is distributed as the target alone would have it.

    Draft x of row i, drawn with probability q(x), stands with probability min(1, p(x) / q(x)), p
    being the target's distribution there. The first that falls is replaced by a draw from the
    residual, max(p - q, 0) normalised; when all stand, the bonus is a draw from p:

      p = [.5 .3 .2]   q = [.8 .2 .]   x = 0: stands with probability .5 / .8
      residual         [. .1 .2] / .3

    Leviathan et al., arXiv:2211.17192, appendix A.1; Chen et al., arXiv:2302.01318, algorithm 2.
    Rows of temperature zero are judged as by :func:`greedy`.

    Args:
      logits: [B, 1 + K, V] float32, penalties and bans applied.
      proposal: [B, K] tokens; its support is q.
      truncation: [B], the target's.
      streams: [B] keys.
      at: [B] int32, the position that the first row of logits predicts; with the stream it makes
        the round's keys.
    """
    verdict = greedy(logits, proposal)
    warm = truncation.temperature > 0

    def judge() -> Verdict:
        finite = _speaks(logits, best_token(logits))  # [B, 1 + K]
        # What says nothing must not reach a product; it is rejected below.
        target = distribution(jnp.where(finite[..., None], logits, 0.0), truncation)
        drafts, length = proposal.tokens, proposal.length
        width = drafts.shape[1]
        proposed = jnp.arange(width, dtype=jnp.int32)[None] < length[:, None]
        tokens = jnp.maximum(drafts, 0)
        rows = jax.tree.map(lambda x: x[:, :width], target)
        p = jnp.exp(rows.log_prob(tokens))
        q = _proposed_with(proposal, tokens)
        keys = draw_keys(streams, at, 0)
        u = jax.vmap(lambda key: jax.random.uniform(key, (width,), jnp.float32))(keys)
        stands = (u * q < p) & finite[:, :-1] & proposed
        accepted = jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        last = target.rows(accepted).probs()  # [B, V]
        residual = jnp.maximum(last - _fallen(proposal, accepted, last.shape[-1]), 0.0)
        # A draft falls only where p < q, so something is left, except for what rounding takes.
        left = jnp.sum(residual, axis=-1, keepdims=True) > 0
        token = draw(jnp.where(left, residual, last), draw_keys(streams, at, 1))
        says = jnp.take_along_axis(finite, accepted[:, None], axis=1)[:, 0]
        return Verdict(
            jnp.where(warm, accepted, verdict.accepted),
            jnp.where(warm, token, verdict.next_token),
            jnp.where(warm, says, verdict.finite),
        )

    return lax.cond(jnp.any(warm), judge, lambda: verdict)


def _speaks(logits: jax.Array, best: jax.Array) -> jax.Array:
    """Whether rows of logits [..., V] with these best tokens [...] predict anything.

    A NaN is the best token there is. ``jnp.max`` would not do: on CPUs it may drop one.
    """
    value = jnp.take_along_axis(logits, best[..., None], axis=-1)[..., 0]
    return jnp.isfinite(value) & (value > MASKED / 2)


def _proposed_with(proposal: Proposal, tokens: jax.Array) -> jax.Array:
    """The probability that each draft was drawn with, [B, K]."""
    if proposal.support is None:
        return jnp.ones(tokens.shape, jnp.float32)
    support = proposal.support
    return jnp.sum(jnp.where(support.tokens == tokens[..., None], support.probs, 0.0), axis=-1)


def _fallen(proposal: Proposal, accepted: jax.Array, vocab: int) -> jax.Array:
    """q where draft ``accepted`` [B] fell, zero where none did: [B, V]."""
    batch, width = proposal.tokens.shape
    none = jnp.zeros((batch, vocab), jnp.float32)
    if width == 0:
        return none
    at = jnp.minimum(accepted, width - 1)[:, None]
    fell = (accepted < proposal.length)[:, None]
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    if proposal.support is None:
        token = jnp.take_along_axis(proposal.tokens, at, axis=1)
        return none.at[row, jnp.where(fell, token, vocab)].add(1.0, mode="drop")
    tokens = jnp.take_along_axis(proposal.support.tokens, at[..., None], axis=1)[:, 0]
    probs = jnp.take_along_axis(proposal.support.probs, at[..., None], axis=1)[:, 0]
    return none.at[row, jnp.where(fell, tokens, vocab)].add(probs, mode="drop")
