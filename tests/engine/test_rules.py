"""Requests with rules of every kind share a batch, and each gets what it gets alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from jaxdraft import AdaptiveDrafter, Engine, FallbackDrafter, Model, NgramDrafter, Sampling
from jaxdraft.keys import row_streams
from jaxdraft.text import Text
from tests.engine.helpers import VOCAB, alone, greedy, history_model
from tests.engine.test_engine import SIZES, everything_is_free, finish, prompts


@functools.cache
def spoken() -> Model:
    """The history model over tokens ``a``, ``b``, ... and the three bytes of the euro sign."""
    words = [*"abcdefgh", "bc", "âĤ", "¬", "i"]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    model = history_model()
    return Model.of(model.target, model.drafter, text=Text(tokenizer=tokenizer))


BIAS = np.linspace(-1, 1, VOCAB).astype(np.float32)
EVERYTHING: dict[str, Any] = dict(
    stop=("€", "abab"),
    logprobs=3,
    key=4,
    sampling=Sampling(
        temperature=0.9, repetition_penalty=1.2, presence_penalty=0.2, logit_bias=BIAS,
        allowed=BIAS > -0.7, min_new_tokens=3,
    ),
)  # fmt: skip
SAMPLED: list[dict[str, Any]] = [
    dict(key=5, sampling=Sampling(temperature=1.2, top_p=0.8, proposals="greedy_path")),
    dict(key=6, sampling=Sampling(temperature=1.0, proposals="none"), stop_ids=(1, 2, 3, 4, 5)),
    dict(key=7, sampling=Sampling(temperature=0.7, top_k=4, proposals="independent")),
]


def test_rules_of_all_kinds() -> None:
    """In one batch, with pages for two thirds of it: sampled rows draw what they draw alone, and
    greedy ones beside them stay greedy.
    """
    model = spoken()
    engine = Engine(model, **SIZES, prefix_cache=False)  # no row waits for another's pages
    inputs = prompts(8, seed=9, longest=8)
    assert model.text is not None
    sixth = model.text.decode(greedy(model, inputs[1], 6)[5:])  # what one request will end with
    rules = [
        EVERYTHING,
        dict(stop=(sixth, "cdcd")),
        *SAMPLED,
        dict(logprobs=0, draft_limit=1),
        {},
        {},
    ]
    rules[6] = EVERYTHING | dict(key=8)
    requests = [
        engine.submit(p, **dict(max_new_tokens=12) | r) for p, r in zip(inputs, rules, strict=True)
    ]
    events = finish(engine)
    for request, prompt, rule in zip(requests, inputs, rules, strict=True):
        assert request.text == "".join(e.text for e in events if e.request is request)
        if "sampling" not in rule:
            plain = greedy(model, prompt, 12)
            texts = [model.text.decode(plain[:n]) for n in range(13)]
            ends = [
                n for n, text in enumerate(texts) if any(s in text for s in rule.get("stop", ()))
            ]
            assert request.tokens == plain[: min(ends, default=12)]
            assert request.finish_reason == ("stop_string" if ends else "length")
            assert (request.logprobs is not None) == ("logprobs" in rule)
            continue
        out = alone(model, [prompt], 12, max_length=64, **rule)
        assert request.tokens == out.ids()[0], rule
        assert request.finish_reason == out.finish_reasons[0]
        assert request.text == out.texts()[0]
        if "logprobs" in rule:
            assert request.logprobs is not None and out.logprobs is not None
            assert len(request.logprobs) == len(request.tokens)
            for place, (chance, others) in enumerate(request.logprobs):
                np.testing.assert_allclose(chance, out.logprobs.token[0, place], atol=1e-5)
                assert [t for t, _ in others] == out.logprobs.top_tokens[0, place].tolist()
    assert requests[1].finish_reason == "stop_string" and engine.faults == 0
    # The first request asks for all there is: what comes and goes beside it compiles nothing.
    assert engine.programs <= 3
    assert everything_is_free(engine)


def test_map_is_generate() -> None:
    """Request i draws as row i of a batch does, from a stream of its own."""
    model, inputs = spoken(), prompts(3, seed=10, longest=8)
    rules: dict[str, Any] = dict(
        max_new_tokens=10, key=jax.random.key(11), sampling=Sampling(temperature=1.0, top_k=6)
    )
    engine = Engine(model, **SIZES)
    requests = engine.map(inputs, progress=True, **rules)
    for row, (request, prompt) in enumerate(zip(requests, inputs, strict=True)):
        alone = engine.submit(prompt, row=row, **rules)
        assert alone.result() == request.tokens
        streams = row_streams(rules["key"], 3)[row]
        how = request._sequence.rules.sampling
        assert how is not None
        found = how.streams
        np.testing.assert_array_equal(found[0], jax.random.key_data(streams))  # type: ignore[unsupported-operation]
    assert len({tuple(r.tokens) for r in engine.map([inputs[0]] * 3, **rules)}) == 3
    assert engine.submit("abca", max_new_tokens=1).prompt == [0, 1, 2, 0]
    with pytest.raises(ValueError, match="prompt 2: prompt 0 is empty"):
        engine.map([[1], [2], [], [3]], max_new_tokens=2)
    with pytest.raises(ValueError, match="needs a key"):
        engine.submit([1], sampling=Sampling())
    for _ in engine.run():
        pass
    assert everything_is_free(engine)


@pytest.mark.parametrize("beside", [False, True])
def test_what_a_drafter_learned_survives(beside: bool) -> None:
    """How far an adaptive drafter drafts decides which tokens are drawn: it may not forget when a
    row loses its place, and may not remember an earlier turn.
    """
    model = spoken()
    drafter: Any = AdaptiveDrafter(model.drafter, round_cost=0.1, draft_cost=0.6, gain=0.5)
    if beside:  # the statistics of a drafter inside another survive, too
        drafter = FallbackDrafter(NgramDrafter(3, 4, drafter.draft_tokens), drafter)
    engine = Engine(model, drafter=drafter, **SIZES)
    inputs = [p[:3] for p in prompts(4, seed=12, longest=8)]
    rules: dict[str, Any] = dict(
        sampling=Sampling(temperature=0.8), stop_ids=(), key=jax.random.key(1)
    )
    requests = engine.map(inputs, keep=True, max_new_tokens=16, **rules)
    assert sum(r.preemptions for r in requests) > 0
    for row, request in enumerate(requests):
        alone = engine.submit(request.prompt, max_new_tokens=16, row=row, **rules)
        assert alone.result() == request.tokens and alone.preemptions == 0
        assert alone.stats.proposed == request.stats.proposed
    turns = [r.extend([1, 2], max_new_tokens=12) for r in requests]
    for _ in engine.run():
        engine.check()
    for row, request in enumerate(turns):
        alone = engine.submit(request.prompt, max_new_tokens=12, row=row, **rules)
        assert alone.result() == request.tokens
    for request in requests:
        request.close()
    assert everything_is_free(engine)
