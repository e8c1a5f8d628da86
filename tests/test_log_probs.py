"""Log-probabilities of given tokens, without scores of the whole vocabulary."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdraft
from jaxdraft import scoring
from jaxdraft.testing import TableTarget, tiny_model
from tests.examples import first

LENGTHS = np.asarray([30, 17, 1])
IDS = np.random.default_rng(0).integers(0, 48, (3, 30)).astype(np.int32)
ROWS = np.arange(29)[None] < LENGTHS[:, None] - 1


def plain(model: Any, heat: Any = 1.0) -> jax.Array:
    logits = jaxdraft.score(model, IDS, LENGTHS).logits / np.float32(heat)
    found = jax.nn.log_softmax(logits, axis=-1)[:, :-1]
    found = jnp.take_along_axis(found, jnp.asarray(IDS[:, 1:, None]), axis=-1)[..., 0]
    return jnp.where(ROWS, found, 0.0)


@pytest.mark.parametrize("scores", first(1, [3 * 48 * 7, 1 << 24, 1]))
def test_they_are_those_of_score(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their gradients, in blocks of 7 rows, in one block, and row by row."""
    monkeypatch.setattr(scoring, "_SCORES", scores)
    jax.clear_caches()
    model = tiny_model()
    found = jaxdraft.log_probs(model, IDS, LENGTHS, temperature=1.3)
    np.testing.assert_allclose(found, plain(model, 1.3), atol=1e-5)
    assert not found[~ROWS].any()
    weights = np.random.default_rng(1).normal(size=ROWS.shape).astype(np.float32)

    def loss(decoder: Any, through: Any) -> jax.Array:
        target = jax.tree.unflatten(jax.tree.structure(model.target), jax.tree.leaves(decoder))
        return jnp.sum(through(model.__class__(target, model.drafter, model.info)) * weights)

    own = jax.grad(loss)(model.target, lambda m: jaxdraft.log_probs(m, IDS, LENGTHS))
    other = jax.grad(loss)(model.target, plain)
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    jax.clear_caches()


def test_scores_of_the_vocabulary_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from compiled gradients: their memory hardly grows with T."""
    monkeypatch.setattr(scoring, "_SCORES", 1 << 16)
    jax.clear_caches()
    model = tiny_model(vocab_size=16_384)

    def total(target: Any, size: int) -> jax.Array:
        ids, ones = np.zeros((2, size + 1), np.int32), np.ones(2, np.float32)
        return jnp.sum(scoring.token_log_probs(target, ids, np.full(2, size, np.int32), ones)[0])

    held = []
    for size in (128, 512):
        program = jax.jit(jax.grad(total), static_argnums=1).lower(model.target, size).compile()
        analysis = program.memory_analysis()
        assert analysis is not None
        held.append(analysis.temp_size_in_bytes)
    whole = 2 * (512 - 128) * 16_384 * 4
    assert held[1] - held[0] < whole / 8, held
    jax.clear_caches()


def test_targets_without_a_head_and_transformations() -> None:
    table = jax.random.normal(jax.random.key(0), (97, 48))
    model = jaxdraft.Model.of(TableTarget(table))
    expected = plain(model)
    np.testing.assert_allclose(jaxdraft.log_probs(model, IDS, LENGTHS), expected, atol=1e-5)
    run = jax.jit(jaxdraft.log_probs)
    np.testing.assert_allclose(run(model, IDS, LENGTHS), expected, atol=1e-5)
    each = jax.vmap(lambda i, n: jaxdraft.log_probs(model, i[None], n[None])[0])(IDS, LENGTHS)
    np.testing.assert_allclose(each, expected, atol=1e-5)
    assert jaxdraft.log_probs(model, [[5]]).shape == (1, 0)


@pytest.mark.parametrize("heat", [0.0, -1.0, np.nan, np.inf, "hot", [1.0, 2.0]])
def test_temperatures_that_are_none(heat: Any) -> None:
    model = jaxdraft.Model.of(TableTarget(jnp.zeros((97, 48))))
    with pytest.raises(ValueError, match="temperature is"):
        jaxdraft.log_probs(model, IDS, LENGTHS, temperature=heat)
