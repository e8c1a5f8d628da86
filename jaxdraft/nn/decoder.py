"""A decoder of softmax-attention and delta-net layers over explicit state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdraft.base import TargetOutput
from jaxdraft.config import TargetConfig
from jaxdraft.nn.attention import Attention, attend
from jaxdraft.nn.delta_net import DeltaNet
from jaxdraft.nn.linear import Embedding, Linear, matmul
from jaxdraft.nn.mlp import feed_forward
from jaxdraft.nn.norm import RMSNorm
from jaxdraft.nn.packed import PackedMatrix
from jaxdraft.nn.rope import Rotary, rotary_tables
from jaxdraft.state import paged, ring
from jaxdraft.state.decoder import DecoderState


class Layer(nnx.Module):
    """One pre-norm layer: a mixer and a feed-forward part, each added to the residual stream."""

    def __init__(self, config: TargetConfig, kind: str, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.input_norm = RMSNorm(config.width, config.norm_eps, dtype=dtype)
        if kind == "delta_net":
            assert config.delta_net is not None
            self.mixer = DeltaNet(config.width, config.delta_net, dtype=dtype, rngs=rngs)
        else:
            shape = config.attention if kind == "attention" else config.sliding
            assert shape is not None
            self.mixer = Attention(config.width, shape, dtype=dtype, rngs=rngs)
        self.post_norm = RMSNorm(config.width, config.norm_eps, dtype=dtype)
        self.mlp = feed_forward(config.width, config.mlp, dtype=dtype, rngs=rngs)


class Decoder(nnx.Module):
    """The weights of a target and its forward pass."""

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.width, dtype=dtype, rngs=rngs)
        if config.rotary_dim:
            cos, sin = rotary_tables(config.context_length, config.rotary_dim, 10000.0)
            self.rotary = Rotary(jnp.asarray(cos), jnp.asarray(sin))
        self.layers = nnx.List(
            [Layer(config, kind, dtype=dtype, rngs=rngs) for kind in config.layers]
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

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Rows after the final norm [..., D] -> [..., V] float32."""
        if self.own_head is not None:
            return self.own_head(hidden, out_dtype=jnp.float32)
        return matmul(hidden, self.embed.table, out_dtype=jnp.float32)

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
        cos, sin = self.rotary.at(positions) if hasattr(self, "rotary") else (None, None)
        pool, sliding, taps, capsules = state.pool, state.sliding, {}, []
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            if i in config.taps:
                taps[i] = x
            y = layer.input_norm(x)
            mixer = layer.mixer
            if isinstance(mixer, Attention):
                index = config.layers[:i].count(config.layers[i])
                q, k, v, gate = mixer.project(y, cos, sin)
                if config.layers[i] == "attention":
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
                y = mixer.finish(y, gate)
            else:
                recurrent_state = state.recurrent[len(capsules)]
                y, capsule = mixer(y, recurrent_state.conv, recurrent_state.state)
                capsules.append(capsule)
            x = x + y
            x = x + layer.mlp(layer.post_norm(x))
        aux = jnp.concatenate([taps[i] for i in config.taps], axis=-1) if config.taps else None
        hidden = self.norm(x)
        last = hidden
        if row is not None:
            last = jnp.take_along_axis(hidden, row[:, None, None], axis=1, mode="clip")
        logits = self.logits(last)
        tentative = DecoderState(pool, state.recurrent, tuple(capsules), sliding)
        return TargetOutput(logits=logits, aux=aux, hidden=hidden, state=tentative)
