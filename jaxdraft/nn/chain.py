"""The shared part of chained heads: one decoder layer over (next token, row) pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdraft.nn.attention import Attention, attend
from jaxdraft.nn.rope import Rotary
from jaxdraft.state import paged
from jaxdraft.state.paged import PagedPool


class ChainLayer(nnx.Module):
    """A layer that reads a row for each position and the token after it.

    Its rows are fed back to it with the next token: one layer, chained. Subclasses define the way
    into the attention and out of it.
    """

    mixer: Attention
    rotary: Rotary

    def enter(self, embedded: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the residual rows [B, T, D], and the rows that queries, keys and values read.

        Args:
          embedded: [B, T, D], embeddings of the token after each row.
          hidden: [B, T, D], rows of the target, or this layer's own.
        """
        raise NotImplementedError

    def leave(self, residual: jax.Array, mixed: jax.Array) -> jax.Array:
        """Return the rows [B, T, D] of the next link, from the residual and the attention's."""
        raise NotImplementedError

    def __call__(
        self, embedded: jax.Array, hidden: jax.Array, count: jax.Array, pool: PagedPool
    ) -> tuple[jax.Array, PagedPool]:
        """Run T rows at positions ``pool.length + t``. Commits nothing.

        Args:
          embedded: [B, T, D], embeddings of the token after each row.
          hidden: [B, T, D], rows of the target, or this layer's own.
          count: [B] int32.
          pool: one layer.

        Returns:
          Rows [B, T, D] for the next link, and the pool with the rows written.
        """
        steps = jnp.arange(embedded.shape[1], dtype=jnp.int32)
        positions = pool.length[:, None] + steps[None]
        cos, sin = self.rotary.at(positions)
        residual, rows = self.enter(embedded, hidden)
        q, k, v, gate = self.mixer.project(rows, cos, sin)
        pool = paged.write(pool, 0, k, v, count)
        keys = paged.source(pool, 0, pool.length + count)
        attended = attend(
            q,
            positions,
            keys,
            self.mixer.config,
            causal=True,
            sinks=self.mixer.sink_scores,
            implementation=self.mixer.implementation,
        )
        return self.leave(residual, self.mixer.finish(attended, gate)), pool
