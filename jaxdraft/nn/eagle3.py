"""EAGLE-3: one decoder layer over (next token, rows of three layers of the target) pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdraft.config import Eagle3Config
from jaxdraft.meshes import whole_channels
from jaxdraft.nn.attention import Attention
from jaxdraft.nn.chain import ChainLayer
from jaxdraft.nn.linear import Embedding, Linear, Table
from jaxdraft.nn.mlp import feed_forward
from jaxdraft.nn.norm import RMSNorm
from jaxdraft.nn.rope import Rotary
from jaxdraft.nn.vocabulary import places


class Eagle3(ChainLayer):
    """``h = fc(aux)``; attention over ``[norm_e(embed(next)), norm_h(h)]``, added to ``h``; an MLP.

    Queries, keys and values read rows of twice the width. The next link reads the layer's output
    in place of ``fc(aux)``.

    Source: Li et al., EAGLE-3, arXiv:2503.01840, section 3. The norms of :class:`Eagle3Config` are
    those of the speculators package.
    """

    def __init__(self, config: Eagle3Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        width, eps = config.width, config.norm_eps
        if config.fc_norm:
            self.fc_norm = nnx.List(
                [RMSNorm(config.tap_width, eps, dtype=dtype) for _ in range(config.taps)]
            )
        self.fc = Linear(config.aux_width, width, dtype=dtype, rngs=rngs)
        self.input_norm = RMSNorm(width, eps, dtype=dtype)
        self.hidden_norm = RMSNorm(width, eps, dtype=dtype)
        self.rotary = Rotary.of(config.rope, config.context_length, config.attention.rotary_dim)
        self.mixer = Attention(width, config.attention, dtype=dtype, rngs=rngs, inputs=2 * width)
        self.post_norm = RMSNorm(width, eps, dtype=dtype)
        self.mlp = feed_forward(width, config.mlp, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(width, eps, dtype=dtype)
        if config.own_embedding:
            self.embed = Embedding(config.vocab_size, width, dtype=dtype, rngs=rngs)
        if config.own_head:
            self.head = Linear(width, config.draftable, dtype=dtype, rngs=rngs)
        if config.draft_vocab_size is not None:  # [V'] int32, ascending
            self.vocabulary = Table(jnp.arange(config.draft_vocab_size, dtype=jnp.int32))

    def fuse(self, aux: jax.Array) -> jax.Array:
        """Return the rows of the first link, [..., A] -> [..., D]."""
        config = self.config
        if config.fc_norm:
            taps = jnp.split(aux, config.taps, axis=-1)
            normed = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
            aux = jnp.concatenate(normed, axis=-1)
        return whole_channels(self.fc(whole_channels(aux)))

    def enter(self, embedded: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See :meth:`ChainLayer.enter`; ``hidden`` is from :meth:`fuse` or :meth:`leave`."""
        dtype = self.norm.weight[...].dtype
        hidden = hidden.astype(dtype)
        normed = self.hidden_norm(hidden)
        rows = jnp.concatenate([self.input_norm(embedded.astype(dtype)), normed], axis=-1)
        return normed if self.config.norm_before_residual else hidden, rows

    def leave(self, residual: jax.Array, mixed: jax.Array) -> jax.Array:
        """See :meth:`ChainLayer.leave`."""
        x = residual + mixed
        x = x + self.mlp(self.post_norm(x))
        return self.norm(x) if self.config.norm_output else x

    def features(self, rows: jax.Array) -> jax.Array:
        """Return the input of the head, from rows of :meth:`leave` [..., D]."""
        return rows if self.config.norm_output else self.norm(rows)

    def tokens(self, draft_ids: jax.Array) -> jax.Array:
        """Map draft ids [...], indices of the draft vocabulary, to token ids [...]."""
        if self.config.draft_vocab_size is None:
            return draft_ids
        return jnp.take(self.vocabulary[...], draft_ids, axis=0, mode="clip")

    def draft_ids(self, tokens: jax.Array) -> jax.Array:
        """Map token ids [...] to draft ids [...]; V' for tokens outside the draft vocabulary."""
        if self.config.draft_vocab_size is None:
            return tokens
        return places(self.vocabulary[...], tokens)
