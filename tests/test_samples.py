"""Several samples per prompt, and the log-probabilities of what was drawn."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdraft
from jaxdraft import Model, Sampling, generate, stream
from jaxdraft.config import DeltaNetConfig
from jaxdraft.testing import LatticeDrafter, TableTarget, tiny_model
from tests.examples import first
from tests.oracle.sampling import adjusted, truncated

NET = DeltaNetConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=4, conv_width=4)
MIXED: dict[str, Any] = dict(layers=("delta_net", "attention"), delta_net=NET)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [2, 7]]
WARM = Sampling(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.2)
VOCAB = 12


def table_model() -> Model:
    table = 1.5 * jax.random.normal(jax.random.key(5), (97, VOCAB), jnp.float32)
    return Model.of(TableTarget(table), LatticeDrafter.random(jax.random.key(6), VOCAB, 3, 3))


@pytest.mark.parametrize(
    ("kind", "changes"),
    first(2, [("dflash2", MIXED), ("dspark", {}), ("mtp", {}), ("eagle3", {}), ("dflash", {})]),
)
def test_samples_are_copies_of_a_prompt(kind: str, changes: dict[str, Any]) -> None:
    """Pools, rings and recurrent states are copied: rows continue as if each had read alone."""
    model = tiny_model(kind, **changes)
    copies = [prompt for prompt in PROMPTS for _ in range(3)]
    how: dict[str, Any] = dict(max_new_tokens=8, sampling=WARM, key=3, logprobs=1)
    out, plain = generate(model, PROMPTS, n=3, **how), generate(model, copies, **how)
    assert out.ids() == plain.ids() and len({*map(tuple, out.ids())}) > 2
    assert out.prompts is not None and plain.prompts is not None
    np.testing.assert_array_equal(out.prompts, plain.prompts)
    for a, b in zip(jax.tree.leaves(out.logprobs), jax.tree.leaves(plain.logprobs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    events = list(stream(model, PROMPTS, n=3, **how))
    for row, ids in enumerate(out.ids()):
        assert [t for e in events if e.row == row for t in e.tokens] == ids


def test_samples_in_a_program_of_the_caller() -> None:
    model = table_model()
    ids, lengths = np.asarray([[3, 1, 4], [2, 7, 0]], np.int32), np.asarray([3, 2])
    run = jax.jit(lambda m, i, n: generate(m, i, lengths=n, n=4, max_new_tokens=6).tokens)
    expected = generate(model, ids, lengths=lengths, n=4, max_new_tokens=6).tokens
    np.testing.assert_array_equal(run(model, ids, lengths), expected)


def test_a_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, real = set(), TableTarget.forward

    def forward(self: Any, tokens: jax.Array, *rest: Any, **more: Any) -> Any:
        shapes.add(tokens.shape)
        return real(self, tokens, *rest, **more)

    monkeypatch.setattr(TableTarget, "forward", forward)
    model = table_model()
    generate(model, [[1] * 17, [2] * 3], n=5, max_new_tokens=5)
    assert shapes == {(2, 32), (10, 4)}  # two prompts in a bucket of 32; ten windows of 1 + K


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_numbers_of_samples_that_are_none(wrong: Any) -> None:
    with pytest.raises(ValueError, match="n is"):
        generate(table_model(), [[1, 2]], n=wrong)


def test_settings_of_single_samples() -> None:
    out = generate(table_model(), [[1, 2], [3]], n=2, max_new_tokens=[1, 2, 3, 4])
    assert out.lengths.tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="or 4 of them"):
        generate(table_model(), [[1, 2], [3]], n=2, max_new_tokens=[1, 2])


@pytest.mark.parametrize(
    ("how", "changes"),
    [
        ({"temperature": 0.7}, {}),
        ({"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.05}, {}),
        (
            {"temperature": 1.1, "top_p": 0.8},
            {"repetition_penalty": 1.3, "presence_penalty": 0.2, "logit_bias": {3: 0.7}},
        ),
        ({"temperature": 0.0}, {"repetition_penalty": 1.3}),
    ],
    ids=str,
)
def test_log_probabilities_of_draws(how: dict[str, float], changes: dict[str, Any]) -> None:
    """Accepted drafts, corrections and bonuses alike, against the distributions in NumPy."""
    model = table_model()
    rules = Sampling(**how, **changes)  # type: ignore[bad-argument-type]
    out = generate(model, PROMPTS, n=4, max_new_tokens=12, sampling=rules, key=1, logprobs=0)
    assert out.logprobs is not None and jaxdraft.summarize(out.stats).accepted > 0
    table = np.asarray(model.target.table, np.float64)  # type: ignore[missing-attribute]
    for row, ids in enumerate(out.ids()):
        prompt = PROMPTS[row // 4]
        for place, token in enumerate(ids):
            before, last = ([0] + prompt + ids[:place])[-2:]
            logits = table[(31 * before + last) % len(table)]
            drawn = truncated(adjusted(logits, prompt, ids[:place], **changes), **how)
            own = np.log(truncated(logits)[token])
            np.testing.assert_allclose(
                out.logprobs.sampled[row, place], np.log(drawn[token]), atol=2e-5
            )
            np.testing.assert_allclose(out.logprobs.token[row, place], own, atol=2e-5)


def test_log_probabilities_of_draws_in_an_engine() -> None:
    model = table_model()
    rules: dict[str, Any] = dict(max_new_tokens=8, sampling=Sampling(temperature=0.8), key=2)
    out = generate(model, PROMPTS, n=2, logprobs=1, **rules)
    with jaxdraft.Engine(model, max_batch=4, page_size=4, context=32) as engine:
        found = engine.map(PROMPTS, n=2, logprobs=1, **rules)
        assert [r.tokens for r in found] == out.ids()
        assert out.logprobs is not None
        for row, request in enumerate(found):
            assert request.sampled_logprobs is not None
            own = out.logprobs.sampled[row, : len(request.tokens)]
            np.testing.assert_allclose(request.sampled_logprobs, own, atol=1e-5)
        assert engine.map(PROMPTS[:1], max_new_tokens=2)[0].sampled_logprobs is None
