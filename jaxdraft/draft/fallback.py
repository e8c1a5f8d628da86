"""Asks one drafter, and another where the first has nothing to say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxdraft import guard
from jaxdraft.base import (
    NO_TOKEN,
    Drafter,
    DrafterDefaults,
    DraftInfo,
    Feed,
    FullDrafter,
    Proposal,
    Support,
    full_drafter,
)
from jaxdraft.draft.wrapper import pool_of


@struct.dataclass
class FallbackDrafter(DrafterDefaults):
    """Two drafters: a row without drafts from the first gets the drafts of the second.

    Made for :class:`jaxdraft.NgramDrafter` before a drafter with weights: where a text repeats
    itself, the earlier text is the better draft, and looking it up costs nothing. By name,
    ``drafter="ngram+auto"``.

    Both ingest every committed row, and both are called in every round. Rows served by the first
    are marked as unwanted for the second, and a block drafter does not run if no row wants drafts.
    Sampled output keeps its distribution: the choice of drafter does not depend on the draws.
    Proposals have no lattice.

    Example, K = 3: of three rows the first proposes ``a b`` for row 0 only, the second ``d e f``
    for row 1 and nothing for row 2. The proposal is ``a b .``, ``d e f`` and none.

    Attributes:
      first: any :class:`jaxdraft.base.Drafter` that often proposes nothing.
      second: any other drafter.
    """

    first: Drafter
    second: Drafter

    @property
    def draft_tokens(self) -> int:
        """Larger K of the two drafters."""
        return max(self.first.draft_tokens, self.second.draft_tokens)

    @property
    def declines(self) -> bool:
        """Whether both drafters decline."""
        return all(one.declines for one in self._both)

    @property
    def overlap(self) -> int:
        """Number of tokens after a page that its content depends on."""
        return max(one.overlap for one in self._both)

    def with_draft_tokens(self, draft_tokens: int) -> FallbackDrafter:
        """Return both drafters with this K.

        Raises:
          ValueError: one of them does not support this K.
        """
        return FallbackDrafter(*(d.with_draft_tokens(draft_tokens) for d in self._both))

    @property
    def _both(self) -> tuple[FullDrafter, FullDrafter]:
        return full_drafter(self.first), full_drafter(self.second)

    def init(self, batch: int, capacity: int) -> tuple[Any, Any]:
        """Return the states of both."""
        return self.first.init(batch, capacity), self.second.init(batch, capacity)

    def init_pool(self, batch: int, **sizes: int) -> tuple[Any, Any]:
        """Return the pooled states of both, or a full state per row where one has no pool."""
        return pool_of(self.first, batch, sizes), pool_of(self.second, batch, sizes)

    def skip(self, state: tuple[Any, Any], tokens: jax.Array, length: jax.Array) -> Any:
        """Continue after the first ``length`` [B] positions if both can; else None."""
        both = zip(self._both, state, strict=True)
        first, second = (one.skip(memory, tokens, length) for one, memory in both)
        return None if first is None or second is None else (first, second)

    def row_statistics(self, state: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return the statistics of both drafters."""
        one, two = self._both
        return one.row_statistics(state[0]), two.row_statistics(state[1])

    def with_row_statistics(
        self, state: tuple[Any, Any], statistics: tuple[Any, Any]
    ) -> tuple[Any, Any]:
        """Return the state with the result of :meth:`row_statistics` restored."""
        one, two = self._both
        return one.with_row_statistics(state[0], statistics[0]), two.with_row_statistics(
            state[1], statistics[1]
        )

    def misses(self, state: tuple[Any, Any]) -> jax.Array | int:
        """Count how often either found no room."""
        one, two = self._both
        return one.misses(state[0]) + two.misses(state[1])

    def ingest(self, state: tuple[Any, Any], feed: Feed) -> tuple[Any, Any]:
        """See :meth:`jaxdraft.base.Drafter.ingest`."""
        one, two = state
        return guard.ingest(self.first, one, feed), guard.ingest(self.second, two, feed)

    def propose(
        self, state: tuple[Any, Any], feed: Feed
    ) -> tuple[tuple[Any, Any], Proposal, DraftInfo]:
        """See :meth:`jaxdraft.base.Drafter.propose`."""
        one, first, info = guard.propose(self.first, state[0], feed)
        served = first.length > 0
        asks = replace(feed, wants_draft=feed.wants_draft & ~served)
        two, second, also = guard.propose(self.second, state[1], asks)
        first, second = self._wide(first), self._wide(second)
        supports = [p.support for p in (first, second) if p.support is not None]
        support = None
        if supports:
            width = max(one.tokens.shape[-1] for one in supports)
            support = jax.tree.map(
                lambda a, b: jnp.where(served[:, None, None], a, b),
                _support(first, width),
                _support(second, width),
            )
        proposal = Proposal(
            jnp.where(served[:, None], first.tokens, second.tokens),
            jnp.where(served, first.length, second.length),
            support=support,
        )
        reason = jnp.where(served, info.reason, also.reason)
        return (one, two), proposal, DraftInfo(reason, info.forwards + also.forwards)

    def _wide(self, proposal: Proposal) -> Proposal:
        """Pad the proposal to K drafts."""
        more = self.draft_tokens - proposal.tokens.shape[1]
        tokens = jnp.pad(proposal.tokens, ((0, 0), (0, more)), constant_values=NO_TOKEN)
        support = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, more), (0, 0))), proposal.support)
        return Proposal(tokens, proposal.length, support=support)


def _support(proposal: Proposal, width: int) -> Support:
    """Return the drafts' distributions over ``width`` tokens per step.

    A draft that was not drawn has probability one."""
    if proposal.support is None:
        tokens = proposal.tokens[..., None]
        probs = jnp.ones(tokens.shape, jnp.float32)
    else:
        tokens, probs = proposal.support.tokens, proposal.support.probs
    beside = ((0, 0), (0, 0), (0, width - tokens.shape[-1]))
    return Support(jnp.pad(tokens, beside, constant_values=NO_TOKEN), jnp.pad(probs, beside))
