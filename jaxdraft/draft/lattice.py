"""Walks through a candidate lattice: one scan, whatever the rule for the next step."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxdraft.base import Lattice

Choose = Callable[[jax.Array, jax.Array], jax.Array]
"""(scores of the C candidates [B, C], step [] int32) -> chosen index [B] int32."""


def walk(lattice: Lattice, choose: Choose) -> jax.Array:
    """Follow ``choose`` from the anchor through all K steps.

    Example, K = 2, C = 2, greedy: step 0 picks the best of ``scores[b, 0, 0]``, say candidate 1;
    step 1 then picks the best of ``scores[b, 1, 1]``, the row of that predecessor.

    Args:
      lattice: see :class:`jaxdraft.base.Lattice`.
      choose: picks one candidate of a step, given the row of its predecessor.

    Returns:
      Candidate indices [B, K] int32.
    """
    batch, steps, _ = lattice.candidates.shape

    def step(previous: jax.Array, here: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, scores = here  # [], [B, C, C]
        row = jnp.take_along_axis(scores, previous[:, None, None], axis=1)[:, 0]
        index = choose(row, number)
        return index, index

    start = jnp.zeros((batch,), jnp.int32)
    numbered = (jnp.arange(steps, dtype=jnp.int32), jnp.swapaxes(lattice.scores, 0, 1))
    _, indices = lax.scan(step, start, numbered)
    return jnp.swapaxes(indices, 0, 1)


def greedy(scores: jax.Array, step: jax.Array) -> jax.Array:
    """The best candidate; ties go to the lowest index."""
    del step
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def path_tokens(lattice: Lattice, indices: jax.Array) -> jax.Array:
    """Token ids [B, K] of candidate indices [B, K]."""
    picked = jnp.take_along_axis(lattice.candidates, indices[..., None], axis=2)
    return picked[..., 0]
