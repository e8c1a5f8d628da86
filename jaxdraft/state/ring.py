"""A bounded window of keys and values: R pages a row, used round and round.

Position p of a row lives in column ``(p // Z) % R`` of its table, so a ring of ``W = R * Z`` slots
always holds the last W positions. What a query may see is decided by positions, never by slots: a
query at position q sees keys in ``(q - window, ...]``, itself counted.

Only rows made from committed hidden states enter a ring. The drafter's block attends to its own
keys beside the ring and leaves nothing in it, so no rejected row can ever be read back.
"""

from __future__ import annotations

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxdraft.base import NO_PAGE
from jaxdraft.state import paged
from jaxdraft.state.budget import ring_pages
from jaxdraft.state.paged import Chunk, Source, hide


@struct.dataclass
class Ring:
    """Rings for every layer: one a row for good, or a pool of them that rows take and give back.

    A pool is the same pages behind a table that :func:`admit` fills from a stack, a whole ring at a
    time, and :func:`jaxdraft.state.paged.release` blanks. Its laws are those of a paged pool.
    """

    keys: tuple[jax.Array, ...]  # L x [P, G, Z, H]
    values: tuple[jax.Array, ...]  # L x [P, G, Z, H]
    table: jax.Array  # [B, R] int32, NO_PAGE where a row has no ring
    length: jax.Array  # [B] int32, positions ingested so far
    free: jax.Array  # [P] int32: entries below free_count are the free pages
    free_count: jax.Array  # [] int32
    window: int = struct.field(pytree_node=False)
    dense: bool = struct.field(pytree_node=False, default=False)
    """Row b owns pages b * R .. b * R + R - 1: no table needs to be read."""

    @property
    def page_size(self) -> int:
        """Z."""
        return self.keys[0].shape[2]

    @property
    def pages(self) -> int:
        """P."""
        return self.free.shape[0]

    @property
    def slots(self) -> int:
        """W = R * Z."""
        return self.table.shape[1] * self.page_size

    @classmethod
    def zeros(
        cls,
        *,
        layers: int,
        batch: int,
        window: int,
        block: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
    ) -> Ring:
        """A ring for every row, empty."""
        ring = cls.pool(
            layers=layers,
            batch=batch,
            rings=batch,
            window=window,
            block=block,
            page_size=page_size,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
        )
        return replace(
            ring,
            table=jnp.arange(ring.pages, dtype=jnp.int32).reshape(ring.table.shape),
            free_count=jnp.asarray(0, jnp.int32),
            dense=True,
        )

    @classmethod
    def pool(
        cls,
        *,
        layers: int,
        batch: int,
        rings: int,
        window: int,
        block: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
    ) -> Ring:
        """``rings`` rings of R pages, all free; no row has one.

        Args:
          layers: L.
          batch: B; more rows than rings are fine, some will find none.
          rings: rings in the pool.
          window: positions a query sees, itself counted.
          block: query rows of a block, Q.
          page_size: Z.
          kv_heads: G.
          head_dim: H.
          dtype: of keys and values.
        """
        columns = ring_pages(window, block, page_size)
        pages = rings * columns
        shape = (pages, kv_heads, page_size, head_dim)
        return cls(
            keys=tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
            values=tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
            table=jnp.full((batch, columns), NO_PAGE, jnp.int32),
            length=jnp.zeros((batch,), jnp.int32),
            # The stack is taken from its end, so page 0 goes out first.
            free=jnp.arange(pages - 1, -1, -1, dtype=jnp.int32),
            free_count=jnp.asarray(pages, jnp.int32),
            window=window,
        )


def admit(ring: Ring, rows: jax.Array) -> tuple[Ring, jax.Array]:
    """Give a ring to every row where ``rows`` [B] is true: all of its pages, or none.

    Rows are served in order; one that has a ring keeps it.

    Returns:
      The rings, and [B] bool: false where a row asked and no ring was left.
    """
    # A whole ring is what `slots` positions need: R pages, since a row owns either all or none.
    return paged.grow(ring, jnp.where(rows, ring.slots, 0))


def write(
    ring: Ring,
    keys: tuple[jax.Array, ...],
    values: tuple[jax.Array, ...],
    first: jax.Array,
    count: jax.Array,
) -> Ring:
    """Take in rows ``t < count[b]`` at positions ``first[b] + t`` and move ``length`` behind them.

    Rows that no later query can reach (more than ``window - 1`` before the new end) are dropped.
    What is left is at most ``window - 1 <= W`` rows, so no two land in one slot, and the result
    does not depend on the order of a scatter (jax-ml/jax#12359).

    Args:
      ring: the rings.
      keys: L x [B, T, G, H].
      values: L x [B, T, G, H].
      first: [B] int32.
      count: [B] int32; zero leaves the row as it was.
    """
    chex.assert_equal_shape([first, count, ring.length])
    if not keys:
        return ring
    step = jnp.arange(keys[0].shape[1])[None]
    end = first + count
    position = first[:, None] + step
    kept = (step < count[:, None]) & (position > end[:, None] - ring.window)
    # Example, Z = 4, R = 3: position 13 is slot 13 % 12 = 1, column 0, slot 1 of that page.
    slot = position % ring.slots
    page = jnp.take_along_axis(ring.table, slot // ring.page_size, axis=1, mode="clip")
    page = jnp.where(kept, page, NO_PAGE)
    offset = slot % ring.page_size

    def put(pages: jax.Array, rows: jax.Array) -> jax.Array:
        return pages.at[page, :, offset].set(rows.astype(pages.dtype), mode="drop")

    return replace(
        ring,
        keys=tuple(map(put, ring.keys, keys)),
        values=tuple(map(put, ring.values, values)),
        length=jnp.where(count > 0, end, ring.length),
    )


def source(ring: Ring, layer: int) -> Source:
    """All that one layer's rings hold, as attention reads it, which applies the window."""
    batch, pages = ring.table.shape
    slot = jnp.arange(ring.slots, dtype=jnp.int32)[None]
    # The last position below `length` that lives in this slot, negative if there was none yet.
    # Example, W = 12, length = 14: slot 1 holds 13, slot 2 holds 2.
    last = ring.length[:, None] - 1
    position = last - (last - slot) % ring.slots
    position = jnp.where(position >= 0, position, -1).reshape(batch, pages, -1)

    def read(index: jax.Array) -> Chunk:
        del index  # one chunk: a ring is small
        if ring.dense:
            shape = (batch, pages, *ring.keys[layer].shape[1:])
            keys, values = (x.reshape(shape) for x in (ring.keys[layer], ring.values[layer]))
        else:
            keys = jnp.take(ring.keys[layer], ring.table, axis=0, mode="clip")
            values = jnp.take(ring.values[layer], ring.table, axis=0, mode="clip")
        return hide(keys, values, position)

    return Source(read, jnp.asarray(1, jnp.int32), 1)


__all__ = ["Ring", "admit", "ring_pages", "source", "write"]
