"""The division of the states of programs: caches by heads, and everything by rows."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

from jaxdraft.sharding.placement import Placement
from jaxdraft.state.paged import PagedPool
from jaxdraft.state.recurrent import Recurrent
from jaxdraft.state.ring import Ring

_Pages = TypeVar("_Pages", bound=PagedPool | Ring)


def divide_pages(placement: Placement, cache: _Pages) -> _Pages:
    """Divide keys and values by heads, and by rows where every row owns its pages."""
    rows = placement.rows_axis(cache.table.shape[0]) if cache.dense else None

    def place(x: jax.Array) -> jax.Array:
        heads = placement.model if x.shape[1] % placement.parts == 0 else None
        return placement.constrain(x, rows, heads)

    return dataclasses.replace(
        cache,
        keys=tuple(map(place, cache.keys)),
        values=tuple(map(place, cache.values)),
        table=placement.constrain(cache.table, rows),
        length=placement.constrain(cache.length, rows),
    )


def divide_recurrent(placement: Placement, state: Recurrent, by_heads: bool) -> Recurrent:
    """Divide recurrent states by rows, and by heads if their layers are divided."""
    rows = placement.rows_axis(state.state.shape[0])
    heads = placement.model if by_heads else None
    return Recurrent(
        state=placement.constrain(state.state, rows, heads),
        conv=placement.constrain(state.conv, rows, None, heads),
    )


def divide_state(placement: Placement, tree: Any, batch: int) -> Any:
    """Divide the state of a round: caches as :func:`divide_pages`, other arrays [B, ...] by rows.

    Recurrent states are divided by rows alone: the target has divided their heads.
    """
    rows = placement.rows_axis(batch)

    def by_rows(x: jax.Array) -> jax.Array:
        return placement.constrain(x, rows, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))

    def place(part: Any) -> Any:
        if isinstance(part, PagedPool | Ring):
            return divide_pages(placement, part)
        if isinstance(part, Recurrent):
            return part if rows is None else jax.tree.map(by_rows, part)
        if part.ndim and part.shape[0] == batch:
            return placement.constrain(part, rows)
        return part

    kinds = PagedPool | Ring | Recurrent
    return jax.tree.map(place, tree, is_leaf=lambda part: isinstance(part, kinds))
