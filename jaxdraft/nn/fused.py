"""Parts of a fused matrix: cut from its products, and ordered for several devices.

A fused matrix has the rows of several matrices that read the same input: queries, keys and values,
or gate and up. On one device its parts lie one after the other. Divided over n devices, each
device holds its share of every part, so that no part has to move between devices:

    one device:   q0 q1 q2 q3 k0 k1 v0 v1
    two devices:  q0 q1 k0 v0 | q2 q3 k1 v1
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def split(x: jax.Array, sizes: Sequence[int], shards: int = 1, *, axis: int = -1) -> list:
    """Return the parts of the products of a fused matrix.

    Args:
      x: an array in which one axis has the outputs of a fused matrix.
      sizes: number of outputs of each part; each divides by ``shards``.
      shards: number of devices for which the matrix is ordered.
      axis: the axis of the outputs.
    """
    axis %= x.ndim
    ends = np.cumsum(sizes)[:-1].tolist()
    if shards == 1:
        return jnp.split(x, ends, axis=axis)
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    apart = x.reshape(*before, shards, x.shape[axis] // shards, *after)
    parts = jnp.split(apart, [end // shards for end in ends], axis=axis + 1)
    return [part.reshape(*before, -1, *after) for part in parts]


def order(parts: Sequence[np.ndarray], shards: int) -> np.ndarray:
    """Return the row of the matrix on one device that each row of the divided one is.

    Example, parts (0 1 2 3) and (4 5), two devices: 0 1 4 2 3 5.

    Args:
      parts: row numbers of each part; their counts divide by ``shards``.
      shards: number of devices.
    """
    return np.concatenate([part.reshape(shards, -1) for part in parts], axis=1).reshape(-1)
