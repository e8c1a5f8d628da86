"""Weights that are numbers of a narrower type, so that every export of a family holds the same.

Matrices can be trained for four bits: a loss that sees them rounded (``make_step(rounding=...)``)
makes weights that lose nothing when they are stored so.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from jaxdraft.checkpoint.forms import from_int4, to_int4
from jaxdraft.nn.linear import Frozen
from jaxdraft.train.optimize import Labels


def round_to_int4(params: Any, kinds: Labels) -> Any:
    """Round matrices to four bits with a scale for every 64 inputs, and keep their dtype.

    Source: :func:`jaxdraft.checkpoint.forms.to_int4`, by which they are stored.

    Args:
      params: as in :class:`jaxdraft.nn.linear.Frozen`; matrices are [out, in].
      kinds: result of :func:`jaxdraft.train.optimize.labels`; only a "matrix" is rounded.

    Raises:
      ValueError: the inputs of a matrix are no multiple of 64.
    """

    def one(kind: str, value: jax.Array) -> jax.Array:
        if kind != "matrix":
            return value
        return from_int4(*to_int4(value.astype(jnp.float32))).astype(value.dtype)

    return jax.tree.map(one, kinds, params)


def round_to_bfloat16(frozen: Frozen, *, shifted_norms: bool) -> Frozen:
    """Round the stored form of parameters to bfloat16, and keep the arrays' dtype.

    A checkpoint does not store every array as it is used: a decay is ``-exp(A_log)``, and the
    RMSNorms of Qwen3.5 store ``weight - 1``. There the stored number is rounded. Constants stay.

    Args:
      frozen: a module.
      shifted_norms: its RMSNorms store ``weight - 1``: targets and MTP heads of Qwen3.5. The gated
        norm inside a delta net never does.
    """
    params = {p for p, v in nnx.to_flat_state(nnx.state(frozen())) if isinstance(v, nnx.Param)}

    def one(path: tuple[Any, ...], value: jax.Array) -> jax.Array:
        names = tuple(getattr(part, "key", None) for part in path)
        if names not in params:
            return value
        wide = np.asarray(value, np.float64)
        if names[-1] == "decay_scale":
            wide = -np.exp(_rounded(np.log(-wide)))
        elif shifted_norms and names[-1] == "weight" and str(names[-2]).endswith("norm"):
            wide = 1.0 + _rounded(wide - 1.0)
        else:
            wide = _rounded(wide)
        return jnp.asarray(wide.astype(value.dtype))

    return Frozen(jax.tree.map_with_path(one, frozen.params), frozen.structure)


def round_as_stored(frozen: Frozen, kinds: Labels, *, shifted_norms: bool) -> Frozen:
    """Round so that ``checkpoint.save(int4=True, dtype="bfloat16")`` loses nothing.

    Args:
      frozen: a module.
      kinds: result of :func:`jaxdraft.train.optimize.labels`. A "matrix" is rounded by
        :func:`round_to_int4`, everything else by :func:`round_to_bfloat16`.
      shifted_norms: as in :func:`round_to_bfloat16`.

    Raises:
      ValueError: the inputs of a matrix are no multiple of 64.
    """
    matrices = round_to_int4(frozen.params, kinds)
    others = round_to_bfloat16(frozen, shifted_norms=shifted_norms).params
    chosen = jax.tree.map(
        lambda kind, matrix, other: matrix if kind == "matrix" else other, kinds, matrices, others
    )
    return Frozen(chosen, frozen.structure)


def _rounded(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
