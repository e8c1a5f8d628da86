"""The caller's handle of a request, and the events of an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Ids
from contextlib import AbstractContextManager
from typing import Any, Protocol

from jaxdraft.engine.sequence import Sequence
from jaxdraft.telemetry import Stats, Summary, summarize


class Owner(Protocol):
    """The part of :class:`jaxdraft.Engine` that a handle calls."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Lock that is held while counters are read."""
        ...

    def cancel(self, request: Request) -> None:
        """See :meth:`jaxdraft.Engine.cancel`."""
        ...

    def extend(self, request: Request, tokens: str | Ids[int], **rules: Any) -> Request:
        """See :meth:`jaxdraft.Engine.extend`."""
        ...

    def rewind(self, request: Request) -> Request:
        """See :meth:`jaxdraft.Engine.rewind`."""
        ...

    def release(self, request: Request) -> None:
        """See :meth:`jaxdraft.Engine.release`."""
        ...

    def wait(self, done: Callable[[], bool]) -> None:
        """Run steps, or wait while another thread runs them, until ``done()``."""
        ...


class Request:
    """A prompt and its output, as returned by :meth:`jaxdraft.Engine.submit`."""

    def __init__(self, engine: Owner, sequence: Sequence) -> None:
        self._engine, self._sequence = engine, sequence

    @property
    def number(self) -> int:
        """The number of the request: 0 is the engine's first."""
        return self._sequence.number

    @property
    def prompt(self) -> list[int]:
        """The input ids of all turns, with the outputs of earlier turns between them."""
        return self._sequence.prompt

    @property
    def tokens(self) -> list[int]:
        """The ids of the current turn's output so far."""
        return self._sequence.tokens

    @property
    def text(self) -> str | None:
        """The output as text, before a stop string; None without a tokenizer."""
        return self._sequence.text

    @property
    def logprobs(self) -> list[tuple[float, list[tuple[int, float]]]] | None:
        """Log-probabilities with ``logprobs=n``: a pair for every token of the output.

        A pair holds the token's log-probability and the n best ``(token, log-probability)``.
        """
        return self._sequence.logprobs

    @property
    def sampled_logprobs(self) -> list[float] | None:
        """Log-probabilities in the distribution that each token was drawn from, after penalties,
        temperature and truncation; those of greedy tokens are 0. With ``logprobs=n``."""
        return self._sequence.sampled_logprobs

    @property
    def finished(self) -> bool:
        """Whether the current turn is over."""
        return self._sequence.finished

    @property
    def finish_reason(self) -> str | None:
        """The reason why the request ended; None before the end.

        ``"stop"``, ``"stop_string"``, ``"length"``, ``"context"``, ``"complete"``, ``"dead_end"``,
        ``"nonfinite"``, ``"cancelled"`` or ``"failed"``.
        """
        return self._sequence.finish_reason

    @property
    def error(self) -> BaseException | None:
        """The error of a request that ended as ``"failed"``, ``"nonfinite"`` or ``"dead_end"``."""
        return self._sequence.error

    @property
    def preemptions(self) -> int:
        """The number of times the request was preempted and recomputed."""
        return self._sequence.preemptions

    @property
    def reused(self) -> int:
        """Number of prompt positions taken from a cache instead of computed."""
        return self._sequence.reused

    @property
    def stats(self) -> Stats:
        """The request's counters, one row. Shared forward passes count fully."""
        with self._engine.lock:
            return (self._sequence.done + self._sequence.now).stats()

    def summary(self) -> Summary:
        """Return the request's counters as Python numbers."""
        return summarize(self.stats)

    def cancel(self) -> None:
        """End the request now and keep the emitted tokens; a finished one is left unchanged."""
        self._engine.cancel(self)

    def extend(self, tokens: str | Ids[int], **rules: Any) -> Request:
        """Continue a finished request with more tokens; see :meth:`jaxdraft.Engine.extend`."""
        return self._engine.extend(self, tokens, **rules)

    def rewind(self) -> Request:
        """Forget the last turn; see :meth:`jaxdraft.Engine.rewind`."""
        return self._engine.rewind(self)

    def result(self) -> list[int]:
        """Wait until this request is over, and return its tokens.

        The engine's steps run here, or in another thread that waits for a result.

        Raises:
          BaseException: the error of this request.
          RuntimeError: if a step failed in another waiting thread. The engine continues, and
            the caller can wait for the result again.
        """
        self._engine.wait(lambda: self.finished)
        if self.error is not None:
            raise self.error
        return self.tokens

    def close(self) -> None:
        """Free everything the request holds. Its results stay readable; it cannot be continued."""
        self._engine.release(self)

    def __repr__(self) -> str:
        return repr(self._sequence)


@dataclasses.dataclass(frozen=True)
class EngineEvent:
    """The tokens and text that one request received in one step."""

    request: Request
    tokens: list[int]
    text: str | None  # None without a tokenizer; may lag behind the tokens by a partial character
    accepted: int  # accepted drafts among the tokens; -1 for the token after the prompt
    finish_reason: str | None  # set on the request's last event
    error: BaseException | None = None  # the error of this request, if it failed
