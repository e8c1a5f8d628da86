"""A bounded window of keys and values: R pages per row, reused cyclically.

Position p of a row lives in column ``(p // Z) % R`` of its table, so a ring of ``W = R * Z`` slots
always holds the last W positions. Visibility is decided by positions, never by slots: a query
at position q sees keys in ``(q - window, ...]``, including its own.

A *drafter's* ring ingests committed rows alone (:func:`write`). Its block attends to its own keys
beside the ring and leaves nothing in it, so no rejected row can ever be read back.

A *target's* ring holds the keys of its layers with a window. Rows are put past ``length`` before it
is known which are accepted (:func:`put`), attention reads them with the keys still in the window
(:func:`reachable`), and :func:`commit` moves ``length``. Up to ``rows`` rows at once: W is at least
``window + rows - 1``, so what they overwrite is behind the window of every row that can still come,
whether they are committed or not. A rejected row is never seen: it is at or past the end until
its slot is written again, and counts as a position behind every window afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct

from jaxdraft.base import NO_PAGE
from jaxdraft.config import KvShape
from jaxdraft.meshes import on_a_mesh, set_in_own_pages, take_own_pages
from jaxdraft.sizes import ring_pages, window_pages
from jaxdraft.state import paged
from jaxdraft.state.paged import CHUNK, Chunk, Source, Span, hide


@struct.dataclass
class Ring:
    """Rings for every layer: one fixed ring per row, or a pool that rows take from.

    A pool is the same pages behind a table that :func:`admit` fills from a stack, a whole ring at a
    time (or :func:`grow`, page by page), and :func:`jaxdraft.state.paged.release` blanks. Its rules
    are those of a paged pool.
    """

    keys: tuple[jax.Array, ...]  # L x [P, G, Z, H]
    values: tuple[jax.Array, ...]  # L x [P, G, Z, H]
    table: jax.Array  # [B, R] int32, NO_PAGE where a row has no ring
    length: jax.Array  # [B] int32, positions ingested or committed so far
    free: jax.Array  # [P] int32: entries below free_count are the free pages
    free_count: jax.Array  # [] int32
    window: int = struct.field(pytree_node=False)
    rows: int = struct.field(pytree_node=False, default=0)
    """Rows that may be put past ``length`` at once; 0 in a drafter's ring."""
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
        shape: KvShape,
        *,
        batch: int,
        window: int,
        block: int = 0,
        rows: int = 0,
        capacity: int | None = None,
        page_size: int,
    ) -> Ring:
        """Return an empty ring for every row."""
        ring = cls.pool(
            shape,
            batch=batch,
            rings=batch,
            window=window,
            block=block,
            rows=rows,
            capacity=capacity,
            page_size=page_size,
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
        shape: KvShape,
        *,
        batch: int,
        rings: int,
        window: int,
        block: int = 0,
        rows: int = 0,
        capacity: int | None = None,
        page_size: int,
    ) -> Ring:
        """Return ``rings`` free rings of R pages; no row has one.

        Args:
          shape: its keys and values.
          batch: B; may exceed the number of rings; some rows then get none.
          rings: rings in the pool.
          window: positions a query sees, including its own.
          block: query rows Q of the block, for a drafter's ring.
          rows: rows that may be put at once, for a target's ring.
          capacity: positions of the longest row, if known.
          page_size: Z.
        """
        columns = window_pages(window, 2 * block + rows, page_size, capacity)
        fields = paged.empty_fields(
            shape, batch=batch, pages=rings * columns, page_size=page_size, columns=columns
        )
        return cls(**fields, window=window, rows=rows)


