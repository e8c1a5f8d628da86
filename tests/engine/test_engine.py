"""Every request of an engine gets the tokens it would get alone."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from jaxdraft import Engine, Model, generate
from jaxdraft.engine import Buckets
from jaxdraft.testing import check_stats, tiny_drafter, tiny_model, tiny_mtp, tiny_target
from tests.engine.models import VOCAB, greedy, history_model

PAGE = 4


def history_engine(*, recurrent: bool = False, rows: int = 4, **options: Any) -> Engine:
    options = dict(page_size=PAGE, context=64, chunk=8, budget=12) | options
    options.setdefault("buckets", Buckets(rows=(rows,), chunks=(8,), columns=(16,)))
    return Engine(history_model(recurrent=recurrent), max_batch=rows, **options)


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
    if kind == "attention":  # no recurrent layers: pages alone hold a prefix, the drafter's too
        target = tiny_target(layers=("attention", "attention"), taps=(0, 1))
        return Model.of(target, tiny_drafter(target, "dspark"))
    if kind == "attention mtp":
        target = tiny_target(layers=("attention", "attention"), taps=())
        return Model.of(target, tiny_mtp(target))
    return tiny_model(kind)


@pytest.mark.parametrize("kind", ["dflash2", "attention", "attention mtp"])
def test_decoders_with_their_drafters(kind: str) -> None:
    """A pool for a third of the rows at full context: prefixes are met again, rows lose their
    places, and every token and every accepted draft is as in a batch of one.
    """
    model = tiny(kind)
    engine = Engine(
        model, max_batch=3, context=48, page_size=8, pages=8, chunk=16, budget=24,
        buckets=Buckets(rows=(3,), chunks=(16,), columns=(6,)),
    )  # fmt: skip
    said = prompts(7, seed=1, vocab=48, longest=24)
    requests = [engine.submit(p, max_new_tokens=16) for p in said]
    finish(engine)
    alone = generate(model, said, max_new_tokens=16, max_length=48)
    assert [r.tokens for r in requests] == alone.ids()
    assert sum(r.reused for r in requests) > 0
    assert sum(r.preemptions for r in requests) > 0
    undisturbed = [i for i, r in enumerate(requests) if not r.preemptions]
    for i in undisturbed:
        np.testing.assert_array_equal(requests[i].stats.accepted_at[0], alone.stats.accepted_at[i])
    assert engine.faults == 0 and everything_is_free(engine)
