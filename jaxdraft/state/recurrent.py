"""The state of the delta-net layers, and capsules, which a verify pass creates for ``commit``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax


@struct.dataclass
class Capsule:
    """The uncommitted effect of T rows on one layer's state.

    ``S_n = exp(g_0 + ... + g_{n-1}) S + sum_{j<n} exp(g_{j+1} + ... + g_{n-1}) k_j (outer) u_j``
    for any n up to T: rejected rows are simply not summed.
    """

    log_decay: jax.Array  # [B, T, Hv] float32
    key: jax.Array  # [B, T, Hk, Dk] float32, normalised
    update: jax.Array  # [B, T, Hv, Dv] float32, beta * (v - S^T k)
    rows: jax.Array  # [B, T, channels], pre-convolution
    implementation: str = struct.field(pytree_node=False, default="xla")
    """Implementation of its commit; see :mod:`jaxdraft.kernels`."""


@struct.dataclass
class Recurrent:
    """One layer's committed state."""

    state: jax.Array  # [B, Hv, Dk, Dv] float32
    conv: jax.Array  # [B, W - 1, channels], the last pre-convolution rows, oldest first

    @classmethod
    def zeros(
        cls,
        batch: int,
        *,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_width: int,
        channels: int,
        dtype: jax.typing.DTypeLike,
    ) -> Recurrent:
        """Return the state before any row."""
        return cls(
            state=jnp.zeros((batch, value_heads, key_dim, value_dim), jnp.float32),
            conv=jnp.zeros((batch, conv_width - 1, channels), dtype),
        )


def commit(recurrent: Recurrent, capsule: Capsule, count: jax.Array) -> Recurrent:
    """Commit the first ``count[b]`` rows of the capsule.

    Args:
      recurrent: the state the capsule was made from.
      capsule: T rows.
      count: [B] int32, 0..T. Zero leaves the row's state as it was, bit for bit.
    """
    steps = capsule.log_decay.shape[1]
    kept = jnp.arange(steps, dtype=jnp.int32)[None, :] < count[:, None]  # [B, T]
    decay = jnp.where(kept[..., None], capsule.log_decay, 0.0)
    # What follows a row, summed from the end so that no digits are lost in a difference of sums.
    # Example, T = 3, count = 2: decay = [g0 g1 0], from the end [g0+g1 g1 0], after a row [g1 0 0].
    onward = jnp.cumsum(decay[:, ::-1], axis=1)[:, ::-1]  # [B, T, Hv]
    total = onward[:, 0]  # [B, Hv]
    after = jnp.exp(jnp.pad(onward[:, 1:], ((0, 0), (0, 1), (0, 0))))
    update = jnp.where(kept[..., None, None], capsule.update * after[..., None], 0.0)
    shared = update.shape[2] // capsule.key.shape[2]
    # A masked row's key meets a zero update; it is zeroed too, since 0 * nan would survive.
    key = jnp.repeat(jnp.where(kept[..., None, None], capsule.key, 0.0), shared, axis=2)
    added = jnp.einsum("bthk,bthv->bhkv", key, update, precision=lax.Precision.HIGHEST)
    state = recurrent.state * jnp.exp(total)[..., None, None] + added
    return Recurrent(state=state, conv=_shift(recurrent.conv, capsule.rows, count))


def reset(recurrent: Recurrent, rows: jax.Array) -> Recurrent:
    """Reset the rows where ``rows`` [B] is true to the state before any token."""
    keep = ~rows
    return Recurrent(
        state=jnp.where(keep[:, None, None, None], recurrent.state, 0),
        conv=jnp.where(keep[:, None, None], recurrent.conv, 0),
    )


def _shift(conv: jax.Array, rows: jax.Array, count: jax.Array) -> jax.Array:
    """Return the last W - 1 rows after appending ``count`` rows to the stream.

    Example, W - 1 = 3, conv = [a b c], rows = [d e f g]: count 0 keeps [a b c], count 1 gives
    [b c d], count 4 gives [e f g]: the window of width 3 that starts at ``count``.
    """
    width = conv.shape[1]
    stream = jnp.concatenate([conv, rows.astype(conv.dtype)], axis=1)
    index = count[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    return jnp.take_along_axis(stream, index[..., None], axis=1, mode="clip")
