"""Structures and masks of requests in an engine: each gets what it gets alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxdraft
from jaxdraft import Engine, Sampling, Structure
from jaxdraft.engine import programs
from jaxdraft.engine.programs import Buckets
from tests.engine.helpers import VOCAB, alone
from tests.engine.test_engine import SIZES, everything_is_free, finish, prompts
from tests.engine.test_rules import spoken


def no_repeats(tokens: jax.Array, length: jax.Array) -> jax.Array:
    """A token may not follow itself."""
    return jnp.arange(VOCAB) != tokens[length - 1]


def even(tokens: jax.Array, length: jax.Array) -> jax.Array:
    """Every other token is even, and the others are odd."""
    return jnp.arange(VOCAB) % 2 != tokens[length - 1] % 2


WORDS = Structure.regex("(a|bc|d{2}€)+")
LONG = Structure.regex("[a-d]{9}(ef|g)+")

RULES: list[dict[str, Any]] = [
    dict(structure=WORDS, stop_ids=[11], key=1, sampling=Sampling(temperature=1.1)),
    dict(structure=LONG, stop_ids=[11]),
    dict(key=2, sampling=Sampling(temperature=1.0, mask=even)),
    dict(),
    dict(structure=Structure.choice(["abc", "€"]), stop_ids=()),
    dict(structure=LONG, stop_ids=[11], key=3, sampling=Sampling(mask=no_repeats)),
]


def test_requests_with_structures_and_masks() -> None:
    """In one batch with free ones, and pages for half of it, so that rows are preempted."""
    model, inputs = spoken(), prompts(len(RULES), seed=3, longest=8)
    engine = Engine(model, **SIZES)
    requests = [
        engine.submit(prompt, max_new_tokens=24, **rules)
        for prompt, rules in zip(inputs, RULES, strict=True)
    ]
    finish(engine)
    assert sum(request.preemptions for request in requests) > 1
    for request, prompt, rules in zip(requests, inputs, RULES, strict=True):
        out = alone(model, [prompt], 24, max_length=64, **rules)
        assert request.tokens == out.ids()[0], rules
        assert request.finish_reason == out.finish_reasons[0]
    assert requests[4].finish_reason == "complete" and requests[4].text in ("abc", "€")
    again = engine.extend(requests[4], [1], structure=LONG, max_new_tokens=12)
    finish(engine)
    assert (
        again.tokens
        == alone(model, [again.prompt], 12, max_length=64, structure=LONG, stop_ids=()).ids()[0]
    )
    assert everything_is_free(engine)


def test_other_structures_compile_nothing() -> None:
    """Whatever the structures of requests are, one after the other and side by side."""
    model, inputs = spoken(), prompts(12, seed=4, longest=6)
    sizes = SIZES | dict(pages=64, buckets=Buckets(rows=(4,), chunks=(8,), columns=(16,)))
    engine = Engine(model, **sizes)
    compiled: list[int] = []
    for number, prompt in enumerate(inputs):
        one = Structure.regex(f"(a|b){{{number + 1}}}c+")
        engine.submit(prompt, structure=one, max_new_tokens=8)
        if number % 3 == 2:
            engine.submit(prompt, structure=one, max_new_tokens=8)
            finish(engine)
            sizes_now = [f._cache_size() for f in (programs.run_round, programs.run_chunk)]
            compiled = compiled or sizes_now
            assert sizes_now == compiled and engine.programs <= 3


def test_a_file_of_prompts(tmp_path: Path) -> None:
    """All answers follow the structure; a run is not continued with another one."""
    file, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    file.write_text('{"prompt": [1]}\n{"prompt": [2, 3]}\n')
    sizes = SIZES | dict(pages=64)
    engine = Engine(spoken(), **sizes)
    rules: dict[str, Any] = dict(structure=Structure.choice(["abc", "d€"]), stop_ids=())
    assert jaxdraft.map_file(engine, file, out, **rules).failed == 0
    answers = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert all(answer["text"] in ("abc", "d€") for answer in answers)
    with pytest.raises(ValueError, match="structure"):
        jaxdraft.map_file(engine, file, out, **rules | dict(structure=WORDS))
    with pytest.raises(ValueError, match="which the record of a run cannot hold"):
        jaxdraft.map_file(engine, file, out, key=0, sampling=Sampling(mask=even))


def test_a_structure_of_another_vocabulary() -> None:
    engine = Engine(spoken(), **SIZES)
    with pytest.raises(ValueError, match="can be written with the tokens of this vocabulary"):
        engine.submit([1], structure=Structure.regex("[0-9]+"))
    assert not engine.busy
