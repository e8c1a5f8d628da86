"""Recipes -> a Flax module: exact key set, shapes and dtypes, then the numbers."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from convert.errors import ArtifactError
from convert.recipes import Recipe, Recipes
from jaxdraft.config import DrafterConfig, DrafterKind, TargetConfig
from jaxdraft.nn.decoder import Decoder
from jaxdraft.nn.linear import Frozen, Structure

if TYPE_CHECKING:
    from convert.gguf.text import GgufText
    from jaxdraft.sharding.placement import Placement


@dataclasses.dataclass(frozen=True)
class Shell:
    """A module without numbers: shape, dtype and recipe of every parameter."""

    structure: Structure
    wanted: Mapping[tuple[str | int, ...], jax.ShapeDtypeStruct]
    recipes: Recipes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """A converted artifact.

    Attributes:
      target_config: the target's description.
      target: its module, split.
      drafter_kind: kind of the drafter, if there is one.
      drafter_config: the drafter's description.
      drafter: its module, split. It holds no embedding and no head: those are the target's.
      eos_token_ids: tokens that end a sequence.
      bos_token_id, pad_token_id: as configured, or None.
      context_length: the longest sequence.
      model_type: ``model.type`` of the configuration.
      vocab_size: V.
      page_size, max_batch: of the engine's section, or None.
      folder: the folder that was read.
      stored_bytes: bytes read from disk, for ``"target"`` and ``"drafter"``.
      weight_bytes: bytes of the arrays, likewise.
      warnings: settings of the files that are not applied.
      text: tokenizer and chat template, if they are part of the file of the weights.
    """

    target_config: TargetConfig
    target: Frozen[Decoder]
    drafter_kind: DrafterKind | None
    drafter_config: DrafterConfig | None
    drafter: Frozen[Any] | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    context_length: int
    model_type: str
    vocab_size: int
    page_size: int | None
    max_batch: int | None
    folder: pathlib.Path
    stored_bytes: Mapping[str, int]
    weight_bytes: Mapping[str, int]
    warnings: tuple[str, ...] = ()
    text: GgufText | None = None


Path = tuple[str | int, ...]

Progress = Callable[[int, int, str], None]

_ALIGNMENT = 64
"""Alignment in bytes that the CPU backend requires to take over a buffer without a copy."""

_THREADS = 4
"""Parameters written at once. numpy releases the interpreter lock while it copies."""

_ARENA = 64 << 20
"""Bytes allocated at once. numpy requests huge pages from 4 MiB up, which most single matrices of a
small model are below; one by one their page faults take as long as the transpositions."""


def abstract(
    module: Callable[..., nnx.Module], config: TargetConfig | DrafterConfig, dtype: DTypeLike
) -> Any:
    """Return ``module(config)`` with shapes and dtypes in place of arrays.

    Traces a smaller module, with rotary tables of one position (they are numpy and would be
    computed in full) and one decoder layer of each sort (tracing thirty takes longer than reading
    the weights of a small model). Tables and layers are then extended to those of ``config``; a
    test checks that the result equals a full trace.
    """
    small: Any = dataclasses.replace(config, context_length=1)
    sorts: list[tuple[str, bool]] = []
    if isinstance(config, TargetConfig):
        sorts = [(kind, i in config.dense_layers) for i, kind in enumerate(config.layers)]
        kinds, dense = zip(*dict.fromkeys(sorts), strict=True)
        places = tuple(i for i, is_dense in enumerate(dense) if is_dense)
        small = dataclasses.replace(small, layers=kinds, dense_layers=places)
    made: Any = nnx.eval_shape(lambda: module(small, dtype=dtype, rngs=nnx.Rngs(0)))
    if sorts:
        traced = dict(zip(dict.fromkeys(sorts), made.layers, strict=True))
        made.layers = nnx.List([nnx.clone(traced[sort]) for sort in sorts])
    part: Any
    for _, part in nnx.iter_modules(made):
        if getattr(part, "config", None) == small:
            setattr(part, "config", config)  # noqa: B010 - modules declare it, Module does not
    for name in ("rotary", "sliding_rotary"):
        if hasattr(made, name):
            for table in (getattr(made, name).cos, getattr(made, name).sin):
                shape = (config.context_length, *table.shape[1:])
                table.set_value(jax.ShapeDtypeStruct(shape, table.dtype))
    return made


def split(module: nnx.Module) -> tuple[Structure, dict[Path, jax.ShapeDtypeStruct]]:
    """Return the structure and the parameters of an abstract module."""
    graphdef, state = nnx.split(module)
    return Structure(graphdef), dict(_flatten(nnx.to_pure_dict(state)))


def check(
    file: str, wanted: Mapping[Path, jax.ShapeDtypeStruct], recipes: Mapping[Path, Recipe]
) -> None:
    """Check that the recipes make exactly the module's parameters; ``nnx`` does not check it."""
    for path in wanted.keys() - recipes.keys():
        raise ArtifactError(file, f"parameter {_dotted(path)}", "no tensor for it", "one")
    for path in recipes.keys() - wanted.keys():
        raise ArtifactError(file, f"parameter {_dotted(path)}", "a tensor", "no such parameter")
    for path, leaf in wanted.items():
        if recipes[path].shape != leaf.shape:
            raise ArtifactError(
                file,
                f"parameter {_dotted(path)}",
                f"shape {list(recipes[path].shape)}",
                list(leaf.shape),
            )


