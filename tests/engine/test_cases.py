"""Cases that engines of this kind got wrong before."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import jax
import numpy as np
import pytest

from jaxdraft import Engine, Model, generate, plan
from jaxdraft.base import Status
from jaxdraft.engine import Buckets, programs
from jaxdraft.state import rows
from jaxdraft.state.paged import PagedPool
from jaxdraft.testing import TableDrafter, TableTarget
from tests.engine.helpers import greedy, history_model
from tests.engine.test_engine import (
    SIZES,
    everything_is_free,
    finish,
    history_engine,
    prompts,
    tiny,
    tiny_engine,
)


def test_two_requests_in_a_pool_for_one() -> None:
    """14 pages of 4, two requests of 8 + 25 tokens: 8 pages each in the end."""
    engine = history_engine(prefix_cache=False)
    said = [[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]]
    requests = [engine.submit(p, max_new_tokens=25) for p in said]
    finish(engine)
    assert [r.tokens for r in requests] == [greedy(history_model(), p, 25) for p in said]
    assert engine.scheduler.pages.free == 14 and requests[1].preemptions == 1
    assert requests[0].preemptions == 0


def test_a_request_needs_no_more_than_it_writes() -> None:
    """14 pages of 4 for 16 + 41 tokens; one more does not fit, and is refused at once."""
    engine = history_engine()
    waiting = engine.submit([1] * 16, max_new_tokens=41)
    with pytest.raises(ValueError, match="16 prompt tokens and 42 new ones need 15 pages of 4"):
        engine.submit([1] * 16, max_new_tokens=42)
    assert waiting.result() == greedy(history_model(), [1] * 16, 41)
    assert waiting.preemptions == 0 and everything_is_free(engine)


def test_bad_requests_are_refused_alone() -> None:
    engine = history_engine()
    good = engine.submit([1, 2, 3], max_new_tokens=4)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([], {}, "is empty"),
        ([99], {}, "holds id 99"),
        ([1] * 64, {}, "with max_length 64 the longest prompt that leaves room .* has 63"),
        ([1] * 8, dict(max_length=8), "with max_length 8"),
        ([1], dict(max_length=65), "max_length is 65; the engine's context has 64"),
        ([1], dict(max_new_tokens=0), "max_new_tokens is 0; expected at least 1"),
        ([1], dict(stop_ids=(12,)), "stop id 12"),
        ([1], dict(draft_limit=-1), "draft_limit is -1"),
        ([1], dict(logprobs=13), "logprobs is 13"),
        ([1], dict(stop="a"), "has no tokenizer"),
        ("text", {}, "has no tokenizer"),
    ]
    for prompt, rules, message in cases:
        with pytest.raises(ValueError, match=message):
            engine.submit(prompt, **rules)
    last = engine.submit([1] * 52, max_length=53)  # room for one token
    finish(engine)
    assert good.tokens == greedy(history_model(), [1, 2, 3], 4)
    assert last.tokens == greedy(history_model(), [1] * 52, 1)
    assert last.finish_reason == "length"
    with pytest.raises(ValueError, match="cannot be continued"):
        engine.submit([1], max_new_tokens=1).extend([2])
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="the engine is closed"):
        engine.submit([1])


def test_engines_are_refused_in_words() -> None:
    model = history_model()
    for options, message in [
        (dict(context=65), "context is 65; the model's has 64"),
        (dict(chunk=129), "chunk is 129; expected at most 128"),
        (dict(max_batch=0), "max_batch is 0"),
        (dict(pages=0), "pages is 0"),
        (dict(pages=4, memory="1GiB"), "expected one of them"),
        (dict(memory="1GiB"), "only a decoder with a TargetConfig"),
    ]:
        with pytest.raises(ValueError, match=message):
            Engine(model, **options)


def test_a_memory_is_divided_as_planned() -> None:
    """Checkpoints first: recurrent states and rings; the plan divides what is left."""
    model = tiny("hybrid, ring")
    sizes: dict[str, Any] = dict(max_batch=3, context=48, page_size=8)
    free = plan(model, memory=2_000_000, **sizes)
    engine = Engine(model, memory=2_000_000, checkpoints=0, **sizes)
    assert engine.scheduler.pages.count == min(free.pages, 18) == 18
    page = free.page_bytes
    state = engine.runner.state.target.recurrent[0]
    row = (state.state.nbytes + state.conv.nbytes) // 3
    tight = free.bytes - free.pages * page + 5 * page  # five pages, if nothing else is wanted
    assert Engine(model, memory=tight, checkpoints=0, **sizes).scheduler.pages.count == 5
    with pytest.raises(ValueError, match="99 checkpoints of [0-9]+ bytes need more"):
        Engine(model, memory=tight, checkpoints=99, **sizes)
    each = int(str(_message(model, tight, sizes)).split("checkpoints of ")[1].split()[0])
    assert each >= row + engine.runner.state.drafter.cache.keys[0].nbytes * 2 // 3
    more = Engine(model, memory=tight + 2 * each, checkpoints=2, **sizes)
    assert more.scheduler.pages.count == 5 and more.scheduler.cache.checkpoints == 2


def _message(model: Model, memory: int, sizes: dict[str, Any]) -> ValueError:
    with pytest.raises(ValueError) as found:
        Engine(model, memory=memory, checkpoints=99, **sizes)
    return found.value


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize(("size", "reused"), [(18, 16), (16, 12)])
def test_the_same_prompt_again(size: int, reused: int, recurrent: bool) -> None:
    """Pages of 4: of 18 tokens 16 are known, of 16 only 12: one row must run to give logits."""
    engine = history_engine(recurrent=recurrent)
    prompt = prompts(1, seed=3, longest=20)[0]
    prompt = (prompt * 3)[:size]
    first = engine.submit(prompt, max_new_tokens=4)
    finish(engine)
    second = engine.submit(prompt, max_new_tokens=4)
    finish(engine)
    assert (first.reused, second.reused) == (0, reused)
    assert first.tokens == second.tokens == greedy(history_model(recurrent=recurrent), prompt, 4)


def test_what_others_got_to_gets_a_checkpoint() -> None:
    """A recurrent target: the second prompt that begins alike leaves a state behind the beginning,
    and the third goes on from there.
    """
    engine, model = history_engine(recurrent=True), history_model(recurrent=True)
    common = [5, 3, 1, 4, 2, 6, 7, 0]
    tails = [[1] * 9, [2] * 9, [3] * 9]
    found = []
    for tail in tails:
        request = engine.submit(common + tail, max_new_tokens=3)
        finish(engine)
        assert request.tokens == greedy(model, common + tail, 3)
        found.append(request.reused)
    assert found == [0, 0, 8]


def test_rules_follow_the_request() -> None:
    """Not its row: when the first is over, the limits of the others still hold."""
    engine = history_engine()
    said = prompts(3, seed=5)
    limits, new = [3, 0, 1], [3, 20, 20]
    requests = [
        engine.submit(p, max_new_tokens=n, draft_limit=k)
        for p, n, k in zip(said, new, limits, strict=True)
    ]
    finish(engine)
    for request, prompt, n, limit in zip(requests, said, new, limits, strict=True):
        assert request.tokens == greedy(history_model(), prompt, n)
        rounds, proposed = int(request.stats.rounds[0]), int(request.stats.proposed[0])
        assert proposed <= limit * rounds and (proposed > 0) == (limit > 0)


def test_a_step_without_drafts_is_a_plain_one() -> None:
    """While nobody has any, and only then; the tokens are the same."""
    sizes = dataclasses.replace(SIZES["buckets"], plain=True)
    engine = history_engine(buckets=sizes)
    said = prompts(4, seed=11)
    limits = [0, 0, 3, 0]
    requests = [engine.submit(p, max_new_tokens=8, draft_limit=0) for p in said]
    finish(engine)
    assert {shape[-1] for shape in engine.runner.compiled if shape[0] == "round"} == {True}
    requests += [
        engine.submit(p, max_new_tokens=8, draft_limit=k) for p, k in zip(said, limits, strict=True)
    ]
    finish(engine)
    assert {shape[-1] for shape in engine.runner.compiled if shape[0] == "round"} == {True, False}
    assert [r.tokens for r in requests] == 2 * [greedy(history_model(), p, 8) for p in said]
    accepted = [int(r.stats.accepted[0]) for r in requests]
    assert accepted[6] > 0 and sum(accepted) == accepted[6]


def test_a_row_forgets_who_had_it() -> None:
    """Cancelled in the middle of its prompt and of its output: the next one starts from nothing."""
    engine, model = history_engine(recurrent=True), history_model(recurrent=True)
    for steps in (0, 1, 4):
        gone = [engine.submit(p, max_new_tokens=30) for p in prompts(4, seed=6)]
        for _ in range(steps):
            engine.step()
        for request in gone:
            request.cancel()
            request.cancel()
            assert request.finish_reason == "cancelled"
        assert [e.finish_reason for e in engine.step()] == ["cancelled"] * 4
        engine.check()
        engine.scheduler.cache.clear()
        assert engine.scheduler.pages.free == engine.scheduler.pages.count
        state = engine.runner.state
        assert (np.asarray(state.status) != Status.RUNNING).all()
        said = prompts(4, seed=7)
        assert [r.tokens for r in engine.map(said, max_new_tokens=5)] == [
            greedy(model, p, 5) for p in said
        ]


@pytest.mark.parametrize("garbage", [np.nan, 1e30])
def test_pages_of_nobody_are_never_read_or_written(garbage: float) -> None:
    """Free pages are filled with garbage after every step: it is still there, and tells nobody."""
    model = tiny("hybrid, ring")
    engine = tiny_engine("hybrid, ring", prefix_cache=False)
    said = prompts(7, seed=1, vocab=48, longest=24)
    requests = [engine.submit(p, max_new_tokens=16) for p in said]
    before: list[int] = []

    def pools() -> list[PagedPool]:
        return [p for p in rows._found(engine.runner.state.target) if isinstance(p, PagedPool)]

    while engine.busy:
        engine.step()
        free = [p for p, held in enumerate(engine.scheduler.pages.held) if not held]
        still = [p for p in free if p in before]  # of nobody, before the step and after
        for pool in pools():
            for pages in (*pool.keys, *pool.values):
                kept = np.asarray(pages)[still]
                assert (np.isnan(kept) if np.isnan(garbage) else kept == np.float32(garbage)).all()

        def spoil(pages: jax.Array, free: list[int] = free) -> jax.Array:
            spoiled = np.array(pages)
            spoiled[free] = garbage
            return jax.device_put(spoiled)

        engine.runner.state = engine.runner.state.replace(
            target=rows._pools(
                lambda p: (
                    p.replace(keys=tuple(map(spoil, p.keys)), values=tuple(map(spoil, p.values)))
                    if isinstance(p, PagedPool)
                    else p
                ),
                engine.runner.state.target,
            )
        )
        before = free
    assert [r.tokens for r in requests] == generate(
        model, said, max_new_tokens=16, max_length=48
    ).ids()


def test_ten_thousand_requests() -> None:
    """One after the other, and memory, arrays and programs stay what they were."""
    table = TableTarget.random(jax.random.key(0), 12)
    model = Model.of(table, TableDrafter.random(jax.random.key(1), 12))
    engine = Engine(
        model, max_batch=32, context=16, chunk=8, budget=256,
        buckets=Buckets(rows=(32,), chunks=(8,), columns=(1,)),
    )  # fmt: skip
    truth: dict[tuple[int, ...], list[int]] = {}

    def batch(start: int, count: int) -> None:
        for i in range(start, start + count):
            prompt = [i % 12, i // 12 % 12, i % 5]
            request = engine.submit(prompt, max_new_tokens=1 + i % 3, stop_ids=())
            requests.append((tuple(prompt), request))
        for _ in engine.run():
            pass
        for prompt, request in requests:
            longest = truth.setdefault(prompt, request.tokens)
            shared = min(len(longest), len(request.tokens))
            assert request.tokens[:shared] == longest[:shared]
            truth[prompt] = max(longest, request.tokens, key=len)
        requests.clear()

    requests: list[tuple[tuple[int, ...], Any]] = []
    batch(0, 500)
    gc.collect()
    arrays = len(jax.live_arrays())
    compiled = [f._cache_size() for f in (programs.run_round, programs.run_chunk, programs.admit)]
    for start in range(500, 10_000, 500):
        batch(start, 500)
    gc.collect()
    assert len(jax.live_arrays()) <= arrays
    assert compiled == [
        f._cache_size() for f in (programs.run_round, programs.run_chunk, programs.admit)
    ]
    assert engine.programs <= 3 and engine.summary().prompts == 10_000
    engine.check()
    some = list(truth)[:20]
    out = generate(model, [list(p) for p in some], max_new_tokens=3, stop_ids=())
    for prompt, tokens in zip(some, out.ids(), strict=True):
        assert truth[prompt] == tokens[: len(truth[prompt])]
