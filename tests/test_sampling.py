"""Rules of a generation: truncation, penalties, keys, log-probabilities, errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxdraft
from jaxdraft import Model, Sampling, generate, sampling, score, stream
from jaxdraft.base import Truncation
from jaxdraft.ranking import best_token
from jaxdraft.sampling import distribution, probabilities
from jaxdraft.testing import LatticeDrafter, ScriptedDrafter, TableTarget, assert_lossless
from tests.oracle.sampling import adjusted, truncated
from tests.test_generate import compilations

VOCAB = 12
TARGET = TableTarget(2 * jax.random.normal(jax.random.key(1), (97, VOCAB), jnp.float32))
MODEL = Model.of(TARGET, LatticeDrafter.random(jax.random.key(2), VOCAB, 3, 4))
PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5]]


def one_row(**how: Any) -> Truncation:
    return Truncation(
        temperature=jnp.asarray([how.get("temperature", 1.0)], jnp.float32),
        top_k=jnp.asarray([how.get("top_k", 0)], jnp.int32),
        top_p=jnp.asarray([how.get("top_p", 1.0)], jnp.float32),
        min_p=jnp.asarray([how.get("min_p", 0.0)], jnp.float32),
    )


@jax.jit
def dense(logits: jax.Array, how: Truncation) -> jax.Array:
    return distribution(logits, how).probs()


@given(
    seed=st.integers(0, 2**31 - 1),
    temperature=st.floats(0.05, 4.0),
    top_k=st.integers(0, 700),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.4, 1.0]),
    ties=st.booleans(),
    vocab=st.sampled_from([1, 7, 600]),
)
def test_truncation_equals_sorting(
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    ties: bool,
    vocab: int,
) -> None:
    """Wide vocabularies take both ways: the few largest logits, and bisection of the rest."""
    logits = np.random.default_rng(seed).normal(size=(1, 1, vocab)).astype(np.float32)
    if ties:
        logits = np.round(logits * 2) / 2
    how = dict(temperature=np.float32(temperature), top_k=top_k, top_p=np.float32(top_p))
    how["min_p"] = np.float32(min_p)
    found = np.asarray(dense(jnp.asarray(logits), one_row(**how)))[0, 0]
    expected = truncated(logits[0, 0], **{k: float(v) for k, v in how.items() if k != "top_k"},
                         top_k=top_k)  # fmt: skip
    # A threshold that falls within the rounding of a sum may go either way by one group of ties.
    if (found > 0).sum() != (expected > 0).sum():
        at = np.sort(expected if (expected > 0).sum() > (found > 0).sum() else found)
        edge = at[at > 0][0]
        assert _at_the_edge(logits[0, 0], how, edge), (found, expected)
    else:
        np.testing.assert_allclose(found, expected, atol=2e-6)


def _at_the_edge(logits: np.ndarray, how: dict[str, Any], edge: float) -> bool:
    """Whether top-p or min-p is reached within rounding just where the two disagree."""
    nudged = [
        truncated(
            logits,
            temperature=float(how["temperature"]),
            top_k=how["top_k"],
            top_p=float(np.clip(how["top_p"] + d, 1e-6, 1.0)),
            min_p=float(how["min_p"]) * (1 + d),
        )
        for d in (-1e-5, 1e-5)
    ]
    return (nudged[0] > 0).sum() != (nudged[1] > 0).sum() and edge > 0


@pytest.mark.parametrize("vocab", [7, 4096, 4100, 5000])
@pytest.mark.parametrize("values", ["ties", "numbers", "infinite", "nan"])
def test_best_token_is_argmax(vocab: int, values: str) -> None:
    """By groups or not: ties to the lowest id, a NaN before everything, nothing beyond the end."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=(2, 9, vocab)).astype(np.float32)
    if values == "ties":
        logits = np.minimum(np.round(logits), 2.0)
    elif values == "infinite":
        logits[0] = -np.inf
        logits[1, 3, vocab // 2] = np.inf
    elif values == "nan":
        logits[:, ::2, rng.integers(vocab, size=5)] = np.nan
    found = jax.jit(best_token)(logits)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, np.argmax(logits, axis=-1))


def test_temperature_zero_is_certain() -> None:
    probs = probabilities(jnp.asarray([[1.0, 3.0, 3.0]]), one_row(temperature=0.0))
    np.testing.assert_array_equal(probs, [[0.0, 1.0, 0.0]])


def test_tiny_and_huge_temperatures_stay_finite() -> None:
    logits = jnp.asarray([[1e4, -1e4, 3.0]])
    for temperature in (1e-30, 1e30):
        probs = probabilities(logits, one_row(temperature=temperature))
        np.testing.assert_allclose(np.sum(probs), 1.0, rtol=1e-6)


# ----------------------------------------------------------------------------- greedy rows