def fill(
    structure: Structure,
    wanted: Mapping[Path, jax.ShapeDtypeStruct],
    recipes: Mapping[Path, Recipe],
    done: Callable[[int, str], None],
) -> Frozen[Any]:
    """Allocate and write every parameter.

    Args:
      structure, wanted: from :func:`abstract`, checked against ``recipes``.
      recipes: recipe of each.
      done: called with the stored bytes read for a parameter and its dotted path.
    """
    arena = _Arena(sum(_padded(leaf) for leaf in wanted.values()))
    # Largest first, so that no thread is left with a big one at the end.
    order = sorted(wanted, key=lambda path: -math.prod(wanted[path].shape))
    buffers = {path: arena.empty(wanted[path].shape, wanted[path].dtype) for path in order}

    def write(path: Path) -> Path:
        recipe = recipes[path]
        recipe.write(buffers[path])
        for piece in recipe.pieces:
            for tensor in piece.tensors:
                tensor.release()
        return path

    leaves: dict[Path, jax.Array] = {}
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        for finished in as_completed([pool.submit(write, path) for path in order]):
            path = finished.result()
            # Nothing else writes to this buffer, so the backend may keep it.
            leaves[path] = jax.device_put(buffers.pop(path))
            done(recipes[path].nbytes, _dotted(path))
    return Frozen(_nest({path: leaves[path] for path in wanted}), structure)


def _padded(leaf: jax.ShapeDtypeStruct) -> int:
    size = math.prod(leaf.shape) * leaf.dtype.itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class _Arena:
    """Uninitialised arrays, cut from larger allocations, each on a boundary of ``_ALIGNMENT``."""

    def __init__(self, total: int):
        self._left = total
        self._room = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        if padded > self._room.size:
            raw = np.empty(max(padded, min(self._left, _ARENA)) + _ALIGNMENT, np.uint8)
            self._room = raw[-raw.ctypes.data % _ALIGNMENT :]
        piece, self._room = self._room[:size], self._room[padded:]
        self._left -= padded
        return piece.view(dtype).reshape(shape)


def _flatten(tree: Any, path: Path = ()) -> Any:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flatten(value, (*path, key))
    else:
        yield path, tree


def _nest(leaves: Mapping[Path, Any]) -> dict:
    tree: dict = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def _dotted(path: Path) -> str:
    return ".".join(str(key) for key in path)


def recipe_bytes(recipes: Recipes) -> int:
    """Return the bytes on disk of all tensors used, each counted once."""
    tensors = {
        tensor.name: tensor.nbytes
        for recipe in recipes.values()
        for piece in recipe.pieces
        for tensor in piece.tensors
    }
    return sum(tensors.values())


def device_bytes(shell: Shell, parts: int) -> int:
    """Return the bytes of a module's arrays on each of ``parts`` devices that share it."""
    from jaxdraft.sharding.place import device_size
    from jaxdraft.sharding.rules import divide

    cuts = divide(nnx.merge(shell.structure.graphdef, _nest(shell.wanted)), parts)
    return sum(
        device_size(leaf.shape, cuts.get(path), parts) * leaf.dtype.itemsize
        for path, leaf in shell.wanted.items()
    )


def fill_on_mesh(
    shell: Shell, done: Callable[[int, str], None], placement: Placement
) -> Frozen[Any]:
    """Write one parameter at a time, and divide it over a mesh before the next.

    The host holds one parameter and a device's slice of it, never the module.

    Args:
      shell: the module without numbers.
      done: as in :func:`fill`.
      placement: the mesh.
    """
    from jaxdraft.sharding.place import moved_from_host
    from jaxdraft.sharding.rules import divide

    module = nnx.merge(shell.structure.graphdef, _nest(shell.wanted))
    cuts = divide(module, placement.parts)
    leaves: dict[Path, jax.Array] = {}
    for path, leaf in shell.wanted.items():
        buffer, recipe = np.empty(leaf.shape, leaf.dtype), shell.recipes[path]
        recipe.write(buffer)
        for piece in recipe.pieces:
            for tensor in piece.tensors:
                tensor.release()
        leaves[path] = moved_from_host(buffer, cuts.get(path), placement)
        done(recipe.nbytes, _dotted(path))
    structure = Structure(nnx.split(module)[0], whole=shell.structure)
    return Frozen(_nest(leaves), structure)


def fill_shells(
    shells: Mapping[str, Shell],
    progress: Callable[[int, int, str], None] | None,
    placement: Placement | None = None,
) -> tuple[dict[str, Frozen], dict[str, int], dict[str, int]]:
    """Return frozen modules, their bytes on disk and the bytes of their arrays, all by name.

    Args:
      shells: modules without numbers, by name.
      progress: as in :func:`jaxdraft.load`, over all of them together.
      placement: the mesh that the arrays are divided over, if there is one.
    """
    stored = {name: recipe_bytes(shell.recipes) for name, shell in shells.items()}
    weights = {
        name: sum(leaf.size * leaf.dtype.itemsize for leaf in shell.wanted.values())
        for name, shell in shells.items()
    }
    recipes = [recipe for shell in shells.values() for recipe in shell.recipes.values()]
    total, so_far = sum(recipe.nbytes for recipe in recipes), 0

    def done(nbytes: int, label: str) -> None:
        nonlocal so_far
        so_far += nbytes
        if progress is not None:
            progress(so_far, total, label)

    def filled(shell: Shell) -> Frozen[Any]:
        if placement is not None:
            return fill_on_mesh(shell, done, placement)
        return fill(shell.structure, shell.wanted, shell.recipes, done)

    frozen = {name: filled(shell) for name, shell in shells.items()}
    return frozen, stored, weights