def admit(ring: Ring, rows: jax.Array) -> tuple[Ring, jax.Array]:
    """Give a ring to every row where ``rows`` [B] is true: all of its pages, or none.

    Rows are served in order; a row that has a ring keeps it.

    Returns:
      The rings, and [B] bool: false where no ring was left for a requested row.
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
    """Ingest rows ``t < count[b]`` at positions ``first[b] + t`` and set ``length`` to their end.

    Rows that no later query can reach (more than ``window - 1`` before the new end) are dropped.
    At most ``window - 1 <= W`` rows remain, so no two share a slot, and the result
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
    step = jnp.arange(keys[0].shape[1], dtype=jnp.int32)[None]
    end = first + count
    position = first[:, None] + step
    kept = (step < count[:, None]) & (position > end[:, None] - ring.window)
    # Example, Z = 4, R = 3: position 13 is slot 13 % 12 = 1, column 0, slot 1 of that page.
    slot = position % ring.slots
    page = jnp.take_along_axis(ring.table, slot // ring.page_size, axis=1, mode="clip")
    page = jnp.where(kept, page, NO_PAGE)
    offset = slot % ring.page_size

    def put(pages: jax.Array, rows: jax.Array) -> jax.Array:
        if ring.dense and on_a_mesh():
            column = jnp.where(kept, slot // ring.page_size, ring.table.shape[1])
            return set_in_own_pages(pages, column, offset, rows)
        return pages.at[page, :, offset].set(rows.astype(pages.dtype), mode="drop")

    return replace(
        ring,
        keys=tuple(map(put, ring.keys, keys)),
        values=tuple(map(put, ring.values, values)),
        length=jnp.where(count > 0, end, ring.length),
    )


def grow(ring: Ring, positions: jax.Array) -> tuple[Ring, jax.Array]:
    """Give each row pages for ``positions`` [B], at most R, or none: see :func:`paged.grow`."""
    return paged.grow(ring, jnp.minimum(positions, ring.slots))


def put(ring: Ring, layer: int, keys: jax.Array, values: jax.Array, count: jax.Array) -> Ring:
    """Write rows ``t < count[b]`` at positions ``length[b] + t`` of one layer, without committing.

    Rows at or past ``count`` are dropped, and so are writes to a page that the row does not
    own.

    Args:
      ring: a target's rings.
      layer: index of the layer.
      keys: [B, T, G, H].
      values: [B, T, G, H].
      count: [B] int32.

    Raises:
      ValueError: T is more than ``ring.rows``: the last rows would overwrite keys that the first
        ones still see.
    """
    chex.assert_equal_shape([keys, values])
    steps = keys.shape[1]
    if steps > ring.rows:
        raise ValueError(
            f"{steps} rows are written at once; a ring of {ring.slots} slots with a window "
            f"of {ring.window} has room for {ring.rows}"
        )
    step = jnp.arange(steps, dtype=jnp.int32)[None]
    # Example, Z = 4, R = 3: position 13 is in column 3 % 3 = 0, slot 1 of that page.
    position = ring.length[:, None] + step
    page = _pages(ring.table, position // ring.page_size)
    page = jnp.where(step < count[:, None], page, NO_PAGE)
    slot = position % ring.page_size

    def into(pages: tuple[jax.Array, ...], rows: jax.Array) -> tuple[jax.Array, ...]:
        if ring.dense and on_a_mesh():
            columns = ring.table.shape[1]
            column = jnp.where(step < count[:, None], position // ring.page_size % columns, columns)
            new = set_in_own_pages(pages[layer], column, slot, rows)
        else:
            new = pages[layer].at[page, :, slot].set(rows.astype(pages[layer].dtype), mode="drop")
        return (*pages[:layer], new, *pages[layer + 1 :])

    return replace(ring, keys=into(ring.keys, keys), values=into(ring.values, values))


def commit(ring: Ring, count: jax.Array) -> Ring:
    """Commit the first ``count[b]`` rows of the last :func:`put`; discard the others."""
    return replace(ring, length=ring.length + count)


def reachable(ring: Ring, layer: int, count: jax.Array) -> Source:
    """Return the keys visible to rows ``length .. length + count - 1`` of one layer, as a source.

    Each row's columns are read starting at its oldest visible key, so the cost depends on the
    window and not on the ring's size.

    Args:
      ring: a target's rings.
      layer: index of the layer.
      count: [B] int32, rows just put.
    """
    size, columns = ring.page_size, ring.table.shape[1]
    take = max(1, min(columns, CHUNK // size))
    oldest = jnp.maximum(ring.length - ring.window + 1, 0)
    end = ring.length + count
    longest = jnp.max(end - oldest // size * size, initial=0)
    data = (ring.keys[layer], ring.values[layer], ring.table, oldest, end)
    read = _reachable_reader(take, ring.dense and on_a_mesh())
    span = Span(ring.keys[layer], ring.values[layer], oldest, end, ring.table)
    return Source(read, data, -(-longest // (take * size)), -(-columns // take), span)


@functools.cache
def _reachable_reader(take: int, by_row: bool) -> Callable[[Any, jax.Array, int], Chunk]:
    """Return the ``read`` of chunks of ``take`` pages; the same object for each call."""
    return functools.partial(_read_reachable, take, by_row)


def _read_reachable(
    take: int, by_row: bool, data: tuple[jax.Array, ...], index: jax.Array, chunks: int
) -> Chunk:
    keys, values, table, oldest, end = data
    size = keys.shape[2]
    # Example, Z = 4, R = 3, window 6, length 13, count 2: keys 8 to 14 are visible, columns 2
    # and 3 hold them, which are columns 2 and 0 of the table.
    first = (oldest // size)[:, None] + index * take
    column = first + jnp.arange(chunks * take, dtype=jnp.int32)[None]
    page = _pages(table, column)  # [B, chunks * take]
    position = column[:, :, None] * size + jnp.arange(size, dtype=jnp.int32)[None, None]
    seen = (position >= oldest[:, None, None]) & (position < end[:, None, None])
    seen = seen & (page != NO_PAGE)[:, :, None]
    if by_row:
        keys, values = (take_own_pages(x, column % table.shape[1]) for x in (keys, values))
    else:
        keys, values = (jnp.take(x, page, axis=0, mode="clip") for x in (keys, values))
    return hide(keys, values, jnp.where(seen, position, -1))


def _pages(table: jax.Array, column: jax.Array) -> jax.Array:
    """Return pages of columns [B, S] of an endless table that repeats ``table``'s R columns."""
    return jnp.take_along_axis(table, column % table.shape[1], axis=1)


def source(ring: Ring, layer: int) -> Source:
    """Return all keys of one layer's rings as a source; attention applies the window."""
    batch, pages = ring.table.shape
    slot = jnp.arange(ring.slots, dtype=jnp.int32)[None]
    # The last position below `length` that lives in this slot, negative if there was none yet.
    # Example, W = 12, length = 14: slot 1 holds 13, slot 2 holds 2.
    last = ring.length[:, None] - 1
    position = last - (last - slot) % ring.slots
    position = jnp.where(position >= 0, position, -1).reshape(batch, pages, -1)

    read = _read_ring if ring.dense else _gather_ring
    data = (ring.keys[layer], ring.values[layer], ring.table, position)
    table = None if ring.dense else ring.table
    oldest = jnp.maximum(ring.length - ring.slots, 0)
    span = Span(ring.keys[layer], ring.values[layer], oldest, ring.length, table)
    return Source(read, data, jnp.asarray(1, jnp.int32), 1, span)


def _read_ring(data: tuple[jax.Array, ...], index: jax.Array, chunks: int) -> Chunk:
    del index, chunks  # one chunk: a ring is small
    keys, values, table, position = data
    shape = (*table.shape, *keys.shape[1:])
    return hide(keys.reshape(shape), values.reshape(shape), position)


def _gather_ring(data: tuple[jax.Array, ...], index: jax.Array, chunks: int) -> Chunk:
    del index, chunks
    keys, values, table, position = data
    keys = jnp.take(keys, table, axis=0, mode="clip")
    values = jnp.take(values, table, axis=0, mode="clip")
    return hide(keys, values, position)


__all__ = [
    "Ring",
    "admit",
    "commit",
    "grow",
    "put",
    "reachable",
    "ring_pages",
    "source",
    "window_pages",
    "write",
]
