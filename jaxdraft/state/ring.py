"""A bounded window of keys and values: R pages a row, used round and round.

Position p of a row lives in column ``(p // Z) % R`` of its table, so a ring of ``W = R * Z`` slots always
holds the last W positions. What a query may see is decided by positions, never by slots: a query
at position q sees keys in ``(q - window, ...]``, itself counted.

Only rows made from committed hidden states enter a ring. The drafter's block attends to its own
keys beside the ring and leaves nothing in it, so no rejected row can ever be read back.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxdraft.base import NO_PAGE
from jaxdraft.state.paged import Chunk, Source, hide


def ring_pages(window: int, block: int, page_size: int) -> int:
    """R: pages of one row's ring, ``ceil((window + 2 * block) / Z) + 1``.

    A block's queries reach ``window - 1`` positions back; the rest of the reservation (the block's own
    rows, a block of ingested rows, a partly used page) is the reference runtime's, and
    :mod:`jaxdraft.state.budget` bills it.
    """
    return -(-(window + 2 * block) // page_size) + 1


@struct.dataclass
class Ring:
    """Rings of all rows, for every layer."""

    keys: tuple[jax.Array, ...]  # L x [P, G, Z, H]
    values: tuple[jax.Array, ...]  # L x [P, G, Z, H]
    table: jax.Array  # [B, R] int32, NO_PAGE where a row has no ring
    length: jax.Array  # [B] int32, positions ingested so far
    window: int = struct.field(pytree_node=False)
    dense: bool = struct.field(pytree_node=False, default=False)
    """Row b owns pages b * R .. b * R + R - 1: no table needs to be read."""

    @property
    def page_size(self) -> int:
        """Z."""
        return self.keys[0].shape[2]

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
        pages = ring_pages(window, block, page_size)
        shape = (batch * pages, kv_heads, page_size, head_dim)
        return cls(
            keys=tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
            values=tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
            table=jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages),
            length=jnp.zeros((batch,), jnp.int32),
            window=window,
            dense=True,
        )


def write(
    ring: Ring,
    keys: tuple[jax.Array, ...],
    values: tuple[jax.Array, ...],
    first: jax.Array,
    count: jax.Array,
) -> Ring:
    """Take in rows ``t < count[b]`` at positions ``first[b] + t`` and move ``length`` behind them.

    Rows that no later query can reach (more than ``window - 1`` before the new end) are dropped. What
    is left is at most ``window - 1 <= W`` rows, so no two land in one slot, and the result does not
    depend on the order of a scatter (jax-ml/jax#12359).

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

    return ring.replace(
        keys=tuple(map(put, ring.keys, keys)),
        values=tuple(map(put, ring.values, values)),
        length=jnp.where(count > 0, end, ring.length),
    )


def source(ring: Ring, layer: int) -> Source:
    """Everything one layer's rings hold, as attention reads it (the window is attention's to apply)."""
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
