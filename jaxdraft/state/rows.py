"""Rows of a batched state: select some, run them, and write them back.

A leaf whose first axis is the batch belongs to the rows; every other leaf (the pages of a pool) is
shared. The two are told apart by building the same state with one more row, so this works for the
state of any target and any drafter.

The engine assigns pages to rows on the host. The pools of its state are *owned by the
engine*: their own stacks are empty, so no program ever takes a page, and between steps their tables
are blank. :func:`bind_pages` gives the rows of one step their pages, :func:`unbind_pages` removes
them again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxdraft.base import NO_PAGE
from jaxdraft.state.paged import PagedPool
from jaxdraft.state.ring import Ring

Layout = tuple[bool, ...]
"""Flag per leaf: whether it belongs to the rows. Hashable, for use as a static argument."""

State = TypeVar("State")

_CONTENTS = ("keys", "values", "length")
"""Members of a pool that a row brings along."""


def layout(make: Callable[[int], Any], batch: int) -> Layout:
    """Return which leaves of ``make(batch)`` have one row per batch row, without allocating."""
    one, more = (jax.eval_shape(functools.partial(make, b)) for b in (batch, batch + 1))

    def of(a: Any, b: Any) -> Any:
        if not _is_pool(a):
            return a.shape[:1] == (batch,) and b.shape[:1] == (batch + 1,)
        shared = jax.tree.map(lambda _: False, a)
        return replace(shared, table=True, length=True)

    return tuple(jax.tree.leaves(jax.tree.map(of, one, more, is_leaf=_is_pool)))


def take(state: State, where: Layout, rows: jax.Array) -> State:
    """Return the rows ``rows`` [R] int32 as a batch of R with the same shared leaves.

    Ids past the end give the last row; the caller must keep those rows inactive.
    """
    leaves, tree = jax.tree.flatten(state)
    picked = (
        jnp.take(x, rows, axis=0, mode="clip") if mine else x
        for x, mine in zip(leaves, where, strict=True)
    )
    return jax.tree.unflatten(tree, picked)


def put(state: State, part: State, where: Layout, rows: jax.Array) -> State:
    """Write ``part`` to rows ``rows`` [R] and take its shared leaves; drop ids past the end."""
    leaves, tree = jax.tree.flatten(state)
    new = (
        x.at[rows].set(y, mode="drop") if mine else y
        for x, y, mine in zip(leaves, jax.tree.leaves(part), where, strict=True)
    )
    return jax.tree.unflatten(tree, new)


def repeatable(make: Callable[[int], Any], batch: int, times: int) -> bool:
    """Return whether :func:`repeat` can tell the rows of ``make(batch)`` apart."""
    one, more = (jax.eval_shape(functools.partial(make, b)) for b in (batch, batch * times))

    def fits(a: Any, b: Any) -> bool:
        if _is_pool(a):
            return a.dense
        return a.shape == b.shape or (
            a.shape[0] % batch == 0 and b.shape == (times * a.shape[0], *a.shape[1:])
        )

    return jax.tree.all(jax.tree.map(fits, one, more, is_leaf=_is_pool))


def repeat(make: Callable[[int], State], state: State, batch: int, times: int) -> State:
    """Return a state of ``batch * times`` rows, every row ``times`` times, side by side.

    Pages are copied, since each of the new rows writes to its own. Example, two rows of one page
    each, three times: pages 0 0 0 1 1 1.

    Args:
      make: function that returns an empty state of so many rows; :func:`repeatable`.
      state: a state of ``batch`` rows.
      batch: B.
      times: n.
    """
    # Its page tables and stacks of free pages; its pages are not used, and so are not allocated.
    fresh = make(batch * times)

    def rows(x: jax.Array, new: jax.Array) -> jax.Array:
        if x.shape == new.shape:
            return x
        each = x.shape[0] // batch  # a row may own several pages
        parts = x.reshape(batch, 1, each, *x.shape[1:])
        return jnp.broadcast_to(parts, (batch, times, *parts.shape[2:])).reshape(new.shape)

    def each(old: Any, new: Any) -> Any:
        if not _is_pool(old):
            return rows(old, new)
        contents = {n: jax.tree.map(rows, getattr(old, n), getattr(new, n)) for n in _CONTENTS}
        return replace(new, **contents)

    return jax.tree.map(each, state, fresh, is_leaf=_is_pool)


def own(state: Any, where: Layout) -> tuple[jax.Array, ...]:
    """Return the leaves of ``state`` that belong to its rows, as a checkpoint keeps them."""
    return tuple(x for x, mine in zip(jax.tree.leaves(state), where, strict=True) if mine)


def with_own(state: State, where: Layout, leaves: tuple[jax.Array, ...]) -> State:
    """Return ``state`` with the leaves of its rows replaced."""
    olds, tree = jax.tree.flatten(state)
    new = iter(leaves)
    return jax.tree.unflatten(
        tree, [next(new) if mine else x for x, mine in zip(olds, where, strict=True)]
    )


# --------------------------------------------------------------------------- pools of an engine


def engine_owned(state: State) -> State:
    """Return a state whose pools an engine owns: no page is free, and no row has one.

    Raises:
      ValueError: a pool is dense, with its rows bound to their pages.
    """

    def own_pool(pool: Any) -> Any:
        if pool.dense:
            raise ValueError(
                "a state holds a pool of one page per row, whose rows cannot be "
                "separated: its target or drafter needs an init_pool"
            )
        pool = replace(pool, free_count=jnp.zeros((), jnp.int32))
        return replace(pool, table=pool.table[:, :0]) if isinstance(pool, PagedPool) else pool

    return _pools(own_pool, state)


def bind_pages(state: State, table: jax.Array, rings: jax.Array) -> State:
    """Bind the rows of a state to their pages.

    Args:
      state: B rows.
      table: [B, M] int32, table for every paged pool.
      rings: [B] int32: ring r is pages ``r * R .. r * R + R - 1`` of every ring's pages.
    """

    def bind(pool: Any) -> Any:
        if isinstance(pool, PagedPool):
            return replace(pool, table=table)
        columns = pool.table.shape[1]
        pages = rings[:, None] * columns + jnp.arange(columns, dtype=jnp.int32)[None]
        return replace(pool, table=jnp.where(pages < pool.pages, pages, NO_PAGE))

    return _pools(bind, state)


def unbind_pages(state: State) -> State:
    """Remove the pages of the rows."""
    return _pools(
        lambda p: replace(p, table=p.table[:, :0]) if isinstance(p, PagedPool) else p, state
    )


def copy_pages(state: State, source: jax.Array, to: jax.Array) -> State:
    """Copy pages ``source`` [C] of every paged pool onto pages ``to`` [C]; NO_PAGE drops."""

    def copy(pages: jax.Array) -> jax.Array:
        return pages.at[to].set(jnp.take(pages, source, axis=0, mode="clip"), mode="drop")

    def each(pool: Any) -> Any:
        if not isinstance(pool, PagedPool):
            return pool
        keys, values = tuple(map(copy, pool.keys)), tuple(map(copy, pool.values))
        return replace(pool, keys=keys, values=values)

    return _pools(each, state)


def ring_contents(state: Any) -> tuple[jax.Array, ...]:
    """Return keys and values of every ring of a one-row state with its pages, [R, G, Z, H] each."""
    rings = [p for p in _found(state) if isinstance(p, Ring)]
    return tuple(
        jnp.take(pages, ring.table[0], axis=0, mode="clip")
        for ring in rings
        for pages in (*ring.keys, *ring.values)
    )


def with_ring_contents(state: State, contents: tuple[jax.Array, ...]) -> State:
    """Write the result of :func:`ring_contents` to the rings of a one-row state with its pages."""
    parts = iter(contents)

    def fill(pool: Any) -> Any:
        if not isinstance(pool, Ring):
            return pool
        into = pool.table[0]
        keys = tuple(k.at[into].set(next(parts), mode="drop") for k in pool.keys)
        values = tuple(v.at[into].set(next(parts), mode="drop") for v in pool.values)
        return replace(pool, keys=keys, values=values)

    return _pools(fill, state)


def has_pages(state: Any) -> bool:
    """Return whether any paged pool of the state holds data; if not, its rows own no page."""
    return any(isinstance(p, PagedPool) and p.keys for p in _found(state))


def row_bytes(make: Callable[[int], Any]) -> int:
    """Return the bytes of a row of ``make(batch)`` outside its pages: the size of a checkpoint."""
    shape, where = jax.eval_shape(functools.partial(make, 1)), layout(make, 1)
    total = sum(x.size * x.dtype.itemsize for x in own(shape, where))
    for pool in _found(shape):
        if isinstance(pool, Ring):
            pages = sum(x.size * x.dtype.itemsize for x in (*pool.keys, *pool.values))
            total += pages * pool.table.shape[1] // pool.pages
    return total


def _is_pool(x: Any) -> bool:
    return isinstance(x, PagedPool | Ring)


def _found(state: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(state, is_leaf=_is_pool) if _is_pool(x)]


def _pools(change: Callable[[Any], Any], state: State) -> State:
    return jax.tree.map(lambda x: change(x) if _is_pool(x) else x, state, is_leaf=_is_pool)
