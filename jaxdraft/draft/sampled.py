"""Randomly drawn drafts, with the distributions they were drawn from."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxdraft.base import Draw, Lattice, Support
from jaxdraft.draft.lattice import greedy, path_tokens, walk
from jaxdraft.keys import own_streams
from jaxdraft.ranking import largest_first
from jaxdraft.sampling import draw, gumbel, perturb, probabilities


def sampled_walk(lattice: Lattice, how: Draw) -> tuple[jax.Array, Support]:
    """Walk a lattice, drawing each step from the scores that its predecessor gives it.

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
    return path_tokens(lattice, indices), Support(lattice.candidates, rows)


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
