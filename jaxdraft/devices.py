"""Properties of devices: the data type of products.

| device | compute capability | dtype | why |
|---|---|---|---|
| CPU | | float32 | XLA widens both kinds of 16 bits for every product |
| NVIDIA V100, T4 and other GPUs before Ampere | below 8.0 | float16 | no products in bfloat16 |
| NVIDIA A100, L4, H100, H200, B200 | from 8.0 on | bfloat16 | native; has the range of float32 |
| TPU | | bfloat16 | native |
| any other | | float32 | nothing is known |

No XLA flag is set in this package. Compiled for GPUs, every round is one CUDA graph
under XLA's defaults, and no weight is concatenated whatever the flags are (``nn.linear``). Choices
of the autotuner are kept between processes by JAX itself wherever ``jax_compilation_cache_dir``
names a folder. ``XLA_FLAGS`` belongs to the caller.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxdraft.base import Target, full_target
from jaxdraft.sizes import GPU_CHUNK, PREFILL_CHUNK

AMPERE = (8, 0)
"""Compute capability of the first NVIDIA GPUs with products in bfloat16."""


def native_dtype(device: Any = None) -> jnp.dtype:
    """Return the floating-point type of weights with the fastest products on a device.

    Example: ``jaxdraft.load(folder, dtype=native_dtype())``.

    Args:
      device: a ``jax.Device``. Default: the first one.

    Returns:
      One of float32, float16 and bfloat16; see the table above.

    Raises:
      ValueError: an NVIDIA GPU that states no compute capability.
    """
    device = jax.devices()[0] if device is None else device
    if device.platform == "tpu":
        return jnp.dtype(jnp.bfloat16)
    if device.platform not in ("gpu", "cuda"):
        return jnp.dtype(jnp.float32)
    stated = str(getattr(device, "compute_capability", None))
    parts = stated.split(".")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        if "nvidia" not in str(getattr(device, "device_kind", "")).lower():
            return jnp.dtype(jnp.float32)
        raise ValueError(
            f"compute_capability of {device} is {stated!r}; expected a form like '9.0'"
        )
    older = (int(parts[0]), int(parts[1])) < AMPERE
    return jnp.dtype(jnp.float16 if older else jnp.bfloat16)


def platform_of(tree: Any) -> str:
    """Return the platform that holds the arrays of a pytree, or else JAX's default.

    Example: "cpu". Both names that JAX has for an NVIDIA GPU become "gpu".
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            platform = next(iter(leaf.devices())).platform
            break
    else:
        platform = jax.default_backend()
    return "gpu" if platform == "cuda" else platform


def prompt_chunk(target: Target, *, batch: int, size: int, room: int) -> int:
    """Return the number of rows of every prompt that run at once: a multiple of 128, or ``size``.

    On a CPU it is 128. On a GPU the weights would be read once per 128 rows, in more time than the
    products take; so there it is up to 512, divided among the prompts.

    Example, H200, two prompts of up to 8,192 tokens: 256.

    Args:
      target: the target.
      batch: number of prompts.
      size: tokens of the longest prompt, padded.
      room: tokens that may follow a prompt.
    """
    most = PREFILL_CHUNK
    if platform_of(target) == "gpu":
        most = min(full_target(target).prompt_rows, GPU_CHUNK // batch)
    rows = PREFILL_CHUNK
    # The last chunk is whole, and states have room for 128 rows past their capacity.
    while 2 * rows <= most and -(-size // (2 * rows)) * 2 * rows <= size + room + PREFILL_CHUNK:
        rows *= 2
    return min(size, rows)
