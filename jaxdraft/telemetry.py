"""Counters of a run, and their summary.

The counts follow the usual definitions: *evaluated* drafts stop at the first rejection,
*acceptance* is accepted / evaluated, *tokens per round* counts the accepted drafts and the token
that follows them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxdraft.base import NoDraft


@struct.dataclass
class Stats:
    """Counters of a run, per row where they apply to rows.

    ``evaluated`` drafts stop at the first rejection, so ``accepted / evaluated`` is the probability
    that a draft is accepted if its predecessors are; ``accepted <= evaluated <= proposed`` always.
    The prompt's own token belongs to no round: ``emitted`` sums the rounds' tokens plus that one.
    """

    target_forwards: jax.Array  # [] int32: prefill passes and rounds
    drafter_forwards: jax.Array  # [] int32: forward passes of the drafter that proposed
    rounds: jax.Array  # [B] int32
    emitted: jax.Array  # [B] int32
    proposed: jax.Array  # [B] int32
    evaluated_at: jax.Array  # [B, K] int32, by position in the block
    accepted_at: jax.Array  # [B, K] int32
    undrafted: jax.Array  # [B, len(NoDraft)] int32: rounds without drafts, by reason

    @classmethod
    def zeros(cls, batch: int, draft_tokens: int) -> Stats:
        """Return counters of zero."""
        row = jnp.zeros((batch,), jnp.int32)
        place = jnp.zeros((batch, draft_tokens), jnp.int32)
        none = jnp.zeros((), jnp.int32)
        reasons = jnp.zeros((batch, len(NoDraft)), jnp.int32)
        return cls(none, none, row, row, row, place, place, reasons)

    @property
    def evaluated(self) -> jax.Array:
        """Drafts evaluated, [B] int32."""
        return jnp.sum(self.evaluated_at, axis=1, dtype=jnp.int32)

    @property
    def accepted(self) -> jax.Array:
        """Drafts accepted, [B] int32."""
        return jnp.sum(self.accepted_at, axis=1, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """Counters of one or more runs, summed over rows. Python numbers only.

    Attributes:
      target_forwards: prefill passes and rounds of the target.
      drafter_forwards: forward passes of the drafter for proposals: one per round for a block, one
        per draft for a chain, none for a lookup.
      rounds: rounds, counted per row.
      emitted: tokens emitted, the one after each prompt included.
      prompts: rows that emitted anything.
      proposed: drafts proposed.
      evaluated_at: drafts evaluated, by position in the block.
      accepted_at: drafts accepted, by position.
      undrafted: rounds without drafts, per row, by reason.
      admission_misses: how often a row found no ring or page in a pooled drafter's cache.
    """

    target_forwards: int
    drafter_forwards: int
    rounds: int
    emitted: int
    prompts: int
    proposed: int
    evaluated_at: tuple[int, ...]
    accepted_at: tuple[int, ...]
    undrafted: dict[str, int]
    admission_misses: int = 0

    def __add__(self, other: Summary) -> Summary:
        """Return the counters of both, with drafts of the same positions."""

        def both(name: str) -> Any:
            one, two = getattr(self, name), getattr(other, name)
            if isinstance(one, tuple):
                return tuple(a + b for a, b in zip(one, two, strict=True))
            if isinstance(one, dict):
                return {key: one.get(key, 0) + two.get(key, 0) for key in {**one, **two}}
            return one + two

        return Summary(**{field.name: both(field.name) for field in dataclasses.fields(self)})

    @property
    def evaluated(self) -> int:
        """Drafts evaluated."""
        return sum(self.evaluated_at)

    @property
    def accepted(self) -> int:
        """Drafts accepted."""
        return sum(self.accepted_at)

    @property
    def acceptance(self) -> float | None:
        """Accepted / evaluated drafts; None before any draft was evaluated."""
        return self.accepted / self.evaluated if self.evaluated else None

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens emitted in rounds / rounds; None before any round."""
        return (self.emitted - self.prompts) / self.rounds if self.rounds else None

    @property
    def acceptance_at(self) -> tuple[float | None, ...]:
        """Probability that a draft is accepted if its predecessors are, by position."""
        pairs = zip(self.accepted_at, self.evaluated_at, strict=True)
        return tuple(a / e if e else None for a, e in pairs)

    def lines(self) -> list[str]:
        """Return the summary as lines of text."""
        lines = [
            f"{self.emitted} tokens in {self.rounds} rounds"
            + (f", {self.tokens_per_round:.2f} tokens per round" if self.rounds else ""),
            f"{self.target_forwards} target forwards, {self.drafter_forwards} drafter forwards",
        ]
        if self.evaluated:
            lines.append(
                f"drafts: {self.proposed} proposed, {self.evaluated} evaluated, "
                f"{self.accepted} accepted ({self.acceptance:.1%} of the evaluated)"
            )
            rates = ("-" if r is None else f"{r:.0%}" for r in self.acceptance_at)
            lines.append("accepted, by position: " + "  ".join(rates))
        missed = {why: n for why, n in self.undrafted.items() if n}
        if missed and self.proposed:
            reasons = ", ".join(f"{n} {why}" for why, n in missed.items())
            lines.append(f"rounds without drafts: {reasons}")
        if self.admission_misses:
            lines.append(f"admission misses: {self.admission_misses}")
        return lines


def summarize(stats: Stats | Iterable[Stats], *, admission_misses: int = 0) -> Summary:
    """Sum counters over rows and runs, as Python numbers.

    Runs with different K are padded to the longest.

    Args:
      stats: counters of a run, or of several.
      admission_misses: the ``misses`` of pooled drafter states, summed; a fixed batch has none.

    Raises:
      ValueError: there are no runs.
    """
    runs = [stats] if isinstance(stats, Stats) else list(stats)
    if not runs:
        raise ValueError("no runs to summarize")
    width = max(run.accepted_at.shape[1] for run in runs)

    def total(name: str) -> int:
        return int(sum(np.asarray(getattr(run, name), np.int64).sum() for run in runs))

    def places(name: str) -> tuple[int, ...]:
        counts = np.zeros(width, np.int64)
        for run in runs:
            rows = np.asarray(getattr(run, name), np.int64).sum(axis=0)
            counts[: rows.size] += rows
        return tuple(int(n) for n in counts)

    undrafted = np.sum([np.asarray(run.undrafted, np.int64).sum(axis=0) for run in runs], axis=0)
    return Summary(
        target_forwards=total("target_forwards"),
        drafter_forwards=total("drafter_forwards"),
        rounds=total("rounds"),
        emitted=total("emitted"),
        prompts=int(sum((np.asarray(run.emitted) > 0).sum() for run in runs)),
        proposed=total("proposed"),
        evaluated_at=places("evaluated_at"),
        accepted_at=places("accepted_at"),
        undrafted={reason.name.lower(): int(undrafted[reason]) for reason in NoDraft},
        admission_misses=int(admission_misses),
    )
