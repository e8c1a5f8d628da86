"""A ring reads what the full history would read under the window."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdraft.config import AttentionConfig
from jaxdraft.nn.attention import attend
from jaxdraft.state import ring
from jaxdraft.state.ring import Ring, ring_pages
from tests.state.test_paged import numpy_attention

HEADS, DIM, BATCH, MOST = 2, 8, 2, 24
CONFIG = AttentionConfig(heads=4, kv_heads=HEADS, head_dim=DIM, rotary_dim=0, scale=0.3, window=9)

write = jax.jit(ring.write)


def rings(page_size: int, window: int = 9, block: int = 4) -> Ring:
    return Ring.zeros(
        layers=1, batch=BATCH, window=window, block=block, page_size=page_size,
        kv_heads=HEADS, head_dim=DIM, dtype=jnp.float32,
    )  # fmt: skip


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
