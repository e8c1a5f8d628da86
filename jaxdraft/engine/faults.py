"""Steps that fail on the device, and the request or drafter that causes the failure."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from jaxdraft.engine.sequence import Sequence

STRIKES = 2
"""Number of steps a sequence must fail alone before it or the drafter is blamed."""


class Blame(enum.Enum):
    """Action to take after a failed step."""

    NOTHING = enum.auto()  # the suspects run one by one
    DRAFTER = enum.auto()  # continue without the drafter
    SEQUENCE = enum.auto()  # end the sequence that ran


class Faults:
    """Finds the cause of failing steps.

    Sequences that took part in a failed step are suspects: each runs alone until it completes a
    step. A sequence that fails twice alone is retried without the drafter. If it still fails, the
    sequence is the cause; otherwise the drafter is.

    Attributes:
      count: number of steps that failed on the device.
      last: the error of the last failed step.
      drafter: the error that caused the drafter to be switched off, if the drafter is the cause.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last: BaseException | None = None
        self.drafter: BaseException | None = None
        self._suspects: list[Sequence] = []

    def suspect(self) -> Sequence | None:
        """Return the sequence that must run alone, if there is one."""
        self._suspects = [s for s in self._suspects if not s.finished]
        return self._suspects[0] if self._suspects else None

    def failed(self, part: list[Sequence], error: BaseException, *, drafts: bool) -> Blame:
        """Record a failed step.

        Args:
          part: the sequences that took part in the step.
          error: the error.
          drafts: whether the engine has a drafter that can be switched off.
        """
        self.count += 1
        self.last = error
        blame = Blame.NOTHING
        if len(part) == 1:
            part[0].strikes += 1
            if part[0].strikes == STRIKES and drafts:
                blame = Blame.DRAFTER
            elif part[0].strikes >= STRIKES:
                blame = Blame.SEQUENCE
        if blame is not Blame.SEQUENCE:
            self._add(part)
        return blame

    def passed(self, sequence: Sequence, *, drafts: bool) -> None:
        """Record that a sequence received tokens, which clears it as a suspect."""
        if sequence in self._suspects:
            self._suspects.remove(sequence)
            if sequence.strikes >= STRIKES and drafts:
                self.drafter = self.last
            sequence.strikes = 0

    def _add(self, part: Iterable[Sequence]) -> None:
        known = set(self._suspects)
        self._suspects += [s for s in part if s not in known and not s.finished]
