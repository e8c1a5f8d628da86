"""Weights before the first step.

A module of ``jaxdraft.nn`` is born random so that tests see every term. Training starts better
where residual branches begin at zero, decays spread over time scales and pair scores are silent.
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
    """A target: branches at zero, a quiet head, heads of the delta net from fast to slow."""

    def one(path: tuple[Any, ...], value: jax.Array) -> jax.Array:
        names = _names(path)
        if names[0] == "embed":
            return EMBEDDING_SCALE * jax.random.normal(key, value.shape, value.dtype)
        if names[-1] == "dt_bias":
            return _spread(value.shape[0]).astype(value.dtype)
        return _branch(names, value)

    return Frozen(jax.tree.map_with_path(one, frozen.params), frozen.structure)


def drafter(frozen: Frozen) -> Frozen:
    """A block drafter or an MTP head: branches at zero, and pair scores at zero."""

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
    """Zero for the last matrix of a residual branch, and for a head of its own."""
    last = names[-1] == "weight" and names[-2] in ("o", "out", "down", "head")
    return jnp.zeros_like(value) if last else value


def _spread(heads: int) -> jax.Array:
    """``dt_bias`` so that, with ``decay_scale`` -1 and no input, half-lives are spread evenly."""
    half_lives = np.geomspace(SHORTEST, LONGEST, heads) if heads > 1 else np.asarray([20.0])
    rate = np.log(2.0) / half_lives  # softplus(dt_bias)
    return jnp.asarray(np.log(np.expm1(rate)))
