"""The multi-token-prediction head: one decoder layer over (next token, hidden row) pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdraft.config import MtpConfig
from jaxdraft.meshes import whole_channels
from jaxdraft.nn.attention import Attention
from jaxdraft.nn.chain import ChainLayer
from jaxdraft.nn.linear import Linear
from jaxdraft.nn.mlp import feed_forward
from jaxdraft.nn.norm import RMSNorm
from jaxdraft.nn.rope import Rotary


class Mtp(ChainLayer):
    """``layer(fc([norm_e(embed(next)), norm_h(hidden)]))``, then a final norm that the head reads.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.2, with one shared layer chained.
    """

    def __init__(self, config: MtpConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        width, eps = config.width, config.norm_eps
        self.embedding_norm = RMSNorm(width, eps, dtype=dtype)
        self.hidden_norm = RMSNorm(width, eps, dtype=dtype)
        self.fc = Linear(2 * width, width, dtype=dtype, rngs=rngs)
        self.rotary = Rotary.of(config.rope, config.context_length, config.attention.rotary_dim)
        self.input_norm = RMSNorm(width, eps, dtype=dtype)
        self.mixer = Attention(width, config.attention, dtype=dtype, rngs=rngs)
        self.post_norm = RMSNorm(width, eps, dtype=dtype)
        self.mlp = feed_forward(width, config.mlp, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(width, eps, dtype=dtype)

    def enter(self, embedded: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See :meth:`ChainLayer.enter`; ``hidden`` is final-normed, the target's or its own."""
        dtype = self.norm.weight[...].dtype
        pair = [
            self.embedding_norm(embedded.astype(dtype)),
            self.hidden_norm(hidden.astype(dtype)),
        ]
        x = whole_channels(self.fc(whole_channels(jnp.concatenate(pair, axis=-1))))
        return x, self.input_norm(x)

    def leave(self, residual: jax.Array, mixed: jax.Array) -> jax.Array:
        """See :meth:`ChainLayer.leave`; the rows are final-normed."""
        x = residual + mixed
        x = x + self.mlp(self.post_norm(x))
        return self.norm(x)
