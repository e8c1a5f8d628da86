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
from jaxdraft.draft.around import pool_of


@struct.dataclass
class FallbackDrafter(DrafterDefaults):
    """Two drafters: a row for which the first is silent gets the drafts of the second.

    Made for :class:`jaxdraft.NgramDrafter` before a drafter with weights: where a text repeats
    itself, what stood there before is the better draft, and looking it up costs nothing. By name,
    ``drafter="ngram+auto"``.

    Both take in every committed row, and both are asked in every round; the second is told which
    rows want nothing of it, and a block drafter of which no row wants anything does not run.
    Sampled output keeps its distribution: who drafts is decided before anything is drawn. Proposals
    have no lattice.

    Example, K = 3: of three rows the first proposes ``a b`` for row 0 only, the second ``d e f``
    for row 1 and nothing for row 2. The proposal is ``a b .``, ``d e f`` and none.

    Attributes:
      first: any :class:`jaxdraft.base.Drafter` that is often silent.
      second: any other.
    """

    first: Drafter
    second: Drafter

    @property
    def draft_tokens(self) -> int:
        """K of the drafter that has more."""
        return max(self.first.draft_tokens, self.second.draft_tokens)

    @property
    def declines(self) -> bool:
        """Only if both do."""
        return all(one.declines for one in self._both)

    @property
    def overlap(self) -> int:
        """Tokens after a page that its content depends on too."""
        return max(one.overlap for one in self._both)

    def with_draft_tokens(self, draft_tokens: int) -> FallbackDrafter:
        """Both with this K.

        Raises:
          ValueError: one of them cannot have it.
        """
        return FallbackDrafter(*(d.with_draft_tokens(draft_tokens) for d in self._both))

    @property
    def _both(self) -> tuple[FullDrafter, FullDrafter]:
        return full_drafter(self.first), full_drafter(self.second)

    def init(self, batch: int, capacity: int) -> tuple[Any, Any]:
        """The states of both."""
        return self.first.init(batch, capacity), self.second.init(batch, capacity)

    def init_pool(self, batch: int, **sizes: int) -> tuple[Any, Any]:
        """The pooled states of both; one without a pool has its whole state in every row."""
        return pool_of(self.first, batch, sizes), pool_of(self.second, batch, sizes)

    def skip(self, state: tuple[Any, Any], tokens: jax.Array, length: jax.Array) -> Any:
        """Go on behind the first ``length`` [B] positions, if both can; else None."""
        both = zip(self._both, state, strict=True)
        first, second = (one.skip(memory, tokens, length) for one, memory in both)
        return None if first is None or second is None else (first, second)

    def learned(self, state: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return what both learned."""
        one, two = self._both
        return one.learned(state[0]), two.learned(state[1])

    def with_learned(self, state: tuple[Any, Any], learned: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return the state with what :meth:`learned` gave."""
        one, two = self._both
        return one.with_learned(state[0], learned[0]), two.with_learned(state[1], learned[1])

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
        one, first, said = guard.propose(self.first, state[0], feed)
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
        reason = jnp.where(served, said.reason, also.reason)
        return (one, two), proposal, DraftInfo(reason, said.forwards + also.forwards)

    def _wide(self, proposal: Proposal) -> Proposal:
        """The proposal with room for K drafts."""
        more = self.draft_tokens - proposal.tokens.shape[1]
        tokens = jnp.pad(proposal.tokens, ((0, 0), (0, more)), constant_values=NO_TOKEN)
        support = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, more), (0, 0))), proposal.support)
        return Proposal(tokens, proposal.length, support=support)


def _support(proposal: Proposal, width: int) -> Support:
    """What drafts were drawn from, over ``width`` tokens a step; a certain draft has it all."""
    if proposal.support is None:
        tokens = proposal.tokens[..., None]
        probs = jnp.ones(tokens.shape, jnp.float32)
    else:
        tokens, probs = proposal.support.tokens, proposal.support.probs
    beside = ((0, 0), (0, 0), (0, width - tokens.shape[-1]))
    return Support(jnp.pad(tokens, beside, constant_values=NO_TOKEN), jnp.pad(probs, beside))
