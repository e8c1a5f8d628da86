"""The place of a model on a mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxdraft.checks import check_int
from jaxdraft.meshes import ShardingError

DATA, MODEL = "data", "model"
"""Default names of the axes of rows and of weights."""


def check_sizes(sizes: Mapping[str, int] | str) -> dict[str, int]:
    """Return the sizes of both axes, 1 where one is not given.

    Args:
      sizes: size per axis, or a string like ``"data=2,model=4"``.

    Raises:
      ShardingError: another axis, a size that is not a positive integer, or a string of another
        form.
    """
    if isinstance(sizes, str):
        pairs = [part.partition("=") for part in sizes.split(",")]
        names = [name.strip() for name, _, _ in pairs]
        if len(set(names)) < len(names) or not all(n.strip().isdecimal() for _, _, n in pairs):
            raise ShardingError(f"mesh is {sizes!r}; expected axes and sizes: data=2,model=4")
        sizes = {name: int(size) for name, (_, _, size) in zip(names, pairs, strict=True)}
    unknown = sorted(set(sizes) - {DATA, MODEL})
    if unknown:
        listed = ", ".join(map(repr, unknown))
        raise ShardingError(f"mesh has the axes {listed}; expected {DATA!r} and {MODEL!r}")
    try:
        return {
            name: check_int(f"mesh axis {name!r}", sizes.get(name, 1)) for name in (DATA, MODEL)
        }
    except ValueError as error:
        raise ShardingError(str(error)) from None


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh of rows and parts. Hashable, and a static part of every program.

    Attributes:
      mesh: the devices along two axes: rows of a batch are divided over the first, weights over
        the second.
    """

    mesh: Mesh

    @classmethod
    def of(cls, mesh: Mesh, data: str | None = DATA, model: str | None = MODEL) -> Placement:
        """Return the placement on a mesh.

        Args:
          mesh: the devices. Its axes may be in any order, and of any type.
          data: name of the axis of rows; None: there is none.
          model: name of the axis of weights; None: there is none.

        Raises:
          ShardingError: the mesh has no such axis, or one more of several devices.
        """
        names = tuple(mesh.axis_names)
        for argument, name in (("data", data), ("model", model)):
            if name is not None and name not in names:
                raise ShardingError(
                    f"the mesh has no axis {name!r}; found {', '.join(map(repr, names))}; name its "
                    f"axis with {argument}=, or pass {argument}=None"
                )
        if data is not None and data == model:
            raise ShardingError(f"data and model are both {data!r}; expected two axes")
        left = [n for n in names if n not in (data, model) and mesh.shape[n] > 1]
        if left:
            raise ShardingError(
                f"the mesh has the axes {', '.join(map(repr, names))}; nothing would be divided "
                f"over {', '.join(map(repr, left))}"
            )
        order = [names.index(name) for name in (data, model) if name is not None]
        order += [axis for axis in range(len(names)) if axis not in order]
        sizes = [1 if name is None else mesh.shape[name] for name in (data, model)]
        axes = [name or default for name, default in ((data, "rows"), (model, "parts"))]
        devices = np.transpose(mesh.devices, order).reshape(sizes)
        return cls(Mesh(devices, axes, axis_types=(AxisType.Auto,) * 2))

    @classmethod
    def like(cls, mesh: AnyMesh) -> Placement:
        """Return the placement on a mesh, or on as many of this process's devices as sizes say.

        On several hosts the sizes have to be those of all devices.

        Raises:
          ShardingError: as :meth:`of`, or there are not so many devices.
        """
        if isinstance(mesh, Placement):
            return mesh
        if isinstance(mesh, Mesh):
            return cls.of(mesh)
        sizes, devices = check_sizes(mesh), jax.devices()
        count = math.prod(sizes.values())
        if count > len(devices) or (jax.process_count() > 1 and count != len(devices)):
            raise ShardingError(
                f"mesh is {sizes}, {count} devices; found {len(devices)} {devices[0].platform} "
                f"devices of {jax.process_count()} processes"
            )
        shape = tuple(sizes.values())
        return cls.of(jax.make_mesh(shape, tuple(sizes), devices=devices[:count]))

    @property
    def data(self) -> str:
        """Name of the axis of rows."""
        return self.mesh.axis_names[0]

    @property
    def model(self) -> str:
        """Name of the axis of weights."""
        return self.mesh.axis_names[1]

    @property
    def rows(self) -> int:
        """Devices along the axis of rows."""
        return self.mesh.shape[self.data]

    @property
    def parts(self) -> int:
        """Devices along the axis of weights."""
        return self.mesh.shape[self.model]

    def check_local(self) -> None:
        """Check that this process has all devices, as programs that the host steps need.

        Raises:
          ShardingError: it has not.
        """
        foreign = [d for d in self.mesh.devices.flat if d.process_index != jax.process_index()]
        if foreign:
            raise ShardingError(
                f"{len(foreign)} of {self.mesh.size} devices belong to other processes; expected "
                "devices of this one: run an engine in every process, each on a mesh of its own "
                "devices"
            )

    def sharding(self, *axes: str | None) -> NamedSharding:
        """Return the sharding of an array whose dimensions lie along ``axes``."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def along(self, dim: int | None) -> NamedSharding:
        """Return the sharding of weights that are divided along ``dim``; None: of all alike."""
        return self.sharding(*([] if dim is None else [None] * dim + [self.model]))

    def rows_axis(self, batch: int) -> str | None:
        """Return the axis that ``batch`` rows are divided over: None unless they divide."""
        return self.data if batch % self.rows == 0 else None

    def constrain(self, x: jax.Array, *axes: Any) -> jax.Array:
        """Divide an array inside a program; axes of a surrounding ``shard_map`` are left out."""
        around = jax.sharding.get_abstract_mesh()
        manual = set(around.manual_axes) if around.axis_names else set()
        if not manual:
            return lax.with_sharding_constraint(x, self.sharding(*axes))
        kept = [None if axis in manual else axis for axis in axes]
        if not any(kept):
            return x
        return lax.with_sharding_constraint(x, NamedSharding(around, PartitionSpec(*kept)))

    def everywhere(self, tree: Any) -> Any:
        """Give every device the whole of all arrays, as results for the host."""
        return jax.tree.map(self.constrain, tree)


AnyMesh = Mesh | Placement | Mapping[str, int] | str
"""Devices, or the sizes of their axes: ``{"data": 2, "model": 4}`` or ``"data=2,model=4"``."""
