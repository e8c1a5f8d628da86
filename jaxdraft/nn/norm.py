"""Root-mean-square norms. All sums run in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Return ``x / sqrt(mean(x**2) + eps) * weight`` over the last axis, in the dtype of ``x``.

    Source: onnxruntime ``SimplifiedLayerNormalization`` (stash_type 1: float32 inside).

    Args:
      x: [..., D].
      weight: [D]. Already ``1 + w`` where a model family stores ``w``.
      eps: number added to the mean of squares.
    """
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * _row(weight, x.ndim)).astype(x.dtype)


def gated_rms_norm(x: jax.Array, weight: jax.Array, gate: jax.Array, eps: float) -> jax.Array:
    """Return ``rms_norm(x) * silu(gate)``. Source: onnxruntime ``GatedRMSNorm``.

    Args:
      x: [..., Dv], one value head per row.
      weight: [Dv].
      gate: like ``x``.
      eps: number added to the mean of squares.
    """
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    gated = wide * scale * _row(weight, x.ndim) * jax.nn.silu(gate.astype(jnp.float32))
    return gated.astype(x.dtype)


def l2_normalize(x: jax.Array) -> jax.Array:
    """Return ``x / |x|`` over the last axis in float32, without epsilon; zero stays zero.

    Source: ONNX ``LpNormalization`` (p = 2), onnxruntime ``GatedDeltaNet`` (qk_l2_norm = 1).
    """
    wide = x.astype(jnp.float32)
    square = jnp.sum(wide * wide, axis=-1, keepdims=True)
    # rsqrt(0) is infinite and 0 * inf is not a number, hence the inner select.
    return wide * lax.rsqrt(jnp.where(square > 0, square, 1.0))


class RMSNorm(nnx.Module):
    """:func:`rms_norm` with its weight."""

    def __init__(self, width: int, eps: float, *, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        return rms_norm(x, self.weight[...], self.eps)


def _row(weight: jax.Array, ndim: int) -> jax.Array:
    return weight.astype(jnp.float32).reshape((1,) * (ndim - 1) + weight.shape)
