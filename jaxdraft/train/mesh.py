"""Training on a mesh: parameters, optimizer state and batches divided over its devices.

Every array is divided over the rows of devices, along the largest dimension that divides and that
the model's own placement leaves whole (Rajbhandari et al., "ZeRO", arXiv:1910.02054, stage 3; known
as fully sharded data parallelism). XLA gathers a weight where a step needs it, and scatters its
gradient.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdraft.nn.linear import Frozen
from jaxdraft.sharding.placement import Placement, ShardingError

Specs = dict[tuple[str, ...], PartitionSpec]
"""Partitions of parameters, by path."""


def check_trainable(frozen: Frozen) -> None:
    """Check that no parameter is kept several times.

    Raises:
      ShardingError: key/value heads are copied; their gradients would have to be summed.
    """
    for path, part in nnx.iter_modules(frozen()):
        copies = getattr(part, "copies", 1)
        if copies > 1:
            raise ShardingError(
                f"{'.'.join(map(str, path))} has {copies} copies of every key/value head; expected "
                "a mesh whose model axis divides the key/value heads"
            )


def specs(frozen: Frozen, placement: Placement) -> Specs:
    """Return how each parameter is divided in training, by path."""
    found = {}
    for path, leaf in jax.tree.leaves_with_path(frozen.params):
        own = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else ()
        axes = [*own, *[None] * (leaf.ndim - len(own))]
        found[_names(path)] = _with_rows(leaf.shape, axes, placement)
    return found


def _with_rows(shape: tuple[int, ...], axes: list[Any], placement: Placement) -> PartitionSpec:
    """Return a partition that is divided over the rows of devices, too, if a dimension allows it.

    Example, four rows of devices: (512, 2048) divided along none is divided along the second.
    """
    sizes = [
        size if axis is None and size % placement.rows == 0 else 0
        for size, axis in zip(shape, axes, strict=True)
    ]
    if placement.rows > 1 and any(sizes):
        axes = list(axes)
        axes[sizes.index(max(sizes))] = placement.data
    return PartitionSpec(*axes)


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the keys of dictionaries at the end of a path."""
    names: list[str] = []
    for part in path:
        if isinstance(part, jax.tree_util.DictKey):
            names.append(str(part.key))
        else:
            names = []
    return tuple(names)


def _spec_of(path: tuple[Any, ...], leaf: jax.Array, known: Specs) -> PartitionSpec:
    """Return the partition of an array: that of the parameter with the same path and rank."""
    found = known.get(_names(path), PartitionSpec())
    return found if len(found) <= leaf.ndim else PartitionSpec()


def divide_state(tree: Any, known: Specs, placement: Placement) -> Any:
    """Move a training state to the mesh: moments lie as their parameters do."""
    return jax.tree.map_with_path(
        lambda path, x: jax.device_put(x, NamedSharding(placement.mesh, _spec_of(path, x, known))),
        tree,
    )


def constrain_state(tree: Any, known: Specs, placement: Placement) -> Any:
    """Keep the training state divided, inside a step."""
    return jax.tree.map_with_path(
        lambda path, x: lax.with_sharding_constraint(
            x, NamedSharding(placement.mesh, _spec_of(path, x, known))
        ),
        tree,
    )


def constrain_batch(batch: Any, placement: Placement) -> Any:
    """Divide a batch by its first dimension, inside a step.

    Raises:
      ShardingError: the rows of an array do not divide.
    """

    def one(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        if not x.ndim:
            return x
        if x.shape[0] % placement.rows:
            raise ShardingError(
                f"batch{jax.tree_util.keystr(path)} has {x.shape[0]} rows; expected a multiple of "
                f"{placement.rows}, the rows of devices"
            )
        return placement.constrain(x, placement.data)

    return jax.tree.map_with_path(one, batch)


def trained(params: Any, frozen: Frozen) -> Frozen:
    """Return a module with trained parameters, each placed as ``frozen`` has it.

    Args:
      params: ``params`` of a :class:`jaxdraft.train.TrainState`.
      frozen: the module before training.
    """
    placed = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), params, frozen.params)
    return Frozen(placed, frozen.structure)
