"""Verifies drafts only where the drafter is sure of them: any drafter that proposes a lattice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxdraft.base import NO_TOKEN, Drafter, DraftInfo, Feed, Lattice, NoDraft, Proposal
from jaxdraft.draft.lattice import greedy, walk


@struct.dataclass
class ConfidentDrafter:
    """Wraps a drafter and cuts its proposals where they are not worth verifying, to nothing if so.

    A round that verifies n drafts is expected to emit ``1 + q_1 + q_1 q_2 + ... + q_1 ... q_n``
    tokens, q_k being the share that the lattice's greedy walk gives to its step k, and costs ``1 +
    round_cost + n draft_cost`` plain steps of the target (1 without drafts; proposing is paid for
    either way). Each row takes the n with the most tokens for its cost, ties go to the fewest. A
    round in which no row takes any runs the target over one row.

    :class:`jaxdraft.AdaptiveDrafter` looks at the rounds before, and saves the proposal, too. This
    one looks at the drafts themselves, so it takes the easy stretches of a text and leaves the
    rest. The gain it estimates is that of Leviathan et al., arXiv:2211.17192, section 3.3.

    Nothing is lost by it, sampled or not: how many drafts are verified depends on the lattice
    alone, never on what was drawn from it. Numbers are dynamic: changing them compiles nothing.

    Attributes:
      inner: a :class:`jaxdraft.base.Drafter` whose proposals have a lattice: DFlash2, DSpark.
      round_cost: what verifying drafts adds to a round, in plain steps: a window of rows in place
        of one. Shares are of the candidates alone, and a drafter is surer than it should be, so
        what pays best is more than what is measured: on SmolLM2-135M and a CPU verifying costs 0.5
        steps, and of 1, 1.5, 2 and 3 the default was best, on other prompts than those of
        ``experiments/smollm2.md``.
      draft_cost: what each further draft adds, where a window is only as wide as its drafts.
    """

    inner: Drafter
    round_cost: float | jax.Array = 1.5
    draft_cost: float | jax.Array = 0.0

    def __post_init__(self) -> None:
        for name in ("round_cost", "draft_cost"):
            value = getattr(self, name)  # inside `jit` it may be anything: only numbers are judged
            if isinstance(value, int | float) and not value >= 0:
                raise ValueError(f"{name} is {value}; expected at least 0")

    @property
    def draft_tokens(self) -> int:
        """K of the drafter inside."""
        return self.inner.draft_tokens

    @property
    def declines(self) -> bool:
        """It does: rounds without drafts are worth a program of their own."""
        return True

    @property
    def overlap(self) -> int:
        """Of the drafter inside: tokens after a page that its content depends on too."""
        return getattr(self.inner, "overlap", 0)

    def init(self, batch: int, capacity: int) -> Any:
        """The state of the drafter inside: this one remembers nothing."""
        return self.inner.init(batch, capacity)

    def init_pool(self, batch: int, **sizes: int) -> Any:
        """The pooled state of the drafter inside; one without a pool has its state in every row."""
        make = getattr(self.inner, "init_pool", None)
        if make is None:
            return self.inner.init(batch, sizes["columns"] * sizes["page_size"])
        return make(batch, **sizes)

    def skip(self, state: Any, tokens: jax.Array, length: jax.Array) -> Any:
        """Go on behind the first ``length`` [B] positions, if the drafter inside can; else None."""
        if not jax.tree.leaves(state):
            return state
        method = getattr(self.inner, "skip", None)
        return None if method is None else method(state, tokens, length)

    def ingest(self, state: Any, feed: Feed) -> Any:
        """See :meth:`jaxdraft.base.Drafter.ingest`."""
        return self.inner.ingest(state, feed)

    def propose(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        """See :meth:`jaxdraft.base.Drafter.propose`.

        Raises:
          ValueError: the drafter inside proposes no lattice.
        """
        state, proposal, info = self.inner.propose(state, feed)
        if proposal.lattice is None:
            kind = type(self.inner).__name__
            raise ValueError(f"inner is a {kind}, which proposes no lattice to be judged by")
        length = jnp.minimum(proposal.length, self.width(proposal.lattice))
        pauses = (proposal.length > 0) & (length == 0)
        reason = jnp.where(pauses, NoDraft.PAUSED, info.reason).astype(jnp.int32)
        kept = jnp.arange(self.draft_tokens)[None] < length[:, None]
        tokens = jnp.where(kept, proposal.tokens, NO_TOKEN)
        return state, replace(proposal, tokens=tokens, length=length), replace(info, reason=reason)

    def width(self, lattice: Lattice) -> jax.Array:
        """Drafts that pay best, [B] int32 in 0..K.

        Example, K = 2, round_cost 0.5: shares 0.4, 0.5 promise 1.4 and 1.6 tokens for 1.5 steps,
        and no drafts 1 for 1: two drafts. Shares 0.3, 0.5 promise 1.45 at best: none.
        """
        share = self.shares(lattice)
        steps = jnp.arange(share.shape[1] + 1, dtype=jnp.float32)
        tokens = 1.0 + jnp.cumsum(jnp.cumprod(share, axis=1), axis=1)
        tokens = jnp.pad(tokens, ((0, 0), (1, 0)), constant_values=1.0)  # [B, 1 + K]
        cost = 1.0 + jnp.where(steps > 0, self.round_cost, 0.0) + steps * self.draft_cost
        return jnp.argmax(tokens / cost[None], axis=1).astype(jnp.int32)

    @staticmethod
    def shares(lattice: Lattice) -> jax.Array:
        """What the greedy walk's row gives to the candidate it takes, [B, K] float32.

        Zero where scores are not finite.
        """
        index = walk(lattice, greedy)
        before = jnp.pad(index[:, :-1], ((0, 0), (1, 0)))
        rows = jnp.take_along_axis(lattice.scores, before[..., None, None], axis=2)[:, :, 0]
        share = jnp.max(jax.nn.softmax(rows, axis=-1), axis=-1)
        return jnp.where(jnp.isfinite(share), share, 0.0)

    def step(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        """``ingest`` then ``propose``, as one compiled program."""
        return _step(self, state, feed)


@jax.jit
def _step(drafter: ConfidentDrafter, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
    return drafter.propose(drafter.ingest(state, feed), feed)
