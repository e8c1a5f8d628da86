"""From the reports of steps to tokens, texts, ends and events of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxdraft.base import Status
from jaxdraft.engine.counters import Counters
from jaxdraft.engine.faults import Faults
from jaxdraft.engine.programs import Columns, Report
from jaxdraft.engine.request import EngineEvent, Request
from jaxdraft.engine.scheduler import Scheduler, Work
from jaxdraft.engine.sequence import Phase, Sequence
from jaxdraft.text import Text

Reported = tuple[Columns, Report]
"""What the program of one step returned."""


class Results:
    """The unfinished requests of an engine, and the events that it has for its readers.

    Args:
      scheduler: the engine's scheduler.
      counters: the engine's counters.
      faults: the engine's record of failed steps.
      text: the model's tokenizer, if there is one.
      drafts: whether rounds have drafts.
      save: function that copies the recurrent states of a row.

    Attributes:
      handles: unfinished requests by number.
      events: events that no one has read yet.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        counters: Counters,
        faults: Faults,
        *,
        text: Text | None,
        drafts: bool,
        save: Callable[[Sequence], Any],
    ) -> None:
        self._scheduler, self._counters, self._faults = scheduler, counters, faults
        self._text, self._drafts, self._save = text, drafts, save
        self.handles: dict[int, Request] = {}
        self.events: list[EngineEvent] = []

    def take(self) -> list[EngineEvent]:
        """Return the events, in the order in which their requests arrived, and forget them."""
        events, self.events = self.events, []
        return sorted(events, key=lambda event: event.request._sequence.order)

    def report(self, work: Work, running: Reported | None, reading: Reported | None) -> None:
        """Apply the reports of a step's two programs, where they ran."""
        if running is not None:
            for place, sequence in enumerate(work.running):
                self._row(sequence, *running, place, first=False)
        if reading is not None:
            for place, (sequence, count) in enumerate(work.reading):
                sequence.read += count
                if sequence.read >= sequence.goal:
                    self._row(sequence, *reading, place, first=not sequence.known)
                else:
                    sequence.now = self._counters.row(sequence.now, reading[0], place)

    def _row(
        self, sequence: Sequence, columns: Columns, report: Report, place: int, *, first: bool
    ) -> None:
        """Apply the report of a step to a row that ran or finished reading its text."""
        sequence.now = self._counters.row(sequence.now, columns, place)
        tokens = sequence.apply(columns, report.logprobs, place, first=first)
        if tokens:
            self._faults.passed(sequence, drafts=self._drafts)
        status = Status(int(columns.status[place]))
        over, began = status is not Status.RUNNING, sequence.phase is Phase.READING
        accepted = -1 if first else int(columns.accepted[place])
        try:
            stopped = status is Status.STOP_STRING
            text = sequence.decode(self._text, tokens, done=over, stopped=stopped)
        except Exception as error:  # from the tokenizer, so only this request is affected
            self._end(sequence, "failed", error, tokens=tokens, accepted=accepted)
            return
        if over:
            error: Exception | None = None
            if status is Status.NONFINITE:
                error = FloatingPointError("the target's logits are not finite")
            elif status is Status.DEAD_END:
                error = ValueError(
                    "no token may follow: masks, bans and the structure allow none together"
                )
            self._end(sequence, status.reason, error, tokens=tokens, text=text, accepted=accepted)
            return
        sequence.phase = Phase.RUNNING
        if began:
            self._scheduler.remember(sequence)
        if tokens:
            handle = self.handles[sequence.number]
            self.events.append(EngineEvent(handle, tokens, text, accepted, None))

    def cut_short(
        self, sequence: Sequence, reason: str, error: BaseException | None = None
    ) -> None:
        """End a request between steps, and emit the text that was held back."""
        text = None
        try:
            if sequence.output_text is not None:
                text = sequence.decode(self._text, [], done=True)
        finally:
            self._end(sequence, reason, error, text=text)

    def _end(
        self,
        sequence: Sequence,
        reason: str,
        error: BaseException | None = None,
        *,
        tokens: list[int] | None = None,
        text: str | None = None,
        accepted: int = -1,
    ) -> None:
        """End a request: free its row, and keep, remember or free its cache."""
        keeps = sequence.keep and error is None and sequence.row is not None
        checkpoint = self._save(sequence) if keeps and self._scheduler.checkpointed else None
        sequence.settle()
        sequence.finish_reason, sequence.error = reason, error
        # A row that ended by itself has already stopped on the device; any other must be stopped.
        stop = reason in ("cancelled", "failed")
        sequence.phase, sequence.output_text = Phase.DONE, None
        if keeps:
            self._scheduler.retain(sequence, checkpoint, stop=stop)
        elif sequence.row is not None:
            self._scheduler.release(sequence, stop=stop, remember=error is None)
        handle = self.handles.pop(sequence.number)
        self.events.append(EngineEvent(handle, tokens or [], text, accepted, reason, error))
