"""Multi-token prediction, chained: the target's own head, fed its own hidden rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxdraft.base import Feed
from jaxdraft.config import MtpConfig
from jaxdraft.draft.chain import ChainDrafter
from jaxdraft.draft.links import DRAFT_TOKENS
from jaxdraft.guard import needed
from jaxdraft.nn.linear import Frozen, matmul, take
from jaxdraft.nn.mtp import Mtp
from jaxdraft.nn.packed import PackedMatrix


@struct.dataclass
class MtpDrafter(ChainDrafter):
    """A multi-token-prediction head as a :class:`jaxdraft.base.Drafter`.

    The embedding and the head are the target's own arrays.
    """

    mtp: Frozen[Mtp]
    embedding: jax.Array | PackedMatrix  # [V, D]
    head: jax.Array | PackedMatrix  # [V, D]
    config: MtpConfig = struct.field(pytree_node=False)
    dtype: jnp.dtype = struct.field(pytree_node=False)
    draft_tokens: int = struct.field(pytree_node=False, default=DRAFT_TOKENS)
    confidence: float | jax.Array | None = None

    @property
    def draftable(self) -> int:
        """V."""
        return self.config.vocab_size

    def layer(self) -> Mtp:
        """Return the module."""
        return self.mtp()

    def fed(self, feed: Feed) -> jax.Array:
        """Return the target's rows after its final norm, [B, T, D]."""
        return needed(self, "hidden", feed.hidden, self.config.width)

    def rows(self, fed: jax.Array) -> jax.Array:
        """Return the same rows in the head's dtype."""
        return fed.astype(self.dtype)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [...] -> vectors [..., D]."""
        return take(self.embedding, tokens)

    def logits(self, rows: jax.Array) -> jax.Array:
        """Return the logits of the head's rows: [..., D] -> [..., V] float32."""
        return matmul(rows, self.head, out_dtype=jnp.float32)
