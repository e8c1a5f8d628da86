"""Moving the arrays of a model to a mesh, and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxdraft.meshes import whole_array
from jaxdraft.model import Model
from jaxdraft.nn.linear import Frozen, Structure
from jaxdraft.nn.packed import PackedMatrix
from jaxdraft.sharding.placement import Placement, ShardingError
from jaxdraft.sharding.rules import Cut, Path, divide, with_copies
from jaxdraft.target import DecoderTarget

_VOCABULARY = ("embedding", "head")
"""Fields of drafters with a row for every token."""


def shard(model: Model, placement: Placement) -> Model:
    """See :func:`jaxdraft.shard`."""
    target = model.target
    if not isinstance(target, DecoderTarget):
        raise ShardingError(
            f"the target is a {type(target).__name__}; expected a DecoderTarget, whose parts have "
            "rules"
        )
    if target.placement is not None:
        raise ShardingError(
            f"the model is divided over the mesh {dict(target.placement.mesh.shape)} already; "
            "expected a model on one device: see jaxdraft.unshard"
        )
    move = _Move(placement)
    return dataclasses.replace(
        model, target=move.part(target, ""), drafter=move.part(model.drafter, "")
    )


class _Walk:
    """A pass over the parts of a model; arrays that parts share stay shared."""

    target: Placement | None

    def __init__(self, placement: Placement):
        self.placement = placement
        self.moved: dict[int, Any] = {}
        self.kept: list[Any] = []  # so that no identity is used twice

    def frozen(self, frozen: Frozen) -> Frozen:
        """Move a module."""
        raise NotImplementedError

    def packed(self, matrix: PackedMatrix, name: str) -> PackedMatrix:
        """Move a packed matrix that is the member ``name`` of a drafter."""
        raise NotImplementedError

    def array(self, x: Any, cut: Cut | None) -> jax.Array:
        """Move an array, or return the result of its first move."""
        if id(x) not in self.moved:
            if isinstance(x, jax.core.Tracer):
                raise ShardingError("an array of the model is traced; expected to be outside jit")
            self.kept.append(x)
            self.moved[id(x)] = self.move(x, cut)
        return self.moved[id(x)]

    def move(self, x: Any, cut: Cut | None) -> jax.Array:
        """Move an array."""
        raise NotImplementedError

    def config(self, config: Any, moved: Mapping[str, Any]) -> Any:
        """Return the description of a part whose other members were moved already."""
        raise NotImplementedError

    def part(self, part: Any, name: str) -> Any:
        """Move a part of a model, the member ``name`` of another."""
        if isinstance(part, Frozen):
            return self.frozen(part)
        if isinstance(part, PackedMatrix):
            return self.packed(part, name)
        if isinstance(part, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            rows = part.shape[0] if name in _VOCABULARY and part.ndim == 2 else 1
            return self.array(part, None if rows % self.placement.parts else Cut(0))
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            return self._fields(part)
        if isinstance(part, tuple | list):
            return type(part)([self.part(each, "") for each in part])
        if isinstance(part, dict):
            return {key: self.part(each, str(key)) for key, each in part.items()}
        return part

    def _fields(self, part: Any) -> Any:
        new: dict[str, Any] = {}
        fields = dataclasses.fields(part)
        for field in fields:
            value = getattr(part, field.name)
            if field.metadata.get("pytree_node", True):
                new[field.name] = self.part(value, field.name)
        if any(field.name == "config" and field.name not in new for field in fields):
            new["config"] = self.config(part.config, new)
        if isinstance(part, DecoderTarget):
            new["placement"] = self.target
        return dataclasses.replace(part, **new)


class _Move(_Walk):
    """From one device to the mesh."""

    def __init__(self, placement: Placement):
        super().__init__(placement)
        self.target = placement

    def frozen(self, frozen: Frozen) -> Frozen:
        module = frozen()
        cuts = divide(module, self.placement.parts)
        graphdef, _ = nnx.split(module)
        params = _with_paths(lambda path, x: self.array(x, cuts.get(path)), frozen.params)
        return Frozen(params, Structure(graphdef, whole=frozen.structure))

    def packed(self, matrix: PackedMatrix, name: str) -> PackedMatrix:
        """Divide a packed matrix by the vocabulary, or replicate it."""
        form, parts = matrix.form, self.placement.parts
        aligned = form.outputs % parts == 0 and form.outputs // parts % form.rows == 0
        fits = name in _VOCABULARY and aligned
        cuts = {n: Cut(0) if fits and n != "order" else None for n in matrix.arrays}
        arrays = {n: self.array(x, cuts[n]) for n, x in matrix.arrays.items()}
        return PackedMatrix(arrays, form)

    def move(self, x: Any, cut: Cut | None) -> Any:
        """Move an array, or return the shape of a divided one."""
        if isinstance(x, jax.ShapeDtypeStruct):
            sharding = self.placement.along(None if cut is None else cut.dim)
            return jax.ShapeDtypeStruct(divided_shape(x.shape, cut), x.dtype, sharding=sharding)
        return moved(x, cut, self.placement)

    def config(self, config: Any, moved: Mapping[str, Any]) -> Any:
        """Return the description with copied heads."""
        del moved
        return with_copies(config, self.placement.parts)


class _Measure(_Move):
    """From one device, or a mesh, to the shapes of one device's slices."""

    def __init__(self, parts: int):
        self.placement = self.target = cast(Any, _Parts(parts))
        self.moved, self.kept = {}, []

    def frozen(self, frozen: Frozen) -> Frozen:
        """Measure a module, which may lie on a mesh already."""
        if frozen.structure.whole is None:
            return super().frozen(frozen)
        params = _with_paths(lambda _, x: self.array(x, None), frozen.params)
        return Frozen(params, frozen.structure)

    def move(self, x: Any, cut: Cut | None) -> Any:
        """Return the shape of a slice."""
        if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:
            return jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)
        size = device_size(x.shape, cut, self.placement.parts)
        return jax.ShapeDtypeStruct((size,), x.dtype)


