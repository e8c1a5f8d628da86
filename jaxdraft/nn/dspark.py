"""DSpark: the plain backbone, and a Markov head that scores pairs by the two tokens alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdraft.config import BlockDrafterConfig
from jaxdraft.nn.block_drafter import BlockBackbone
from jaxdraft.nn.linear import matmul, precision


class DSpark(BlockBackbone):
    """``pair(p, c) = markov_w1[p] . markov_w2[c]``."""

    def __init__(self, config: BlockDrafterConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        shape = (config.draftable, config.rank)
        self.markov_w1 = nnx.Param(
            jax.random.normal(rngs.params(), shape, jnp.float32).astype(dtype)
        )
        self.markov_w2 = nnx.Param(
            jax.random.normal(rngs.params(), shape, jnp.float32).astype(dtype)
        )

    def pair_bias(self, previous: jax.Array) -> jax.Array:
        """See :meth:`BlockBackbone.pair_bias`."""
        first = self.codes(self.markov_w1[...], previous)
        return matmul(first, self.markov_w2[...], out_dtype=jnp.float32)

    def pair_scores(
        self, features: jax.Array, previous: jax.Array, candidates: jax.Array
    ) -> jax.Array:
        """See :meth:`BlockBackbone.pair_scores`."""
        del features
        before = self.codes(self.markov_w1[...], previous)
        after = self.codes(self.markov_w2[...], candidates)
        return jnp.einsum(
            "bkpr,bkcr->bkpc", before, after, precision=precision(after.dtype)
        ).astype(jnp.float32)
