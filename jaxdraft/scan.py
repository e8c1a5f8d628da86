"""A scan whose gradient needs little memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def checkpointed_scan(
    step: Callable[[Any, None], tuple[Any, Any]], carry: Any, length: int
) -> tuple[Any, Any]:
    """Run a scan without inputs whose gradient keeps about ``2 sqrt(length)`` carries.

    A carry holds a whole cache of keys and values, so one per step would take too much memory.
    Steps are grouped: the carry before every group is kept, and those inside one group at a
    time are recomputed. Without a gradient, grouping changes nothing.

    Example, 32 steps: 8 groups of 4. 19 steps: 4 groups of 4, then 3 steps.

    Args:
      step: body of the scan.
      carry: initial carry.
      length: number of steps, at least one.

    Returns:
      The last carry, and the outputs of all steps, stacked.
    """
    step = jax.checkpoint(step, prevent_cse=False)
    size = _group(length)
    groups, rest = divmod(length, size) if size > 2 else (0, length)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def group(carry: Any, _: None) -> tuple[Any, Any]:
        return lax.scan(step, carry, None, length=size)

    outputs = []
    if groups:
        carry, grouped = lax.scan(group, carry, None, length=groups)
        outputs.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), grouped))
    if rest:
        carry, last = lax.scan(step, carry, None, length=rest)
        outputs.append(last)
    return carry, jax.tree.map(lambda *x: jnp.concatenate(x), *outputs)


def _group(length: int) -> int:
    """Return the steps per group: near the root of ``length``, and a divisor if one is near."""
    root = math.isqrt(length)
    near = range(root, root // 2, -1)
    return next((size for size in near if length % size == 0), root)
