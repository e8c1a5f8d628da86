"""Quantized matrices that stay packed in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from convert.artifact.quantized import PackedBytes, Quantized, Scales
from convert.build import Path
from convert.recipes import Piece, Recipe
from convert.tensors import FLOATS
from jaxdraft.nn.linear import Linear
from jaxdraft.nn.packed import PackedLinear


def pack(
    module: nnx.Module, recipes: Mapping[Path, Recipe], dtype: DTypeLike
) -> dict[Path, Recipe]:
    """Replace each ``Linear`` whose source is packed uniformly by a ``PackedLinear``.

    Uniformly means that every piece comes from MatMulNBits with the same bits, block and type of
    scales, and without zero points. Everything else is dequantized on load as without packing: the
    head and the embedding, which target and drafter share as one array, and the experts of a MoE.

    Args:
      module: an abstract module; changed in place.
      recipes: recipes of its parameters.
      dtype: type of its products.

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
    """Return pieces that differ only in their first axis, concatenated along it."""
    height = sum(piece.shape[0] for piece in pieces)
    return Recipe.stack((height, *pieces[0].shape[1:]), pieces)


def _alike(recipe: Recipe) -> list[Quantized] | None:
    """Return the pieces, if they can be concatenated in a ``PackedLinear``."""
    parts = [piece for piece in recipe.pieces if isinstance(piece, Quantized)]
    if len(parts) < len(recipe.pieces) or len({(p.blocks, p.scales.data_type) for p in parts}) != 1:
        return None
    blocks = parts[0].blocks
    implied = not blocks.signed and blocks.zero == 1 << (blocks.bits - 1)
    return parts if implied and all(p.zeros is None for p in parts) else None
