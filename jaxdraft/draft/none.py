"""No drafts: plain decoding is a round of one row."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from jaxdraft.base import DrafterDefaults, DraftInfo, Feed, NoDraft, Proposal


@struct.dataclass
class NoDrafter(DrafterDefaults):
    """A :class:`jaxdraft.base.Drafter` with K = 0."""

    @property
    def draft_tokens(self) -> int:
        """K = 0."""
        return 0

    def init(self, batch: int, capacity: int) -> tuple[()]:
        """Return an empty state."""
        del batch, capacity
        return ()

    def ingest(self, state: tuple[()], feed: Feed) -> tuple[()]:
        """Return the state unchanged."""
        del feed
        return state

    def propose(self, state: tuple[()], feed: Feed) -> tuple[tuple[()], Proposal, DraftInfo]:
        """Return an empty proposal."""
        batch = feed.anchor.shape[0]
        proposal = Proposal(jnp.zeros((batch, 0), jnp.int32), jnp.zeros((batch,), jnp.int32))
        reason = jnp.full((batch,), NoDraft.UNWANTED, jnp.int32)
        return state, proposal, DraftInfo(reason, jnp.zeros((), jnp.int32))
