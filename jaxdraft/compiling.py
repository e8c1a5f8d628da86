"""The time that JAX spends on compiling, measured, and a folder that keeps compiled programs.

Host code, for the shell. JAX reports every part of a compilation when it ends: tracing, lowering,
XLA's own work, or reading a program that an earlier process compiled.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
from jax import monitoring

_PARTS = "/jax/core/compile/"
_REQUEST = "/jax/compilation_cache/compile_requests_use_cache"
_HIT = "/jax/compilation_cache/cache_hits"

LEAST_SECONDS = 0.2
"""Programs that compile faster are not kept."""


class CompileClock:
    """Measures the time of all compilations while it is entered.

    Parts may lie inside one another (a traced function calls another), so each is an interval, and
    their union counts. Example: [0, 3] and [1, 2] are 3 seconds.

        with CompileClock() as clock:
            ...
        clock.seconds
    """

    def __init__(self) -> None:
        self._intervals: list[tuple[float, float]] = []
        self.programs = 0
        """Programs that were compiled or read, while there is a folder that keeps them."""
        self.read = 0
        """Those of them that were read."""

    def __enter__(self) -> Self:
        monitoring.register_event_duration_secs_listener(self._duration)
        monitoring.register_event_listener(self._event)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        monitoring.unregister_event_duration_listener(self._duration)
        monitoring.unregister_event_listener(self._event)

    def _duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith(_PARTS):
            now = time.perf_counter()
            self._intervals.append((now - duration_secs, now))

    def _event(self, event: str, **_: Any) -> None:
        self.programs += event == _REQUEST
        self.read += event == _HIT

    @property
    def seconds(self) -> float:
        """Seconds of compiling so far."""
        return self.between(float("-inf"), float("inf"))

    def between(self, start: float, end: float) -> float:
        """Return the seconds of compiling between two readings of ``time.perf_counter``."""
        total, reached = 0.0, start
        for first, last in sorted(self._intervals):
            first, last = max(first, reached), min(last, end)
            if last > first:
                total += last - first
                reached = last
        return total

    def __str__(self) -> str:
        kept = f", {self.read} of {self.programs} programs read from the cache" if self.read else ""
        return f"compiling took {self.seconds:.1f} s{kept}"


def keep_programs() -> Path | None:
    """Let compiled programs serve later processes, unless the caller chose a folder.

    The folder is ``jaxdraft/xla`` in ``XDG_CACHE_HOME`` or ``~/.cache``. It may be deleted at any
    time. JAX's own setting ``jax_compilation_cache_dir``, or the environment variable
    ``JAX_COMPILATION_CACHE_DIR`` (an empty one for none), comes first.

    Returns:
      The folder; None if the choice is the caller's.
    """
    chosen = jax.config.values["jax_compilation_cache_dir"]
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or chosen:
        return None
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "jaxdraft" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
    return folder
