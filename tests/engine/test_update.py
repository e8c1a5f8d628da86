"""Weights that change between the steps of an engine."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import jaxdraft
from jaxdraft import Engine, Model, Sampling
from jaxdraft.testing import LatticeDrafter, TableTarget
from tests.engine.helpers import HistoryDrafter, HistoryTarget, greedy, history_model
from tests.engine.test_engine import SIZES, everything_is_free, finish, prompts
from tests.examples import LONG


def changed(model: Model, seed: int) -> Model:
    """Return the model with another table, and its drafter with the same."""
    table = model.target.table  # type: ignore[missing-attribute]
    target = replace(model.target, table=jax.random.normal(jax.random.key(seed), table.shape))  # type: ignore[bad-specialization]
    return replace(model, target=target, drafter=HistoryDrafter(target))  # type: ignore[bad-argument-type]


@pytest.mark.parametrize("recurrent", [False, True])
def test_running_requests_continue_with_the_new_weights(recurrent: bool) -> None:
    """Their tokens stay, caches and prefixes of the old weights are gone, nothing compiles."""
    old = history_model(recurrent=recurrent)
    new, engine = changed(old, 9), Engine(old, **SIZES)
    said = prompts(6, seed=3)
    first = engine.map(said, max_new_tokens=10)
    assert [r.tokens for r in first] == [greedy(old, p, 10) for p in said]
    kept = engine.submit(said[0], max_new_tokens=4, keep=True)
    kept.result()
    requests = [engine.submit(p, max_new_tokens=10) for p in said]
    for _ in range(4):
        engine.step()
    before, programs = [list(r.tokens) for r in requests], engine.programs
    assert any(before) and not all(len(b) == 10 for b in before)
    engine.update(new)
    finish(engine)
    for request, prompt, emitted in zip(requests, said, before, strict=True):
        more = 10 - len(emitted)
        expected = emitted + (greedy(new, prompt + emitted, more) if more else [])
        assert request.tokens == expected
    assert engine.programs == programs and engine.summary().accepted > 0
    start = said[0] + kept.tokens
    assert kept.extend([1, 2], max_new_tokens=5).result() == greedy(new, [*start, 1, 2], 5)
    kept.close()
    assert everything_is_free(engine)


def test_only_models_of_the_same_form() -> None:
    old = history_model()
    engine = Engine(old, **SIZES)
    table = old.target.table  # type: ignore[missing-attribute]
    for other, words in [
        (table.astype(jnp.bfloat16), "target.table is bfloat16"),
        (jnp.concatenate([table, table]), r"target.table is float32\[.*expected float32\["),
    ]:
        target = HistoryTarget(other)
        with pytest.raises(ValueError, match=words):
            engine.update(replace(old, target=target))
    with pytest.raises(ValueError, match="the target is a HistoryTarget of another form"):
        engine.update(history_model(recurrent=True))
    with pytest.raises(ValueError, match="the drafter is a LatticeDrafter of another form"):
        engine.update(old, LatticeDrafter.random(jax.random.key(6), 13, 3, 3))
    with pytest.raises(ValueError, match="draft_tokens is 3"):
        engine.update(old, "none")
    assert engine.map([[1, 2, 3]], max_new_tokens=6)[0].tokens == greedy(old, [1, 2, 3], 6)
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.update(old)


@struct.dataclass
class _Policy:
    table: jax.Array


def test_a_training_loop_compiles_once_and_keeps_its_memory() -> None:
    """Rollouts and updates in turns: after the first ones no program and no array is added."""
    rows, vocab = 97, 12
    drafter = LatticeDrafter.random(jax.random.key(6), vocab, 3, 3)
    rules: dict[str, Any] = dict(max_new_tokens=6, sampling=Sampling(), n=2, logprobs=0)

    def of(policy: _Policy) -> Model:
        return Model.of(TableTarget(policy.table), drafter)

    @jax.jit
    def improve(policy: _Policy, tokens: jax.Array, lengths: jax.Array) -> _Policy:
        loss = lambda p: -jnp.sum(jaxdraft.log_probs(of(p), tokens, lengths))  # noqa: E731
        return jax.tree.map(lambda x, g: x - 0.05 * g, policy, jax.grad(loss)(policy))

    policy = _Policy(jax.random.normal(jax.random.key(0), (rows, vocab)))
    said = [[1, 2, 3], [4, 5]]
    compiled: list[str] = []

    def listen(name: str, seconds: float, **_: Any) -> None:
        del seconds
        compiled.extend([name] * ("backend_compile" in name))

    with Engine(of(policy), max_batch=4, page_size=4, context=32) as engine:
        sizes, programs = [], []
        for number in range(100 if LONG else 16):
            found = engine.map(said, key=number, **rules)
            for request in found[: number % 5 == 0]:  # under the weights of this very step
                row = [*request.prompt, *request.tokens]
                own = jaxdraft.log_probs(of(policy), [row])[0, len(request.prompt) - 1 :]
                np.testing.assert_allclose(request.sampled_logprobs, own, atol=1e-5)
            tokens, lengths = np.zeros((4, 16), np.int32), np.zeros(4, np.int32)
            for place, request in enumerate(found):
                row = [*request.prompt, *request.tokens]
                tokens[place, : len(row)], lengths[place] = row, len(row)
                request.close()
            policy = improve(policy, *jax.device_put((tokens, lengths)))
            engine.update(of(policy))
            if number == 5:
                jax.monitoring.register_event_duration_secs_listener(listen)
            if number >= 5:
                gc.collect()
                sizes.append(sum(x.nbytes for x in jax.live_arrays()))
                programs.append(engine.programs)
    jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled and len(set(programs)) == 1, (len(compiled), programs)
    assert max(sizes) == min(sizes), (min(sizes), max(sizes))


def test_requests_with_the_same_text_read_it_once() -> None:
    """The second waits for the pages of the first; one with another text does not."""
    model = history_model()
    engine = Engine(model, **SIZES | dict(pages=40))
    text = prompts(1, seed=5, longest=30)[0] * 3
    requests = engine.map([text[:25], text[1:20]], n=2, max_new_tokens=5)
    assert [r.reused for r in requests] == [0, 24, 0, 16]
    for request in requests:
        assert request.tokens == greedy(model, request.prompt, 5)
    assert everything_is_free(engine)
