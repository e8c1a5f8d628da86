"""A ring reads what the full history would read under the window."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdraft.config import AttentionConfig, KvShape
from jaxdraft.nn.attention import attend
from jaxdraft.state import paged, ring
from jaxdraft.state.ring import Ring, ring_pages, window_pages
from tests.examples import examples
from tests.oracle.ops import attend as reference
from tests.oracle.ops import visible_keys
from tests.state.test_paged import numpy_attention

HEADS, DIM, BATCH, MOST = 2, 8, 2, 24
CONFIG = AttentionConfig(heads=4, kv_heads=HEADS, head_dim=DIM, rotary_dim=0, scale=0.3, window=9)
SHAPE = KvShape(layers=1, kv_heads=HEADS, head_dim=DIM, dtype=jnp.float32)

write = jax.jit(ring.write)


def rings(page_size: int, window: int = 9, block: int = 4) -> Ring:
    return Ring.zeros(SHAPE, batch=BATCH, window=window, block=block, page_size=page_size)


@functools.partial(jax.jit, static_argnames="window")
def read(cache: Ring, q: jax.Array, positions: jax.Array, window: int) -> jax.Array:
    config = dataclasses.replace(CONFIG, window=window)
    return attend(q, positions, ring.source(cache, 0), config, causal=False)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("dense", [True, False])
@given(data=st.data(), seed=st.integers(0, 2**31 - 1))
def test_ring_reads_what_the_full_history_would(
    page_size: int, dense: bool, data: st.DataObject, seed: int
) -> None:
    """Random splits of up to 120 rows: several wraps of a ring of 18 to 48 slots."""
    rng = np.random.default_rng(seed)
    sizes = data.draw(
        st.lists(
            st.lists(st.integers(0, MOST), min_size=1, max_size=5), min_size=BATCH, max_size=BATCH
        )
    )  # noqa: E501
    cache = rings(page_size)
    if not dense:  # the same rings behind a shuffled table
        table = rng.permutation(cache.table.size).reshape(cache.table.shape)
        cache = cache.replace(table=jnp.asarray(table, jnp.int32), dense=False)
    keys, values = rng.standard_normal((2, BATCH, 5 * MOST, HEADS, DIM)).astype(np.float32)
    at = np.zeros(BATCH, np.int32)
    for call in range(5):
        count = np.asarray([row[call] if call < len(row) else 0 for row in sizes], np.int32)
        part = [
            np.stack(
                [
                    x[b, at[b] : at[b] + MOST]
                    if at[b] + MOST <= 5 * MOST
                    else np.resize(x[b, at[b] :], (MOST, HEADS, DIM))
                    for b in range(BATCH)
                ]
            )
            for x in (keys, values)
        ]  # noqa: E501
        cache = write(
            cache,
            (jnp.asarray(part[0]),),
            (jnp.asarray(part[1]),),
            jnp.asarray(at),
            jnp.asarray(count),
        )  # noqa: E501
        at = at + count  # a new array: jnp.asarray may have borrowed the old one
    np.testing.assert_array_equal(cache.length, at)
    positions = at[:, None] + np.arange(4)[None]
    q = rng.standard_normal((BATCH, 4, 4, DIM)).astype(np.float32)
    found = read(cache, jnp.asarray(q), jnp.asarray(positions, jnp.int32), 9)
    expected = numpy_attention(q, keys, values, positions, at, causal=False, window=9)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_one_call_and_many_leave_the_same_ring() -> None:
    """1000 rows into a ring of 256 slots: only the last that fit are written, once each."""
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.standard_normal((BATCH, 1000, HEADS, DIM)), jnp.float32)
    cache = rings(64, window=130, block=8)
    count = jnp.full((BATCH,), 1000, jnp.int32)
    whole = write(cache, (rows,), (rows,), 0 * count, count)
    pieces = cache
    for start in range(0, 1000, 100):
        part = (rows[:, start : start + 100],)
        first = jnp.full((BATCH,), start, jnp.int32)
        pieces = write(pieces, part, part, first, jnp.full((BATCH,), 100, jnp.int32))
    q = jnp.ones((BATCH, 1, 4, DIM))
    at = count[:, None]
    np.testing.assert_array_equal(read(whole, q, at, 130), read(pieces, q, at, 130))


@pytest.mark.parametrize(
    ("window", "block", "page", "pages"),
    [
        (2048, 8, 16, 130),  # ceil(2064 / 16) + 1
        (2048, 8, 256, 10),  # ceil(2064 / 256) + 1
        (40, 8, 16, 5),  # ceil(56 / 16) + 1
        (8, 4, 4, 5),
    ],
)
def test_ring_pages(window: int, block: int, page: int, pages: int) -> None:
    assert ring_pages(window, block, page) == pages
    # Every query of a block reaches window - 1 rows back: they fit with the block beside them.
    assert pages * page >= window - 1 + block


# ------------------------------------------------------------------ a target's rings

ROWS = 4


@jax.jit
def step(
    cache: Ring, q: jax.Array, keys: jax.Array, values: jax.Array, count: jax.Array
) -> tuple[Ring, jax.Array]:
    """Put rows, and attend from all of them."""
    cache = ring.put(cache, 0, keys, values, count)
    positions = cache.length[:, None] + jnp.arange(ROWS, dtype=jnp.int32)[None]
    return cache, attend(q, positions, ring.reachable(cache, 0, count), CONFIG, causal=True)


commit = jax.jit(ring.commit)
grow = jax.jit(ring.grow)
put = jax.jit(lambda cache, *rows: ring.put(cache, 0, *rows))


def target_rings(page_size: int, columns: int | None = None) -> Ring:
    """Rings for a window of 9 and four rows at once; or of so many columns."""
    cache = Ring.zeros(SHAPE, batch=BATCH, window=9, rows=ROWS, page_size=page_size)
    return cache if columns is None else cache.replace(table=cache.table[:, :columns])


def drive(caches: list[Ring], steps: list[list[int]], seed: int) -> float:
    """Calls of which ``steps[call][b]`` rows are committed: how far what these see is from the full
    history, over all calls and caches. Others are rejected: in every other call finite ones are
    read with the rest, and before every call a pass of NaN is dropped as a whole.
    """
    rng = np.random.default_rng(seed)
    total = ROWS * len(steps)
    keys, values = rng.standard_normal((2, BATCH, total, HEADS, DIM)).astype(np.float32)
    q = rng.standard_normal((BATCH, ROWS, 4, DIM)).astype(np.float32)
    nan = jnp.full((BATCH, ROWS, HEADS, DIM), jnp.nan)
    full = jnp.full((BATCH,), ROWS, jnp.int32)
    at, worst = np.zeros(BATCH, np.int32), 0.0
    for call, kept in enumerate(np.asarray(steps, np.int32)):
        k, v = rng.standard_normal((2, BATCH, ROWS, HEADS, DIM)).astype(np.float32)
        for b, n in enumerate(kept):
            k[b, :n], v[b, :n] = (x[b, at[b] : at[b] + n] for x in (keys, values))
        count = jnp.asarray(kept) if call % 2 else full
        outs = []
        for i, cache in enumerate(caches):
            cache = put(cache, nan, nan, full)
            cache, out = step(cache, *map(jnp.asarray, (q, k, v)), count)
            caches[i] = commit(cache, jnp.asarray(kept))
            outs.append(np.asarray(out))
        for b, n in enumerate(kept):
            if not n:
                continue
            end = at[b] + n
            seen = visible_keys(np.arange(at[b], end), end, causal=True, window=9)
            past = (x[b, :end] for x in (keys, values))
            expected = reference(q[b, :n], *past, seen, scale=CONFIG.scale).reshape(n, 4 * DIM)
            for out in outs:
                error = np.abs(out[b, :n] - expected).max(initial=0.0)
                worst = max(worst, np.inf if np.isnan(error) else float(error))
        at = at + kept
    return worst


SPLITS = st.lists(
    st.lists(st.integers(0, ROWS), min_size=BATCH, max_size=BATCH), min_size=12, max_size=12
)


@settings(max_examples=examples(10))
@pytest.mark.parametrize("page_size", [1, 4, 16])
@given(steps=SPLITS, seed=st.integers(0, 2**31 - 1))
def test_a_target_reads_what_the_full_history_would(
    page_size: int, steps: list[list[int]], seed: int
) -> None:
    """Any number of committed and of rejected rows, over shuffled pages that come one by one."""
    cache = target_rings(page_size)
    order = np.random.default_rng(seed).permutation(cache.pages)
    pool = Ring.pool(
        SHAPE, batch=BATCH, rings=BATCH, window=9, rows=ROWS, page_size=page_size
    ).replace(free=jnp.asarray(order, jnp.int32))
    assert pool.slots == cache.slots >= 9 + ROWS - 1
    grown, granted = grow(pool, jnp.full((BATCH,), 10**6, jnp.int32))
    assert granted.all()
    assert drive([cache, grown], steps, seed) < 2e-6


@pytest.mark.parametrize("page_size", [1, 4])
def test_window_and_rows_less_one_are_slots_enough_and_the_least(page_size: int) -> None:
    """Every row of a call reaches eight positions back while four are written: twelve slots. With
    fewer, rows that are rejected overwrite what the next ones still see.
    """
    always_wrong = [[1, 1]] * 24
    least = 12 // page_size
    assert drive([target_rings(page_size, least)], always_wrong, 0) < 2e-6
    assert not drive([target_rings(page_size, least - 1)], always_wrong, 0) < 1e-2
    assert window_pages(9, ROWS, page_size) > least


def test_a_row_takes_pages_as_it_grows_and_never_more_than_its_ring() -> None:
    cache = Ring.pool(SHAPE, batch=BATCH, rings=BATCH, window=9, rows=ROWS, page_size=4)
    for positions, owned in (([3, 0], [1, 0]), ([9, 1], [3, 1]), ([500, 2], [5, 1])):
        cache, granted = grow(cache, jnp.asarray(positions, jnp.int32))
        assert granted.all() and paged.owned(cache).tolist() == owned
    assert int(cache.free_count) == 4


def test_too_many_rows_at_once_are_refused() -> None:
    rows = jnp.zeros((BATCH, ROWS + 1, HEADS, DIM))
    with pytest.raises(
        ValueError, match="5 rows are written.*20 slots.*window of 9 has room for 4"
    ):
        ring.put(target_rings(4), 0, rows, rows, jnp.zeros((BATCH,), jnp.int32))


@pytest.mark.parametrize(
    ("window", "rows", "page", "capacity", "pages"),
    [
        (4096, 128, 256, None, 18),  # ceil(4224 / 256) + 1
        (4096, 128, 256, 2048, 9),  # a context of 2048 and the rows past it: ceil(2176 / 256)
        (4096, 128, 256, 4096, 17),
        (4096, 128, 256, 10**6, 18),
        (12, 16, 16, None, 3),
    ],
)
def test_window_pages(window: int, rows: int, page: int, capacity: int | None, pages: int) -> None:
    assert window_pages(window, rows, page, capacity) == pages
