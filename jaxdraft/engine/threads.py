"""Threads around one engine: a fair lock, and one thread at a time that runs the steps.

A thread that waits for a result runs the engine's steps itself, unless another thread does so
already. Then it sleeps until a step is over and checks its request again. It takes over when the
other thread's wait is over. No thread is started here.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class FairLock:
    """A reentrant lock that threads acquire in the order of arrival.

    Without the order, a thread that runs step after step would take an ordinary lock again before a
    waiting ``submit`` wakes up.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()  # around the members below, held for no longer than that
        self._owner: int | None = None
        self._depth = 0
        self._queue: deque[tuple[int, threading.Lock]] = deque()

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return
        gate = threading.Lock()
        with self._mutex:
            if self._owner is None:
                self._owner, self._depth = me, 1
                return
            gate.acquire()
            self._queue.append((me, gate))
        try:
            gate.acquire()  # the owner opens it, and the lock is this thread's
        except BaseException:  # an interrupt; the place in the queue must not stay behind
            with self._mutex:
                waits = (me, gate) in self._queue
                if waits:
                    self._queue.remove((me, gate))
            if not waits:
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        with self._mutex:
            if not self._queue:
                self._owner = None
                return
            self._owner, gate = self._queue.popleft()
            self._depth = 1
            gate.release()


class Waiters:
    """Threads that wait for a result of an engine's steps."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._driven = False  # whether a thread runs steps for all that wait
        self._count = 0
        self._failures = 0
        self._failure: Exception | None = None

    def until(
        self,
        done: Callable[[], bool],
        step: Callable[[], Any],
        after: Callable[[], Any] = lambda: None,
    ) -> None:
        """Wait until ``done()``, and run steps meanwhile if no other waiting thread does.

        Args:
          done: function that returns whether the wait is over.
          step: function that runs one step.
          after: function called after every step that this thread notices.

        Raises:
          Exception: the error of a step that this thread ran.
          RuntimeError: a step that another waiting thread ran failed; its cause is that error.
        """
        seen = self._failures
        while not done():
            with self._changed:
                if self._failures != seen:
                    raise RuntimeError(
                        f"a step failed in another thread that waited: {self._failure}"
                    ) from self._failure
                if self._driven:
                    self._sleep(done)
                    drives = False
                else:
                    drives = self._driven = True
            if drives:
                self._drive(done, step, after)
            after()

    def notify(self) -> None:
        """Wake the waiting threads to check their conditions again."""
        if self._count:
            with self._changed:
                self._changed.notify_all()

    def _sleep(self, done: Callable[[], bool]) -> None:
        self._count += 1
        try:
            if not done():  # checked after counting: a later change is sure to notify
                self._changed.wait()
        finally:
            self._count -= 1

    def _drive(
        self, done: Callable[[], bool], step: Callable[[], Any], after: Callable[[], Any]
    ) -> None:
        try:
            while not done():
                step()
                self.notify()
                after()
        except Exception as error:
            with self._changed:
                self._failures, self._failure = self._failures + 1, error
            raise
        finally:
            with self._changed:
                self._driven = False
                self._changed.notify_all()


class Readers:
    """Iterations over an engine's events; those of one thread at a time."""

    def __init__(self) -> None:
        self._threads: dict[object, int] = {}  # by reader

    def __bool__(self) -> bool:
        return bool(self._threads)

    def claim(self, reader: object) -> None:
        """Make the calling thread the one that reads the events.

        Args:
          reader: the iteration. Its next step may be in another thread.

        Raises:
          RuntimeError: an iteration in another thread is not over.
        """
        self.refuse(reader)
        self._threads[reader] = threading.get_ident()

    def refuse(self, reader: object = None) -> None:
        """Raise the error of :meth:`claim` if another thread reads the events."""
        me = threading.get_ident()
        if any(r is not reader and thread != me for r, thread in list(self._threads.items())):
            raise RuntimeError(
                "another thread iterates over this engine's events; wait for request.result() "
                "here, or read the events in one thread"
            )

    def leave(self, reader: object) -> None:
        """End an iteration. The garbage collector may call this, so it takes no lock."""
        self._threads.pop(reader, None)


class Shared(Protocol):
    """An object that threads share."""

    lock: FairLock
    waiters: Waiters


_Self = TypeVar("_Self", bound=Shared)
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def exclusive(
    method: Callable[Concatenate[_Self, _Args], _Result],
) -> Callable[Concatenate[_Self, _Args], _Result]:
    """Return the method run with the lock held; waiting threads are woken afterwards."""

    @functools.wraps(method)
    def locked(self: _Self, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        try:
            with self.lock:
                return method(self, *args, **kwargs)
        finally:
            self.waiters.notify()

    return locked
