"""Several threads around one engine: the same tokens, or one clear error at once; never a hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxdraft import Engine, generate
from jaxdraft.engine.threads import FairLock, Waiters
from jaxdraft.testing import tiny_model
from tests.engine.helpers import greedy, history_model
from tests.engine.test_engine import everything_is_free, history_engine, prompts

SECONDS = 60


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return or raise, each in a thread of its own that begins with the others."""
    found: list[Any] = [None] * len(calls)
    gate = threading.Barrier(len(calls))

    def run(place: int, call: Callable[[], Any]) -> None:
        gate.wait(SECONDS)
        try:
            found[place] = call()
        except BaseException as error:
            found[place] = error

    threads = [
        threading.Thread(target=run, args=(n, call), daemon=True) for n, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return found


def expected(inputs: list[list[int]], new: int) -> list[list[int]]:
    return [greedy(history_model(), prompt, new) for prompt in inputs]


def test_results_are_waited_for_in_many_threads() -> None:
    model = tiny_model("dflash2")
    want = generate(model, [[1, 2, 3]], max_new_tokens=20).ids()[0]
    with Engine(model, max_batch=4, page_size=16) as engine:
        requests = [engine.submit([1, 2, 3], max_new_tokens=20) for _ in range(8)]
        assert together(*(r.result for r in requests)) == [want] * 8
        assert engine.faults == 0


def test_everything_from_every_thread() -> None:
    """Each thread submits, waits, extends and rewinds; some cancel what another waits for."""
    engine, inputs = history_engine(), prompts(12, seed=4, longest=8)
    shared = engine.submit(inputs[0], max_new_tokens=40)

    def work(mine: list[list[int]]) -> list[Any]:
        found = []
        for prompt in mine:
            request = engine.submit(prompt, max_new_tokens=6, keep=True)
            first = request.result()
            request.extend([1, 2], max_new_tokens=4)
            second = request.result()
            again = request.rewind().extend([3], max_new_tokens=4).result()
            assert int(request.stats.emitted[0]) == 14 and engine.summary().emitted > 0
            engine.check()
            request.close()
            found.append((first, second, again))
        return found

    def cancel() -> None:
        time.sleep(0.05)
        shared.cancel()

    parts = [inputs[n::4] for n in range(4)]
    *found, kept, _ = together(*(lambda p=part: work(p) for part in parts), shared.result, cancel)
    for part, results in zip(parts, found, strict=True):
        assert isinstance(results, list), results
        for prompt, (first, second, again) in zip(part, results, strict=True):
            assert first == expected([prompt], 6)[0]
            assert second == expected([[*prompt, *first, 1, 2]], 4)[0]
            assert again == expected([[*prompt, *first, 3]], 4)[0]
    assert shared.finish_reason == "cancelled" or len(shared.tokens) == 40
    assert kept == shared.tokens == expected([inputs[0]], 40)[0][: len(kept)]
    assert everything_is_free(engine)


def test_events_and_results_at_the_same_time() -> None:
    """The reader of the events misses none, whichever thread runs the steps."""
    engine, inputs = history_engine(), prompts(8, seed=5, longest=8)
    requests = [engine.submit(p, max_new_tokens=12) for p in inputs]

    def read() -> list[Any]:
        return [(e.request, list(e.tokens), e.finish_reason) for e in engine.run()]

    events, *results = together(read, *(r.result for r in requests))
    assert results == expected(inputs, 12)
    if isinstance(events, list) and {r for r, *_ in events} == set(requests):
        for request in requests:
            told = [t for r, tokens, _ in events if r is request for t in tokens]
            assert told == request.tokens[len(request.tokens) - len(told) :]


def test_a_waiting_thread_leaves_the_events_to_the_reader() -> None:
    engine, inputs = history_engine(), prompts(3, seed=6, longest=8)
    requests = [engine.submit(p, max_new_tokens=12) for p in inputs]
    reader = engine.run()
    events = [next(reader)]
    assert together(*(r.result for r in requests)) == expected(inputs, 12)
    events += reader
    for request in requests:
        assert [t for e in events if e.request is request for t in e.tokens] == request.tokens


def test_a_second_reader_is_refused_at_once() -> None:
    engine, inputs = history_engine(), prompts(2, seed=7, longest=8)
    requests = [engine.submit(p, max_new_tokens=12) for p in inputs]
    reader = engine.run()
    next(reader)
    errors = together(lambda: list(engine.run()), engine.step, lambda: next(iter(engine)))
    for error in errors:
        assert isinstance(error, RuntimeError) and "another thread iterates" in str(error)
    list(reader)  # the first goes on
    assert [r.tokens for r in requests] == expected(inputs, 12)
    assert together(lambda: list(engine.run())) == [[]]  # and the next may begin


def test_an_iterator_may_change_threads() -> None:
    """As ``run_in_executor(None, next, iterator)`` does."""
    engine, inputs = history_engine(), prompts(1, seed=8, longest=8)
    request = engine.submit(inputs[0], max_new_tokens=12)
    reader, tokens = engine.run(), []
    while not request.finished:
        tokens += together(lambda: next(reader).tokens)[0]
    assert tokens == expected(inputs, 12)[0]


def test_an_error_of_the_step_reaches_all_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ran the step gets the error itself; the engine goes on afterwards."""
    engine, inputs = history_engine(), prompts(4, seed=9, longest=8)
    requests = [engine.submit(p, max_new_tokens=12) for p in inputs]
    real, calls = engine.scheduler.next_step, []

    def breaks(*args: Any) -> Any:
        calls.append(threading.get_ident())
        if len(calls) == 3:
            time.sleep(0.3)  # all others are asleep by now
            raise OSError("the host breaks")
        return real(*args)

    monkeypatch.setattr(engine.scheduler, "next_step", breaks)
    errors = together(*(r.result for r in requests))
    first = [e for e in errors if isinstance(e, OSError)]
    others = [e for e in errors if isinstance(e, RuntimeError)]
    assert len(first) == 1 and len(others) == 3, errors
    assert all("the host breaks" in str(e) and e.__cause__ is first[0] for e in others)
    assert together(*(r.result for r in requests)) == expected(inputs, 12)


def test_an_interrupt_is_for_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, inputs = history_engine(), prompts(4, seed=10, longest=8)
    requests = [engine.submit(p, max_new_tokens=12) for p in inputs]
    real, calls = engine.scheduler.next_step, []

    def interrupted(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(engine.scheduler, "next_step", interrupted)
    found = together(*(r.result for r in requests))
    gone = [n for n, e in enumerate(found) if isinstance(e, KeyboardInterrupt)]
    assert len(gone) == 1
    want = expected(inputs, 12)
    assert [f for n, f in enumerate(found) if n not in gone] == [
        w for n, w in enumerate(want) if n not in gone
    ]


def test_a_closed_engine_lets_all_threads_go() -> None:
    engine, inputs = history_engine(), prompts(6, seed=11, longest=8)
    requests = [engine.submit(p, max_new_tokens=30) for p in inputs]
    real = engine.scheduler.next_step

    def slow(*args: Any) -> Any:
        time.sleep(0.01)
        return real(*args)

    engine.scheduler.next_step = slow  # type: ignore[method-assign]
    found = together(*(r.result for r in requests), lambda: (time.sleep(0.1), engine.close()))
    for tokens, whole in zip(found[:-1], expected(inputs, 30), strict=True):
        assert tokens == whole[: len(tokens)]
    refused = together(lambda: engine.submit([1]), engine.step)
    assert all(isinstance(e, ValueError) and "closed" in str(e) for e in refused)


def test_map_from_two_threads() -> None:
    engine, inputs = history_engine(), prompts(8, seed=12, longest=8)
    one, two = together(
        lambda: engine.map(inputs[:4], max_new_tokens=9),
        lambda: engine.map(inputs[4:], max_new_tokens=9),
    )
    assert [r.tokens for r in [*one, *two]] == expected(inputs, 9)


def test_a_thread_that_steps_does_not_shut_others_out() -> None:
    """A call waits for the step that runs, and not for those after it."""
    engine, steps, stop = history_engine(), [0], threading.Event()

    def drive() -> None:
        while not stop.is_set():
            with engine.lock:
                steps[0] += 1
                time.sleep(0.002)

    def call() -> int:
        most = 0
        for _ in range(20):
            before = steps[0]
            engine.summary()
            most = max(most, steps[0] - before)
        stop.set()
        return most

    _, most = together(drive, call)
    assert most <= 3, most


def test_the_lock_is_reentrant_and_fair() -> None:
    lock, order = FairLock(), []
    with lock, lock:
        threads = []
        for number in range(5):

            def take(number: int = number) -> None:
                with lock, lock:
                    order.append(number)

            threads.append(threading.Thread(target=take, daemon=True))
            threads[-1].start()
            while len(lock._queue) <= number:
                time.sleep(0.001)
        assert order == []
    for thread in threads:
        thread.join(SECONDS)
    assert order == list(range(5)) and lock._owner is None


def test_no_change_is_missed() -> None:
    """Many short waits whose ends come from other threads, at any moment."""
    waiters, rng = Waiters(), np.random.default_rng(0)
    for pause in rng.uniform(0, 2e-4, 200):
        flags = [False, False, False]

        def finish(pause: float = pause, flags: list[bool] = flags) -> None:
            time.sleep(pause)
            flags[2] = True
            waiters.notify()

        def step(flags: list[bool] = flags) -> None:
            time.sleep(1e-4)
            flags[int(flags[0])] = True

        def until(place: int, flags: list[bool] = flags, step: Any = step) -> bool:
            waiters.until(lambda: flags[place], step)
            return flags[place]

        found = together(finish, *(lambda n=n: until(n) for n in range(3)))
        assert found[1:] == [True] * 3
