"""The time of compilations, and the folder that keeps compiled programs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import monitoring

from jaxdraft import compiling
from jaxdraft.compiling import CompileClock, keep_programs


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let a test change the settings of JAX's cache."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    kept = {name: getattr(jax.config, name) for name in names}
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    yield monkeypatch
    for name, value in kept.items():
        jax.config.update(name, value)


def test_parts_inside_one_another_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """[1, 2] and [0, 3], then [4, 6] and [5, 7], and something else."""
    now = [0.0]
    monkeypatch.setattr(compiling.time, "perf_counter", lambda: now[0])
    with CompileClock() as clock:
        for end, seconds in [(2, 1), (3, 3), (6, 2), (7, 2)]:
            now[0] = end
            monitoring.record_event_duration_secs("/jax/core/compile/x", seconds)
        monitoring.record_event_duration_secs("/jax/other", 100.0)
    monitoring.record_event_duration_secs("/jax/core/compile/x", 100.0)  # it is not entered
    assert clock.seconds == 6
    assert clock.between(2.5, 5) == 1.5 and clock.between(8, 9) == 0
    assert str(clock).startswith("compiling took 6.0 s")


def test_the_clock_measures_what_jax_compiles() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jnp.sin(x) @ x

    program = jax.jit(step)
    with CompileClock() as first:
        start = time.perf_counter()
        program(jnp.ones((3, 3)))
        elapsed = time.perf_counter() - start
    with CompileClock() as second:
        program(jnp.ones((3, 3)))
    assert 0 < first.seconds <= elapsed
    assert second.seconds == 0


def test_programs_are_kept_in_the_users_cache(settings: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert keep_programs() == tmp_path / "jaxdraft" / "xla"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "jaxdraft" / "xla")
    assert keep_programs() is None  # a folder is chosen


def test_the_callers_folder_stays(settings: pytest.MonkeyPatch) -> None:
    settings.setenv("JAX_COMPILATION_CACHE_DIR", "")
    assert keep_programs() is None and jax.config.jax_compilation_cache_dir is None
