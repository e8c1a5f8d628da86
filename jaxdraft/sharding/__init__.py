"""Models on a mesh of devices: weights, caches and rows divided, programs partitioned by XLA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax.sharding import Mesh

from jaxdraft.sharding.placement import DATA, MODEL, AnyMesh, Placement, ShardingError

if TYPE_CHECKING:
    from jaxdraft.model import Model

__all__ = ["DATA", "MODEL", "Placement", "ShardingError", "shard", "unshard"]


def shard(
    model: Model,
    mesh: AnyMesh,
    *,
    data: str | None = DATA,
    model_axis: str | None = MODEL,
) -> Model:
    """Return the model with its arrays divided over the devices of a mesh.

    Weights are divided over ``model_axis`` by the table of :mod:`jaxdraft.sharding.rules`, and
    repeated along ``data``, over which the rows of a batch are divided when their number divides.
    Programs are partitioned by XLA. All results are those of one device, up to the order of sums.

    Args:
      model: a model whose arrays are on one device; or one of shapes alone, which gives shapes to
        compile programs with.
      mesh: the devices, or the sizes of their axes, like ``{"data": 2, "model": 4}`` or
        ``"data=2,model=4"``.
      data: name of the axis of rows; None: there is none.
      model_axis: name of the axis of weights; None: there is none.

    Raises:
      ShardingError: a ``ValueError``; the mesh has other axes, the model is on a mesh already, is
        kept in blocks, or has a target that is not a decoder of this package.
    """
    from jaxdraft.sharding import place  # it imports every module of weights

    named = isinstance(mesh, Mesh)
    return place.shard(
        model, Placement.of(mesh, data, model_axis) if named else Placement.like(mesh)
    )


def unshard(model: Model) -> Model:
    """Return a model of a mesh as it was before, on JAX's default device.

    Its arrays pass through the memory of the host, one at a time. On several hosts every process
    gets the whole model.

    Args:
      model: a model that :func:`shard` or ``load(mesh=)`` has returned, perhaps trained since. One
        that is on no mesh is returned as it is.
    """
    from jaxdraft.sharding import place

    return place.unshard(model)
