"""Drafts only as far as they pay: any drafter, with a limit that follows its acceptance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxdraft import guard
from jaxdraft.base import Drafter, DraftInfo, Feed, NoDraft, Proposal
from jaxdraft.draft.wrapper import Wrapper, best_width, check_numbers, pool_of


@struct.dataclass
class AdaptiveState:
    """The state of the rule and of the drafter inside."""

    inner: Any
    rate: jax.Array  # [B, K] float32, moving acceptance of a draft whose predecessors are accepted
    proposed: jax.Array  # [B] int32, drafts proposed in the round whose outcome is unknown
    cut: jax.Array  # [B] int32, rounds since the last full proposal of the row


@struct.dataclass
class AdaptiveDrafter(Wrapper):
    """Wraps a drafter and limits the number of drafts it proposes, down to none.

    A round with n drafts is expected to emit ``1 + a_1 + a_1 a_2 + ... + a_1 ... a_n`` tokens; a_k
    is the acceptance of draft k when its predecessors are accepted. The round costs
    ``1 + round_cost + n draft_cost`` plain steps of the target (1 without drafts). Each row takes
    the n with the most tokens for its cost; ties go to the fewest drafts.

    Acceptances are moving averages per row and position, learned from the number of rows committed
    after each proposal. A feed describes the previous round, never the tokens that will be verified
    next. A row that was cut short for ``probe_every`` rounds gets one full proposal, to detect
    when drafts begin to pay. All numbers are dynamic: changing them does not recompile.

    Attributes:
      inner: any :class:`jaxdraft.base.Drafter`.
      round_cost: fixed cost of drafting in a round, in plain steps (a block drafter's pass). The
        default, and the next, were measured on a DFlash2 family of width 512 on a CPU
        (``experiments/round_cost.md``); measure your own.
      draft_cost: added cost per draft: its row in the target's window, and its own pass of a chain.
        In a fixed batch a window has 1 + K rows however few drafts a row has. Fewer drafts save
        nothing there, so only ``round_cost`` counts (``experiments/adaptive.md``).
      gain: weight of the newest observation in the moving averages.
      start: acceptance assumed before anything was observed.
      probe_every: rounds between two full proposals of a row that is cut short.
    """

    inner: Drafter
    round_cost: float | jax.Array = 0.6
    draft_cost: float | jax.Array = 0.12
    gain: float | jax.Array = 0.2
    start: float | jax.Array = 0.8
    probe_every: int | jax.Array = 16

    def __post_init__(self) -> None:
        check_numbers(
            self,
            {
                "round_cost": (0, None),
                "draft_cost": (0, None),
                "gain": (0, 1),
                "start": (0, 1),
                "probe_every": (1, None),
            },
        )

    def init(self, batch: int, capacity: int) -> AdaptiveState:
        """Return an empty state around the inner drafter's."""
        none = jnp.zeros((batch,), jnp.int32)
        return AdaptiveState(self.inner.init(batch, capacity), self._rate(batch), none, none)

    def init_pool(self, batch: int, **sizes: int) -> AdaptiveState:
        """Return an empty state around the inner drafter's pool.

        The sizes are those of its ``init_pool``. A drafter without a pool keeps a full state per
        row.
        """
        none = jnp.zeros((batch,), jnp.int32)
        inner = pool_of(self.inner, batch, sizes)
        return AdaptiveState(inner, self._rate(batch), none, none)

    def skip(self, state: AdaptiveState, tokens: jax.Array, length: jax.Array) -> Any:
        """Continue after the first ``length`` [B] positions if the inner drafter can; else None."""
        inner = super().skip(state.inner, tokens, length)
        return None if inner is None else replace(state, inner=inner)

    def row_statistics(self, state: AdaptiveState) -> Any:
        """Return the statistics of the rule and of the inner drafter, per row.

        It cannot be recomputed from the row's tokens.
        """
        return state.rate, state.proposed, state.cut, super().row_statistics(state.inner)

    def with_row_statistics(self, state: AdaptiveState, statistics: Any) -> AdaptiveState:
        """Return the state with the result of :meth:`row_statistics` restored."""
        rate, proposed, cut, inside = statistics
        inner = super().with_row_statistics(state.inner, inside)
        return replace(state, inner=inner, rate=rate, proposed=proposed, cut=cut)

    def misses(self, state: AdaptiveState) -> jax.Array | int:
        """Count how often the drafter inside found no room."""
        return super().misses(state.inner)

    def ingest(self, state: AdaptiveState, feed: Feed) -> AdaptiveState:
        """See :meth:`jaxdraft.base.Drafter.ingest`; learns from the outcome of the last proposal.

        A round that commits c rows accepted c - 1 drafts. Example: 3 proposed, 2 rows committed:
        draft 0 was accepted, draft 1 was rejected, and nothing is known about draft 2. A row that
        starts again at position 0 is a new text, so its acceptances are reset.
        """
        fresh = (feed.count > 0) & (feed.first_position == 0)
        judged = (feed.count > 0) & (state.proposed > 0)
        accepted = (feed.count - 1)[:, None]
        place = jnp.arange(self.draft_tokens, dtype=jnp.int32)[None]
        known = judged[:, None] & (place <= accepted) & (place < state.proposed[:, None])
        hit = (place < accepted).astype(jnp.float32)
        step = jnp.where(known, hit - state.rate, 0.0)
        rate = state.rate + jnp.asarray(self.gain, jnp.float32) * step
        return replace(
            state,
            inner=guard.ingest(self.inner, state.inner, feed),
            rate=jnp.where(fresh[:, None], self._rate(feed.count.shape[0]), rate),
            proposed=jnp.where(feed.count > 0, 0, state.proposed),
            cut=jnp.where(fresh, 0, state.cut),
        )

    def propose(
        self, state: AdaptiveState, feed: Feed
    ) -> tuple[AdaptiveState, Proposal, DraftInfo]:
        """See :meth:`jaxdraft.base.Drafter.propose`."""
        limit = jnp.minimum(feed.limit, self.draft_tokens)
        asked = feed.wants_draft & (limit > 0)
        full = state.cut + 1 >= jnp.asarray(self.probe_every, jnp.int32)
        width = jnp.where(full, limit, jnp.minimum(self.width(state), limit))
        asks = replace(feed, wants_draft=asked & (width > 0), limit=width)
        inner, proposal, info = guard.propose(self.inner, state.inner, asks)
        reason = jnp.where(asked & (width == 0), NoDraft.PAUSED, info.reason).astype(jnp.int32)
        cut = jnp.where(width < limit, state.cut + 1, 0)
        state = replace(
            state,
            inner=inner,
            proposed=proposal.length,
            cut=jnp.where(asked, cut, state.cut),
        )
        return state, proposal, replace(info, reason=reason)

    def width(self, state: AdaptiveState) -> jax.Array:
        """Return the best number of drafts at the acceptance seen so far, [B] int32 in 0..K."""
        return best_width(state.rate, self.round_cost, self.draft_cost)

    def _rate(self, batch: int) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(self.start, jnp.float32), (batch, self.draft_tokens))
