"""Randomly drawn drafts, with the distributions they were drawn from."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxdraft.base import Draw, Guide, Lattice, Support
from jaxdraft.draft.lattice import greedy, path_tokens, walk
from jaxdraft.keys import own_streams
from jaxdraft.ranking import largest_first
from jaxdraft.sampling import draw, gumbel, perturb, probabilities


def sampled_walk(
    lattice: Lattice, how: Draw, guide: Guide | None = None
) -> tuple[jax.Array, Support]:
    """Walk a lattice, drawing each step from the scores that its predecessor gives it.

    With a ``guide``, rows that have a structure draw from what it allows.

    Example: anchor -> draw i from ``scores[b, 0, 0]``, then j from ``scores[b, 1, i]``, and so on;
    rows of temperature zero walk greedily and propose with probability one.

    Returns:
      Tokens [B, K], and the distribution of each.
    """

    steps = jnp.arange(lattice.candidates.shape[1], dtype=jnp.int32)
    probs = probabilities(lattice.scores, how.truncation)  # [B, K, C, C]
    fold = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)), in_axes=(0, None))
    noise = gumbel(fold(own_streams(how.keys), steps), lattice.candidates.shape[2])  # [B, K, C]
    # Where a step leads from any predecessor is settled before the walk: the best after noise.
    indices = walk(replace(lattice, scores=perturb(probs, noise[:, :, None])), greedy)
    before = jnp.pad(indices[:, :-1], ((0, 0), (1, 0)))
    rows = jnp.take_along_axis(probs, before[..., None, None], axis=2)[:, :, 0]
    if guide is not None:
        free = guide.free[:, None]
        guided, among = _guided(lattice, guide, how, noise)
        indices = jnp.where(free, indices, guided)
        rows = jnp.where(free[..., None], rows, among)
    return path_tokens(lattice, indices), Support(lattice.candidates, rows)


def guided_walk(lattice: Lattice, guide: Guide) -> jax.Array:
    """Return the tokens [B, K] of a greedy walk through what the rows' structures allow."""
    return path_tokens(lattice, _guided(lattice, guide, None, None)[0])


def _guided(
    lattice: Lattice, guide: Guide, how: Draw | None, noise: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Walk step by step, since what is allowed depends on all drafts before.

    Args:
      lattice: the lattice.
      guide: the rows' structures.
      how: rules of drawing; None: the best candidate.
      noise: [B, K, C] float32 for the draws.

    Returns:
      Indices [B, K] int32, and the distributions [B, K, C] that they were drawn from.
    """
    batch, steps, _ = lattice.candidates.shape
    index = jnp.zeros((batch,), jnp.int32)
    path, chances = [], []
    for step in range(steps):
        candidates = lattice.candidates[:, step]
        row = jnp.take_along_axis(lattice.scores[:, step], index[:, None, None], axis=1)[:, 0]
        row = guide.scores(row, candidates)
        if how is not None and noise is not None:
            chances.append(probabilities(row, how.truncation))
            row = perturb(chances[-1], noise[:, step])
        index = greedy(row, jnp.int32(step))
        path.append(index)
        guide = guide.after(jnp.take_along_axis(candidates, index[:, None], axis=1)[:, 0])
    indices = jnp.stack(path, axis=1)
    if not chances:
        return indices, jax.nn.one_hot(indices, lattice.candidates.shape[2])
    return indices, jnp.stack(chances, axis=1)


def sampled_token(
    logits: jax.Array, how: Draw, step: jax.Array, candidates: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw one token per row from its best ``candidates``.

    Args:
      logits: [B, V] float32.
      how: see :class:`jaxdraft.base.Draw`.
      step: [] int32, which draft of the proposal this is.
      candidates: C: a draft comes from the C best, so that its distribution stays small.

    Returns:
      Tokens [B], and the support: tokens [B, C] and their probabilities [B, C].
    """
    values, tokens = largest_first(logits, candidates)
    probs = probabilities(values, how.truncation)
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(own_streams(how.keys), step)
    index = draw(probs, keys)
    return jnp.take_along_axis(tokens, index[:, None], axis=1)[:, 0], tokens, probs
