"""A step that fails costs nobody a token, and the engine goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jaxdraft import Engine, Model, generate
from jaxdraft.base import Feed
from jaxdraft.engine import programs
from tests.engine.helpers import HistoryDrafter, HistoryTarget, greedy, history_model
from tests.engine.test_engine import SIZES, everything_is_free, finish, history_engine, prompts

STAGES = ["stop", "run_round", "admit", "run_chunk", "save"]


def expected(said: list[list[int]], new: int, *, recurrent: bool) -> list[list[int]]:
    return [greedy(history_model(recurrent=recurrent), p, new) for p in said]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_any_program_may_fail_once(stage: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it ran, or after it took the state away."""
    engine = history_engine(recurrent=True)
    real, calls = getattr(programs, stage), 0

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != 2:
            return real(*args, **kwargs)
        if late:
            real(*args, **kwargs)
        raise RuntimeError(f"injected into {stage}")

    monkeypatch.setattr(programs, stage, fails)
    said = prompts(6, seed=2)
    requests = [engine.submit(p, max_new_tokens=12, keep=i == 0) for i, p in enumerate(said)]
    other = engine.submit(said[0], max_new_tokens=12)
    for _ in range(4):
        engine.step()
        engine.check()
    other.cancel()
    requests += [engine.submit(p, max_new_tokens=12) for p in said]
    finish(engine)
    assert calls > 2 and engine.faults == 1 and "injected" in str(engine.last_fault)
    assert [r.tokens for r in requests] == 2 * expected(said, 12, recurrent=True)
    assert all(r.error is None for r in requests)
    requests[0].close()
    assert everything_is_free(engine)


