"""The attention kernel, interpreted, against float64 and against the XLA path."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdraft.base import NO_PAGE
from jaxdraft.config import FULL_ATTENTION, AttentionConfig
from jaxdraft.kernels import MAX_ROWS
from jaxdraft.kernels import attention as fused
from jaxdraft.nn.attention import attend
from jaxdraft.state import paged, ring
from jaxdraft.state.paged import Chunk, PagedPool, Source
from jaxdraft.state.ring import Ring
from tests.examples import examples

WITHIN = 3e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape of cache and window; lengths, tables and numbers are drawn."""

    kind: str  # dense, paged, sliding (a target's ring) or block (a drafter's ring, and its block)
    steps: int
    page_size: int
    columns: int
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    window: int = FULL_ATTENTION
    softcap: float = 0.0
    splits: int | None = None
    forward: bool = False  # rows of a block see those before them alone

    @property
    def writes(self) -> bool:
        """Whether the rows' own keys are in the cache."""
        return self.kind != "block"

    @property
    def causal(self) -> bool:
        return self.writes or self.forward

    @property
    def config(self) -> AttentionConfig:
        return AttentionConfig(
            heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, rotary_dim=0,
            scale=0.3, window=self.window, softcap=self.softcap,
        )  # fmt: skip

    @property
    def most(self) -> int:
        """The longest row before the window."""
        rolling = self.kind in ("sliding", "block")
        return 90 if rolling else self.page_size * self.columns - self.steps


CASES = {
    "dense": Case("dense", steps=4, page_size=256, columns=1, head_dim=24, heads=6),
    "one_share": Case("dense", steps=1, page_size=40, columns=1, softcap=4.0, splits=1),
    "paged": Case("paged", steps=3, page_size=3, columns=70, batch=3, softcap=4.0, splits=3),
    "widest": Case("paged", steps=MAX_ROWS, page_size=16, columns=5, heads=10, splits=2),
    "sliding": Case("sliding", steps=5, page_size=4, columns=5, window=9),
    "block": Case("block", steps=4, page_size=4, columns=5, window=13, splits=1),
    "block_forward": Case(
        "block", steps=4, page_size=4, columns=5, window=13, splits=2, forward=True
    ),
    "block_pages": Case("block", steps=4, page_size=100, columns=1, splits=2),
}


def source(case: Case, cache: PagedPool | Ring, count: jax.Array) -> Source:
    if isinstance(cache, Ring):
        return ring.reachable(cache, 0, count) if cache.rows else ring.source(cache, 0)
    return paged.source(cache, 0, cache.length + (count if case.writes else 0))


@functools.partial(jax.jit, static_argnames=("case", "kernels"))
def run(
    case: Case,
    kernels: bool,
    q: jax.Array,
    positions: jax.Array,
    cache: PagedPool | Ring,
    count: jax.Array,
    block_keys: Chunk | None,
) -> jax.Array:
    keys = source(case, cache, count)
    if not kernels:
        return attend(q, positions, keys, case.config, causal=case.causal, block_keys=block_keys)
    return fused.attend(
        q,
        positions,
        keys,
        case.config,
        causal=case.causal,
        block_keys=block_keys,
        xla=attend,
        splits=case.splits,
    )


def history(case: Case, rng: np.random.Generator, length: np.ndarray) -> tuple[np.ndarray, ...]:
    """Keys and values [B, S, G, H] of every position there ever was, scratch rows included."""
    shape = (case.batch, case.most + case.steps, case.kv_heads, case.head_dim)
    return tuple(rng.standard_normal((2, *shape)).astype(np.float32))


