"""EAGLE-3, chained: a head that reads rows of several layers of the target."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxdraft.base import Feed
from jaxdraft.config import Eagle3Config
from jaxdraft.draft.chain import ChainDrafter
from jaxdraft.draft.links import DRAFT_TOKENS
from jaxdraft.guard import needed
from jaxdraft.nn.eagle3 import Eagle3
from jaxdraft.nn.linear import Frozen, matmul, take
from jaxdraft.nn.packed import PackedMatrix


@struct.dataclass
class Eagle3Drafter(ChainDrafter):
    """An EAGLE-3 head as a :class:`jaxdraft.base.Drafter`.

    The embedding and the head are the target's own arrays, unless the module has its own.
    """

    eagle3: Frozen[Eagle3]
    embedding: jax.Array | PackedMatrix | None  # [V, D]; None: the module has its own
    head: jax.Array | PackedMatrix | None  # [V, D]; None: the module has its own
    config: Eagle3Config = struct.field(pytree_node=False)
    dtype: jnp.dtype = struct.field(pytree_node=False)
    draft_tokens: int = struct.field(pytree_node=False, default=DRAFT_TOKENS)
    confidence: float | jax.Array | None = None

    @classmethod
    def of(
        cls,
        eagle3: Frozen[Eagle3],
        embedding: jax.Array | PackedMatrix,
        head: jax.Array | PackedMatrix,
        config: Eagle3Config,
        dtype: jnp.dtype,
    ) -> Eagle3Drafter:
        """Return a drafter for the target whose ``embedding`` and ``head`` [V, D] are given."""
        return cls(
            eagle3,
            None if config.own_embedding else embedding,
            None if config.own_head else head,
            config,
            dtype,
            config.draft_tokens,
        )

    @property
    def draftable(self) -> int:
        """Tokens that a draft can be: V', or V."""
        return self.config.draftable

    def layer(self) -> Eagle3:
        """Return the module."""
        return self.eagle3()

    def fed(self, feed: Feed) -> jax.Array:
        """Return the target's auxiliary states, [B, T, A]."""
        return needed(self, "aux", feed.aux, self.config.aux_width)

    def rows(self, fed: jax.Array) -> jax.Array:
        """Return the fused rows [B, T, D] of auxiliary states [B, T, A]."""
        return self.layer().fuse(fed.astype(self.dtype))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [...] -> vectors [..., D]."""
        return take(self.layer().embed.table if self.embedding is None else self.embedding, tokens)

    def logits(self, rows: jax.Array) -> jax.Array:
        """Return the logits of the layer's rows: [..., D] -> [..., V'] float32."""
        layer = self.layer()
        features = layer.features(rows)
        if self.head is None:
            return layer.head(features, out_dtype=jnp.float32)
        return matmul(features, self.head, out_dtype=jnp.float32)

    def vocabulary(self) -> jax.Array | None:
        """Return the token of each score, [V'] int32; None: the index of the score."""
        return None if self.config.draft_vocab_size is None else self.layer().vocabulary[...]
