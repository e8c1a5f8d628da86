"""The delta rule over T rows against the recurrence, one row at a time, in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdraft.nn.delta_net import delta_rule, solve_unit_lower
from jaxdraft.nn.norm import l2_normalize
from jaxdraft.state.recurrent import Capsule, Recurrent, commit

KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 16, 12

rule = jax.jit(delta_rule)


def recurrence(q, k, v, g, beta, state):  # noqa: ANN001, ANN201
    """The definition, in float64."""
    q, k, v, g, beta, state = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, state))
    k, q = (np.repeat(x, HEADS // KEY_HEADS, axis=2) for x in (k, q))
    outputs = np.zeros(v.shape)
    for t in range(v.shape[1]):
        state = state * np.exp(g[:, t])[..., None, None]
        delta = beta[:, t, :, None] * (v[:, t] - np.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], delta)
        outputs[:, t] = np.einsum("bhk,bhkv->bhv", q[:, t], state)
    return outputs, state


def inputs(steps: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, 2, steps, KEY_HEADS, KEY))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((2, steps, HEADS, VALUE))
    g = -np.exp(rng.standard_normal((2, steps, HEADS)))
    beta = rng.random((2, steps, HEADS))
    state = rng.standard_normal((2, HEADS, KEY, VALUE))
    return [x.astype(np.float32) for x in (q * KEY**-0.5, k, v, g, beta, state)]


def after(arrays: list[np.ndarray], update: jax.Array, count: int) -> jax.Array:
    """The state once ``count`` rows are committed."""
    _, k, _, g, _, state = arrays
    conv = jnp.zeros((2, 3, 5))
    capsule = Capsule(jnp.asarray(g), jnp.asarray(k), update, jnp.zeros((2, g.shape[1], 5)))
    return commit(
        Recurrent(jnp.asarray(state), conv), capsule, jnp.full((2,), count, jnp.int32)
    ).state


@pytest.mark.parametrize("steps", [1, 2, 7, 8, 9, 16, 70, 128, 129, 300, 512])
def test_rows_at_once_equal_rows_one_by_one(steps: int) -> None:
    arrays = inputs(steps)
    output, update = rule(*map(jnp.asarray, arrays))
    expected, state = recurrence(*arrays)
    np.testing.assert_allclose(output, expected, atol=1e-5)
    np.testing.assert_allclose(after(arrays, update, steps), state, atol=1e-5)


@pytest.mark.parametrize("steps", [8, 64, 128])
def test_worst_case_equal_keys_without_forgetting(steps: int) -> None:
    """One key, beta 1, no decay: the system is as far from diagonal as it gets."""
    arrays = inputs(steps)
    arrays[1][:] = arrays[1][:1, :1, :1]
    arrays[3][:], arrays[4][:] = 0.0, 1.0
    output, update = rule(*map(jnp.asarray, arrays))
    expected, state = recurrence(*arrays)
    np.testing.assert_allclose(output, expected, atol=1e-4)
    np.testing.assert_allclose(after(arrays, update, steps), state, atol=1e-4)


def test_extreme_gates() -> None:
    """g = 0 is the ungated rule; g = -200 forgets everything; neither makes a NaN."""
    for gate in (0.0, -200.0):
        arrays = inputs(70)
        arrays[3][:] = gate
        output, update = rule(*map(jnp.asarray, arrays))
        expected, state = recurrence(*arrays)
        np.testing.assert_allclose(output, expected, atol=2e-5)
        np.testing.assert_allclose(after(arrays, update, 70), state, atol=2e-5)


def test_a_zero_key_changes_nothing_and_is_not_a_nan() -> None:
    assert np.asarray(l2_normalize(jnp.zeros((1, 4)))).tolist() == [[0.0] * 4]
    arrays = inputs(4)
    arrays[1][:] = 0.0
    _, update = rule(*map(jnp.asarray, arrays))
    decayed = arrays[5] * np.exp(arrays[3].sum(axis=1))[..., None, None]
    np.testing.assert_allclose(after(arrays, update, 4), decayed, atol=1e-6)


def test_commit_of_a_prefix_ignores_what_follows() -> None:
    """Even when the rejected rows are not numbers. Zero rows leave state and convolution alone."""
    arrays = inputs(6)
    _, update = rule(*map(jnp.asarray, arrays))
    _, k, _, g, _, state = (jnp.asarray(x) for x in arrays)
    rows = jnp.arange(2 * 6 * 5, dtype=jnp.float32).reshape(2, 6, 5)
    conv = -jnp.arange(2 * 3 * 5, dtype=jnp.float32).reshape(2, 3, 5)
    spoil = jnp.asarray([[False] * 2 + [True] * 4, [True] * 6])
    capsule = Capsule(
        jnp.where(spoil[..., None], jnp.nan, g),
        jnp.where(spoil[..., None, None], jnp.nan, k),
        jnp.where(spoil[..., None, None], jnp.nan, update),
        rows,
    )
    found = commit(Recurrent(state, conv), capsule, jnp.asarray([2, 0], jnp.int32))
    np.testing.assert_allclose(found.state[0], after(arrays, update, 2)[0], atol=1e-6)
    np.testing.assert_array_equal(found.state[1], state[1])
    np.testing.assert_array_equal(found.conv[0], jnp.concatenate([conv[0, 2:], rows[0, :2]]))
    np.testing.assert_array_equal(found.conv[1], conv[1])


SIZES = [1, 3, 8, 15, 16, 17, 20, 32, 33, 64, 100, 128, 129]


@pytest.mark.parametrize("steps", SIZES)
def test_solver(steps: int) -> None:
    rng = np.random.default_rng(steps)
    lower = np.tril(rng.standard_normal((3, steps, steps)), -1) * 0.5 * min(1.0, 20 / steps)
    check_solver(lower, rng.standard_normal((3, steps, 5)))


@pytest.mark.parametrize("decay", [1.0, 0.99])
@pytest.mark.parametrize("signs", [False, True])
@pytest.mark.parametrize("steps", SIZES)
def test_solver_of_equal_keys(steps: int, signs: bool, decay: float) -> None:
    """Every entry is one, or as good as one, of either sign: nothing fades with distance."""
    rng = np.random.default_rng(steps)
    key = rng.choice([-1.0, 1.0], (3, steps, 1)) if signs else np.ones((3, steps, 1))
    apart = np.arange(steps)[:, None] - np.arange(steps)[None]
    lower = np.tril(key * np.swapaxes(key, 1, 2) * decay**apart, -1)
    check_solver(lower, rng.standard_normal((3, steps, 5)))


def check_solver(lower: np.ndarray, right: np.ndarray) -> None:
    lower, right = lower.astype(np.float32), right.astype(np.float32)
    system = np.eye(lower.shape[-1]) + lower.astype(np.float64)
    expected = np.linalg.solve(system, right.astype(np.float64))
    found = jax.jit(solve_unit_lower)(lower, right)
    np.testing.assert_allclose(found, expected, atol=4e-6 * np.abs(expected).max())
