"""The delta-net kernel, interpreted, against float64 and against the XLA path."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdraft.config import DeltaNetConfig
from jaxdraft.kernels import MAX_ROWS, PALLAS, XLA
from jaxdraft.kernels import delta_net as fused
from jaxdraft.nn import delta_net
from jaxdraft.nn.delta_net import DeltaNet, Weights
from jaxdraft.state.recurrent import Capsule, Recurrent
from tests.examples import examples

CONFIG = DeltaNetConfig(key_heads=2, value_heads=4, key_dim=24, value_dim=16, conv_width=4)
WITHIN = 2e-5
"""Of numbers around one, and of updates and outputs that are sums of up to 24 of them."""

Arguments = tuple[Weights, jax.Array, jax.Array, jax.Array, jax.Array]


def with_rates(
    config: DeltaNetConfig, weights: Weights, mixed: jax.Array, rates: Any, *states: jax.Array
) -> tuple[jax.Array, Capsule]:
    (ba,) = rates
    return delta_net.window(config, weights, mixed, ba, *states)


@functools.partial(jax.jit, static_argnames="kernels")
def run(kernels: bool, arguments: Arguments) -> tuple[jax.Array, Capsule]:
    if not kernels:
        return delta_net.window(CONFIG, *arguments)
    weights, mixed, ba, conv, state = arguments
    return fused.window(CONFIG, weights, mixed, (ba,), conv, state, xla=with_rates)


@jax.jit
def commit(before: Recurrent, capsule: Capsule, count: jax.Array) -> Recurrent:
    return delta_net.commit(before, capsule, count)


def plain(capsule: Capsule) -> Capsule:
    """The same capsule, to be committed on the XLA path."""
    return dataclasses.replace(capsule, implementation=XLA)


def draw(rng: np.random.Generator, steps: int, *, batch: int = 2, decay: float = 1.0) -> Arguments:
    """Weights, projected rows and a state of order one."""
    c = CONFIG

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    weights = Weights(
        conv_weight=normal(c.channels, c.conv_width),
        conv_bias=normal(c.channels),
        decay_scale=-decay * jnp.exp(normal(c.value_heads)),
        dt_bias=normal(c.value_heads),
        norm_weight=normal(c.value_dim),
    )
    mixed = normal(batch, steps, c.channels + c.value_rows)
    ba, conv = normal(batch, steps, 2 * c.value_heads), normal(batch, 3, c.channels)
    return weights, mixed, ba, conv, normal(batch, c.value_heads, c.key_dim, c.value_dim)


def reference(arguments: Arguments) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """The recurrence in float64, one row after the other: outputs, capsule, states after rows."""
    c = CONFIG
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), arguments)
    weights, mixed, ba, conv, state = wide
    batch, steps, _ = mixed.shape
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    stream = np.concatenate([conv, mixed[..., : c.channels]], axis=1)
    rows = np.stack([
        weights.conv_bias
        + sum(stream[:, t + w] * weights.conv_weight[:, w] for w in range(c.conv_width))
        for t in range(steps)
    ], axis=1)  # fmt: skip
    rows = rows * sigmoid(rows)
    q, k, v = np.split(rows, (c.key_rows, 2 * c.key_rows), axis=-1)
    heads = (batch, steps, c.key_heads, c.key_dim)
    q, k = (x.reshape(heads) / np.linalg.norm(x.reshape(heads), axis=-1)[..., None] for x in (q, k))
    v = v.reshape(batch, steps, c.value_heads, c.value_dim)
    beta, a = sigmoid(ba[..., : c.value_heads]), ba[..., c.value_heads :]
    log_decay = weights.decay_scale * np.log1p(np.exp(a + weights.dt_bias))
    gate = mixed[..., c.channels :].reshape(v.shape)
    out, update, states = np.zeros_like(v), np.zeros_like(v), [state]
    for t in range(steps):
        state = state * np.exp(log_decay[:, t])[..., None, None]
        key, query = (np.repeat(x[:, t], 2, axis=1) for x in (k, q))  # two heads share a key
        seen = np.einsum("bhkv,bhk->bhv", state, key)
        update[:, t] = beta[:, t, :, None] * (v[:, t] - seen)
        state = state + key[..., None] * update[:, t, :, None]
        out[:, t] = np.einsum("bhkv,bhk->bhv", state, query * c.key_dim**-0.5)
        states.append(state)
    out = out / np.sqrt(np.mean(out**2, axis=-1, keepdims=True) + c.norm_eps)
    out = out * weights.norm_weight * gate * sigmoid(gate)
    capsule = dict(log_decay=log_decay, key=k, update=update, rows=mixed[..., : c.channels])
    return out.reshape(batch, steps, -1), capsule, np.stack(states)


@pytest.mark.parametrize("steps", [1, 5, MAX_ROWS])
@settings(max_examples=examples(5))
@given(data=st.data(), seed=st.integers(0, 2**31 - 1))
def test_kernel_equals_float64_and_the_xla_path(steps: int, data: st.DataObject, seed: int) -> None:
    """Outputs, capsules, and what committing any number of its rows, or none, leaves."""
    arguments = draw(np.random.default_rng(seed), steps)
    out, capsule = run(True, arguments)
    assert capsule.implementation == PALLAS
    expected, parts, states = reference(arguments)
    np.testing.assert_allclose(out, expected, atol=10 * WITHIN, rtol=0)  # divided by a small norm
    for name, part in parts.items():
        np.testing.assert_allclose(getattr(capsule, name), part, atol=WITHIN, rtol=0, err_msg=name)
    other, others = run(False, arguments)
    np.testing.assert_allclose(out, other, atol=10 * WITHIN, rtol=0)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=WITHIN, rtol=0), plain(capsule), others
    )
    count = np.array(data.draw(st.lists(st.integers(0, steps), min_size=2, max_size=2)), np.int32)
    before = Recurrent(state=arguments[4], conv=arguments[3])
    after = commit(before, capsule, jnp.asarray(count))
    for b in range(2):
        np.testing.assert_allclose(after.state[b], states[count[b], b], atol=WITHIN, rtol=0)
    other = commit(before, plain(capsule), jnp.asarray(count))
    np.testing.assert_allclose(after.state, other.state, atol=WITHIN, rtol=0)
    np.testing.assert_array_equal(after.conv, other.conv)


def test_equal_keys_without_decay() -> None:
    """The worst conditioned system: every key is the same, nothing is forgotten, every rate is 1.

    The update of a row then replaces what the row before stored, so errors could double per row.
    """
    weights, mixed, ba, conv, state = draw(np.random.default_rng(0), MAX_ROWS, decay=0.0)
    keys = slice(CONFIG.key_rows, 2 * CONFIG.key_rows)
    mixed = mixed.at[..., keys].set(mixed[:1, :1, keys])
    conv = conv.at[..., keys].set(mixed[:, :3, keys])
    ba = ba.at[..., : CONFIG.value_heads].set(40.0)
    arguments = (weights, mixed, ba, conv, state)
    _, capsule = run(True, arguments)
    _, parts, _ = reference(arguments)
    np.testing.assert_allclose(capsule.key[:, 1:], capsule.key[:, :-1], atol=1e-6, rtol=0)
    np.testing.assert_allclose(capsule.update, parts["update"], atol=WITHIN, rtol=0)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_rows_past_the_count_may_hold_anything(count: int) -> None:
    """NaN in a row reaches no row before it, and no state that is committed without it."""
    weights, mixed, ba, conv, state = draw(np.random.default_rng(1), 5)
    out, capsule = run(True, (weights, mixed, ba, conv, state))
    broken = (weights, mixed.at[:, count:].set(jnp.nan), ba.at[:, count:].set(jnp.nan), conv, state)
    found, damaged = run(True, broken)
    np.testing.assert_array_equal(found[:, :count], out[:, :count])
    assert np.isnan(found[:, count:]).all()
    before, kept = Recurrent(state=state, conv=conv), jnp.full((2,), count, jnp.int32)
    after = commit(before, damaged, kept)
    jax.tree.map(np.testing.assert_array_equal, after, commit(before, capsule, kept))
    if not count:
        jax.tree.map(np.testing.assert_array_equal, after, before)


def test_a_zero_key_stays_zero() -> None:
    weights, mixed, ba, conv, state = draw(np.random.default_rng(2), 5)
    silent = weights._replace(conv_bias=jnp.zeros_like(weights.conv_bias))
    arguments = (silent, jnp.zeros_like(mixed), ba, jnp.zeros_like(conv), state)
    out, capsule = run(True, arguments)
    assert (np.asarray(capsule.key) == 0).all() and (np.asarray(out) == 0).all()


def test_vmap_equals_one_call_after_the_other() -> None:
    windows = [draw(np.random.default_rng(i), 5) for i in range(3)]
    many = jax.tree.map(lambda *x: jnp.stack(x), *windows)
    found = jax.vmap(functools.partial(run, True))(many)
    for i, one in enumerate(windows):
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, atol=WITHIN, rtol=0),
            found,
            run(True, one),
        )


def test_gradients_are_those_of_the_xla_path() -> None:
    arguments = draw(np.random.default_rng(3), 5)

    def loss(kernels: bool, arguments: Any) -> jax.Array:
        out, capsule = run(kernels, arguments)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(capsule.update))

    found, expected = (jax.grad(functools.partial(loss, k))(arguments) for k in (True, False))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), found, expected
    )
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(found))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rounds_where_the_xla_path_does(dtype: str) -> None:
    weights, mixed, ba, conv, state = draw(np.random.default_rng(4), 5)
    rounded = weights._replace(
        **{
            n: getattr(weights, n).astype(dtype)
            for n in ("conv_weight", "conv_bias", "norm_weight")
        }
    )
    rows = (x.astype(dtype) for x in (mixed, ba, conv))
    arguments = (rounded, *rows, state)
    out, capsule = run(True, arguments)
    other, others = run(False, arguments)
    assert out.dtype == other.dtype == dtype
    last = 2 * float(jnp.finfo(dtype).eps)
    scale = float(jnp.abs(other).max())
    np.testing.assert_allclose(
        out.astype(jnp.float32), other.astype(jnp.float32), atol=last * scale, rtol=0
    )
    np.testing.assert_allclose(capsule.update, others.update, atol=8 * last, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [40, 1100])
def test_a_layer_with_kernels_equals_one_without(dtype: str, width: int) -> None:
    """Rates and decays are made in the kernel, of one and of several parts of the input."""
    layer = DeltaNet(width, CONFIG, dtype=dtype, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(5)
    _, _, _, conv, state = draw(rng, 3)
    x = jnp.asarray(rng.standard_normal((2, 3, width)), dtype)

    @nnx.jit
    def run(layer: DeltaNet) -> tuple[jax.Array, Capsule]:
        return layer(x, conv.astype(dtype), state)

    expected, others = run(layer)
    layer.implementation = PALLAS
    found, capsule = run(layer)
    assert "pallas_call" in str(jax.make_jaxpr(lambda x: layer(x, conv.astype(dtype), state))(x))
    last = 4 * float(jnp.finfo(dtype).eps)
    within = max(last, WITHIN)
    np.testing.assert_allclose(
        found.astype(jnp.float32), expected.astype(jnp.float32), atol=10 * within, rtol=0
    )
    np.testing.assert_allclose(capsule.log_decay, others.log_decay, atol=within, rtol=within)


def test_wide_windows_take_the_xla_path() -> None:
    assert fused.serves(CONFIG, jnp.zeros((1, MAX_ROWS, 4)))
    assert not fused.serves(CONFIG, jnp.zeros((1, MAX_ROWS + 1, 4)))
