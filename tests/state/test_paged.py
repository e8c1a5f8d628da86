"""The paged pool against a plain Python model of it, and attention over it against numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdraft.base import NO_PAGE
from jaxdraft.config import AttentionConfig, KvShape
from jaxdraft.nn.attention import attend
from jaxdraft.state import paged
from jaxdraft.state.paged import PagedPool
from jaxdraft.testing import check_pool

BATCH, PAGES, SIZE, COLUMNS = 4, 10, 4, 6
HEADS, DIM = 2, 8
CONFIG = AttentionConfig(heads=4, kv_heads=HEADS, head_dim=DIM, rotary_dim=0, scale=0.3)
SHAPE = KvShape(layers=1, kv_heads=HEADS, head_dim=DIM, dtype=jnp.float32)

grow = jax.jit(paged.grow)
release = jax.jit(paged.release)
write = jax.jit(paged.write, static_argnums=1)


def empty(pages: int = PAGES) -> PagedPool:
    return PagedPool.zeros(SHAPE, batch=BATCH, pages=pages, page_size=SIZE, columns=COLUMNS)


class PythonPool:
    """What the pool is supposed to do, in lists."""

    def __init__(self) -> None:
        self.owned: list[list[int]] = [[] for _ in range(BATCH)]
        self.free = PAGES

    def grow(self, positions: list[int]) -> list[bool]:
        granted = []
        for row, p in enumerate(positions):
            need = max(0, -(-p // SIZE) - len(self.owned[row]))
            fits = -(-p // SIZE) <= COLUMNS and need <= self.free
            if fits:
                self.owned[row] += [0] * need
                self.free -= need
            granted.append(fits)
        return granted

    def release(self, rows: list[bool]) -> None:
        for row, gone in enumerate(rows):
            if gone:
                self.free += len(self.owned[row])
                self.owned[row] = []


step = st.one_of(
    st.tuples(
        st.just("grow"),
        st.lists(st.integers(0, COLUMNS * SIZE + 5), min_size=BATCH, max_size=BATCH),
    ),
    st.tuples(st.just("release"), st.lists(st.booleans(), min_size=BATCH, max_size=BATCH)),
)


@given(st.lists(step, max_size=25))
def test_pool_follows_the_python_model(steps: list[tuple[str, list]]) -> None:
    pool, model = empty(), PythonPool()
    for kind, rows in steps:
        if kind == "grow":
            pool, granted = grow(pool, jnp.asarray(rows, jnp.int32))
            assert granted.tolist() == model.grow(rows)
        else:
            pool = release(pool, jnp.asarray(rows))
            model.release(rows)
        assert paged.owned(pool).tolist() == [len(pages) for pages in model.owned]
        assert int(pool.free_count) == model.free
        check_pool(pool)


def test_release_twice_is_release_once() -> None:
    pool, _ = grow(empty(), jnp.full((BATCH,), 5, jnp.int32))
    rows = jnp.asarray([True, False, True, False])
    once = release(pool, rows)
    twice = release(once, rows)
    jax.tree.map(np.testing.assert_array_equal, once, twice)
    # The next allocations never give one page to two rows.
    again, granted = grow(twice, jnp.full((BATCH,), 8, jnp.int32))
    assert granted.all()
    check_pool(again)


def test_no_page_is_never_the_last_page() -> None:
    """A write through a blank table, or by an inactive row, touches nothing."""
    pool = empty()
    pool = pool.replace(keys=(jnp.full_like(pool.keys[0], 9.0),), values=pool.keys)
    pool, granted = grow(pool, jnp.asarray([1, 0, 0, 0], jnp.int32))
    rows = jnp.ones((BATCH, 3, HEADS, DIM))
    count = jnp.asarray([1, 3, 0, 2], jnp.int32)  # rows 1 and 3 own no page
    after = write(pool, 0, rows, rows, count)
    changed = np.flatnonzero((np.asarray(after.keys[0]) != 9.0).any(axis=(1, 3)).any(axis=1))
    page = int(pool.table[0, 0])
    assert changed.tolist() == [page]
    assert (np.asarray(after.keys[0])[page, :, 0] == 1.0).all()
    assert (np.asarray(after.keys[0])[page, :, 1:] == 9.0).all()


def test_writes_past_the_table_are_dropped() -> None:
    pool, _ = grow(empty(), jnp.asarray([COLUMNS * SIZE, 0, 0, 0], jnp.int32))
    pool = pool.replace(length=jnp.asarray([COLUMNS * SIZE - 1, 0, 0, 0], jnp.int32))
    rows = jnp.ones((BATCH, 3, HEADS, DIM))
    after = write(pool, 0, rows, rows, jnp.asarray([3, 0, 0, 0], jnp.int32))
    assert int((np.asarray(after.keys[0]) != 0).any(axis=(1, 3)).sum()) == 1


def test_more_rows_than_a_dense_pool_has_room_for_do_not_slide_back() -> None:
    """A window of 200 rows, of which five count, at 150 of 256 slots."""
    pool = PagedPool.one_page_per_row(SHAPE, batch=2, capacity=paged.room(128, 128))
    pool = pool.replace(length=jnp.asarray([150, 0], jnp.int32))
    rows = jnp.ones((2, 200, HEADS, DIM))
    after = write(pool, 0, rows, rows, jnp.asarray([5, 0], jnp.int32))
    touched = np.flatnonzero((np.asarray(after.keys[0][0]) != 0).any(axis=(0, 2)))
    assert touched.tolist() == list(range(150, 155))
    assert not np.asarray(after.keys[0][1]).any()


def numpy_attention(q, k, v, positions, length, *, causal, window):  # noqa: ANN001, ANN202
    out = np.zeros(q.shape)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            p = positions[b, t]
            keys = [
                j
                for j in range(length[b])
                if (not causal or j <= p) and (window < 0 or j > p - window)
            ]
            for n in range(q.shape[2]):
                if not keys:
                    continue
                g = n // (q.shape[2] // HEADS)
                s = np.array([q[b, t, n] @ k[b, j, g] for j in keys]) * CONFIG.scale
                w = np.exp(s - s.max())
                out[b, t, n] = (w / w.sum()) @ np.array([v[b, j, g] for j in keys])
    return out.reshape(*q.shape[:2], -1)


def filled(kind: str, keys: np.ndarray, values: np.ndarray, seed: int) -> PagedPool:
    """All rows written in pieces into a pool of one page a row, or of shuffled pages."""
    batch, total = keys.shape[:2]
    if kind == "dense":
        pool = PagedPool.one_page_per_row(SHAPE, batch=batch, capacity=paged.room(total, 8))
    else:
        size = 16
        columns = -(-total // size) + 1
        pool = PagedPool.zeros(
            SHAPE, batch=batch, pages=batch * columns, page_size=size, columns=columns
        )
        order = jax.random.permutation(jax.random.key(seed), batch * columns)
        pool = pool.replace(free=order.astype(jnp.int32))
        pool, granted = grow(pool, jnp.full((batch,), total, jnp.int32))
        assert granted.all()
    for start in range(0, total, 8):
        part = slice(start, start + 8)
        count = jnp.full((batch,), min(8, total - start), jnp.int32)
        k, v = (np.zeros((batch, 8, HEADS, DIM), np.float32) for _ in range(2))
        k[:, : min(8, total - start)], v[:, : min(8, total - start)] = (
            keys[:, part],
            values[:, part],
        )
        pool = write(pool, 0, jnp.asarray(k), jnp.asarray(v), count)
        pool = pool.replace(length=pool.length + count)
    return pool


@functools.partial(jax.jit, static_argnames=("causal", "window"))
def read(
    pool: PagedPool,
    q: jax.Array,
    positions: jax.Array,
    length: jax.Array,
    causal: bool,
    window: int,
) -> jax.Array:  # noqa: E501
    import dataclasses

    config = dataclasses.replace(CONFIG, window=window)
    return attend(q, positions, paged.source(pool, 0, length), config, causal=causal)


@pytest.mark.parametrize("kind", ["dense", "pages"])
@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("window", [-1, 7, 140])
def test_attention_reads_what_was_written(kind: str, batch: int, window: int) -> None:
    """Ragged lengths over several chunks, every layout, with and without a window."""
    rng = np.random.default_rng(batch)
    total = 300
    keys, values = rng.standard_normal((2, batch, total, HEADS, DIM)).astype(np.float32)
    length = rng.integers(1, total + 1, batch).astype(np.int32)
    length[0] = total
    steps = 5
    positions = np.maximum(length[:, None] - steps + np.arange(steps)[None], 0).astype(np.int32)
    q = rng.standard_normal((batch, steps, 4, DIM)).astype(np.float32)
    pool = filled(kind, keys, values, seed=3)
    for causal in (True, False):
        found = read(
            pool, jnp.asarray(q), jnp.asarray(positions), jnp.asarray(length), causal, window
        )
        expected = numpy_attention(q, keys, values, positions, length, causal=causal, window=window)
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_where_pages_lie_changes_nothing() -> None:
    """Bit-equal reads under any permutation of the pages."""
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, 2, 50, HEADS, DIM)).astype(np.float32)
    q = jnp.asarray(rng.standard_normal((2, 3, 4, DIM)), jnp.float32)
    length = jnp.asarray([50, 31], jnp.int32)
    positions = length[:, None] - 3 + jnp.arange(3)[None]
    reads = [
        read(filled("pages", keys, values, seed), q, positions, length, True, -1)
        for seed in range(3)
    ]
    np.testing.assert_array_equal(reads[0], reads[1])
    np.testing.assert_array_equal(reads[0], reads[2])


def test_a_query_without_keys_gives_zeros() -> None:
    pool = empty()
    q = jnp.ones((BATCH, 2, 4, DIM))
    zero = jnp.zeros((BATCH,), jnp.int32)
    out = read(pool, q, jnp.zeros((BATCH, 2), jnp.int32), zero, True, -1)
    np.testing.assert_array_equal(out, np.zeros_like(out))


def test_sentinel_is_past_every_pool() -> None:
    assert NO_PAGE >= 2**30 and NO_PAGE < 2**31
