"""The backbone that block drafters share: a context path to every layer's keys, and a block.

Committed rows enter through ``fc`` and ``hidden_norm`` and become keys and values of every layer at
once, without input norm and without convolution; no query is ever taken from them. The block (the
anchor's embedding, then mask embeddings) runs through the layers and attends to the context and to
itself, without a causal mask unless the layer is one of ``causal_layers``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdraft.config import BlockDrafterConfig, ConvConfig
from jaxdraft.kernels import XLA
from jaxdraft.meshes import whole_channels
from jaxdraft.nn.attention import attend
from jaxdraft.nn.fused import split
from jaxdraft.nn.linear import Linear, Table, matmul, soft_cap
from jaxdraft.nn.mlp import Mlp
from jaxdraft.nn.norm import RMSNorm
from jaxdraft.nn.packed import PackedMatrix
from jaxdraft.nn.rope import Rotary, rotary_tables, rotate
from jaxdraft.nn.vocabulary import places
from jaxdraft.state.paged import Chunk, Source

Side = int
PREPARE, FINISH = 0, 1


class BlockConv(nnx.Module):
    """A convolution over the rows of a block, its kernels predicted from the rows themselves.

    ``y[t] = sum_tap (base[tap] + delta[t, tap]) * x[t - tap]``, zero before the block's first row.
    One projection predicts the kernels of both sides of a sublayer: *prepare*, applied to its
    normed input, and *finish*, applied to its output.
    """

    def __init__(self, width: int, config: ConvConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        groups = width // config.group
        self.projection = Linear(width, 2 * config.taps * groups, dtype=dtype, rngs=rngs)
        # A fresh convolution is the identity: base (1, 0, ...) and no prediction.
        self.projection.weight.set_value(jnp.zeros_like(self.projection.weight[...]))
        self.base = nnx.Param(jnp.zeros((2, config.taps, width), dtype).at[:, 0].set(1))

    def kernels(self, normed: jax.Array) -> jax.Array:
        """Predict deltas [B, Q, side, tap, groups] from the normed input [B, Q, D]."""
        batch, rows, width = normed.shape
        shape = (batch, rows, 2, self.config.taps, width // self.config.group)
        return self.projection(normed).reshape(shape)

    def __call__(self, x: jax.Array, kernels: jax.Array, side: Side) -> jax.Array:
        """Convolve [B, Q, D] along Q.

        Example, one channel, taps (1, 10), rows [1 2 3]: [1, 12, 23].
        """
        rows = x.shape[1]
        base = self.base[...][side].astype(x.dtype)  # [taps, D]
        y = jnp.zeros_like(x)
        for tap in range(self.config.taps):
            shifted = jnp.pad(x[:, : rows - tap], ((0, 0), (tap, 0), (0, 0)))
            delta = jnp.repeat(kernels[:, :, side, tap], self.config.group, axis=-1)
            y = y + shifted * (base[tap].reshape(1, 1, -1) + delta)
        return y


class BlockLayer(nnx.Module):
    """One layer of the backbone."""

    implementation = XLA
    shards = 1
    """Number of devices that the heads are divided over; see :mod:`jaxdraft.nn.fused`."""
    copies = 1
    """Number of copies of every key/value head, for devices that share one."""

    def __init__(self, config: BlockDrafterConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        a = config.attention
        self.config, self.index = config, index
        self.input_norm = RMSNorm(config.width, config.norm_eps, dtype=dtype)
        self.q = Linear(config.width, a.query_rows, dtype=dtype, rngs=rngs)
        self.kv = Linear(config.width, 2 * a.kv_rows, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(a.head_dim, a.norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(a.head_dim, a.norm_eps, dtype=dtype)
        self.o = Linear(a.heads * a.head_dim, config.width, dtype=dtype, rngs=rngs)
        self.post_norm = RMSNorm(config.width, config.norm_eps, dtype=dtype)
        self.mlp = Mlp(config.width, config.mlp_hidden, dtype=dtype, rngs=rngs)
        if config.conv is not None:
            self.attention_conv = BlockConv(config.width, config.conv, dtype=dtype, rngs=rngs)
            self.mlp_conv = BlockConv(config.width, config.conv, dtype=dtype, rngs=rngs)

    def keys_values(
        self, rows: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return normed, rotated keys and values [B, T, G, H] of rows [B, T, D]."""
        a = self.config.attention
        batch, steps, _ = rows.shape
        both = split(self.kv(rows), (a.kv_rows, a.kv_rows), self.shards)
        k, v = (x.reshape(batch, steps, a.kv_heads, a.head_dim) for x in both)
        return rotate(self.k_norm(k), cos, sin), v

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        context: Source,
    ) -> jax.Array:
        """[B, Q, D] -> [B, Q, D]."""
        y = self._around(
            "attention_conv", self.input_norm(x), self._attend(positions, cos, sin, context)
        )
        x = x + y
        return x + self._around("mlp_conv", self.post_norm(x), self.mlp)

    def _around(
        self, name: str, normed: jax.Array, sublayer: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """Run ``sublayer`` between the two sides of its convolution, if the layer has one."""
        if self.config.conv is None:
            return sublayer(normed)
        conv: BlockConv = getattr(self, name)
        kernels = conv.kernels(normed)
        return conv(sublayer(conv(normed, kernels, PREPARE)), kernels, FINISH)

    def _attend(
        self, positions: jax.Array, cos: jax.Array, sin: jax.Array, context: Source
    ) -> Callable[[jax.Array], jax.Array]:
        a = replace(self.config.attention, window=self.config.window(self.index))

        def attention(rows: jax.Array) -> jax.Array:
            batch, steps, _ = rows.shape
            q = self.q_norm(self.q(rows).reshape(batch, steps, a.heads, a.head_dim))
            keys, values = self.keys_values(rows, cos, sin)
            block = Chunk(  # [B, 1, G, Q, H]: the block's own keys, beside the cache
                jnp.swapaxes(keys, 1, 2)[:, None],
                jnp.swapaxes(values, 1, 2)[:, None],
                positions[:, None],
            )
            q = rotate(q, cos, sin)
            out = attend(
                q,
                positions,
                context,
                a,
                causal=self.index in self.config.causal_layers,
                block_keys=block,
                implementation=self.implementation,
            )
            return self.o(out)

        return attention


class BlockBackbone(nnx.Module):
    """Context path, layers and final norm. Subclasses add scores of pairs of tokens.

    A subclass whose pair scores are those of the whole vocabulary has :meth:`pair_bias`, too. Only
    such a drafter can be chained.
    """

    def __init__(self, config: BlockDrafterConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.fc = Linear(config.aux_width, config.width, dtype=dtype, rngs=rngs)
        self.hidden_norm = RMSNorm(config.width, config.norm_eps, dtype=dtype)
        cos, sin = rotary_tables(config.context_length, config.attention.rotary_dim, 10000.0)
        self.rotary = Rotary(jnp.asarray(cos, dtype), jnp.asarray(sin, dtype))
        self.layers = nnx.List(
            [BlockLayer(config, i, dtype=dtype, rngs=rngs) for i in range(config.layers)]
        )
        self.norm = RMSNorm(config.width, config.norm_eps, dtype=dtype)
        if config.draft_vocab_size is not None:  # [V'] int32, ascending
            self.vocabulary = Table(jnp.arange(config.draft_vocab_size, dtype=jnp.int32))
        if config.own_head:
            self.head = Linear(config.width, config.draftable, dtype=dtype, rngs=rngs)

    def tokens(self, ids: jax.Array) -> jax.Array:
        """Map draft ids [...], indices of the draft vocabulary, to token ids [...]."""
        if self.config.draft_vocab_size is None:
            return ids
        return jnp.take(self.vocabulary[...], ids, axis=0, mode="clip")

    def draft_ids(self, tokens: jax.Array) -> jax.Array:
        """Map token ids [...] to draft ids [...]; V' for tokens outside it.

        Example, vocabulary [2, 5, 9]: tokens [5, 6, 9] have the draft ids [1, 3, 2].
        """
        if self.config.draft_vocab_size is None:
            return tokens
        return places(self.vocabulary[...], tokens)

    def codes(self, table: jax.Array, draft_ids: jax.Array) -> jax.Array:
        """Return rows [..., R] of a table of pair scores; zero for a token without one."""
        whole = self.config.draft_vocab_size is None
        return jnp.take(table, draft_ids, axis=0, mode="clip" if whole else "fill", fill_value=0)

    def predecessors(self, tokens: jax.Array) -> jax.Array:
        """Map token ids [...] to their rows in the table of predecessors [...].

        The table of a drafter with a head of its own has a row for every token of the target.
        """
        return tokens if self.config.own_head else self.draft_ids(tokens)

    def logits(self, features: jax.Array, head: jax.Array | PackedMatrix) -> jax.Array:
        """Return logits [..., V'] float32 of final-normed rows [..., D].

        Args:
          features: from :meth:`block`.
          head: [V', D], the target's rows of the draft vocabulary. Unused if the drafter has a head
            of its own.
        """
        config = self.config
        weight = self.head.table if config.own_head else head
        logits = matmul(features, weight, out_dtype=jnp.float32)
        if config.logit_multiplier != 1.0:
            logits = logits * jnp.float32(config.logit_multiplier)
        return soft_cap(logits, config.logit_softcap)

    def context(
        self, aux: jax.Array, positions: jax.Array
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Return keys and values, L x [B, T, G, H] each, of committed rows.

        Args:
          aux: [B, T, A], the target's auxiliary states.
          positions: [B, T] int32.
        """
        rows = self.hidden_norm(whole_channels(self.fc(whole_channels(aux))))
        cos, sin = self.rotary.at(positions)
        pairs = [layer.keys_values(rows, cos, sin) for layer in self.layers]
        return tuple(k for k, _ in pairs), tuple(v for _, v in pairs)

    def block(
        self,
        embedded: jax.Array,
        first_position: jax.Array,
        context: Callable[[int], Source],
    ) -> jax.Array:
        """Run the block: final-normed rows [B, K, D], one for each draft.

        Args:
          embedded: [B, Q, D], embeddings of the anchor and the masks.
          first_position: [B] int32, the anchor's position.
          context: the cache of a layer.
        """
        config = self.config
        x = embedded.astype(self.norm.weight[...].dtype)
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
        steps = jnp.arange(x.shape[1], dtype=jnp.int32)
        positions = first_position[:, None] + steps[None]
        cos, sin = self.rotary.at(positions)
        for i, layer in enumerate(self.layers):
            x = whole_channels(x)
            x = layer(x, positions, cos, sin, context(i))
        first = config.first_row
        return self.norm(x[:, first : first + config.draft_tokens])

    def pair_scores(
        self, features: jax.Array, previous: jax.Array, candidates: jax.Array
    ) -> jax.Array:
        """Score of every candidate after every predecessor.

        Args:
          features: [B, K, D], from :meth:`block`.
          previous: [B, K, C] int32, rows of the table of predecessors: candidates of the step
            before; step 0: the anchor C times.
          candidates: [B, K, C] int32, draft ids if there is a draft vocabulary.

        Returns:
          [B, K, C, C] float32, predecessor first.
        """
        raise NotImplementedError

    def pair_bias(self, features: jax.Array, previous: jax.Array) -> jax.Array | None:
        """Score every token after a path, for kinds trained on the whole vocabulary.

        Args:
          features: [..., K, D], from :meth:`block`.
          previous: [..., K] int32, the anchor and the drafts but the last, as rows of the table of
            predecessors.

        Returns:
          [..., K, V'] float32; None: the kind is trained on the scores of candidates.
        """
        del features, previous
        return None

    def first_memory(self, batch: int) -> Any:
        """Return the memory of a path before its first draft: arrays [B, ...]."""
        raise NotImplementedError

    def step_bias(
        self, features: jax.Array, previous: jax.Array, memory: Any
    ) -> tuple[jax.Array, Any]:
        """Compute one step of :meth:`pair_bias`.

        Args:
          features: [B, D].
          previous: [B] int32.
          memory: what the step before has returned.

        Returns:
          [B, V'] float32, and the memory of the path with this draft.
        """
        raise NotImplementedError

    def trust(self, features: jax.Array, previous: jax.Array) -> jax.Array:
        """Return the confidence head's logits [..., K] float32; its arguments as in `pair_bias`.

        Their sigmoid is the probability that a draft is accepted if those before it are.
        """
        raise NotImplementedError
