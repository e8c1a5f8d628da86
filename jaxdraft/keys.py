"""Streams of random numbers, one per row: a row's draws never depend on the other rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

STREAM_IMPL = "threefry2x32"
"""Kind of all keys used for draws; see :func:`own_streams`."""


def row_streams(key: jax.Array | int, batch: int, *, first: int = 0) -> jax.Array:
    """Return a stream for every row, [B] keys: row i has ``fold_in(key, first + i)``.

    Args:
      key: a key of any kind, its raw words, or a seed. Only the low 32 bits of a seed are used.
      batch: B.
      first: number of the first row.

    Raises:
      ValueError: ``key`` is none of these, or several keys.
    """
    rows = np.arange(first, first + batch, dtype=np.int32)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(_one_key(key), jax.device_put(rows))


def _one_key(key: Any) -> jax.Array:
    if isinstance(key, int):
        key = np.uint32(key & 0xFFFFFFFF)
    if not isinstance(key, jax.Array | np.ndarray | np.integer):
        raise ValueError(f"key is {key!r}; expected a PRNG key or a seed")
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape != ():
            raise ValueError(f"key has shape {key.shape}; expected one key")
        return own_streams(key)
    if key.shape == () and np.issubdtype(key.dtype, np.integer):
        if not isinstance(key, jax.Array):
            key = jax.device_put((np.asarray(key) & 0xFFFFFFFF).astype(np.uint32))
        return jax.random.key(key.astype(jnp.uint32), impl=STREAM_IMPL)
    kinds = {(2,): STREAM_IMPL, (4,): "rbg"}  # as jax.random.PRNGKey gives them
    if key.dtype != np.uint32 or key.shape not in kinds:
        raise ValueError(
            f"key is {key.dtype}{list(key.shape)}; expected a PRNG key, its 2 or 4 words of "
            "uint32, or an integer as a seed"
        )
    return own_streams(jax.random.wrap_key_data(jax.device_put(key), impl=kinds[key.shape]))


def own_streams(keys: jax.Array) -> jax.Array:
    """Return keys [...] whose draws do not depend on the other keys of the batch.

    Threefry keys have this property and are returned unchanged. With other kinds (``rbg``,
    ``unsafe_rbg``) a batch under ``vmap`` draws from its first key only, so their words are folded
    into a threefry key.
    """
    if jax.random.key_impl(keys) == STREAM_IMPL:
        return keys
    words = jax.random.key_data(keys)

    def fold(words: jax.Array) -> jax.Array:
        key = jax.random.key(jnp.uint32(0), impl=STREAM_IMPL)
        for word in words.reshape(-1):
            key = jax.random.fold_in(key, word)
        return key

    flat = words.reshape(keys.size, -1)
    return jax.vmap(fold)(flat).reshape(keys.shape)


def draw_keys(streams: jax.Array, position: jax.Array, purpose: int) -> jax.Array:
    """Return the keys [B] for draws with the given ``purpose`` at ``position`` [B]."""
    return jax.vmap(lambda s, p: jax.random.fold_in(jax.random.fold_in(s, p), purpose))(
        streams, position
    )


__all__ = ["STREAM_IMPL", "draw_keys", "own_streams", "row_streams"]
