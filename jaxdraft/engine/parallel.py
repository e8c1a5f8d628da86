"""An engine on a mesh with several rows of devices: an engine for each of them, and one door.

No array of one row of devices is read by another: each has the whole model, its own pool and its
own requests. The engines of all rows step at the same time, each in a thread of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from jaxdraft.base import Drafter, full_target
from jaxdraft.checks import check_int
from jaxdraft.engine.engine import Engine
from jaxdraft.engine.request import EngineEvent, Request
from jaxdraft.engine.threads import FairLock, Readers, Waiters, exclusive
from jaxdraft.model import Model
from jaxdraft.plan import MAX_BATCH
from jaxdraft.sharding.placement import ShardingError
from jaxdraft.telemetry import Summary


class ParallelEngine(Engine):
    """The :class:`Engine` of a model on a mesh with several rows of devices.

    A request goes to the row of devices with the fewest unfinished ones, and its tokens do not
    depend on that.

    Args:
      model: a model on a mesh.
      max_batch: rows that run at once, over all rows of devices; must divide by their number.
      pages: pages over all rows of devices, likewise.
      **sizes: as for :class:`Engine`; ``memory`` is that of one device.

    Raises:
      ShardingError: a ``ValueError``; a number does not divide by the rows of devices.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_batch: int = MAX_BATCH,
        pages: int | None = None,
        drafter: str | Drafter = "auto",
        draft_tokens: int | None = None,
        **sizes: Any,
    ) -> None:
        from jaxdraft.sharding.place import rows_of

        placement = full_target(model.target).placement
        assert placement is not None
        count = placement.rows
        for name, value in (("max_batch", max_batch), ("pages", pages)):
            if value is not None and check_int(name, value) % count:
                raise ShardingError(
                    f"{name} is {value}; expected a multiple of {count}, the rows of devices"
                )
        each = max_batch // count, None if pages is None else pages // count
        self.lock, self.waiters = FairLock(), Waiters()
        self._readers, self._closed = Readers(), False
        self.model, self.drafter = model, model.choose(drafter, draft_tokens)
        self._named = drafter if isinstance(drafter, str) else None
        self._engines = [
            Engine(part, max_batch=each[0], pages=each[1], drafter=part.drafter, **sizes)
            for part in rows_of(replace(model, drafter=self.drafter))
        ]
        first = self._engines[0]
        self.draft_tokens = first.draft_tokens
        self.max_batch, self.context = max_batch, first.context
        for engine in self._engines:
            engine._number, engine._order = first._number, first._order
            engine._readers = self._readers
        self._threads = ThreadPoolExecutor(count, "jaxdraft-engine")

    # ------------------------------------------------------------------ requests

    @exclusive
    def submit(self, prompt: str | Ids[int], **rules: Any) -> Request:
        """See :meth:`Engine.submit`."""
        idle = min(self._engines, key=lambda engine: len(engine._results.handles))
        return idle.submit(prompt, **rules)

    @exclusive
    def extend(self, request: Request, tokens: str | Ids[int], **rules: Any) -> Request:
        """See :meth:`Engine.extend`."""
        return request._engine.extend(request, tokens, **rules)

    @exclusive
    def rewind(self, request: Request) -> Request:
        """See :meth:`Engine.rewind`."""
        return request._engine.rewind(request)

    @exclusive
    def update(self, model: Model, drafter: str | Drafter | None = None) -> None:
        """See :meth:`Engine.update`."""
        from jaxdraft.sharding.place import rows_of

        chosen = self._checked(model, drafter)
        self.model, self.drafter = model, chosen
        parts = rows_of(replace(model, drafter=chosen))
        for engine, part in zip(self._engines, parts, strict=True):
            engine.update(part, part.drafter)

    @exclusive
    def cancel(self, request: Request) -> None:
        """See :meth:`Engine.cancel`."""
        request._engine.cancel(request)

    @exclusive
    def release(self, request: Request) -> None:
        """See :meth:`Engine.release`."""
        request._engine.release(request)

    @exclusive
    def close(self) -> None:
        """See :meth:`Engine.close`."""
        for engine in self._engines:
            engine.close()
        self._threads.shutdown()
        self._closed = True

    # ------------------------------------------------------------------ running

    @property
    @exclusive
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return any(engine.busy for engine in self._engines)

    @exclusive
    def step(self) -> list[EngineEvent]:
        """Step the engines of all rows of devices at once; see :meth:`Engine.step`."""
        self._usable()
        self._readers.refuse()
        self._advance()
        events = [event for engine in self._engines for event in _taken(engine)]
        return sorted(events, key=lambda e: e.request._sequence.order)

    @exclusive
    def _step_unread(self, done: Callable[[], bool]) -> None:
        if done():
            return
        self._usable()
        self._advance()
        if not self._readers:
            for engine in self._engines:
                _taken(engine)

    def _advance(self) -> None:
        """Step every engine with work, in threads. All finish before an error is raised."""
        busy = [engine for engine in self._engines if engine.busy]
        futures = [self._threads.submit(_advanced, engine) for engine in busy]
        for error in [future.exception() for future in futures]:
            if error is not None:
                raise error

    # ------------------------------------------------------------------ queries

    @property
    def programs(self) -> int:
        """Number of programs used so far, over all rows of devices."""
        return sum(engine.programs for engine in self._engines)

    @property
    def faults(self) -> int:
        """Number of steps that failed on a device."""
        return sum(engine.faults for engine in self._engines)

    @property
    def last_fault(self) -> BaseException | None:
        """The error of the last failed step of the first row of devices that has one."""
        return next(self._found("last_fault"), None)

    @property
    def drafter_fault(self) -> BaseException | None:
        """The error that caused a drafter to be switched off, if any."""
        return next(self._found("drafter_fault"), None)

    def _found(self, name: str) -> Iterator[Any]:
        found = (getattr(engine, name) for engine in self._engines)
        return (one for one in found if one is not None)

    @exclusive
    def summary(self) -> Summary:
        """Return counters of everything so far, over all requests of all rows of devices."""
        return functools.reduce(Summary.__add__, [e.summary() for e in self._engines])

    @exclusive
    def check(self) -> None:
        """See :meth:`Engine.check`."""
        for engine in self._engines:
            engine.check()


def _advanced(engine: Engine) -> None:
    with engine.lock:
        engine._advance()
    engine.waiters.notify()


def _taken(engine: Engine) -> list[EngineEvent]:
    """Remove and return the unread events of an engine."""
    with engine.lock:
        events = engine._results.take()
    return events


Engine._over_rows = ParallelEngine