class _Parts(NamedTuple):
    """A number of devices in place of a mesh."""

    parts: int


class _Back(_Walk):
    """From the mesh to one device, or to the host."""

    target = None

    def __init__(self, placement: Placement, put: Callable[[np.ndarray], Any] = jax.device_put):
        super().__init__(placement)
        self.put = put

    def frozen(self, frozen: Frozen) -> Frozen:
        """Move a module, with the structure that it had."""
        whole = frozen.structure.whole
        if whole is None:  # on one device already
            return frozen
        cuts = divide(nnx.merge(whole.graphdef, frozen.params), self.placement.parts)
        params = _with_paths(lambda path, x: self.array(x, cuts.get(path)), frozen.params)
        return Frozen(params, whole)

    def packed(self, matrix: PackedMatrix, name: str) -> PackedMatrix:
        """Move a packed matrix."""
        del name
        arrays = {n: self.array(x, None) for n, x in matrix.arrays.items()}
        return PackedMatrix(arrays, matrix.form)

    def move(self, x: Any, cut: Cut | None) -> jax.Array:
        """Move an array."""
        here = whole_array(x)
        if cut is not None and (cut.index is not None or cut.spread > 1):
            count = here.shape[cut.dim] if cut.index is None else int(cut.index.max()) + 1
            entries = _entries((*here.shape[: cut.dim], count // cut.spread), cut)
            places = np.zeros(int(entries.max()) + 1, np.int64)
            places[entries] = np.arange(len(entries))
            here = np.take(here, places, axis=cut.dim)
        return self.put(here)

    def config(self, config: Any, moved: Mapping[str, Any]) -> Any:
        """Return the description of the module among the members, if there is one."""
        found = [part for part in moved.values() if isinstance(part, Frozen)]
        return found[0]().config if found else config


class _Row(_Walk):
    """From a mesh to one of its rows of devices. Nothing is copied."""

    def __init__(self, placement: Placement, row: int):
        super().__init__(placement)
        mesh = placement.mesh
        self.target = Placement(
            Mesh(mesh.devices[row : row + 1], mesh.axis_names, axis_types=mesh.axis_types)
        )
        self.devices = set(self.target.mesh.devices.flat)

    def frozen(self, frozen: Frozen) -> Frozen:
        """Move a module."""
        params = _with_paths(lambda _, x: self.array(x, None), frozen.params)
        return Frozen(params, frozen.structure)

    def packed(self, matrix: PackedMatrix, name: str) -> PackedMatrix:
        """Move a packed matrix."""
        del name
        arrays = {n: self.array(x, None) for n, x in matrix.arrays.items()}
        return PackedMatrix(arrays, matrix.form)

    def move(self, x: Any, cut: Cut | None) -> jax.Array:
        """Return the array of the row's own slices."""
        del cut
        assert self.target is not None
        if not isinstance(x.sharding, NamedSharding):  # on one device: the caller's own drafter
            return x
        slices = [part.data for part in x.addressable_shards if part.device in self.devices]
        sharding = NamedSharding(self.target.mesh, x.sharding.spec)
        return jax.make_array_from_single_device_arrays(x.shape, sharding, slices)

    def config(self, config: Any, moved: Mapping[str, Any]) -> Any:
        """Return the description as it is."""
        del moved
        return config


def rows_of(model: Model) -> list[Model]:
    """Return the model on each row of devices of its mesh; arrays are shared, not copied."""
    assert isinstance(model.target, DecoderTarget) and model.target.placement is not None
    placement = model.target.placement
    walks = [_Row(placement, row) for row in range(placement.rows)]
    return [
        dataclasses.replace(
            model, target=walk.part(model.target, ""), drafter=walk.part(model.drafter, "")
        )
        for walk in walks
    ]


def replaced_head(head: Any, placement: Placement) -> Any:
    """Return a head [V, D], dense or packed, divided by the vocabulary if that divides."""
    return _Move(placement).part(head, "head")


def moved(x: Any, cut: Cut | None, placement: Placement) -> jax.Array:
    """Return an array that lies on one device, divided over the mesh."""
    if cut is None:
        return jax.device_put(x, placement.along(None))
    if cut.spread > 1 or cut.index is not None:
        x = jnp.take(jnp.asarray(x), _entries(x.shape, cut), axis=cut.dim)
    return jax.device_put(x, placement.along(cut.dim))


def moved_from_host(x: np.ndarray, cut: Cut | None, placement: Placement) -> jax.Array:
    """Return an array of the host, divided over the mesh: one device's slice is copied at a time.

    Every process passes the same array, and keeps the slices of its own devices.
    """
    if cut is None:
        return jax.device_put(x, placement.along(None))
    dim, entries = cut.dim, _entries(x.shape, cut)
    shape = (*x.shape[:dim], len(entries), *x.shape[dim + 1 :])

    def part(place: Any) -> np.ndarray:
        return np.take(x, entries[place[dim]], axis=dim)

    return jax.make_array_from_callback(shape, placement.along(dim), part)


def divided_shape(shape: tuple[int, ...], cut: Cut | None) -> tuple[int, ...]:
    """Return the shape of the divided array, over all devices."""
    if cut is None:
        return shape
    return (*shape[: cut.dim], len(_entries(shape, cut)), *shape[cut.dim + 1 :])


def device_size(shape: tuple[int, ...], cut: Cut | None, parts: int) -> int:
    """Return the numbers of an array that each of ``parts`` devices holds."""
    return math.prod(divided_shape(shape, cut)) // (1 if cut is None else parts)


def device_bytes(*roots: Any, parts: int) -> int:
    """Return the bytes of all arrays on each of ``parts`` devices that share them.

    Args:
      *roots: parts of a model on one device, or on a mesh with that many parts.
      parts: devices along the axis of weights.
    """
    measure = _Measure(parts)
    for root in roots:
        measure.part(root, "")
    return sum(x.size * x.dtype.itemsize for x in measure.moved.values())


def _entries(shape: tuple[int, ...], cut: Cut) -> np.ndarray:
    """Return the entry along the cut of the array on one device that each of the new ones is."""
    index = np.arange(shape[cut.dim] * cut.spread) if cut.index is None else cut.index
    return index // cut.spread


def unshard(model: Model) -> Model:
    """See :func:`jaxdraft.unshard`."""
    target = model.target
    if not isinstance(target, DecoderTarget) or target.placement is None:
        return model
    return _Back(target.placement).part(model, "")


def on_host(model: Model | DecoderTarget, drafters: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return a model of a mesh and further drafters of it with arrays of the host, to be saved.

    A model that is on no mesh is returned as it is.
    """
    target = model.target if isinstance(model, Model) else model
    if not isinstance(target, DecoderTarget) or target.placement is None:
        return model, list(drafters)
    back = _Back(target.placement, lambda x: x)
    return back.part(model, ""), [back.part(drafter, "") for drafter in drafters]


def _with_paths(change: Callable[[Path, Any], Any], tree: Any, path: Path = ()) -> Any:
    """Map the leaves of nested dictionaries with their paths."""
    if isinstance(tree, dict):
        return {key: _with_paths(change, part, (*path, key)) for key, part in tree.items()}
    return change(path, tree)
