"""Logits and a proposal -> number of accepted drafts, and the token that follows them."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxdraft.base import MASKED, Proposal, Status, Truncation
from jaxdraft.keys import draw_keys
from jaxdraft.meshes import set_in_rows
from jaxdraft.ranking import best_token
from jaxdraft.sampling import distribution, draw


@struct.dataclass
class Verdict:
    """Outcome of verifying a proposal."""

    accepted: jax.Array  # [B] int32, length of the accepted prefix
    next_token: jax.Array  # [B] int32: a correction, or the bonus after a full acceptance
    finite: jax.Array  # [B] bool: ``next_token`` came from finite logits
    log_prob: jax.Array
    """[B, 1 + K] float32: log-probability of each accepted draft and, at ``accepted``, of
    ``next_token`` in the distribution that it was chosen from. 0 where it was the best token."""
    failure: jax.Array | None = None  # [B] int32, the status of rows that are not finite


def greedy(logits: jax.Array, proposal: Proposal) -> Verdict:
    """Accept the drafts that are the target's own best tokens.

    Row i of the window predicts draft i, so row ``accepted`` gives the next token: a correction,
    or, when all drafts are accepted, the bonus:

      drafts      [4 7 9]         length 3
      best        [4 7 8 1]       rows 0..3
      accepted    2               next_token 8 (row 2)

    Ties go to the lowest id. A row of logits with a NaN, without a finite maximum, or with every
    token banned predicts nothing: the draft at that row is rejected, and ``finite`` is false if
    the next token comes from that row.

    Args:
      logits: [B, 1 + K, V] float32.
      proposal: [B, K] tokens.
    """
    batch, rows, _ = logits.shape
    chex.assert_shape(proposal.tokens, (batch, rows - 1))
    best = best_token(logits)
    finite = _is_finite(logits, best)
    proposed = jnp.arange(rows - 1, dtype=jnp.int32)[None] < proposal.length[:, None]
    match = (proposal.tokens == best[:, :-1]) & finite[:, :-1] & proposed
    accepted = jnp.sum(jnp.cumprod(match.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)

    def last(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, accepted[:, None], axis=1)[:, 0]

    return Verdict(accepted, last(best), last(finite), jnp.zeros((batch, rows), jnp.float32))


def sampled(
    logits: jax.Array, proposal: Proposal, truncation: Truncation, streams: jax.Array, at: jax.Array
) -> Verdict:
    """Accept drafts so that the emitted tokens have the distribution of the target alone.

    Draft x of row i, drawn with probability q(x), is accepted with probability min(1, p(x) / q(x)),
    where p is the target's distribution at that row. The first rejected draft is replaced by a draw
    from the residual, max(p - q, 0) normalised. When all are accepted, the bonus is a draw from p:

      p = [.5 .3 .2]   q = [.8 .2 .]   x = 0: accepted with probability .5 / .8
      residual         [. .1 .2] / .3

    Leviathan et al., arXiv:2211.17192, appendix A.1; Chen et al., arXiv:2302.01318, algorithm 2.
    Rows with temperature zero are verified as in :func:`greedy`.

    Args:
      logits: [B, 1 + K, V] float32, penalties and bans applied.
      proposal: [B, K] tokens; its support is q.
      truncation: [B], truncation of the target.
      streams: [B] keys.
      at: [B] int32, the position that the first row of logits predicts. The keys of the round
        derive from it and the stream.
    """
    verdict = greedy(logits, proposal)
    warm = truncation.temperature > 0

    def judge() -> Verdict:
        finite = _is_finite(logits, best_token(logits))  # [B, 1 + K]
        # Non-finite rows must not reach a product, where NaN spreads; they are rejected below.
        target = distribution(jnp.where(finite[..., None], logits, 0.0), truncation)
        drafts, length = proposal.tokens, proposal.length
        width = drafts.shape[1]
        proposed = jnp.arange(width, dtype=jnp.int32)[None] < length[:, None]
        tokens = jnp.maximum(drafts, 0)
        rows = jax.tree.map(lambda x: x[:, :width], target)
        log_p = rows.log_prob(tokens)
        p = jnp.exp(log_p)
        q = _proposed_with(proposal, tokens)
        keys = draw_keys(streams, at, 0)
        u = jax.vmap(lambda key: jax.random.uniform(key, (width,), jnp.float32))(keys)
        accepts = (u * q < p) & finite[:, :-1] & proposed
        accepted = jnp.sum(jnp.cumprod(accepts.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        end = target.rows(accepted)
        last = end.probs()  # [B, V]
        residual = jnp.maximum(last - _rejected_mass(proposal, accepted, last.shape[-1]), 0.0)
        # A draft is rejected only where p < q, so the residual is positive except after rounding.
        left = jnp.sum(residual, axis=-1, keepdims=True) > 0
        token = draw(jnp.where(left, residual, last), draw_keys(streams, at, 1))
        emitted_finite = jnp.take_along_axis(finite, accepted[:, None], axis=1)[:, 0]
        log_p = jnp.pad(log_p, ((0, 0), (0, 1)))
        at_end = jnp.arange(width + 1, dtype=jnp.int32)[None] == accepted[:, None]
        log_p = jnp.where(at_end, end.log_prob(token)[:, None], log_p)
        return Verdict(
            jnp.where(warm, accepted, verdict.accepted),
            jnp.where(warm, token, verdict.next_token),
            jnp.where(warm, emitted_finite, verdict.finite),
            jnp.where(warm[:, None], log_p, 0.0),
        )

    return lax.cond(jnp.any(warm), judge, lambda: verdict)


def failure(logits: jax.Array, accepted: jax.Array, complete: jax.Array | None) -> jax.Array:
    """Return the status of each row if no token may follow its accepted drafts, [B] int32.

    Args:
      logits: [B, 1 + K, V] float32, the target's own, before masks and bans.
      accepted: [B] int32.
      complete: [B, 1 + K] bool, whether the text before each row of logits is complete.
    """
    row = jnp.take_along_axis(logits, accepted[:, None, None], axis=1)[:, 0]
    status = jnp.where(_is_finite(row, best_token(row)), Status.DEAD_END, Status.NONFINITE)
    if complete is not None:
        over = jnp.take_along_axis(complete, accepted[:, None], axis=1)[:, 0]
        status = jnp.where(over & (status == Status.DEAD_END), Status.COMPLETE, status)
    return status.astype(jnp.int32)


def _is_finite(logits: jax.Array, best: jax.Array) -> jax.Array:
    """Return whether rows of logits [..., V] with these best tokens [...] predict anything.

    The best token of a row with a NaN is the NaN. ``jnp.max`` may drop a NaN on CPUs.
    """
    value = jnp.take_along_axis(logits, best[..., None], axis=-1)[..., 0]
    return jnp.isfinite(value) & (value > MASKED / 2)


def _proposed_with(proposal: Proposal, tokens: jax.Array) -> jax.Array:
    """Return the probability with which each draft was drawn, [B, K]."""
    if proposal.support is None:
        return jnp.ones(tokens.shape, jnp.float32)
    support = proposal.support
    return jnp.sum(jnp.where(support.tokens == tokens[..., None], support.probs, 0.0), axis=-1)


def _rejected_mass(proposal: Proposal, accepted: jax.Array, vocab: int) -> jax.Array:
    """Return q where draft ``accepted`` [B] was rejected, zero where none was: [B, V]."""
    batch, width = proposal.tokens.shape
    none = jnp.zeros((batch, vocab), jnp.float32)
    if width == 0:
        return none
    at = jnp.minimum(accepted, width - 1)[:, None]
    rejected = (accepted < proposal.length)[:, None]
    if proposal.support is None:
        token = jnp.take_along_axis(proposal.tokens, at, axis=1)
        return set_in_rows(none, jnp.where(rejected, token, vocab), 1.0, add=True)
    tokens = jnp.take_along_axis(proposal.support.tokens, at[..., None], axis=1)[:, 0]
    probs = jnp.take_along_axis(proposal.support.probs, at[..., None], axis=1)[:, 0]
    return set_in_rows(none, jnp.where(rejected, tokens, vocab), probs, add=True)
