"""Attention over a cache is differentiable: queries, keys and values, in every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdraft.config import AttentionConfig, KvShape
from jaxdraft.nn.attention import attend
from jaxdraft.state import paged, ring
from jaxdraft.state.paged import CHUNK, Chunk, PagedPool, Source
from jaxdraft.state.ring import Ring


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


HEADS, KV, DIM = 4, 2, 8
SHAPE = KvShape(layers=1, kv_heads=KV, head_dim=DIM, dtype=jnp.float32)
STEPS = 3
LENGTHS = (300, 5)  # positions in use: three chunks in one row, one in the other


def attention(**changes: Any) -> AttentionConfig:
    fields = dict(heads=HEADS, kv_heads=KV, head_dim=DIM, rotary_dim=0, scale=0.4)
    return AttentionConfig(**{**fields, **changes})


def dense(rows: jax.Array, values: jax.Array, config: AttentionConfig) -> tuple[Source, Any]:
    """A page per row; slots behind a row's end hold NaN."""
    pool = PagedPool.one_page_per_row(SHAPE, batch=2, capacity=4 * CHUNK)
    spoiled = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), (pool.keys, pool.values))
    pool = replace(pool, keys=spoiled[0], values=spoiled[1])
    for start in range(0, rows.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        count = jnp.clip(jnp.asarray(LENGTHS) - start, 0, CHUNK)
        pool = paged.write(pool, 0, rows[:, part], values[:, part], count)
        pool = replace(pool, length=pool.length + count)
    return paged.source(pool, 0, jnp.asarray(LENGTHS, jnp.int32)), pool


def table(rows: jax.Array, values: jax.Array, config: AttentionConfig) -> tuple[Source, Any]:
    """Pages of 16 in a shared pool; pages that no row owns hold NaN."""
    pool = PagedPool.zeros(SHAPE, batch=2, pages=48, page_size=16, columns=24)
    spoiled = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), (pool.keys, pool.values))
    pool = replace(pool, keys=spoiled[0], values=spoiled[1])
    pool, _ = paged.grow(pool, jnp.asarray(LENGTHS, jnp.int32))
    pool = paged.write(pool, 0, rows, values, jnp.asarray(LENGTHS))
    return paged.source(pool, 0, jnp.asarray(LENGTHS, jnp.int32)), pool


def window(rows: jax.Array, values: jax.Array, config: AttentionConfig) -> tuple[Source, Any]:
    """A target's rings, wrapped, the last rows put and not committed."""
    rings = Ring.zeros(SHAPE, batch=2, window=config.window, rows=STEPS, page_size=16)
    done = jnp.zeros((2,), jnp.int32)
    for start in range(0, rows.shape[1], STEPS):
        part = slice(start, start + STEPS)
        count = jnp.clip(jnp.asarray(LENGTHS, jnp.int32) - STEPS - done, 0, STEPS)
        rings = ring.put(rings, 0, rows[:, part], values[:, part], count)
        rings = ring.commit(rings, count)
        done = done + count
    at = done[:, None, None, None] + jnp.arange(STEPS)[None, :, None, None]
    last = [jnp.take_along_axis(x, at, axis=1) for x in (rows, values)]
    count = jnp.full((2,), STEPS, jnp.int32)
    rings = ring.put(rings, 0, *last, count)
    return ring.reachable(rings, 0, count), rings


def drafter_ring(rows: jax.Array, values: jax.Array, config: AttentionConfig) -> tuple[Source, Any]:
    """A drafter's rings: everything in one chunk."""
    rings = Ring.zeros(SHAPE, batch=2, window=config.window, block=STEPS, page_size=16)
    first = jnp.zeros((2,), jnp.int32)
    count = jnp.asarray(LENGTHS, jnp.int32)
    rings = ring.write(rings, (rows,), (values,), first, count)
    return ring.source(rings, 0), rings


SOURCES = {
    "dense": (dense, attention(), True),
    "dense, softcap": (dense, attention(softcap=1.5), True),
    "table": (table, attention(), True),
    "table, window": (table, attention(window=40), True),
    "window": (window, attention(window=200), True),
    "drafter's ring": (drafter_ring, attention(window=50), False),
    "drafter's pool": (dense, attention(), False),
}


