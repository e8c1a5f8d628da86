"""Attention sinks: one more score in the softmax of a head, whose value is zero."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdraft.config import AttentionConfig
from jaxdraft.kernels import PALLAS
from jaxdraft.nn import attention as module
from jaxdraft.nn.attention import Attention, attend
from jaxdraft.state.paged import CHUNK, Chunk, Source
from jaxdraft.testing import tiny_drafter, tiny_target, tiny_target_config
from jaxdraft.train.sequence import causal_attention
from tests.examples import examples
from tests.nn.test_attention_gradients import (
    DIM,
    HEADS,
    KV,
    LENGTHS,
    SOURCES,
    STEPS,
    attention,
    normal,
    plain,
)

SINKS = np.asarray([-2.0, 0.5, 3.0, 40.0])  # of the last head nearly everything falls to the sink


def inputs(causal: bool) -> list[Any]:
    """Queries, keys, values, keys and values of a block, and sinks."""
    size = max(LENGTHS)
    block_keys = None if causal else (normal(4, 2, STEPS, KV, DIM), normal(5, 2, STEPS, KV, DIM))
    cache = normal(2, 2, size, KV, DIM), normal(3, 2, size, KV, DIM)
    return [normal(1, 2, STEPS, HEADS, DIM), *cache, block_keys, jnp.asarray(SINKS, jnp.float32)]


def value(
    name: str,
    q: Any,
    keys: Any,
    values: Any,
    block_keys: Any,
    sinks: Any,
    implementation: str = "xla",
) -> jax.Array:
    make, config, causal = SOURCES[name]
    first = jnp.asarray(LENGTHS, jnp.int32) - (STEPS if causal else 0)
    positions = first[:, None] + jnp.arange(STEPS, dtype=jnp.int32)[None]
    source, _ = make(keys, values, config)
    own = None
    if block_keys is not None:
        own = Chunk(*(jnp.swapaxes(x, 1, 2)[:, None] for x in block_keys), positions[:, None])
    return attend(
        q, positions, source, config, causal=causal, block_keys=own, sinks=sinks,
        implementation=implementation,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["dense", "table, window", "window", "drafter's ring"])
def test_values_and_gradients_are_those_of_float64(name: str) -> None:
    """Pools, rings that have wrapped and keys of a block; ragged rows, NaN in scratch."""
    _, config, causal = SOURCES[name]
    args = inputs(causal)
    reference = functools.partial(plain, config=config, causal=causal)
    weights = normal(6, 2, STEPS, HEADS * DIM)
    run = functools.partial(value, name)
    found = jax.jit(run)(*args)
    np.testing.assert_allclose(found, reference(*args[:4], sinks=SINKS), atol=3e-6, rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda *args: jnp.sum(run(*args) * weights), range(5)))(*args)
    leaves, tree = jax.tree.flatten(args)
    direction = [np.asarray(normal(50 + i, *x.shape), np.float64) for i, x in enumerate(leaves)]

    def moved(by: float) -> float:
        pairs = zip(leaves, direction, strict=True)
        there = [np.asarray(x, np.float64) + by * d for x, d in pairs]
        *rest, sinks = jax.tree.unflatten(tree, there)
        return float(np.sum(reference(*rest, sinks=sinks) * np.asarray(weights, np.float64)))

    expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
    parts = zip(jax.tree.leaves(gradient), direction, strict=True)
    slope = sum(float(np.sum(np.asarray(g, np.float64) * d)) for g, d in parts)
    assert slope == pytest.approx(expected, rel=2e-4, abs=2e-4)
    assert np.asarray(gradient[4])[:3].all()


@pytest.mark.parametrize("name", ["dense", "drafter's ring"])
def test_the_form_for_gpus_has_the_same_sinks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def default(*args: Any, cpu: Any, default: Any) -> Any:
        del cpu
        return default(*args)

    expected = jax.jit(functools.partial(value, name))(*inputs(SOURCES[name][2]))
    jax.clear_caches()
    monkeypatch.setattr(module.lax, "platform_dependent", default)
    found = jax.jit(functools.partial(value, name))(*inputs(SOURCES[name][2]))
    jax.clear_caches()
    np.testing.assert_allclose(found, expected, atol=3e-6, rtol=1e-5)


def test_kernels_do_not_ignore_them() -> None:
    args = inputs(True)
    found = value("dense", *args, implementation=PALLAS)
    np.testing.assert_array_equal(found, value("dense", *args))


def test_a_query_that_sees_no_key_gives_zeros_and_no_gradient() -> None:
    """The sink takes everything, whatever keys lie in free slots."""
    config = attention(window=4)
    keys = jnp.full((2, 1, KV, CHUNK, DIM), jnp.nan)
    chunk = Chunk(keys, jnp.zeros_like(keys), jnp.full((2, 1, CHUNK), -1, jnp.int32))
    source = Source(lambda chunk, index, chunks: chunk, chunk, jnp.asarray(1, jnp.int32), 1)
    positions = jnp.zeros((2, STEPS), jnp.int32)

    def run(q: jax.Array, sinks: jax.Array) -> jax.Array:
        return attend(q, positions, source, config, causal=True, sinks=sinks)

    args = normal(1, 2, STEPS, HEADS, DIM), jnp.asarray([-80.0, 0.0, 80.0, -1e30])
    np.testing.assert_array_equal(run(*args), 0)
    for found in jax.grad(lambda *args: jnp.sum(run(*args)), (0, 1))(*args):
        np.testing.assert_array_equal(found, 0)


@functools.partial(jax.jit, static_argnums=0)
def one_query(softcap: float, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> Any:
    """One head attends to one full chunk."""
    config = AttentionConfig(
        heads=1, kv_heads=1, head_dim=DIM, rotary_dim=0, scale=0.4, softcap=softcap
    )
    data = Chunk(k, v, jnp.arange(CHUNK, dtype=jnp.int32)[None, None])
    source = Source(lambda data, index, chunks: data, data, jnp.asarray(1, jnp.int32), 1)
    at = jnp.full((1, 1), CHUNK - 1, jnp.int32)
    return attend(q, at, source, config, causal=True, sinks=sinks)


@settings(max_examples=examples(10))
@given(seed=st.integers(0, 2**31 - 1), low=st.floats(-60, 60), softcap=st.sampled_from([0.0, 2.0]))
def test_a_sink_is_a_key_whose_value_is_zero(seed: int, low: float, softcap: float) -> None:
    """For sinks and scores of any size: the softmax over one more column, in float64."""
    q = normal(seed, 1, 1, 1, DIM) * 10
    k, v = (normal(seed + i, 1, 1, 1, CHUNK, DIM) * 3 for i in (1, 2))
    sinks = jnp.asarray([low], jnp.float32)
    found = one_query(softcap, q, k, v, sinks)
    score = np.asarray(k, np.float64)[0, 0, 0] @ np.asarray(q, np.float64)[0, 0, 0] * 0.4
    if softcap:
        score = softcap * np.tanh(score / softcap)
    score = np.append(score, np.float64(sinks[0]))
    weight = np.exp(score - score.max())
    expected = (weight / weight.sum())[:-1] @ np.asarray(v, np.float64)[0, 0, 0]
    np.testing.assert_allclose(found[0, 0], expected, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [-1, 3])
def test_training_has_the_attention_of_decoding(window: int) -> None:
    """Whole sequences: the plain softmax with one more column."""
    config = attention(window=window, sinks=True)
    layer = Attention(16, config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    assert layer.sink_scores is not None and layer.sink_scores.shape == (HEADS,)
    q, k, v = (normal(i, 2, 7, n, DIM) for i, n in enumerate((HEADS, KV, KV)))
    found = causal_attention(q, k, v, config, jnp.asarray(SINKS, jnp.float32))
    at = jnp.broadcast_to(jnp.arange(7, dtype=jnp.int32), (2, 7))
    keys, values = (jnp.moveaxis(x, 1, 2)[:, None] for x in (k, v))
    data = Chunk(keys, values, at[:, None])
    source = Source(lambda data, index, chunks: data, data, jnp.asarray(1, jnp.int32), 1)
    sinks = jnp.asarray(SINKS, jnp.float32)
    expected = attend(q, at, source, config, causal=True, sinks=sinks)
    np.testing.assert_allclose(found, expected, atol=3e-6, rtol=1e-5)


def test_block_drafters_refuse_them() -> None:
    target = tiny_target()
    shape = tiny_target_config().attention
    assert shape is not None
    shape = replace(shape, gated=False, rotary_dim=16, sinks=True)
    with pytest.raises(ValueError, match="attention.sinks is True"):
        tiny_drafter(target, attention=shape)
