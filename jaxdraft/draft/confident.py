"""Verifies drafts only where the drafter is confident: for any drafter that proposes a lattice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxdraft import guard
from jaxdraft.base import NO_TOKEN, Drafter, DraftInfo, Feed, Lattice, NoDraft, Proposal
from jaxdraft.draft.lattice import greedy, walk
from jaxdraft.draft.wrapper import Wrapper, best_width, check_numbers, pool_of


@struct.dataclass
class ConfidentDrafter(Wrapper):
    """Wraps a drafter and cuts its proposals where verifying does not pay, down to no drafts.

    A round that verifies n drafts is expected to emit ``1 + q_1 + q_1 q_2 + ... + q_1 ... q_n``
    tokens, where q_k is the probability of step k of the lattice's greedy walk. It costs ``1 +
    round_cost + n draft_cost`` plain steps of the target (1 without drafts; proposing is paid for
    either way). Each row takes the n with the most tokens for its cost, ties go to the fewest. A
    round in which no row takes any runs the target over one row.

    :class:`jaxdraft.AdaptiveDrafter` uses the previous rounds, and saves the proposal, too. This
    drafter uses the drafts themselves, so it verifies only the easy stretches of a text.
    The rule is :func:`jaxdraft.draft.wrapper.best_width`.

    The output distribution is unchanged, sampled or not: the number of verified drafts depends on
    the lattice alone, never on the drawn drafts. Numbers are dynamic: changing them does not
    recompile.

    Attributes:
      inner: a :class:`jaxdraft.base.Drafter` whose proposals have a lattice: DFlash, DFlash2, and
        DSpark unless it is chained (see :class:`jaxdraft.draft.block.BlockDrafter` for those).
      round_cost: fixed cost of verifying drafts in a round, in plain steps: a window of rows in
        place of one. Use more than the measured cost: probabilities cover the candidates alone,
        and a drafter tends to be overconfident. ``experiments/smollm2.py`` takes 0.5 for a window
        of four rows,
        which costs a quarter of a step more than one (``experiments/window_cost.md``).
      draft_cost: added cost per draft, where a window is only as wide as its drafts.
    """

    inner: Drafter
    round_cost: float | jax.Array = 1.5
    draft_cost: float | jax.Array = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, {"round_cost": (0, None), "draft_cost": (0, None)})

    def init(self, batch: int, capacity: int) -> Any:
        """Return the state of the drafter inside; the wrapper has no state."""
        return self.inner.init(batch, capacity)

    def init_pool(self, batch: int, **sizes: int) -> Any:
        """Return the inner drafter's pooled state, or a full state per row if it has no pool."""
        return pool_of(self.inner, batch, sizes)

    def ingest(self, state: Any, feed: Feed) -> Any:
        """See :meth:`jaxdraft.base.Drafter.ingest`."""
        return guard.ingest(self.inner, state, feed)

    def propose(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        """See :meth:`jaxdraft.base.Drafter.propose`.

        Raises:
          ValueError: the drafter inside proposes no lattice.
        """
        state, proposal, info = guard.propose(self.inner, state, feed)
        if proposal.lattice is None:
            kind = type(self.inner).__name__
            raise ValueError(
                f"inner is a {kind}, whose proposals have no lattice; expected a block drafter "
                "(of a chain, with_confidence gives one that is cut by its own probabilities)"
            )
        length = self.width(proposal.lattice, proposal.length)
        pauses = (proposal.length > 0) & (length == 0)
        reason = jnp.where(pauses, NoDraft.PAUSED, info.reason).astype(jnp.int32)
        kept = jnp.arange(self.draft_tokens, dtype=jnp.int32)[None] < length[:, None]
        tokens = jnp.where(kept, proposal.tokens, NO_TOKEN)
        return state, replace(proposal, tokens=tokens, length=length), replace(info, reason=reason)

    def width(self, lattice: Lattice, limit: jax.Array | None = None) -> jax.Array:
        """Return the number of drafts that pay best, [B] int32 in 0..K, at most ``limit`` [B].

        Example, K = 2, round_cost 0.5: shares 0.4, 0.5 promise 1.4 and 1.6 tokens for 1.5 steps,
        and no drafts 1 for 1: two drafts, and none for a row that can use one. Shares 0.3, 0.5
        promise 1.45 at best: none.
        """
        return best_width(self.shares(lattice), self.round_cost, self.draft_cost, limit)

    @staticmethod
    def shares(lattice: Lattice) -> jax.Array:
        """Return the probability of each candidate of the greedy walk in its row, [B, K] float32.

        Zero where scores are not finite.
        """
        index = walk(lattice, greedy)
        before = jnp.pad(index[:, :-1], ((0, 0), (1, 0)))
        rows = jnp.take_along_axis(lattice.scores, before[..., None, None], axis=2)[:, :, 0]
        share = jnp.max(jax.nn.softmax(rows, axis=-1), axis=-1)
        return jnp.where(jnp.isfinite(share), share, 0.0)
