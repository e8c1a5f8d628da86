"""Rotary position embedding over tables that are weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdraft.nn.linear import Table
from jaxdraft.rope import Rope


def rotary_tables(
    length: int, rotary_dim: int, theta: float, *, scale: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of ``position * theta**(-2 i / rotary_dim)``, each [length, rotary_dim / 2].

    Source: Su et al., arXiv:2104.09864, equation 34. ``scale`` multiplies both (YaRN's attention
    factor, arXiv:2309.00071 section 3.4).
    """
    frequency = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    angle = np.arange(length, dtype=np.float64)[:, None] * frequency[None]
    return (
        (np.cos(angle) * scale).astype(np.float32),
        (np.sin(angle) * scale).astype(np.float32),
    )


class Rotary(nnx.Module):
    """A pair of rotary tables, for all layers that share them."""

    def __init__(self, cos: jax.Array, sin: jax.Array):
        """cos, sin: [positions, rotary_dim / 2]."""
        self.cos = Table(cos)
        self.sin = Table(sin)

    @classmethod
    def of(cls, rope: Rope | None, length: int, rotary_dim: int) -> Rotary:
        """Return the tables of a target; without a description, plain ones of base 10,000.

        Args:
          rope: description of the tables.
          length: number of positions.
          rotary_dim: channels that are rotated.
        """
        if rope is None:
            tables = rotary_tables(length, rotary_dim, 10000.0)
        else:
            tables = rope.target_tables(length, rotary_dim)
        return cls(*map(jnp.asarray, tables))

    def at(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return float32 cos and sin at ``positions`` [B, T]: two arrays [B, T, rotary_dim / 2].

        Positions past the table give its last row; callers never commit such a row (a sequence is
        refused or stopped before it gets there).
        """
        cos = jnp.take(self.cos[...], positions, axis=0, mode="clip")
        sin = jnp.take(self.sin[...], positions, axis=0, mode="clip")
        return cos.astype(jnp.float32), sin.astype(jnp.float32)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Rotate the first ``rotary_dim`` channels of every head; the rest pass.

    Example, one head of width 4 with rotary_dim 4: channel 0 pairs with 2 and 1 with 3:

      y[0] = x[0] cos[0] - x[2] sin[0]      y[2] = x[2] cos[0] + x[0] sin[0]

    Interleaved, channel 0 pairs with 1 and 2 with 3:

      y[0] = x[0] cos[0] - x[1] sin[0]      y[1] = x[1] cos[0] + x[0] sin[0]

    Text positions are equal in all sections of a multi-section (MRoPE) embedding, so it is this.

    Args:
      x: [B, T, heads, H].
      cos: [B, T, rotary_dim / 2] float32.
      sin: [B, T, rotary_dim / 2] float32.
      interleaved: whether pairs are neighbours.
    """
    half = cos.shape[-1]
    wide, rest = x.astype(jnp.float32), x[..., 2 * half :]
    if interleaved:
        first, second = wide[..., 0 : 2 * half : 2], wide[..., 1 : 2 * half : 2]
    else:
        first, second = wide[..., :half], wide[..., half : 2 * half]
    c, s = cos[:, :, None, :], sin[:, :, None, :]
    pair = [first * c - second * s, second * c + first * s]
    if interleaved:
        turned = jnp.stack(pair, axis=-1).reshape(*x.shape[:-1], 2 * half)
    else:
        turned = jnp.concatenate(pair, axis=-1)
    return (
        jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)
        if rest.size
        else turned.astype(x.dtype)
    )
