"""The largest scores, as CPUs find them and as GPUs do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdraft import ranking


@pytest.mark.parametrize("width", [4096, 5000, 70_000])
@pytest.mark.parametrize("count", [17, 32, 256])
def test_lines_hold_the_largest_in_order_with_ties_to_the_lowest_place(
    width: int, count: int
) -> None:
    rng = np.random.default_rng(width + count)
    several = rng.standard_normal((2, 3, width)).astype(np.float32)
    equal = np.round(several * 2) / 2  # some twenty different numbers
    few = np.where(rng.random((2, 3, width)) < 2 / width, several, -np.inf)
    for scores in (several, equal.astype(np.float32), few.astype(np.float32)):
        values, places = jax.jit(ranking._in_lines, static_argnums=1)(scores, count)
        expected, at = lax.top_k(jnp.asarray(scores), count)
        np.testing.assert_array_equal(places, at)
        np.testing.assert_array_equal(values, expected)


def test_what_is_no_number_comes_first_in_lines_too() -> None:
    scores = np.random.default_rng(0).standard_normal((1, 8192)).astype(np.float32)
    scores[0, [5, 6000]] = np.inf
    scores[0, [70, 7000]] = [-np.nan, np.nan]
    _, places = ranking._in_lines(jnp.asarray(scores), 32)
    assert places[0, :4].tolist() == [70, 7000, 5, 6000]


def test_lines_pass_gradients_on_as_top_k_does() -> None:
    scores = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5000)), jnp.float32)
    weights = jnp.arange(20.0)

    def total(find, scores: jax.Array) -> jax.Array:  # noqa: ANN001
        return jnp.sum(find(scores, 20)[0] * weights[None])

    found, expected = (jax.grad(total, 1)(f, scores) for f in (ranking._in_lines, lax.top_k))
    np.testing.assert_array_equal(found, expected)


def test_on_this_machine_lines_are_not_needed() -> None:
    scores = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5000)), jnp.float32)
    found = jax.jit(ranking.largest_first, static_argnums=1)(scores, 32)
    for value, expected in zip(found, lax.top_k(scores, 32), strict=True):
        np.testing.assert_array_equal(value, expected)
