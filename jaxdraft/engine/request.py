"""Requests, and what an engine says about them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxdraft.base import NoDraft
from jaxdraft.sampling import SamplingRules
from jaxdraft.telemetry import Stats, Summary, summarize
from jaxdraft.text import OutputText

if TYPE_CHECKING:
    from jaxdraft.engine.engine import Engine


class Phase(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"  # for a row and pages
    READING = "reading"  # its prompt, chunk by chunk
    RUNNING = "running"
    DONE = "done"
    CLOSED = "closed"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RequestRules:
    """The rules of one turn, checked; ``sampling`` has one row, in numpy."""

    stop_ids: tuple[int, ...]
    max_new_tokens: int
    max_length: int
    draft_limit: int
    sampling: SamplingRules | None
    stop: tuple[str, ...]
    automaton: np.ndarray | None  # of ``stop``, [states, V]
    logprobs: int | None


@dataclasses.dataclass
class Turn:
    """A turn: tokens that were given, and the output that follows them."""

    start: int  # where its tokens begin
    output: int  # where its output begins
    memory: Any = None  # what the rows remember behind ``start - 1`` positions, if it was kept


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
        """Nothing happened yet."""
        place = np.zeros(draft_tokens, np.int64)
        return cls(0, 0, 0, 0, 0, place, place, np.zeros(len(NoDraft), np.int64))

    def __add__(self, other: Counts) -> Counts:
        names = [f.name for f in dataclasses.fields(self)]
        return Counts(*(getattr(self, n) + getattr(other, n) for n in names))

    def stats(self) -> Stats:
        """As the counters of a batch of one row."""

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


class Request:
    """A prompt, and what becomes of it. :meth:`jaxdraft.Engine.submit` makes them.

    Attributes:
      prompt: the ids that were given, of all turns and with the outputs of earlier ones.
      tokens: the ids of the current turn's output so far.
      text: the output as text, before a stop string; None without a tokenizer.
      logprobs: with ``logprobs=n``: of every token of the output ``(log-probability, [(token,
        log-probability), ...])``.
      finish_reason: ``"stop"``, ``"stop_string"``, ``"length"``, ``"context"``, ``"nonfinite"``,
        ``"cancelled"`` or ``"failed"``; None before the end.
      error: what went wrong, of ``"failed"`` and ``"nonfinite"``.
      preemptions: how often it lost its place and was computed anew.
      reused: prompt positions that were not computed, since they were known.
    """

    def __init__(
        self, engine: Engine, number: int, ids: Sequence[int], rules: RequestRules, keep: bool
    ) -> None:
        self._engine, self.number, self.keep = engine, number, keep
        self.preemptions, self.reused = 0, 0
        self.turns: list[Turn] = []
        self.ids: list[int] = []
        self.done = Counts.zeros(engine.draft_tokens)  # of what was before it last took a row
        self.options: dict[str, Any] = {}
        self.begin(ids, rules)
        # What the scheduler knows.
        self.row: int | None = None
        self.pages: list[int] = []
        self.read = 0  # positions in the caches; those of a kept request too
        self.memory: Any = None  # of a kept request: what its row remembered
        self.order = number
        self.marks: list[int] = []  # positions to make a checkpoint at
        self.saved: dict[int, Any] = {}  # checkpoints whose pages are not remembered yet

    def begin(self, ids: Sequence[int], rules: RequestRules) -> None:
        """Another turn. Nothing of it was emitted yet."""
        self.rules = rules
        start = len(self.ids)
        self.turns.append(Turn(start, start + len(ids), getattr(self, "memory", None)))
        self.ids.extend(ids)
        self.phase = Phase.WAITING
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.logprobs: list[tuple[float, list[tuple[int, float]]]] | None = (
            None if rules.logprobs is None else []
        )
        self.emitted = 0
        self.pending = 0  # drafts of the coming round
        self.failures = self.failed_before = 0  # of the drafter, with the last proposal and before
        self.heard = 0  # state of the stop-string automaton
        self.now = Counts.zeros(self._engine.draft_tokens)
        self.noted: tuple[Any, int] | None = None  # of one that lost its row: see `programs.note`
        self.strikes = 0
        self.text: str | None = None
        self.output_text: OutputText | None = None  # once a token was emitted
        self.total = min(len(self.ids) + rules.max_new_tokens, rules.max_length)

    def unwind(self) -> Turn:
        """The last turn was not."""
        turn = self.turns.pop()
        del self.ids[turn.start :]
        if not self.turns:
            self.turns.append(Turn(0, 0))
        self.emitted, self.text, self.logprobs = 0, None, None
        return turn

    @property
    def prompt(self) -> list[int]:
        return self.ids[: self.turns[-1].output]

    @property
    def tokens(self) -> list[int]:
        return self.ids[self.turns[-1].output :]

    @property
    def finished(self) -> bool:
        """Whether its turn is over."""
        return self.phase in (Phase.DONE, Phase.CLOSED)

    @property
    def known(self) -> bool:
        """Whether the last of its ids was emitted, and is in no cache yet."""
        return self.emitted > 0

    @property
    def goal(self) -> int:
        """Positions to be in the caches before it runs."""
        return len(self.ids) - self.known

    @property
    def cap(self) -> int:
        """Positions that will ever be in the caches: the last token is never put there."""
        return self.total - 1

    @property
    def stats(self) -> Stats:
        """Its counters, one row. Forward passes are those it took part in, others beside it."""
        with self._engine.lock:
            return (self.done + self.now).stats()

    def summary(self) -> Summary:
        """Its counters, as Python numbers."""
        return summarize(self.stats)

    def settle(self) -> None:
        """It leaves its row: the row's counters start again."""
        self._engine.tally(self.now)
        self.done, self.now = self.done + self.now, Counts.zeros(self._engine.draft_tokens)

    def cancel(self) -> None:
        """End it now; what was emitted stays. A request that is over is left alone."""
        self._engine.cancel(self)

    def extend(self, tokens: str | Sequence[int], **rules: Any) -> Request:
        """Continue a finished request with more tokens; see :meth:`jaxdraft.Engine.extend`."""
        return self._engine.extend(self, tokens, **rules)

    def rewind(self) -> Request:
        """Forget the last turn; see :meth:`jaxdraft.Engine.rewind`."""
        return self._engine.rewind(self)

    def result(self) -> list[int]:
        """Wait until this request is over, and return its tokens.

        The engine's steps run here, or in another thread that waits for a result.

        Raises:
          BaseException: what made it fail.
          RuntimeError: a step failed in another thread that waited. The engine goes on, and the
            result can be waited for again.
        """
        self._engine.wait(lambda: self.finished)
        if self.error is not None:
            raise self.error
        return self.tokens

    def close(self) -> None:
        """Give back all it holds. It can be read on, but not continued."""
        self._engine.release(self)

    def __repr__(self) -> str:
        end = f", {self.finish_reason}" if self.finish_reason else ""
        return (
            f"<Request {self.number}: {self.phase.value}{end}, {len(self.prompt)} + "
            f"{len(self.tokens)} tokens>"
        )


@dataclasses.dataclass(frozen=True)
class EngineEvent:
    """What one request received in one step."""

    request: Request
    tokens: list[int]
    text: str | None  # None without a tokenizer; may lag behind the tokens by a partial character
    accepted: int  # accepted drafts among the tokens; -1 for the token after the prompt
    finish_reason: str | None  # set on the request's last event
    error: BaseException | None = None  # what went wrong, of this request alone
