"""Recipes -> a Flax module: exact key set, shapes and dtypes, then the numbers."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from convert.artifact.graph import FLOATS
from convert.errors import ArtifactError
from convert.recipes import PackedBytes, Piece, Quantized, Recipe, Scales
from jaxdraft.config import DrafterConfig, TargetConfig
from jaxdraft.nn.linear import Frozen, Linear, PackedLinear, Structure

Path = tuple[str | int, ...]
Progress = Callable[[int, int, str], None]

_ALIGNMENT = 64
"""What the CPU backend wants of a buffer that it takes over instead of copying."""

_THREADS = 4
"""Parameters written at once. numpy lets go of the interpreter lock while it copies."""

_ARENA = 64 << 20
"""Bytes allocated at once. numpy asks for huge pages from 4 MiB up, which most single matrices of a
small model are below; one by one their page faults take as long as the transpositions."""


def abstract(
    module: Callable[..., nnx.Module], config: TargetConfig | DrafterConfig, dtype: DTypeLike
) -> Any:
    """``module(config)`` with shapes and dtypes in place of arrays.

    Traced is a smaller module: rotary tables of one position, which are numpy and would be computed
    in full, and one decoder layer of each kind, because tracing thirty takes longer than reading
    the weights of a small model. Tables and layers are then widened to those of ``config``; a test
    holds the result equal to the honest one.
    """
    small: Any = dataclasses.replace(config, context_length=1)
    if isinstance(config, TargetConfig):
        small = dataclasses.replace(small, layers=tuple(dict.fromkeys(config.layers)))
    made: Any = nnx.eval_shape(lambda: module(small, dtype=dtype, rngs=nnx.Rngs(0)))
    if isinstance(config, TargetConfig):
        traced: dict[str, Any] = dict(zip(small.layers, made.layers, strict=True))
        made.layers = nnx.List([nnx.clone(traced[kind]) for kind in config.layers])
    part: Any
    for _, part in nnx.iter_modules(made):
        if getattr(part, "config", None) == small:
            setattr(part, "config", config)  # noqa: B010 - modules declare it, Module does not
    if hasattr(made, "rotary"):
        for table in (made.rotary.cos, made.rotary.sin):
            shape = (config.context_length, *table.shape[1:])
            table.set_value(jax.ShapeDtypeStruct(shape, table.dtype))
    return made


def pack(
    module: nnx.Module, recipes: Mapping[Path, Recipe], dtype: DTypeLike
) -> dict[Path, Recipe]:
    """Put a ``PackedLinear`` where ``module`` has a ``Linear`` whose source is packed alike.

    That is: every piece comes from MatMulNBits with the same bits, block and type of scales, and
    none has zero points. Everything else is dequantized on load as without packing: the head and
    the embedding, which target and drafter share as one array, and the experts of a MoE.

    Args:
      module: an abstract module; changed in place.
      recipes: of its parameters.
      dtype: of its products.

    Returns:
      The recipes of the changed module.
    """
    packed: dict[Path, Recipe] = {}
    for path, recipe in recipes.items():
        parts = _alike(recipe) if path[-1] == "weight" and path != ("head", "weight") else None
        parent: Any = module
        for key in path[:-2]:
            parent = parent[key] if isinstance(key, int) else getattr(parent, key)
        if parts is None or not isinstance(getattr(parent, str(path[-2])), Linear):
            packed[path] = recipe
            continue
        made = {
            "weight_q": _below([PackedBytes(part) for part in parts]),
            "scales": _below([Scales(part) for part in parts]),
        }
        first = parts[0]
        linear = PackedLinear(
            jax.ShapeDtypeStruct(made["weight_q"].shape, np.uint8),
            jax.ShapeDtypeStruct(made["scales"].shape, FLOATS[first.scales.data_type]),
            bits=first.blocks.bits,
            block=first.blocks.block,
            inputs=first.blocks.width,
            dtype=dtype,
        )
        setattr(parent, str(path[-2]), linear)
        packed |= {(*path[:-1], name): each for name, each in made.items()}
    return packed


def _below(pieces: Sequence[Piece]) -> Recipe:
    """Pieces that differ in their first axis alone, one below the other."""
    height = sum(piece.shape[0] for piece in pieces)
    return Recipe.stack((height, *pieces[0].shape[1:]), pieces)


def _alike(recipe: Recipe) -> list[Quantized] | None:
    """The pieces, if they can stand one below the other in a ``PackedLinear``."""
    parts = [piece for piece in recipe.pieces if isinstance(piece, Quantized)]
    if len(parts) < len(recipe.pieces) or len({(p.blocks, p.scales.data_type) for p in parts}) != 1:
        return None
    blocks = parts[0].blocks
    implied = not blocks.signed and blocks.zero == 1 << (blocks.bits - 1)
    return parts if implied and all(p.zeros is None for p in parts) else None


def split(module: nnx.Module) -> tuple[Structure, dict[Path, jax.ShapeDtypeStruct]]:
    """Structure and parameters of an abstract module."""
    graphdef, state = nnx.split(module)
    return Structure(graphdef), dict(_flatten(nnx.to_pure_dict(state)))


def check(
    file: str, wanted: Mapping[Path, jax.ShapeDtypeStruct], recipes: Mapping[Path, Recipe]
) -> None:
    """The recipes make exactly the module's parameters. ``nnx`` itself would accept anything."""
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
      recipes: how each is made.
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
            # The buffer is ours alone: nobody else writes it, so the backend may keep it.
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
