"""Weights that are bfloat16 values, so that every export of a family holds the same numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from jaxdraft.nn.linear import Frozen


def round_to_bfloat16(frozen: Frozen, *, shifted_norms: bool) -> Frozen:
    """Round what a checkpoint stores to bfloat16, and keep the arrays' dtype.

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


def _rounded(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
