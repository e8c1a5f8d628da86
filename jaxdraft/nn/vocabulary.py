"""Draft vocabularies: the part of a target's tokens that can be drafts."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def places(vocabulary: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the places of tokens [...] in a vocabulary [V'] in ascending order; V' for others.

    Example, vocabulary [2, 5, 9]: tokens [5, 6, 9] have the places [1, 3, 2].
    """
    at = jnp.searchsorted(vocabulary, tokens).astype(jnp.int32)
    there = jnp.take(vocabulary, at, axis=0, mode="clip") == tokens
    return jnp.where(there, at, vocabulary.shape[0])