def test_one_request_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever step it takes part in fails: it is found, and nobody else loses anything."""
    engine = history_engine()
    real = programs.run_round

    def fails(*args: Any, **kwargs: Any) -> Any:
        rows = np.asarray(args[4].rows).tolist()
        there = {engine.scheduler.active[r] for r in rows if r in engine.scheduler.active}
        if any(s.number == guilty.number and s.emitted >= 3 for s in there):
            raise RuntimeError("the third token")
        return real(*args, **kwargs)

    monkeypatch.setattr(programs, "run_round", fails)
    said = prompts(6, seed=4)
    requests = [engine.submit(p, max_new_tokens=12) for p in said]
    guilty = requests[2]
    events = finish(engine)
    truth = expected(said, 12, recurrent=False)
    for request, tokens in zip(requests, truth, strict=True):
        if request is guilty:
            assert request.finish_reason == "failed" and str(request.error) == "the third token"
            assert 3 <= len(request.tokens) < 12 and request.tokens == tokens[: len(request.tokens)]
        else:
            assert request.tokens == tokens and request.error is None
    assert [e.request for e in events if e.error is not None] == [guilty]
    with pytest.raises(RuntimeError, match="the third token"):
        guilty.result()
    with pytest.raises(ValueError, match="cannot be continued"):
        guilty.extend([1])
    # The drafter was suspected, too, and is back.
    assert engine.drafter_fault is None and engine.runner.drafter is engine.drafter
    assert everything_is_free(engine)


SWITCH = {"target": False, "drafter": False}


def _trip(which: str, x: jax.Array) -> jax.Array:
    """``x``, or an error of the device while the switch is on."""

    def check(value: np.ndarray) -> np.ndarray:
        if SWITCH[which]:
            raise RuntimeError(f"the {which} broke")
        return value

    return jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@struct.dataclass
class FragileTarget(HistoryTarget):
    def forward(self, tokens: jax.Array, count: jax.Array, state: Any, *, row: Any = None) -> Any:
        return super().forward(tokens, _trip("target", count), state, row=row)


@struct.dataclass
class FragileDrafter(HistoryDrafter):
    def propose(self, state: Any, feed: Feed) -> Any:
        return super().propose(state, replace(feed, anchor=_trip("drafter", feed.anchor)))


@pytest.fixture
def fragile() -> Any:
    model = history_model()
    target = model.target
    assert isinstance(target, HistoryTarget)
    # The drafter reads through a target that never breaks.
    yield Model.of(FragileTarget(target.table), FragileDrafter(target))
    SWITCH.update(target=False, drafter=False)


@pytest.mark.parametrize("after", [0, 3])
def test_a_broken_drafter_is_switched_off(fragile: Model, after: int) -> None:
    """From the first step on, or in the middle: tokens as ever, and its last words are kept."""
    engine = Engine(fragile, **SIZES)
    said = prompts(5, seed=5)
    requests = [engine.submit(p, max_new_tokens=10) for p in said]
    for _ in range(after):
        engine.step()
    SWITCH["drafter"] = True
    finish(engine)
    assert [r.tokens for r in requests] == expected(said, 10, recurrent=False)
    assert engine.drafter_fault is not None and "the drafter broke" in str(engine.drafter_fault)
    before = engine.faults
    late = engine.submit(said[0], max_new_tokens=10)
    finish(engine)
    assert late.tokens == requests[0].tokens and engine.faults == before
    assert int(late.stats.proposed[0]) == 0
    assert everything_is_free(engine)


def test_the_device_breaks_for_a_while(fragile: Model) -> None:
    """One step of everybody fails on the device itself, with the state in its hands."""
    engine = Engine(fragile, **SIZES)
    said = prompts(5, seed=6)
    requests = [engine.submit(p, max_new_tokens=10) for p in said]
    for _ in range(3):
        engine.step()
    SWITCH["target"] = True
    engine.step()
    SWITCH["target"] = False
    engine.check()
    assert engine.faults == 1 and "the target broke" in str(engine.last_fault)
    finish(engine)
    assert [r.tokens for r in requests] == expected(said, 10, recurrent=False)
    assert engine.drafter_fault is None
    assert everything_is_free(engine)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["plan", "run", "absorb", "hear"])
def test_the_host_fails(
    where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised, and the next step goes on. Events that were made before are still told."""
    engine = history_engine(recurrent=True)
    owner, name = {
        "plan": (engine.scheduler, "next_step"),
        "run": (engine.runner, "run"),
        "absorb": (engine._results, "report"),
        "hear": (engine._results, "_row"),
    }[where]
    real, calls = getattr(owner, name), 0

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = real(*args, **kwargs)
        if calls == 5:
            raise error("injected")
        return result

    monkeypatch.setattr(owner, name, fails)
    said = prompts(6, seed=7)
    requests = [engine.submit(p, max_new_tokens=8) for p in said]
    heard: dict[int, list[int]] = {r.number: [] for r in requests}
    raised = 0
    while engine.busy:
        try:
            for event in engine.step():
                heard[event.request.number] += event.tokens
        except error:
            raised += 1
        engine.check()
    assert raised == (0 if where == "run" and error is RuntimeError else 1)
    truth = expected(said, 8, recurrent=True)
    assert [r.tokens for r in requests] == truth
    assert list(heard.values()) == truth
    assert everything_is_free(engine)


def test_logits_that_are_not_finite_end_one_request() -> None:
    table = np.array(history_model().target.table)  # type: ignore[missing-attribute]
    table[::7] = np.nan
    model = Model.of(target := HistoryTarget(jnp.asarray(table)), HistoryDrafter(target))
    engine = Engine(model, **SIZES)
    said = prompts(8, seed=8)
    requests = [engine.submit(p, max_new_tokens=6) for p in said]
    events = finish(engine)
    alone = generate(model, said, max_new_tokens=6, throw=False)
    assert [r.tokens for r in requests] == alone.ids()
    assert [r.finish_reason for r in requests] == alone.finish_reasons
    assert {"nonfinite", "length"} == {r.finish_reason for r in requests}
    for event in events:
        wrong = event.finish_reason == "nonfinite"
        assert wrong == isinstance(event.error, FloatingPointError)
    assert everything_is_free(engine)
