"""Programs that XLA divides over several devices: how functions notice, and what they do then.

The programs of a model on a mesh are traced with JAX's abstract mesh set, which is part of the keys
of all of its caches. See :mod:`jaxdraft.sharding`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec


class ShardingError(ValueError):
    """A mesh does not fit, or a model lies on another one."""


def on_a_mesh() -> bool:
    """Return whether the surrounding program is divided by XLA over several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)


_LEAST = 16
"""Default of the minimum size of a part."""


class _Own(threading.local):
    """Whether the abstract mesh in use is that of a placement, whose axes are rows and parts."""

    depth = 0


_own = _Own()


@contextlib.contextmanager
def traced_for(mesh: Mesh | None) -> Iterator[None]:
    """Trace a program for the mesh of a model. Inside ``shard_map`` nothing changes.

    Args:
      mesh: that of the target's placement, with two axes, rows and parts; None: the target is on
        one device.
    """
    if mesh is None or jax.sharding.get_abstract_mesh().manual_axes:
        yield
        return
    _own.depth += 1
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield
    finally:
        _own.depth -= 1


def along_last(
    function: Callable[[jax.Array, str | None], Any], x: jax.Array, *, least: int = _LEAST
) -> Any:
    """Run a reduction over the last axis of [B, ..., X] on every device's own part.

    For operations that XLA would gather their operand for.

    Args:
      function: called with the part of ``x`` of a device, and with the name of the axis of devices
        that have the other parts of the last axis, None if each has the whole. Its results are
        arrays [B, ...] of the same rows.
      x: the operand.
      least: minimum size of the last axis of a part. Smaller ones are not worth a transfer.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not _own.depth or mesh.manual_axes or mesh.size == 1:
        return function(x, None)
    rows, parts = mesh.axis_names
    size, count = x.shape[-1], mesh.shape[parts]
    over = parts if count > 1 and size % count == 0 and size // count >= least else None
    batch = rows if x.ndim > 1 and x.shape[0] % mesh.shape[rows] == 0 else None
    into = PartitionSpec(batch, *[None] * (x.ndim - 2), over) if x.ndim > 1 else PartitionSpec(over)
    run = jax.shard_map(
        lambda part: function(part, over),
        in_specs=(into,),
        out_specs=PartitionSpec(batch),
        check_vma=False,
    )
    return run(x)


def whole_array(x: jax.Array) -> np.ndarray:
    """Return an array on the host, with an explicit transfer; every process has to call this."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(jax.device_get(x))
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def whole_channels(x: jax.Array) -> jax.Array:
    """Keep the last axis of rows [..., D] on every device, whatever reads them.

    Otherwise a matrix that is divided along its inputs would divide the channels of everything
    before it, and every product there would gather them again.
    """
    if not on_a_mesh():
        return x
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    return lax.with_sharding_constraint(x, PartitionSpec(*free, None))


def divided_vocabulary(x: jax.Array) -> jax.Array:
    """Keep scores of the vocabulary [..., V] divided over the devices, if they divide."""
    mesh = jax.sharding.get_abstract_mesh()
    if not _own.depth or mesh.manual_axes or x.shape[-1] % mesh.shape[mesh.axis_names[1]]:
        return x
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    return lax.with_sharding_constraint(x, PartitionSpec(*free, mesh.axis_names[1]))


def set_in_rows(x: jax.Array, place: jax.Array, values: Any, *, add: bool = False) -> jax.Array:
    """Set entries of every row, or add to them; places past the end are dropped.

    Example: x = [[1 2 3] [4 5 6]], place = [[0] [3]], values = [[7] [8]]: [[7 2 3] [4 5 6]].

    Args:
      x: [B, S, ...].
      place: [B, T] int32, not negative. To set, no row has a place twice.
      values: [B, T, ...], or what broadcasts to it.
      add: whether to add.
    """
    if not on_a_mesh():
        row = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
        entries = x.at[row, place]
        return entries.add(values, mode="drop") if add else entries.set(values, mode="drop")

    def one(row: jax.Array, at: jax.Array, new: jax.Array) -> jax.Array:
        entries = row.at[at]
        return entries.add(new, mode="drop") if add else entries.set(new, mode="drop")

    # As a map over rows, which may be on different devices.
    values = jnp.broadcast_to(values, (*place.shape, *x.shape[2:])).astype(x.dtype)
    return jax.vmap(one)(x, place, values)


def set_in_own_pages(
    pages: jax.Array, column: jax.Array, slot: jax.Array, values: jax.Array
) -> jax.Array:
    """Set slots of the pages that every row owns, ``b * R .. b * R + R - 1`` of row b.

    Args:
      pages: [B * R, G, Z, H].
      column: [B, T] int32, 0..R-1; past the end: dropped.
      slot: [B, T] int32.
      values: [B, T, G, H].
    """
    own = _by_row(pages, column.shape[0])
    values = values.astype(pages.dtype)
    one = lambda page, c, s, new: page.at[c, :, s].set(new, mode="drop")  # noqa: E731
    return jax.vmap(one)(own, column, slot, values).reshape(pages.shape)


def take_own_pages(pages: jax.Array, column: jax.Array) -> jax.Array:
    """Return some of the pages that every row owns: [B * R, G, Z, H] -> [B, C, G, Z, H].

    Args:
      pages: see :func:`set_in_own_pages`.
      column: [B, C] int32, 0..R-1.
    """
    return jax.vmap(lambda page, c: jnp.take(page, c, axis=0))(
        _by_row(pages, column.shape[0]), column
    )


def _by_row(pages: jax.Array, batch: int) -> jax.Array:
    return pages.reshape(batch, -1, *pages.shape[1:])
