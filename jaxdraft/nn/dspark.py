"""DSpark: the plain backbone, a Markov head that scores a draft after a path, a confidence head.

With ``e`` the code of the token before a draft, ``h`` the draft's row and ``s`` the memory of the
path, zero before its first draft, the scores of all tokens are

    vanilla   markov_w2 @ e
    gated     markov_w2 @ (sigmoid(gate_weight [h; e] + gate_bias) * e)
    rnn       markov_w2 @ tanh(o), and s becomes sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c),
              where g, c, o are the thirds of joint_weight [s; e; h] + joint_bias

The confidence head gives the logit ``trust_weight [h; e] + trust_bias``; it may have no ``e``.

Source: https://github.com/deepseek-ai/DeepSpec.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jaxdraft.config import BlockDrafterConfig
from jaxdraft.nn.block_drafter import BlockBackbone
from jaxdraft.nn.linear import along_last, matmul, precision


class DSpark(BlockBackbone):
    """``pair(p, c) = code(p) . markov_w2[c]``: the code is ``markov_w1[p]``, gated or not."""

    def __init__(self, config: BlockDrafterConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        rank, width = config.rank, config.width

        def normal(*shape: int, scale: float = 1.0) -> nnx.Param:
            numbers = jax.random.normal(rngs.params(), shape, jnp.float32) * scale
            return nnx.Param(numbers.astype(dtype))

        self.markov_w1 = normal(config.vocab_size if config.own_head else config.draftable, rank)
        self.markov_w2 = normal(config.draftable, rank)
        if config.markov == "gated":
            self.gate_weight = normal(rank, width + rank, scale=(width + rank) ** -0.5)
            self.gate_bias = nnx.Param(jnp.zeros((rank,), dtype))
        elif config.markov == "rnn":
            inputs = 2 * rank + width
            self.joint_weight = normal(3 * rank, inputs, scale=inputs**-0.5)
            self.joint_bias = nnx.Param(jnp.zeros((3 * rank,), dtype))
        if config.confidence is not None:
            inputs = width + (rank if config.confidence == "pair" else 0)
            self.trust_weight = normal(1, inputs, scale=inputs**-0.5)
            self.trust_bias = nnx.Param(jnp.zeros((1,), dtype))

    def _gated(self, features: jax.Array, codes: jax.Array) -> jax.Array:
        """Return gated codes [..., R] of rows [..., D] and codes [..., R] that broadcast."""
        width, weight = self.config.width, self.gate_weight[...]
        # Row and code apart: in a lattice C predecessors share a row.
        gate = matmul(features, weight[:, :width], out_dtype=jnp.float32)
        gate = gate + matmul(codes, weight[:, width:], out_dtype=jnp.float32)
        gate = jax.nn.sigmoid(gate + along_last(self.gate_bias[...], gate))
        return gate.astype(codes.dtype) * codes

    def _recur(
        self, features: jax.Array, codes: jax.Array, memory: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the code [..., R] of one step and the memory [..., R] float32 after it."""
        weight = self.joint_weight[...]
        joined = [memory.astype(weight.dtype), codes, features.astype(weight.dtype)]
        mixed = matmul(jnp.concatenate(joined, axis=-1), weight, out_dtype=jnp.float32)
        mixed = mixed + along_last(self.joint_bias[...], mixed)
        keep, new, out = jnp.split(mixed, 3, axis=-1)
        keep = jax.nn.sigmoid(keep)
        memory = keep * memory + (1.0 - keep) * jnp.tanh(new)
        return jnp.tanh(out).astype(codes.dtype), memory

    def first_memory(self, batch: int) -> jax.Array | None:
        """See :meth:`BlockBackbone.first_memory`."""
        if self.config.markov != "rnn":
            return None
        return jnp.zeros((batch, self.config.rank), jnp.float32)

    def step_bias(
        self, features: jax.Array, previous: jax.Array, memory: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """See :meth:`BlockBackbone.step_bias`."""
        codes = self.codes(self.markov_w1[...], previous)
        if self.config.markov == "gated":
            codes = self._gated(features, codes)
        elif memory is not None:
            codes, memory = self._recur(features, codes, memory)
        return matmul(codes, self.markov_w2[...], out_dtype=jnp.float32), memory

    def pair_bias(self, features: jax.Array, previous: jax.Array) -> jax.Array:
        """See :meth:`BlockBackbone.pair_bias`."""
        if self.config.markov != "rnn":
            return self.step_bias(features, previous, None)[0]

        def step(
            memory: jax.Array, here: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            code, memory = self._recur(*here, memory)
            return memory, code

        codes = self.codes(self.markov_w1[...], previous)
        start = jnp.zeros(codes[..., 0, :].shape, jnp.float32)
        rows = (jnp.moveaxis(features, -2, 0), jnp.moveaxis(codes, -2, 0))
        _, codes = lax.scan(step, start, rows, unroll=True)
        return matmul(jnp.moveaxis(codes, 0, -2), self.markov_w2[...], out_dtype=jnp.float32)

    def pair_scores(
        self, features: jax.Array, previous: jax.Array, candidates: jax.Array
    ) -> jax.Array:
        """See :meth:`BlockBackbone.pair_scores`."""
        before = self.codes(self.markov_w1[...], previous)
        if self.config.markov == "gated":
            before = self._gated(features[:, :, None], before)
        after = self.codes(self.markov_w2[...], candidates)
        return jnp.einsum(
            "bkpr,bkcr->bkpc", before, after, precision=precision(after.dtype)
        ).astype(jnp.float32)

    def trust(self, features: jax.Array, previous: jax.Array) -> jax.Array:
        """See :meth:`BlockBackbone.trust`."""
        rows = features
        if self.config.confidence == "pair":
            codes = self.codes(self.markov_w1[...], previous)
            rows = jnp.concatenate([features.astype(codes.dtype), codes], axis=-1)
        found = matmul(rows, self.trust_weight[...], out_dtype=jnp.float32)
        return (found + along_last(self.trust_bias[...], found))[..., 0]
