"""Counters of requests and of a whole engine, as Python and numpy numbers on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from jaxdraft.base import NoDraft
from jaxdraft.engine.programs import Columns
from jaxdraft.telemetry import Stats, Summary, summarize


@dataclasses.dataclass
class Counts:
    """Counters of a request, numpy; see :class:`jaxdraft.telemetry.Stats`."""

    target_forwards: int
    drafter_forwards: int
    rounds: int
    emitted: int
    proposed: int
    evaluated_at: np.ndarray  # [K]
    accepted_at: np.ndarray  # [K]
    undrafted: np.ndarray  # [len(NoDraft)]

    @classmethod
    def zeros(cls, draft_tokens: int) -> Counts:
        """Return counters that are all zero."""
        place = np.zeros(draft_tokens, np.int64)
        return cls(0, 0, 0, 0, 0, place, place, np.zeros(len(NoDraft), np.int64))

    def __add__(self, other: Counts) -> Counts:
        names = [f.name for f in dataclasses.fields(self)]
        return Counts(*(getattr(self, n) + getattr(other, n) for n in names))

    def stats(self) -> Stats:
        """Return these counters as those of a batch of one row."""

        def whole(name: str) -> Any:
            return np.asarray(getattr(self, name), np.int32)

        def row(name: str) -> Any:
            return whole(name)[None]

        return Stats(
            target_forwards=whole("target_forwards"),
            drafter_forwards=whole("drafter_forwards"),
            rounds=row("rounds"),
            emitted=row("emitted"),
            proposed=row("proposed"),
            evaluated_at=row("evaluated_at"),
            accepted_at=row("accepted_at"),
            undrafted=row("undrafted"),
        )


class Counters:
    """Counters of an engine.

    Args:
      draft_tokens: K, maximum number of drafts per round.

    Attributes:
      total: counters of all rows that requests have already left.
      prompts: number of prompts whose first token was emitted.
    """

    def __init__(self, draft_tokens: int) -> None:
        self.draft_tokens = draft_tokens
        self.total = Counts.zeros(draft_tokens)
        self.prompts = 0
        self._forwards = np.zeros(2, np.int64)  # of target and drafter
        self._device = self._step = np.zeros(2, np.int64)  # the device's counters, last change

    def restart(self) -> None:
        """Record that the device's own counters restart at zero."""
        self._device = np.zeros(2, np.int64)

    def row(self, old: Counts, columns: Columns, place: int) -> Counts:
        """Return the counters of a row after a step.

        Args:
          old: counters of the row before the step.
          columns: the report of the program that ran.
          place: the row's place in the report.
        """
        forwards = np.asarray(
            [columns.target_forwards[place], columns.drafter_forwards[place]], np.int64
        )
        step = (forwards - self._device) % 2**32
        if step.any():  # the first row of this program
            self._forwards = self._forwards + step
            self._device, self._step = forwards, step
        by_place = np.stack([columns.evaluated_at[place], columns.accepted_at[place]])
        missing = self.draft_tokens - by_place.shape[1]
        if missing:  # after the drafter was switched off, the report has no draft positions
            by_place = np.pad(by_place, ((0, 0), (0, missing)))
        by_place = by_place.astype(np.int64)
        return Counts(
            target_forwards=old.target_forwards + int(self._step[0]),
            drafter_forwards=old.drafter_forwards + int(self._step[1]),
            rounds=int(columns.rounds[place]),
            emitted=int(columns.row_emitted[place]),
            proposed=int(columns.proposed[place]),
            evaluated_at=by_place[0],
            accepted_at=by_place[1],
            undrafted=columns.undrafted[place].astype(np.int64),
        )

    def summary(self, running: Iterable[Counts], misses: int) -> Summary:
        """Return the sum of all counters.

        Args:
          running: counters of the requests that have rows.
          misses: number of admissions without room in the drafter's cache.
        """
        counts = self.total
        for more in running:
            counts = counts + more
        target, drafter = (int(n) for n in self._forwards)
        counts = replace(counts, target_forwards=target, drafter_forwards=drafter)
        return replace(summarize(counts.stats(), admission_misses=misses), prompts=self.prompts)
