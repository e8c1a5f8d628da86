"""Weights before the first step.

Modules of ``jaxdraft.nn`` start with random weights, so that tests cover every term. Training
starts better with zero residual branches, decays spread over time scales, and zero pair scores.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdraft.nn.linear import Frozen

EMBEDDING_SCALE = 0.5
SHORTEST, LONGEST = 2.0, 400.0
"""Tokens after which the fastest and the slowest delta-net head have forgotten half."""


def decoder(frozen: Frozen, key: jax.Array) -> Frozen:
    """Return a target with zero branches, a small head, and delta-net heads from fast to slow."""

    def one(path: tuple[Any, ...], value: jax.Array) -> jax.Array:
        names = _names(path)
        if names[0] == "embed":
            return EMBEDDING_SCALE * jax.random.normal(key, value.shape, value.dtype)
        if names[-1] == "dt_bias":
            return _spread(value.shape[0]).astype(value.dtype)
        return _branch(names, value)

    return Frozen(jax.tree.map_with_path(one, frozen.params), frozen.structure)


def drafter(frozen: Frozen) -> Frozen:
    """Return a block drafter or an MTP head with zero branches and zero pair scores."""

    def one(path: tuple[Any, ...], value: jax.Array) -> jax.Array:
        names = _names(path)
        if names[-1] in ("successor", "markov_w2"):
            return jnp.zeros_like(value)
        if names[-1] in ("predecessor", "markov_w1"):
            return value * jnp.asarray(value.shape[-1] ** -0.5, value.dtype)
        return _branch(names, value)

    return Frozen(jax.tree.map_with_path(one, frozen.params), frozen.structure)


def _names(path: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(getattr(part, "key", None) for part in path)


def _branch(names: tuple[Any, ...], value: jax.Array) -> jax.Array:
    """Return zeros for the end of a residual branch and for an own head, else ``value``."""
    last = names[-1] == "weight" and names[-2] in ("o", "out", "down", "head")
    return jnp.zeros_like(value) if last else value


def _spread(heads: int) -> jax.Array:
    """Return ``dt_bias`` of evenly spread half-lives, for ``decay_scale`` -1 and no input."""
    half_lives = np.geomspace(SHORTEST, LONGEST, heads) if heads > 1 else np.asarray([20.0])
    rate = np.log(2.0) / half_lives  # softplus(dt_bias)
    return jnp.asarray(np.log(np.expm1(rate)))
