"""Every request of an engine gets the tokens it would get alone."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from jaxdraft import Engine, Model, generate
from jaxdraft.engine import Buckets
from jaxdraft.testing import check_stats, tiny_drafter, tiny_mtp, tiny_target
from tests.engine.helpers import VOCAB, greedy, history_model

# One set of shapes for all tests with history models: they share their programs. The pool has
# pages for less than one row at full context, and there are four.
SIZES: dict[str, Any] = dict(
    max_batch=4, page_size=4, pages=14, context=64, chunk=8, budget=12,
    buckets=Buckets(rows=(4,), chunks=(8,), columns=(16,)),
)  # fmt: skip


def history_engine(*, recurrent: bool = False, **options: Any) -> Engine:
    return Engine(history_model(recurrent=recurrent), **SIZES | options)


def finish(engine: Engine) -> list[Any]:
    events = []
    while engine.busy:
        events += engine.step()
        engine.check()
    return events


def prompts(count: int, *, seed: int = 0, vocab: int = VOCAB, longest: int = 20) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    common = rng.integers(0, vocab, longest).tolist()
    return [
        common[: rng.integers(0, longest)] + rng.integers(0, vocab, rng.integers(1, 9)).tolist()
        for _ in range(count)
    ]


def everything_is_free(engine: Engine) -> bool:
    scheduler = engine.scheduler
    engine.check()
    scheduler.cache.clear()
    return scheduler.pages.free == scheduler.pages.count and not scheduler.active


@pytest.mark.parametrize("recurrent", [False, True])
def test_requests_share_a_batch(recurrent: bool) -> None:
    """More than there are rows, of different lengths and rules, prefixes in common."""
    model, engine = history_model(recurrent=recurrent), history_engine(recurrent=recurrent)
    said = prompts(12)
    rules = [
        dict(max_new_tokens=3 + 2 * i, stop_ids=(i,) if i % 3 == 0 else (), draft_limit=i % 5)
        for i in range(12)
    ]
    requests = [engine.submit(p, **r) for p, r in zip(said, rules, strict=True)]  # type: ignore[bad-argument-type]
    events = finish(engine)
    for request, prompt, rule in zip(requests, said, rules, strict=True):
        expected = greedy(model, prompt, rule["max_new_tokens"], rule["stop_ids"])  # type: ignore[bad-argument-type]
        assert request.tokens == expected, request
        mine = [e for e in events if e.request is request]
        assert [t for e in mine for t in e.tokens] == expected
        assert [e.finish_reason for e in mine if e.finish_reason] == [request.finish_reason]
        assert request.finish_reason == ("stop" if expected[-1] in rule["stop_ids"] else "length")
        check_stats(request.stats)
        assert int(request.stats.emitted[0]) == len(expected)
    summary = engine.summary()
    assert summary.emitted == sum(len(r.tokens) for r in requests) and summary.prompts == 12
    assert summary.accepted > 0 and summary.admission_misses == 0
    assert summary.rounds == sum(int(r.stats.rounds[0]) for r in requests)
    assert sum(r.reused for r in requests) > 0
    assert everything_is_free(engine)


@functools.cache
def tiny(kind: str) -> Model:
    if kind == "hybrid, ring":  # a prefix needs a checkpoint of the recurrent state and the ring
        target = tiny_target(layers=("delta_net", "attention"), taps=(0, 1))
        return Model.of(target, tiny_drafter(target, "dflash2", layers=1))
    target = tiny_target(layers=("attention",), taps=(0,))
    if kind == "pages and a ring":  # of one drafter
        shape = tiny_drafter(target, "dflash2").config.attention
        mixed = dict(attention=shape, full_layers=(0,), causal_layers=(1,))
        return Model.of(target, tiny_drafter(target, "dflash", **mixed))
    if kind == "pages alone":  # of the drafter too
        return Model.of(target, tiny_drafter(target, "dspark", layers=1))
    return Model.of(target, tiny_mtp(target))  # the last pair of a page needs the token behind it


def tiny_engine(kind: str, **options: Any) -> Engine:
    return Engine(
        tiny(kind), max_batch=3, context=48, page_size=8, pages=7, chunk=16, budget=24,
        buckets=Buckets(rows=(3,), chunks=(16,), columns=(6,)), **options,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["hybrid, ring", "pages alone", "pages and a ring", "mtp"])
def test_decoders_with_their_drafters(kind: str) -> None:
    """Pages for half of the rows at full context: prefixes are met again and rows lose their
    places. A drafter that found its cache a little different would propose something else.
    """
    model, engine = tiny(kind), tiny_engine(kind)
    said = prompts(7, seed=1, vocab=48, longest=24)
    requests = [engine.submit(p, max_new_tokens=16) for p in said]
    finish(engine)
    alone = generate(model, said, max_new_tokens=16, max_length=48)
    assert [r.tokens for r in requests] == alone.ids()
    for row, request in enumerate(requests):
        for name in ("accepted_at", "proposed", "rounds"):
            mine, theirs = getattr(request.stats, name), getattr(alone.stats, name)
            np.testing.assert_array_equal(mine[0], theirs[row], name)
    assert sum(r.reused for r in requests) > 0
    assert sum(r.preemptions for r in requests) > 0
    assert engine.faults == 0 and everything_is_free(engine)
