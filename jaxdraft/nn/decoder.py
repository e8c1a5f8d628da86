"""A decoder of softmax-attention and delta-net layers over explicit state."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdraft.base import TargetOutput
from jaxdraft.config import TargetConfig
from jaxdraft.meshes import whole_channels
from jaxdraft.nn.attention import Attention, attend
from jaxdraft.nn.delta_net import DeltaNet
from jaxdraft.nn.linear import Embedding, Linear, matmul, soft_cap
from jaxdraft.nn.mlp import feed_forward
from jaxdraft.nn.norm import RMSNorm
from jaxdraft.nn.packed import PackedMatrix
from jaxdraft.nn.rope import Rotary
from jaxdraft.state import paged, ring
from jaxdraft.state.decoder import DecoderState

Turns = tuple[jax.Array, jax.Array] | tuple[None, None]
"""Cosines and sines [B, T, rotary_dim / 2]; None twice: nothing is rotated."""


class Layer(nnx.Module):
    """A mixer and a feed-forward part, each added to the residual stream.

    Their inputs pass ``input_norm`` and ``post_norm``, their outputs ``mixer_norm`` and
    ``mlp_norm``; ``config.norms`` selects some of the four.
    """

    def __init__(self, config: TargetConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        kind = config.layers[index]

        def norm() -> RMSNorm:
            return RMSNorm(config.width, config.norm_eps, dtype=dtype)

        self.norms = config.norms
        if config.norms != "post":
            self.input_norm = norm()
        if kind == "delta_net":
            assert config.delta_net is not None
            self.mixer = DeltaNet(config.width, config.delta_net, dtype=dtype, rngs=rngs)
        else:
            shape = config.attention if kind == "attention" else config.sliding
            assert shape is not None
            self.mixer = Attention(config.width, shape, dtype=dtype, rngs=rngs)
        if config.norms != "post":
            self.post_norm = norm()
        self.mlp = feed_forward(config.width, config.feed_forward(index), dtype=dtype, rngs=rngs)
        if config.norms != "pre":
            self.mixer_norm = norm()
            self.mlp_norm = norm()

    def __call__(self, x: jax.Array, mix: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """[B, T, D] -> [B, T, D]. ``mix`` runs the mixer over the state, which is the caller's."""
        x = whole_channels(x)
        y = mix(x if self.norms == "post" else self.input_norm(x))
        x = x + (y if self.norms == "pre" else self.mixer_norm(y))
        y = self.mlp(x if self.norms == "post" else self.post_norm(x))
        return x + (y if self.norms == "pre" else self.mlp_norm(y))


class Decoder(nnx.Module):
    """The weights of a target and its forward pass."""

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.width, dtype=dtype, rngs=rngs)
        length = config.context_length
        if config.rotary_dim:
            self.rotary = Rotary.of(config.rope, length, config.rotary_dim)
        if config.own_tables and config.sliding is not None and config.sliding.rotary_dim:
            rope, dim = config.sliding_rope, config.sliding.rotary_dim
            self.sliding_rotary = Rotary.of(rope, length, dim)
        self.layers = nnx.List(
            [Layer(config, i, dtype=dtype, rngs=rngs) for i in range(len(config.layers))]
        )
        self.norm = RMSNorm(config.width, config.norm_eps, dtype=dtype)
        if not config.tied:
            self.head = Linear(config.width, config.vocab_size, dtype=dtype, rngs=rngs)

    @property
    def head_weight(self) -> jax.Array | PackedMatrix:
        """[V, D], dense or packed; the embedding itself when the two are tied."""
        return (self.embed if self.config.tied else self.head).table

    @property
    def own_head(self) -> Linear | None:
        """The head, unless it is tied to the embedding and was not blocked."""
        return vars(self).get("head")

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """Rows that enter the first layer: [B, T] -> [B, T, D]."""
        x, scale = self.embed(tokens), self.config.embedding_scale
        return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Compute logits [..., V] float32 of rows after the final norm [..., D]."""
        if self.own_head is not None:
            logits = self.own_head(hidden, out_dtype=jnp.float32)
        else:
            logits = matmul(hidden, self.embed.table, out_dtype=jnp.float32)
        return soft_cap(logits, self.config.softcap)

    def turns(self, positions: jax.Array) -> dict[str, Turns]:
        """Return cos and sin at ``positions`` [B, T] for each kind of layer that attends."""
        full = self.rotary.at(positions) if hasattr(self, "rotary") else (None, None)
        if not self.config.own_tables:
            return {"attention": full, "sliding": full}
        own = hasattr(self, "sliding_rotary")
        return {
            "attention": full,
            "sliding": self.sliding_rotary.at(positions) if own else (None, None),
        }

    def through(
        self, tokens: jax.Array, mix: Callable[[int, jax.Array], jax.Array]
    ) -> tuple[jax.Array, jax.Array | None]:
        """Run all layers.

        Args:
          tokens: [B, T] int32.
          mix: the mixer of layer i over its input [B, T, D], with the caller's state.

        Returns:
          Rows after the final norm [B, T, D], and the taps side by side [B, T, A], if any.
        """
        x, taps = self.embedded(tokens), {}
        for i, layer in enumerate(self.layers):
            taps[i] = x
            x = layer(x, functools.partial(mix, i))
        taps[len(self.layers)] = x
        wanted = self.config.taps
        aux = None
        if wanted:
            aux = whole_channels(jnp.concatenate([taps[i] for i in wanted], axis=-1))
        return self.norm(whole_channels(x)), aux

    def __call__(
        self,
        tokens: jax.Array,
        count: jax.Array,
        state: DecoderState,
        *,
        row: jax.Array | None = None,
    ) -> TargetOutput:
        """See :meth:`jaxdraft.base.Target.forward`."""
        config = self.config
        batch, steps = tokens.shape
        positions = state.length[:, None] + jnp.arange(steps, dtype=jnp.int32)[None]
        turns = self.turns(positions)
        pool, sliding, capsules = state.pool, state.sliding, []

        def mix(i: int, y: jax.Array) -> jax.Array:
            nonlocal pool, sliding
            mixer, kind = self.layers[i].mixer, config.layers[i]
            if isinstance(mixer, Attention):
                index = config.layers[:i].count(kind)
                q, k, v, gate = mixer.project(y, *turns[kind])
                if kind == "attention":
                    pool = paged.write(pool, index, k, v, count)
                    keys = paged.source(pool, index, pool.length + count)
                else:
                    assert sliding is not None
                    sliding = ring.put(sliding, index, k, v, count)
                    keys = ring.reachable(sliding, index, count)
                y = attend(
                    q,
                    positions,
                    keys,
                    mixer.config,
                    causal=True,
                    sinks=mixer.sink_scores,
                    implementation=mixer.implementation,
                )
                return mixer.finish(y, gate)
            recurrent_state = state.recurrent[len(capsules)]
            y, capsule = mixer(y, recurrent_state.conv, recurrent_state.state)
            capsules.append(capsule)
            return y

        hidden, aux = self.through(tokens, mix)
        last = hidden
        if row is not None:
            last = jnp.take_along_axis(hidden, row[:, None, None], axis=1, mode="clip")
        logits = self.logits(last)
        tentative = DecoderState(pool, state.recurrent, tuple(capsules), sliding)
        return TargetOutput(logits=logits, aux=aux, hidden=hidden, state=tentative)
