"""DFlash2: the backbone with block convolutions, and a selector that scores pairs by their row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdraft.config import BlockDrafterConfig
from jaxdraft.nn.block_drafter import BlockBackbone
from jaxdraft.nn.linear import Linear, precision


class DFlash2(BlockBackbone):
    """``pair(p, c) = sum_r predecessor[p, r] * hidden_projection(f)[r] * successor[c, r]``."""

    def __init__(self, config: BlockDrafterConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        shape = (config.draftable, config.rank)
        self.hidden_projection = Linear(config.width, config.rank, dtype=dtype, rngs=rngs)
        self.predecessor = nnx.Param(
            jax.random.normal(rngs.params(), shape, jnp.float32).astype(dtype)
        )
        self.successor = nnx.Param(
            jax.random.normal(rngs.params(), shape, jnp.float32).astype(dtype)
        )

    def pair_scores(
        self, features: jax.Array, previous: jax.Array, candidates: jax.Array
    ) -> jax.Array:
        """See :meth:`BlockBackbone.pair_scores`."""
        weight = self.hidden_projection(features)  # [B, K, R]
        before = self.codes(self.predecessor[...], previous)
        after = self.codes(self.successor[...], candidates)
        return jnp.einsum(
            "bkpr,bkcr->bkpc",
            before * weight[:, :, None],
            after,
            precision=precision(after.dtype),
        ).astype(jnp.float32)
