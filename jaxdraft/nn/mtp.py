"""The multi-token-prediction head: one decoder layer over (next token, hidden row) pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdraft.config import MtpConfig
from jaxdraft.nn.attention import Attention, attend
from jaxdraft.nn.linear import Linear
from jaxdraft.nn.mlp import feed_forward
from jaxdraft.nn.norm import RMSNorm
from jaxdraft.nn.rope import Rotary, rotary_tables
from jaxdraft.state import paged
from jaxdraft.state.paged import PagedPool


class Mtp(nnx.Module):
    """``layer(fc([norm_e(embed(next)), norm_h(hidden)]))``, then a final norm that the head reads.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.2, with one shared layer chained.
    """

    def __init__(self, config: MtpConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        width, eps = config.width, config.norm_eps
        self.embedding_norm = RMSNorm(width, eps, dtype=dtype)
        self.hidden_norm = RMSNorm(width, eps, dtype=dtype)
        self.fc = Linear(2 * width, width, dtype=dtype, rngs=rngs)
        cos, sin = rotary_tables(config.context_length, config.attention.rotary_dim, 10000.0)
        self.rotary = Rotary(jnp.asarray(cos), jnp.asarray(sin))
        self.input_norm = RMSNorm(width, eps, dtype=dtype)
        self.mixer = Attention(width, config.attention, dtype=dtype, rngs=rngs)
        self.post_norm = RMSNorm(width, eps, dtype=dtype)
        self.mlp = feed_forward(width, config.mlp, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(width, eps, dtype=dtype)

    def __call__(
        self, embedded: jax.Array, hidden: jax.Array, count: jax.Array, pool: PagedPool
    ) -> tuple[jax.Array, PagedPool]:
        """Run T rows at positions ``pool.length + t``. Commits nothing.

        Args:
          embedded: [B, T, D], embeddings of the token after each row.
          hidden: [B, T, D], the target's rows after its final norm, or this head's own.
          count: [B] int32.
          pool: one layer.

        Returns:
          Final-normed rows [B, T, D], and the pool with the rows written.
        """
        dtype = self.norm.weight[...].dtype
        steps = jnp.arange(embedded.shape[1], dtype=jnp.int32)
        positions = pool.length[:, None] + steps[None]
        cos, sin = self.rotary.at(positions)
        pair = [
            self.embedding_norm(embedded.astype(dtype)),
            self.hidden_norm(hidden.astype(dtype)),
        ]
        x = self.fc(jnp.concatenate(pair, axis=-1))
        q, k, v, gate = self.mixer.project(self.input_norm(x), cos, sin)
        pool = paged.write(pool, 0, k, v, count)
        keys = paged.source(pool, 0, pool.length + count)
        attended = attend(
            q,
            positions,
            keys,
            self.config.attention,
            causal=True,
            implementation=self.mixer.implementation,
        )
        x = x + self.mixer.finish(attended, gate)
        x = x + self.mlp(self.post_norm(x))
        return self.norm(x), pool