def plain(
    q: Any,
    keys: Any,
    values: Any,
    block_keys: Any,
    config: AttentionConfig,
    causal: bool,
    sinks: Any = None,
) -> np.ndarray:
    """The same attention in float64, a row and a query at a time."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    out = np.zeros((2, STEPS, HEADS, DIM))
    for row, length in enumerate(LENGTHS):
        k, v, place = keys[row, :length], values[row, :length], np.arange(length)
        first = length - STEPS if causal else length
        if block_keys is not None:
            k = np.concatenate([k, np.asarray(block_keys[0][row], np.float64)])
            v = np.concatenate([v, np.asarray(block_keys[1][row], np.float64)])
            place = np.concatenate([place, length + np.arange(STEPS)])
        for step in range(STEPS):
            at = first + step
            seen = place <= at if causal else np.ones(len(place), bool)
            if config.window > 0:
                seen = seen & (place > at - config.window)
            for head in range(HEADS):
                group = head // (HEADS // KV)
                score = k[:, group] @ q[row, step, head] * config.scale
                if config.softcap:
                    score = config.softcap * np.tanh(score / config.softcap)
                weight = np.where(seen, np.exp(score - score.max()), 0)
                mass = weight.sum()
                if sinks is not None:
                    mass += np.exp(sinks[head] - score.max())
                out[row, step, head] = weight @ v[:, group] / mass
    return out.reshape(2, STEPS, HEADS * DIM)


@pytest.mark.parametrize("name", list(SOURCES))
def test_attention_has_the_gradient_of_float64_differences(name: str) -> None:
    """Ragged rows of several chunks, NaN in scratch; keys, values, queries and keys beside."""
    make, config, causal = SOURCES[name]
    size = max(LENGTHS)
    args = [
        normal(1, 2, STEPS, HEADS, DIM),
        normal(2, 2, size, KV, DIM),
        normal(3, 2, size, KV, DIM),
        None if causal else (normal(4, 2, STEPS, KV, DIM), normal(5, 2, STEPS, KV, DIM)),
    ]
    weights = normal(6, 2, STEPS, HEADS * DIM)
    first = jnp.asarray(LENGTHS, jnp.int32) - (STEPS if causal else 0)
    positions = first[:, None] + jnp.arange(STEPS, dtype=jnp.int32)[None]

    def value(q: Any, keys: Any, values: Any, block_keys: Any) -> jax.Array:
        source, _ = make(keys, values, config)
        own = None
        if block_keys is not None:
            own = Chunk(*(jnp.swapaxes(x, 1, 2)[:, None] for x in block_keys), positions[:, None])
        return attend(q, positions, source, config, causal=causal, block_keys=own)

    np.testing.assert_allclose(
        jax.jit(value)(*args), plain(*args, config, causal), atol=3e-6, rtol=1e-5
    )
    gradient = jax.jit(jax.grad(lambda *args: jnp.sum(value(*args) * weights), range(4)))(*args)
    leaves, tree = jax.tree.flatten(args)
    for seed in range(3):
        direction = [
            np.asarray(normal(10 * seed + i, *x.shape), np.float64) for i, x in enumerate(leaves)
        ]

        def moved(by: float, direction: Any = direction) -> float:
            pairs = zip(leaves, direction, strict=True)
            there = [np.asarray(x, np.float64) + by * d for x, d in pairs]
            out = plain(*jax.tree.unflatten(tree, there), config, causal)
            return float(np.sum(out * np.asarray(weights, np.float64)))

        expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
        parts = zip(jax.tree.leaves(gradient), direction, strict=True)
        found = sum(float(np.sum(np.asarray(g, np.float64) * d)) for g, d in parts)
        assert found == pytest.approx(expected, rel=2e-4, abs=2e-4)


def test_attention_differentiates_twice_in_every_mode() -> None:
    """Forward over reverse, reverse over reverse and forward over forward agree."""
    config = attention()
    q, k, v = (
        normal(1, 2, STEPS, HEADS, DIM),
        normal(2, 2, 300, KV, DIM),
        normal(3, 2, 300, KV, DIM),
    )
    positions = (
        jnp.asarray(LENGTHS, jnp.int32)[:, None] + jnp.arange(-STEPS, 0, dtype=jnp.int32)[None]
    )

    def value(q: jax.Array) -> jax.Array:
        source, _ = dense(k, v, config)
        return jnp.sum(jnp.sin(attend(q, positions, source, config, causal=True)))

    def along(f: Any) -> Any:
        return lambda q: jax.jvp(f, (q,), (normal(7, *q.shape),))[1]

    first = along(value)(q)
    gradient = jax.grad(value)(q)
    assert first == pytest.approx(float(jnp.sum(gradient * normal(7, *q.shape))), rel=1e-4)
    expected = jax.jit(along(jax.grad(value)))(q)
    np.testing.assert_allclose(jax.jit(jax.grad(along(value)))(q), expected, atol=1e-5)
    twice = jax.jit(jax.grad(lambda q: jnp.sum(jax.grad(value)(q) * normal(7, *q.shape))))(q)
    np.testing.assert_allclose(twice, expected, atol=1e-5)
    found = jax.jit(along(along(value)))(q)
    assert found == pytest.approx(float(jnp.sum(expected * normal(7, *q.shape))), rel=1e-3)


def test_a_query_that_sees_no_key_has_the_gradient_zero() -> None:
    config = attention(window=4)
    keys = jnp.full((2, 1, KV, CHUNK, DIM), jnp.nan)
    chunk = Chunk(keys, jnp.zeros_like(keys), jnp.full((2, 1, CHUNK), -1, jnp.int32))
    positions = jnp.zeros((2, STEPS), jnp.int32)

    def value(q: jax.Array, chunk: Chunk) -> jax.Array:
        source = Source(lambda chunk, index, chunks: chunk, chunk, jnp.asarray(1, jnp.int32), 1)
        return jnp.sum(attend(q, positions, source, config, causal=True))

    q = normal(1, 2, STEPS, HEADS, DIM)
    for found in jax.tree.leaves(jax.grad(value, (0, 1), allow_int=True)(q, chunk))[:3]:
        np.testing.assert_array_equal(found, 0)
