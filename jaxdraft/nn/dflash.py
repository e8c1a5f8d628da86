"""DFlash: the plain backbone. Drafts do not depend on each other."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxdraft.nn.block_drafter import BlockBackbone


class DFlash(BlockBackbone):
    """``pair(p, c) = 0``: the lattice's edges are the candidates' own logits.

    Source: z-lab's first drafters, arXiv:2602.06036.
    """

    def pair_scores(
        self, features: jax.Array, previous: jax.Array, candidates: jax.Array
    ) -> jax.Array:
        """See :meth:`BlockBackbone.pair_scores`."""
        del features
        shape = (*candidates.shape[:-1], previous.shape[-1], candidates.shape[-1])
        return jnp.zeros(shape, jnp.float32)
