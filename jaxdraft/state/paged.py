"""Keys and values in pages: an immutable pool, row tables, and the only functions that write.

A pool holds P pages of Z slots for every layer. Row b owns the pages ``table[b, :]``; its position
p lives in page ``table[b, p // Z]`` at slot ``p % Z``. Positions below ``length[b]`` are committed;
the rest is scratch, which the next write overwrites and every mask hides.

Pages are kept as ``[P, G, Z, H]``, heads before slots: every product of attention then has its
batch dimensions in front and reads a page without transposing it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxdraft.base import NO_PAGE
from jaxdraft.config import KvShape
from jaxdraft.meshes import on_a_mesh, set_in_own_pages

CHUNK = 128
"""Slots that attention reads per pass."""

_LONG, _EVEN = 8192, 512
"""See :func:`room`."""

_UNROLL = 4
"""Rows whose slices are written one by one; more rows go through one scatter."""


class Chunk(NamedTuple):
    """Some keys of every row, and their positions."""

    keys: jax.Array  # [B, C, G, S, H]
    values: jax.Array  # [B, C, G, S, H]
    positions: jax.Array  # [B, C, S] int32, -1 where the slot holds no key


class Span(NamedTuple):
    """Location of every row's keys, for kernels that read pages directly.

    Row b holds the positions ``first[b] <= p < end[b]``, at most ``M * Z`` of them. Position p is
    in page ``table[b, p // Z % M]`` at slot ``p % Z``; a page past the pool holds no key.
    """

    keys: jax.Array  # [P, G, Z, H]
    values: jax.Array  # [P, G, Z, H]
    first: jax.Array  # [B] int32
    end: jax.Array  # [B] int32
    table: jax.Array | None  # [B, M] int32; None: row b owns pages b * M .. b * M + M - 1

    @property
    def columns(self) -> int:
        """M."""
        if self.table is not None:
            return self.table.shape[1]
        return self.keys.shape[0] // self.first.shape[0]


class Source(NamedTuple):
    """Where attention reads its keys: ``chunk(i)`` for i in ``range(used)``, ``used <= chunks``.

    ``read`` and ``whole`` close over no array: their arrays are in ``data``, so that attention can
    differentiate with respect to them. Equal functions compare equal, since they are keys of the
    program cache.
    """

    read: Callable[[Any, jax.Array, int], Chunk]
    """(data, index of the first chunk, number of chunks) -> these chunks as one."""
    data: Any
    used: jax.Array  # [] int32
    chunks: int
    span: Span | None = None  # the same keys; None: they lie on no pages
    whole: Callable[[Any], Chunk] | None = None
    """All chunks as one, without a copy: values that no query sees are not zeroed and may be
    anything, even NaN. None: keys and values cannot be read in place."""

    def chunk(self, index: jax.Array) -> Chunk:
        """Return chunk ``index`` [] int32."""
        return self.read(self.data, index, 1)


def empty_fields(
    shape: KvShape, *, batch: int, pages: int, page_size: int, columns: int
) -> dict[str, Any]:
    """Return the arrays of an empty pool or of empty rings: all pages free, all tables blank."""
    page = (pages, shape.kv_heads, page_size, shape.head_dim)
    return {
        "keys": tuple(jnp.zeros(page, shape.dtype) for _ in range(shape.layers)),
        "values": tuple(jnp.zeros(page, shape.dtype) for _ in range(shape.layers)),
        "table": jnp.full((batch, columns), NO_PAGE, jnp.int32),
        "length": jnp.zeros((batch,), jnp.int32),
        # The stack is taken from its end, so page 0 goes out first.
        "free": jnp.arange(pages - 1, -1, -1, dtype=jnp.int32),
        "free_count": jnp.asarray(pages, jnp.int32),
    }


@struct.dataclass
class PagedPool:
    """The pool, the page tables, and the stack of free pages."""

    keys: tuple[jax.Array, ...]  # L x [P, G, Z, H]
    values: tuple[jax.Array, ...]  # L x [P, G, Z, H]
    table: jax.Array  # [B, M] int32, NO_PAGE where a row owns none
    length: jax.Array  # [B] int32, committed positions
    free: jax.Array  # [P] int32: entries below free_count are the free pages
    free_count: jax.Array  # [] int32
    dense: bool = struct.field(pytree_node=False, default=False)
    """Row b owns page b and only that (Z is the whole capacity): no table needs to be read."""

    @property
    def page_size(self) -> int:
        """Z."""
        return self.keys[0].shape[2] if self.keys else 1

    @property
    def pages(self) -> int:
        """P."""
        return self.free.shape[0]

    @classmethod
    def zeros(
        cls,
        shape: KvShape,
        *,
        batch: int,
        pages: int,
        page_size: int,
        columns: int,
    ) -> PagedPool:
        """Return an empty pool: all pages free, all tables blank.

        Args:
          shape: its keys and values.
          batch: B.
          pages: P.
          page_size: Z.
          columns: M; a row can hold ``columns * page_size`` positions.
        """
        return cls(
            **empty_fields(shape, batch=batch, pages=pages, page_size=page_size, columns=columns)
        )

    @classmethod
    def one_page_per_row(cls, shape: KvShape, *, batch: int, capacity: int) -> PagedPool:
        """Return the pool of a fixed batch: row b owns page b, which has ``capacity`` slots."""
        pool = cls.zeros(shape, batch=batch, pages=batch, page_size=capacity, columns=1)
        return replace(
            pool,
            table=jnp.arange(batch, dtype=jnp.int32)[:, None],
            free_count=jnp.asarray(0, jnp.int32),
            dense=True,
        )


class Pages(Protocol):
    """Tables over a stack of free pages: all that :func:`grow` and :func:`release` use.

    :class:`PagedPool` and :class:`jaxdraft.state.ring.Ring` satisfy it.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def table(self) -> jax.Array:
        """[B, M] int32."""
        ...

    @property
    def length(self) -> jax.Array:
        """[B] int32."""
        ...

    @property
    def free(self) -> jax.Array:
        """[P] int32."""
        ...

    @property
    def free_count(self) -> jax.Array:
        """[] int32."""
        ...

    @property
    def page_size(self) -> int:
        """Z."""
        ...


AnyPool = TypeVar("AnyPool", bound=Pages)

_UNROLL = 64
"""Maximum number of rows that :func:`grow` serves without a loop."""


def owned(pool: Pages) -> jax.Array:
    """Return the number of pages each row owns, [B] int32."""
    return jnp.sum(pool.table != NO_PAGE, axis=1, dtype=jnp.int32)


def grow(pool: AnyPool, positions: jax.Array) -> tuple[AnyPool, jax.Array]:
    """Give every row the pages that ``positions[b]`` positions need, or none.

    Rows are served in order; a row that cannot get all its pages takes none and blocks no row.

    Args:
      pool: the pool.
      positions: [B] int32.

    Returns:
      The pool, and [B] bool: whether the row now covers its positions.
    """
    chex.assert_shape(positions, pool.length.shape)
    columns = pool.table.shape[1]
    have = owned(pool)
    wanted = -(-positions // pool.page_size)
    need = jnp.maximum(wanted - have, 0)

    def serve(left: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        wants, fits = row
        granted = fits & (wants <= left)
        return left - jnp.where(granted, wants, 0), granted

    # Written out, since a loop is no part of a CUDA graph.
    unroll = max(1, min(positions.shape[0], _UNROLL))
    left, granted = lax.scan(serve, pool.free_count, (need, wanted <= columns), unroll=unroll)
    taken = jnp.where(granted, need, 0)
    # Row b takes the `taken[b]` entries below the top of the stack as earlier rows left it.
    # Example: free = [5 4 3 2 | ...], free_count = 4, taken = [1, 2]: row 0 gets page 2 (entry 3),
    # row 1 gets pages 3 and 4 (entries 2 and 1).
    top = pool.free_count - jnp.cumsum(taken) + taken
    column = jnp.arange(columns, dtype=jnp.int32)[None]
    nth = column - have[:, None]
    new = (nth >= 0) & (nth < taken[:, None])
    page = jnp.take(pool.free, top[:, None] - 1 - nth, mode="clip")
    return replace(pool, table=jnp.where(new, page, pool.table), free_count=left), granted


def release(pool: AnyPool, rows: jax.Array) -> AnyPool:
    """Give back every page of the rows where ``rows`` [B] is true; they start again at position 0.

    Releasing a row that owns nothing changes nothing.
    """
    chex.assert_shape(rows, pool.length.shape)
    back = rows[:, None] & (pool.table != NO_PAGE)
    # Each page goes to its own entry above the top of the stack; the others are dropped.
    place = jnp.cumsum(back.reshape(-1), dtype=jnp.int32).reshape(back.shape)
    place = pool.free_count + place - 1
    free = pool.free.at[jnp.where(back, place, NO_PAGE)].set(pool.table, mode="drop")
    return replace(
        pool,
        free=free,
        free_count=pool.free_count + jnp.sum(back, dtype=jnp.int32),
        table=jnp.where(rows[:, None], NO_PAGE, pool.table),
        length=jnp.where(rows, 0, pool.length),
    )


def write(
    pool: PagedPool, layer: int, keys: jax.Array, values: jax.Array, count: jax.Array
) -> PagedPool:
    """Write rows ``t < count[b]`` at positions ``length[b] + t`` of one layer, without committing.

    Rows at or past ``count`` are dropped, and so are writes outside the row's pages. (A dense
    pool may write to scratch slots instead, which every mask hides. It keeps room for that: see
    :func:`room`.)

    Args:
      pool: the pool.
      layer: index of the layer.
      keys: [B, T, G, H].
      values: [B, T, G, H].
      count: [B] int32.
    """
    chex.assert_equal_shape([keys, values])
    # A slice that does not fit is moved back over what is committed: more rows than a dense pool
    # keeps room for (drafts of that many tokens) are scattered, which drops what does not fit.
    if pool.dense and on_a_mesh():
        step = jnp.arange(keys.shape[1], dtype=jnp.int32)[None]
        slot = pool.length[:, None] + step
        column = jnp.where(step < count[:, None], slot // pool.page_size, 1)
        slot = slot % pool.page_size
        new_keys = set_in_own_pages(pool.keys[layer], column, slot, keys)
        new_values = set_in_own_pages(pool.values[layer], column, slot, values)
    elif pool.dense and keys.shape[0] <= _UNROLL and keys.shape[1] <= CHUNK:
        new_keys = _write_slices(pool.keys[layer], keys, pool.length)
        new_values = _write_slices(pool.values[layer], values, pool.length)
    else:
        page, slot = _addresses(pool, keys.shape[1], count)
        new_keys = _scatter(pool.keys[layer], keys, page, slot)
        new_values = _scatter(pool.values[layer], values, page, slot)
    return replace(
        pool,
        keys=(*pool.keys[:layer], new_keys, *pool.keys[layer + 1 :]),
        values=(*pool.values[:layer], new_values, *pool.values[layer + 1 :]),
    )


def room(positions: int, rows: int) -> int:
    """Return the slots of a dense pool for ``positions`` positions and writes of up to ``rows``.

    ``dynamic_update_slice`` moves a start that is too late back to where the update fits
    (jax-ml/jax#34257): with this room no start is too late.

    From ``_LONG`` slots on, a multiple of ``_EVEN``: on GPUs XLA splits the sum over so many values
    into parts, and copies all values to pad them where the parts are uneven.
    """
    slots = -(-(positions + rows) // CHUNK) * CHUNK
    return slots if slots < _LONG else -(-slots // _EVEN) * _EVEN


def _write_slices(pages: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    for b in range(rows.shape[0]):
        update = jnp.swapaxes(rows[b], 0, 1)[None].astype(pages.dtype)  # [1, G, T, H]
        # Indices of one type: beside a Python integer, which `jax_enable_x64` makes an int64, an
        # int32 is refused.
        place = (jnp.int32(b), jnp.int32(0), start[b], jnp.int32(0))
        pages = lax.dynamic_update_slice(pages, update, place)
    return pages


def _addresses(pool: PagedPool, steps: int, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return page and slot of positions ``length + t``, [B, T] each; NO_PAGE: do not write."""
    step = jnp.arange(steps, dtype=jnp.int32)[None]
    position = pool.length[:, None] + step
    column = position // pool.page_size
    inside = (step < count[:, None]) & (column < pool.table.shape[1])
    page = jnp.take_along_axis(pool.table, column, axis=1, mode="clip")
    return jnp.where(inside, page, NO_PAGE), position % pool.page_size


def _scatter(pages: jax.Array, rows: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    # Two index arrays around a slice: the indexed dimensions come first, [B, T, G, H] like rows.
    return pages.at[page, :, slot].set(rows.astype(pages.dtype), mode="drop")


def source(pool: PagedPool, layer: int, length: jax.Array) -> Source:
    """Return the first ``length[b]`` positions of one layer as a source for attention.

    Args:
      pool: the pool.
      layer: index of the layer.
      length: [B] int32: positions at or past it are hidden; may include the scratch rows that were
        just written.
    """
    if pool.dense:
        return _dense_source(pool.keys[layer], pool.values[layer], length)
    return _table_source(pool, pool.keys[layer], pool.values[layer], length)


def _dense_source(keys: jax.Array, values: jax.Array, length: jax.Array) -> Source:
    size = min(CHUNK, keys.shape[2])
    chunks = -(-keys.shape[2] // size)
    used = -(-jnp.max(length, initial=0) // size)
    span = Span(keys, values, jnp.zeros_like(length), length, None)
    whole = _whole_dense if chunks * size == keys.shape[2] else None
    return Source(_read_dense, (keys, values, length), used, chunks, span, whole)


def _whole_dense(data: tuple[jax.Array, jax.Array, jax.Array]) -> Chunk:
    keys, values, length = data
    position = jnp.arange(keys.shape[2], dtype=jnp.int32)[None]
    position = jnp.where(position < length[:, None], position, -1)
    return Chunk(keys[:, None], values[:, None], position[:, None])


def _read_dense(
    data: tuple[jax.Array, jax.Array, jax.Array], index: jax.Array, chunks: int
) -> Chunk:
    keys, values, length = data
    start = index * min(CHUNK, keys.shape[2])
    size = min(chunks * CHUNK, keys.shape[2])
    position = start + jnp.arange(size, dtype=jnp.int32)[None]
    valid = position < length[:, None]
    part = lax.dynamic_slice_in_dim(keys, start, size, axis=2)
    value = lax.dynamic_slice_in_dim(values, start, size, axis=2)
    return hide(part[:, None], value[:, None], jnp.where(valid, position, -1)[:, None])


def _table_source(pool: PagedPool, keys: jax.Array, values: jax.Array, length: jax.Array) -> Source:
    columns = pool.table.shape[1]
    take = max(1, min(columns, CHUNK // pool.page_size))
    chunks = -(-columns // take)
    table = jnp.pad(pool.table, ((0, 0), (0, chunks * take - columns)), constant_values=NO_PAGE)
    used = -(-jnp.max(length, initial=0) // (take * pool.page_size))
    read = _table_reader(take)
    end = jnp.minimum(length, columns * pool.page_size)
    span = Span(keys, values, jnp.zeros_like(length), end, pool.table)
    return Source(read, (keys, values, table, length), used, chunks, span)


@functools.cache
def _table_reader(take: int) -> Callable[[Any, jax.Array, int], Chunk]:
    """Return the ``read`` of chunks of ``take`` pages; the same object for each call."""
    return functools.partial(_read_table, take)


def _read_table(
    take: int,
    data: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    index: jax.Array,
    chunks: int,
) -> Chunk:
    keys, values, table, length = data
    pages = chunks * take
    page = lax.dynamic_slice_in_dim(table, index * take, pages, axis=1)  # [B, pages]
    slot = jnp.arange(pages * keys.shape[2], dtype=jnp.int32).reshape(1, pages, -1)
    position = index * (take * keys.shape[2]) + slot
    valid = (position < length[:, None, None]) & (page != NO_PAGE)[:, :, None]
    part = jnp.take(keys, page, axis=0, mode="clip")
    value = jnp.take(values, page, axis=0, mode="clip")
    return hide(part, value, jnp.where(valid, position, -1))


def read_span(span: Span) -> Source:
    """Return the keys of a span as a source for attention without kernels.

    Every key is gathered separately. The sources that :func:`source` and
    :mod:`jaxdraft.state.ring` make read whole pages or slices of them instead.
    """
    longest = jnp.max(span.end - span.first, initial=0)
    chunks = -(-span.keys.shape[2] * span.columns // CHUNK)
    return Source(_read_span, span, -(-longest // CHUNK), chunks, span)


def _read_span(span: Span, index: jax.Array, chunks: int) -> Chunk:
    pages, _, slots, _ = span.keys.shape
    columns, table = span.columns, span.table
    if table is None:
        table = jnp.arange(pages, dtype=jnp.int32).reshape(-1, columns)
    step = jnp.arange(chunks * CHUNK, dtype=jnp.int32)[None]
    position = span.first[:, None] + index * CHUNK + step
    page = jnp.take_along_axis(table, position // slots % columns, axis=1)
    valid = (position < span.end[:, None]) & (page < pages)
    page, slot = jnp.where(valid, page, 0), position % slots
    part, value = (jnp.moveaxis(x[page, :, slot], 1, 2) for x in (span.keys, span.values))
    return hide(part[:, None], value[:, None], jnp.where(valid, position, -1)[:, None])


def hide(keys: jax.Array, values: jax.Array, positions: jax.Array) -> Chunk:
    """Set hidden values to zero, because a NaN survives a weight of zero."""
    visible = (positions >= 0)[:, :, None, :, None]
    return Chunk(keys, jnp.where(visible, values, jnp.zeros((), values.dtype)), positions)