def filled(
    case: Case, rng: np.random.Generator, k: np.ndarray, v: np.ndarray, length: np.ndarray,
    end: np.ndarray,
) -> PagedPool | Ring:  # fmt: skip
    """A cache of positions below ``end``. Free slots, free pages and rejected rows hold NaN."""
    columns, size = case.columns, case.page_size
    pages = case.batch * columns + (0 if case.kind == "dense" else 2)
    table = rng.permutation(pages)[: case.batch * columns].reshape(case.batch, columns)
    if case.kind == "dense":
        table = np.arange(case.batch)[:, None]
    stored = np.full((2, pages, case.kv_heads, size, case.head_dim), np.nan, np.float32)
    for b in range(case.batch):
        written = int(length[b]) + (case.steps if case.writes else 0)
        for p in range(written):
            page, slot = table[b, p // size % columns], p % size
            rejected = p >= end[b]
            stored[0, page, :, slot] = np.nan if rejected else k[b, p]
            stored[1, page, :, slot] = np.nan if rejected else v[b, p]
        if case.kind == "paged":  # the row owns no more than it needs
            table[b, -(-int(end[b]) // size) :] = NO_PAGE
    same: Any = dict(
        keys=(jnp.asarray(stored[0]),), values=(jnp.asarray(stored[1]),),
        table=jnp.asarray(table, jnp.int32), length=jnp.asarray(length, jnp.int32),
        free=jnp.arange(pages, dtype=jnp.int32), free_count=jnp.asarray(0, jnp.int32),
    )  # fmt: skip
    if case.window == FULL_ATTENTION:
        return PagedPool(**same, dense=case.kind == "dense")
    rows = case.steps if case.kind == "sliding" else 0
    return Ring(**same, window=case.window, rows=rows)


def reference(
    case: Case, q: np.ndarray, positions: np.ndarray, keys: list[list[tuple[int, Any, Any]]]
) -> np.ndarray:
    """Attention in float64, one query after the other, over (position, key, value) of each row."""
    out = np.zeros(q.shape)
    share = case.heads // case.kv_heads
    for b, t, n in np.ndindex(q.shape[:3]):
        at, g = positions[b, t], n // share
        seen = [
            (k[g].astype(np.float64), v[g].astype(np.float64))
            for p, k, v in keys[b]
            if (not case.causal or p <= at)
            and (case.window == FULL_ATTENTION or p > at - case.window)
        ]
        if not seen:
            continue
        scores = np.array([q[b, t, n].astype(np.float64) @ k for k, _ in seen]) * case.config.scale
        if case.softcap:
            scores = case.softcap * np.tanh(scores / case.softcap)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = (weights / weights.sum()) @ np.array([v for _, v in seen])
    return out.reshape(*q.shape[:2], -1)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=examples(6))
@given(data=st.data(), seed=st.integers(0, 2**31 - 1))
def test_kernel_equals_float64_and_the_xla_path(name: str, data: st.DataObject, seed: int) -> None:
    """Ragged lengths, wrapped rings, zero counts, rows without keys, NaN wherever no key lies."""
    case = CASES[name]
    rng = np.random.default_rng(seed)
    rows = dict(min_size=case.batch, max_size=case.batch)
    length = np.array(data.draw(st.lists(st.integers(0, case.most), **rows)))
    count = np.array(data.draw(st.lists(st.integers(0, case.steps), **rows)))
    end = length + (count if case.writes else 0)
    k, v = history(case, rng, length)
    cache = filled(case, rng, k, v, length, end)
    oldest = np.zeros_like(length)
    if isinstance(cache, Ring) and not cache.rows:
        oldest = np.maximum(length - cache.slots, 0)
    keys = [[(p, k[b, p], v[b, p]) for p in range(oldest[b], end[b])] for b in range(case.batch)]
    positions = length[:, None] + np.arange(case.steps)
    block_keys = None
    if case.kind == "block":
        block = rng.standard_normal((2, case.batch, case.steps, case.kv_heads, case.head_dim))
        block = block.astype(np.float32)
        for b in range(case.batch):
            keys[b] += list(zip(positions[b], block[0, b], block[1, b], strict=True))
        shaped = (jnp.asarray(np.swapaxes(x, 1, 2)[:, None]) for x in block)
        block_keys = Chunk(*shaped, jnp.asarray(positions[:, None], jnp.int32))
    q = rng.standard_normal((case.batch, case.steps, case.heads, case.head_dim))
    q = q.astype(np.float32)
    arguments = (jnp.asarray(q), jnp.asarray(positions, jnp.int32), cache, jnp.asarray(count))
    found = run(case, True, *arguments, block_keys)
    np.testing.assert_allclose(found, reference(case, q, positions, keys), atol=WITHIN, rtol=0)
    expected = run(case, False, *arguments, block_keys)
    np.testing.assert_allclose(found, expected, atol=WITHIN, rtol=0)


def window(case: Case, seed: int, *batches: int) -> tuple[jax.Array, jax.Array, Any, jax.Array]:
    """Queries, positions, cache and count, with leading axes ``batches``."""
    made = []
    for i in range(int(np.prod(batches))):
        rng = np.random.default_rng([seed, i])
        length = rng.integers(1, case.most, case.batch)
        k, v = history(case, rng, length)
        cache = filled(case, rng, k, v, length, length + case.steps)
        q = rng.standard_normal((case.batch, case.steps, case.heads, case.head_dim))
        positions = length[:, None] + np.arange(case.steps)
        count = np.full(case.batch, case.steps)
        made.append(
            (jnp.asarray(q, jnp.float32), jnp.asarray(positions, jnp.int32), cache,
             jnp.asarray(count, jnp.int32))
        )  # fmt: skip
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *made)
    return jax.tree.map(lambda x: x.reshape(*batches, *x.shape[1:]), stacked)


def test_vmap_equals_one_call_after_the_other() -> None:
    case = CASES["sliding"]
    many = window(case, 0, 3)
    found = jax.vmap(lambda *x: run(case, True, *x, None))(*many)
    for i in range(3):
        one = run(case, True, *jax.tree.map(lambda x, i=i: x[i], many), None)
        np.testing.assert_array_equal(found[i], one)


def test_gradients_are_those_of_the_xla_path() -> None:
    case = dataclasses.replace(CASES["widest"], steps=2)  # 80 slots: one chunk of the XLA path
    q, positions, cache, count = jax.tree.map(lambda x: x[0], window(case, 1, 1))
    cache = cache.replace(
        keys=(jnp.nan_to_num(cache.keys[0]),), values=(jnp.nan_to_num(cache.values[0]),)
    )

    def loss(kernels: bool, q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        held = cache.replace(keys=(keys,), values=(values,))
        return jnp.sum(jnp.sin(run(case, kernels, q, positions, held, count, None)))

    arguments = (q, cache.keys[0], cache.values[0])
    found, expected = (
        jax.grad(functools.partial(loss, kernels), argnums=(0, 1, 2))(*arguments)
        for kernels in (True, False)
    )
    for a, b in zip(found, expected, strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, atol=WITHIN, rtol=0)


def test_wide_windows_and_keys_without_pages_take_the_xla_path() -> None:
    case = CASES["dense"]
    q, _, cache, count = jax.tree.map(lambda x: x[0], window(case, 2, 1))
    keys = source(case, cache, count)
    assert fused.serves(q, keys)
    assert not fused.serves(jnp.zeros((1, MAX_ROWS + 1, 4, 16)), keys)
    assert not fused.serves(q, keys._replace(span=None))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rounds_once_per_product(dtype: str) -> None:
    """Within a few units of the last place of the float64 result over the rounded numbers."""
    case = CASES["dense"]
    q, positions, cache, count = jax.tree.map(lambda x: x[0], window(case, 3, 1))
    half = functools.partial(jax.tree.map, lambda x: x.astype(dtype))
    halved = cache.replace(keys=half(cache.keys), values=half(cache.values))
    wide = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))
    rounded = cache.replace(keys=wide(halved.keys), values=wide(halved.values))
    found = run(case, True, half(q), positions, halved, count, None)
    expected = run(case, False, wide(half(q)), positions, rounded, count, None)
    assert found.dtype == dtype
    within = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=within, rtol=0)
