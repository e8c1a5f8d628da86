"""The record of a request that scheduler, runner and rules share."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence as Ids
from typing import Any

import numpy as np

from jaxdraft.engine.counters import Counters, Counts
from jaxdraft.engine.programs import Columns
from jaxdraft.requests import Options
from jaxdraft.rounds import Logprobs
from jaxdraft.sampling import SamplingRules
from jaxdraft.structure import TokenAutomaton
from jaxdraft.text import OutputText, Text


class Phase(enum.Enum):
    """The phase of a request."""

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
    structure: TokenAutomaton | None
    logprobs: int | None


@dataclasses.dataclass
class Turn:
    """A turn: tokens that were given, and the output that follows them."""

    start: int  # where its tokens begin
    output: int  # where its output begins
    checkpoint: Any = None  # state of the rows after ``start - 1`` positions, if it was kept


class Sequence:
    """The tokens of a request, turn after turn, and the engine's data about them.

    Args:
      number: the request's number.
      ids: the prompt.
      options: the options of the first turn.
      rules: the same options, checked.
      keep: whether its cache stays in place when a turn is over.
      counters: the engine's counters.

    Attributes:
      ids: all tokens, those of earlier turns included.
      turns: the turns, oldest first; only a rewound sequence has an empty one.
      options: the options that the rules were made from.
      phase: the current phase.
      order: its place in the queue; each turn has a new one.
      row: its row on the device, if it has one.
      pages: its pages.
      read: number of positions in the caches, also for a kept sequence.
      checkpoint: row state of a kept sequence.
      emitted: number of tokens of the current output.
      pending: number of drafts for the next round.
      failures: number of failing rounds of the drafter, the last proposal included.
      failed_before: number of failing rounds without the last proposal.
      stop_state: state of the stop-string automaton.
      structure_state: state of the structure's automaton.
      saved_drafts: drafts of a sequence that lost its row, and their number.
      checkpoint_positions: positions to make a checkpoint at.
      pending_checkpoints: checkpoints whose pages are not cached by content yet.
      strikes: number of failing steps in which it ran alone.
      preemptions: number of times it was preempted and recomputed.
      reused: number of prompt positions taken from a cache instead of computed.
      done: counters of the rows that it has left.
      now: counters of its current row.
      finish_reason, error, text, logprobs, sampled_logprobs: as in :class:`jaxdraft.Request`.
      output_text: the decoder of the output, once a token was emitted.
      total: maximum number of tokens of prompt and output together.
    """

    def __init__(
        self,
        number: int,
        ids: Ids[int],
        options: Options,
        rules: RequestRules,
        *,
        keep: bool,
        counters: Counters,
    ) -> None:
        self.number, self.keep, self.counters = number, keep, counters
        self.ids: list[int] = []
        self.turns: list[Turn] = []
        self.row: int | None = None
        self.pages: list[int] = []
        self.read = 0
        self.checkpoint: Any = None
        self.order = number
        self.checkpoint_positions: list[int] = []
        self.pending_checkpoints: dict[int, Any] = {}
        self.preemptions, self.reused = 0, 0
        self.done = Counts.zeros(counters.draft_tokens)
        self.begin(ids, options, rules)

    def begin(self, ids: Ids[int], options: Options, rules: RequestRules) -> None:
        """Begin another turn, with no output yet."""
        self.options, self.rules = options, rules
        start = len(self.ids)
        self.turns.append(Turn(start, start + len(ids), self.checkpoint))
        self.ids.extend(ids)
        self.phase = Phase.WAITING
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.logprobs: list[tuple[float, list[tuple[int, float]]]] | None = (
            None if rules.logprobs is None else []
        )
        self.sampled_logprobs: list[float] | None = None if rules.logprobs is None else []
        self.emitted = self.pending = 0
        self.failures = self.failed_before = 0
        self.stop_state = self.structure_state = 0
        self.now = Counts.zeros(self.counters.draft_tokens)
        self.saved_drafts: tuple[Any, int] | None = None
        self.strikes = 0
        self.text: str | None = None
        self.output_text: OutputText | None = None
        self.total = min(len(self.ids) + rules.max_new_tokens, rules.max_length)

    def unwind(self) -> Turn:
        """Remove the last turn as if it had never been submitted, and return it."""
        turn = self.turns.pop()
        del self.ids[turn.start :]
        if not self.turns:
            self.turns.append(Turn(0, 0))
        self.emitted, self.text, self.logprobs, self.sampled_logprobs = 0, None, None, None
        return turn

    @property
    def prompt(self) -> list[int]:
        """The ids before the current output."""
        return self.ids[: self.turns[-1].output]

    @property
    def tokens(self) -> list[int]:
        """The ids of the current output."""
        return self.ids[self.turns[-1].output :]

    @property
    def finished(self) -> bool:
        """Whether the current turn is over."""
        return self.phase in (Phase.DONE, Phase.CLOSED)

    @property
    def known(self) -> bool:
        """Whether the last of its ids was emitted, and is in no cache yet."""
        return self.emitted > 0

    @property
    def goal(self) -> int:
        """Number of positions that must be in the caches before it runs."""
        return len(self.ids) - self.known

    @property
    def cap(self) -> int:
        """Maximum number of positions in the caches; the last token is never stored there."""
        return self.total - 1

    def settle(self) -> None:
        """Add the counters of the row to the totals, and reset them."""
        self.counters.total = self.counters.total + self.now
        self.done, self.now = self.done + self.now, Counts.zeros(self.counters.draft_tokens)

    def apply(
        self, columns: Columns, logprobs: Logprobs | None, place: int, *, first: bool
    ) -> list[int]:
        """Apply the report of a step to the row, and return the tokens it emitted.

        Args:
          columns: the report.
          logprobs: log-probabilities of the emitted tokens, if the program returns them.
          place: the row's place in both.
          first: whether the step emitted the first token of the output.
        """
        tokens = columns.tokens[place, : int(columns.count[place])].tolist()
        self.ids.extend(tokens)
        self.emitted = int(columns.emitted[place])
        self.pending = int(columns.pending[place])
        if self.saved_drafts is not None:  # its drafts are those it had, not those in the report
            self.pending, self.saved_drafts = self.saved_drafts[1], None
        else:
            if first or self.phase is Phase.RUNNING:  # otherwise it proposed what it had before
                self.failed_before = self.failures
            self.failures = int(columns.failures[place])
        self.stop_state = int(columns.stop_state[place])
        self.structure_state = int(columns.structure_state[place])
        self.read = len(self.ids) - self.known
        if first:
            self.counters.prompts += len(tokens)
        if self.logprobs is not None and logprobs is not None:
            assert self.sampled_logprobs is not None
            self.logprobs += _listed(logprobs, place, len(tokens), self.rules.logprobs or 0)
            self.sampled_logprobs += logprobs.sampled[place, : len(tokens)].tolist()
        return tokens

    def decode(
        self, text: Text | None, tokens: list[int], *, done: bool, stopped: bool = False
    ) -> str | None:
        """Return the text that tokens of the output add; None without a tokenizer.

        Args:
          text: the tokenizer.
          tokens: the next tokens.
          done: whether they are the last.
          stopped: whether the last of them completes a stop string.
        """
        if text is None:
            return None
        if self.output_text is None:
            self.output_text = OutputText(text, prompt=self.prompt, stop=self.rules.stop)
            self.text = ""
        shown = self.output_text.push(tokens, done=done, stopped=stopped)
        self.text = (self.text or "") + shown
        return shown

    def __repr__(self) -> str:
        end = f", {self.finish_reason}" if self.finish_reason else ""
        return (
            f"<Request {self.number}: {self.phase.value}{end}, {len(self.prompt)} + "
            f"{len(self.tokens)} tokens>"
        )


def _listed(
    found: Logprobs, place: int, count: int, alternatives: int
) -> list[tuple[float, list[tuple[int, float]]]]:
    """Return log-probabilities of a row's tokens as plain numbers."""
    return [
        (
            float(found.token[place, t]),
            [
                (int(found.top_tokens[place, t, n]), float(found.top[place, t, n]))
                for n in range(alternatives)
            ],
        )
        for t in range(count)
    ]