@pytest.mark.parametrize(
    "how",
    [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 2.0, "frequency_penalty": 0.5},
        {"logit_bias": {3: 4.0, 5: -np.inf}},
        {"min_new_tokens": 9},
    ],
    ids=str,
)
def test_rules_change_greedy_tokens_alike_with_drafts(how: dict[str, Any]) -> None:
    """Drafts that are right and wrong in turn; the oracle knows nothing of drafts."""
    stops = [2, 7]
    expected = []
    for prompt in PROMPTS:
        output: list[int] = []
        while len(output) < 20 and not (output and output[-1] in stops):
            before, last = (prompt + output)[-2:]
            logits = np.asarray(TARGET.table)[(31 * before + last) % 97]
            row = adjusted(logits, prompt, output, stop_ids=stops, **how)
            output.append(int(row.argmax()))
        expected.append(output)
    sampling = Sampling(temperature=0.0, **how)
    truth = np.zeros((3, 64), np.int32)
    for row, (prompt, output) in enumerate(zip(PROMPTS, expected, strict=True)):
        truth[row, : len(prompt) + len(output)] = prompt + output
    right = np.random.default_rng(0).random(truth.shape) < 0.8
    drafter = ScriptedDrafter(jnp.asarray(truth), jnp.asarray(right), VOCAB, 3)
    options: dict[str, Any] = dict(max_new_tokens=20, stop_ids=stops, sampling=sampling)
    out = generate(MODEL, PROMPTS, drafter=drafter, **options)
    assert out.ids() == expected
    assert int(np.sum(out.stats.accepted)) > 2
    assert_lossless(MODEL, MODEL.drafter, PROMPTS, **options)


def test_greedy_rows_beside_sampled_ones() -> None:
    greedy = generate(MODEL, PROMPTS, max_new_tokens=15)
    mixed = generate(
        MODEL, PROMPTS, max_new_tokens=15, key=3, sampling=Sampling(temperature=[0.0, 1.0, 0.0])
    )
    assert mixed.ids()[0] == greedy.ids()[0] and mixed.ids()[2] == greedy.ids()[2]
    assert mixed.ids()[1] != greedy.ids()[1]
    np.testing.assert_array_equal(mixed.stats.accepted_at[0], greedy.stats.accepted_at[0])


# ------------------------------------------------------------------------------------ keys


def test_a_row_draws_the_same_whatever_the_batch_around_it() -> None:
    options: dict[str, Any] = dict(max_new_tokens=20, sampling=Sampling(temperature=1.1))
    together = generate(MODEL, PROMPTS, key=jax.random.key(5), **options).ids()
    alone = generate(MODEL, PROMPTS[:1], key=jax.random.key(5), **options).ids()
    swapped = generate(MODEL, [PROMPTS[0], [7], [8]], key=jax.random.key(5), **options).ids()
    other = generate(MODEL, PROMPTS, key=jax.random.key(6), **options).ids()
    assert together[0] == alone[0] == swapped[0]
    assert together != other
    assert together == generate(MODEL, PROMPTS, key=5, **options).ids()


def test_streaming_draws_the_same() -> None:
    options: dict[str, Any] = dict(
        max_new_tokens=20, sampling=Sampling(temperature=1.1, top_k=5), key=2, logprobs=2
    )
    out = generate(MODEL, PROMPTS, **options)
    events = list(stream(MODEL, PROMPTS, **options))
    for row, expected in enumerate(out.ids()):
        mine = [e for e in events if e.row == row]
        assert [t for e in mine for t in e.tokens] == expected
        chances = np.concatenate([e.logprobs.token for e in mine])  # type: ignore[union-attr]
        np.testing.assert_array_equal(chances, out.logprobs.token[row, : len(expected)])  # type: ignore[union-attr]


def test_values_compile_nothing() -> None:
    def run(**how: Any) -> None:
        options: dict[str, Any] = {"repetition_penalty": 1.1, **how}
        sampling = Sampling(**options)
        generate(MODEL, PROMPTS, max_new_tokens=15, sampling=sampling, key=1)

    run(temperature=0.5)
    again = compilations(
        lambda: [
            run(temperature=[0.0, 1.0, 2.0], top_k=3, top_p=0.5, min_p=0.1),
            run(presence_penalty=1.0, min_new_tokens=4, proposals="independent"),
            run(frequency_penalty=1.0, proposals="none"),
            run(proposals="greedy_path"),
        ]
    )
    assert again == []


def test_under_the_caller_s_jit() -> None:
    @jax.jit
    def run(ids: jax.Array, temperature: jax.Array, key: jax.Array) -> jax.Array:
        how = Sampling(temperature=temperature, top_p=0.9)
        return generate(MODEL, ids, max_new_tokens=8, sampling=how, key=key).tokens

    ids = jnp.asarray([[3, 1, 4]], jnp.int32)
    key = jax.random.key(4)
    found = run(ids, jnp.asarray(0.9, jnp.float32), key)
    how = Sampling(temperature=0.9, top_p=0.9)
    expected = generate(MODEL, [[3, 1, 4]], max_new_tokens=8, sampling=how, key=key)
    np.testing.assert_array_equal(found, expected.tokens)


