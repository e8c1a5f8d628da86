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
    """Scan without inputs. A gradient keeps about ``2 sqrt(length)`` carries and computes the rest.

    A carry holds a whole cache of keys and values: one for every step would be as many caches.
    Steps are grouped: the carries in front of every group are kept, and those within one group at
    a time. Without a gradient, grouping changes nothing.

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
    """Steps of a group: about the root of ``length``, and a divisor of it if there is one near."""
    root = math.isqrt(length)
    near = range(root, root // 2, -1)
    return next((size for size in near if length % size == 0), root)