# ----------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.9, repetition_penalty=1.3)])
def test_log_probabilities_are_those_of_the_target(sampling: Sampling | None) -> None:
    """Of the bare logits, at every emitted position, drafts or not."""
    out = generate(MODEL, PROMPTS, max_new_tokens=12, sampling=sampling, key=1, logprobs=3)
    assert out.logprobs is not None and out.logprobs.top.shape == (3, 12, 3)
    assert int(np.sum(out.stats.accepted)) > 0
    for row, (prompt, output) in enumerate(zip(PROMPTS, out.ids(), strict=True)):
        logits = score(MODEL, [prompt + output]).logits[0]
        log = np.asarray(jax.nn.log_softmax(logits, axis=-1))[len(prompt) - 1 : -1]
        size = len(output)
        found = jax.tree.map(lambda x, row=row, n=size: np.asarray(x)[row, :n], out.logprobs)
        np.testing.assert_allclose(found.token, log[np.arange(len(output)), output], atol=1e-5)
        best = np.argsort(-log, axis=-1, kind="stable")[:, :3]
        np.testing.assert_array_equal(found.top_tokens, best)
        np.testing.assert_allclose(found.top, np.take_along_axis(log, best, 1), atol=1e-5)


def test_nothing_is_given_past_a_row_s_end() -> None:
    out = generate(MODEL, PROMPTS, max_new_tokens=[2, 9, 4], logprobs=1)
    assert out.logprobs is not None
    assert not np.asarray(out.logprobs.token)[0, 2:].any()
    assert (np.asarray(out.logprobs.top_tokens)[0, 2:] == -1).all()


# ---------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; expected at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": [1.0, 2.0]}, "or 3 of them"),
        ({"top_k": 1.5}, "top_k is 1.5; expected an integer"),
        ({"top_p": 0.0}, "top_p is 0.0; expected more than 0"),
        ({"top_p": 1.5}, "top_p is 1.5; expected 0 to 1"),
        ({"min_p": 2.0}, "min_p is 2.0; expected 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"logit_bias": {12: 1.0}}, "token 12; the vocabulary has ids 0..11"),
        ({"logit_bias": np.zeros(5)}, "logit_bias has shape"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias holds NaN"),
        ({"allowed": np.zeros(12, bool)}, "allowed leaves no token in rows"),
        ({"allowed": np.ones(12)}, "allowed is float64; expected booleans"),
        ({"proposals": "best"}, "expected one of lattice, greedy_path, independent, none"),
    ],
    ids=str,
)
def test_bad_rules_are_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        generate(MODEL, PROMPTS, sampling=Sampling(**how), key=0)


def test_sampling_needs_a_key() -> None:
    with pytest.raises(ValueError, match="key is None: sampling needs a key"):
        generate(MODEL, PROMPTS, sampling=Sampling())
    with pytest.raises(ValueError, match="logprobs is -1"):
        generate(MODEL, PROMPTS, logprobs=-1)


def test_a_mask_that_allows_nothing_ends_the_row() -> None:
    """Found out while running, so it is data: the row says so, and the others go on."""

    def mask(tokens: jax.Array, length: jax.Array) -> jax.Array:
        return jnp.broadcast_to((length < 5) | (tokens[0] != 1), (VOCAB,))

    for temperature in (0.0, 1.0):
        how = Sampling(temperature=temperature, mask=mask)
        out = generate(MODEL, PROMPTS, max_new_tokens=9, sampling=how, key=0, throw=False)
        assert out.finish_reasons == ["length", "dead_end", "length"]
        assert len(out.ids()[1]) == 3  # positions 2, 3 and 4
    with pytest.raises(ValueError, match=r"no token may follow in rows \[1\]: masks, bans and"):
        generate(MODEL, PROMPTS, max_new_tokens=9, sampling=how, key=0)


def test_the_front_door_knows_sampling() -> None:
    assert jaxdraft.Sampling is Sampling


@pytest.mark.parametrize("need", [0.0, 1.0, 37.0, 5000.0])
def test_a_threshold_is_the_same_by_digits_as_by_bits(need: float) -> None:
    """Weights are whole numbers, whose sums are exact in any order."""
    rng = np.random.default_rng(int(need))
    ordered = rng.integers(0, 2**32, (2, 3, 5000), np.uint32)
    ordered[0] = ordered[0] >> 28 << 4  # few different numbers
    weights = rng.integers(0, 4, ordered.shape).astype(np.float32)
    found = [
        np.asarray(jax.jit(search)(ordered, weights, np.full((2, 3), need, np.float32)))
        for search in (sampling._by_bits, sampling._by_digits)
    ]
    np.testing.assert_array_equal(*found)
    mass = np.where(ordered >= found[0][..., None], weights, 0).sum(-1)
    more = np.where(ordered > found[0][..., None], weights, 0).sum(-1)
    assert (mass >= need).all()
    assert (more < need).all() or need == 0
