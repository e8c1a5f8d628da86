"""The target: a decoder of softmax-attention and delta-net layers over explicit state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.typing import DTypeLike

from jaxdraft.base import Head, TargetOutput
from jaxdraft.config import TargetConfig
from jaxdraft.nn import delta_net
from jaxdraft.nn.attention import Attention, attend
from jaxdraft.nn.delta_net import DeltaNet
from jaxdraft.nn.linear import (
    BlockedLinear,
    Embedding,
    Frozen,
    Linear,
    add_blocks,
    fits_blocks,
    matmul,
)
from jaxdraft.nn.mlp import feed_forward
from jaxdraft.nn.norm import RMSNorm
from jaxdraft.nn.rope import Rotary, rotary_tables
from jaxdraft.state import paged, recurrent, ring
from jaxdraft.state.paged import PagedPool
from jaxdraft.state.recurrent import Capsule, Recurrent
from jaxdraft.state.ring import Ring

PREFILL_CHUNK = 128
"""Rows of a prompt that run at once. A fixed batch has room for as many scratch rows."""


@struct.dataclass
class DecoderState:
    """The state of a decoder. ``capsules`` holds the rows of the last forward pass."""

    pool: PagedPool  # the layers that see everything, in order; its length is the row's
    recurrent: tuple[Recurrent, ...]  # the delta-net layers, in order
    capsules: tuple[Capsule, ...] = ()  # empty once committed
    sliding: Ring | None = None  # the layers with a window, in order; None: there are none

    @property
    def length(self) -> jax.Array:
        """Committed positions, [B] int32."""
        return self.pool.length


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
    def head_weight(self) -> jax.Array:
        """[V, D]; the embedding itself when the two are tied."""
        return (self.embed if self.config.tied else self.head).weight[...]

    @property
    def own_head(self) -> Linear | None:
        """The head, unless it is tied to the embedding and was not blocked."""
        return vars(self).get("head")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Rows after the final norm [..., D] -> [..., V] float32."""
        if self.own_head is not None:
            return self.own_head(hidden, out_dtype=jnp.float32)
        return matmul(hidden, self.embed.weight[...], out_dtype=jnp.float32)

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


@struct.dataclass
class DecoderTarget:
    """A decoder as a :class:`jaxdraft.base.Target`."""

    decoder: Frozen[Decoder]
    config: TargetConfig = struct.field(pytree_node=False)
    dtype: jnp.dtype = struct.field(pytree_node=False)

    @classmethod
    def of(cls, decoder: Decoder) -> DecoderTarget:
        """Freeze ``decoder``."""
        return cls(Frozen.of(decoder), decoder.config, decoder.embed.weight[...].dtype)

    def blocked(self) -> DecoderTarget:
        """The same target, its matrices in blocks too: twice the memory, for short windows on CPUs.

        Matrices whose outputs do not divide into blocks, and experts, are left as they are. See
        :class:`jaxdraft.nn.linear.BlockedLinear`.
        """
        decoder = self.decoder()
        add_blocks(decoder)
        if decoder.own_head is None and fits_blocks(self.vocab_size):
            decoder.head = BlockedLinear(decoder.embed.weight[...])
        return dataclasses.replace(self, decoder=Frozen.of(decoder))

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @property
    def context_length(self) -> int:
        """Positions of the rotary table."""
        return self.config.context_length

    @property
    def head(self) -> Head:
        """See :attr:`jaxdraft.base.TargetDefaults.head`."""
        return Head(self.config.width, self.dtype, self.decoder().logits)

    def init(self, batch: int, capacity: int) -> DecoderState:
        """Return a state: one page per row with room for ``capacity`` positions and scratch rows.

        Layers with a window keep a ring of pages per row instead, whatever the capacity.
        """
        c = self.config
        a = c.attention
        pool = PagedPool.one_page_a_row(
            layers=c.count("attention"),
            batch=batch,
            capacity=paged.room(capacity, PREFILL_CHUNK),
            kv_heads=a.kv_heads if a else 1,
            head_dim=a.head_dim if a else 1,
            dtype=self.dtype,
        )
        sliding = self._rings(Ring.zeros, capacity, page_size=paged.CHUNK, batch=batch)
        return DecoderState(pool, self.init_recurrent(batch), sliding=sliding)

    def init_pool(
        self, batch: int, *, pages: int, page_size: int, columns: int, rows: int = PREFILL_CHUNK
    ) -> DecoderState:
        """Return an empty state whose rows share a pool; a row owns nothing before :meth:`grow`.

        Layers with a window have a pool of their own, which holds ``R`` pages for every row
        (:func:`jaxdraft.state.budget.window_pages`): a row that gets its pages of ``pages``
        always gets those too.

        Args:
          batch: B.
          pages: P, pages of the layers without a window.
          page_size: Z.
          columns: M, pages of the longest row.
          rows: rows that are fed at once.
        """
        a = self.config.attention
        pool = PagedPool.zeros(
            layers=self.config.count("attention"),
            batch=batch,
            pages=pages,
            page_size=page_size,
            columns=columns,
            kv_heads=a.kv_heads if a else 1,
            head_dim=a.head_dim if a else 1,
            dtype=self.dtype,
        )
        sliding = self._rings(
            functools.partial(Ring.pool, rings=batch),
            columns * page_size,
            page_size=page_size,
            batch=batch,
            rows=rows,
        )
        return DecoderState(pool, self.init_recurrent(batch), sliding=sliding)

    def _rings(
        self,
        make: Callable[..., Ring],
        capacity: int,
        *,
        batch: int,
        page_size: int,
        rows: int = PREFILL_CHUNK,
    ) -> Ring | None:
        """Return the rings of the layers with a window, if there are such layers."""
        shape = self.config.sliding
        if shape is None or not self.config.count("sliding"):
            return None
        return make(
            layers=self.config.count("sliding"),
            batch=batch,
            window=shape.window,
            rows=rows,
            capacity=capacity,
            page_size=page_size,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=self.dtype,
        )

    def grow(self, state: DecoderState, positions: jax.Array) -> tuple[DecoderState, jax.Array]:
        """Give each row pages for ``positions`` [B], or none: see :func:`paged.grow`."""
        pool, granted = state.pool, jnp.ones(positions.shape, bool)
        if pool.keys:  # otherwise no layer sees everything: there is nothing to own
            pool, granted = paged.grow(pool, positions)
        sliding = state.sliding
        if sliding is not None:
            sliding, _ = ring.grow(sliding, jnp.where(granted, positions, 0))
        return dataclasses.replace(state, pool=pool, sliding=sliding), granted

    def release(self, state: DecoderState, rows: jax.Array) -> DecoderState:
        """Release the pages of the rows where ``rows`` [B] is true, and reset those rows."""
        recurrents = tuple(recurrent.reset(m, rows) for m in state.recurrent)
        sliding = None if state.sliding is None else paged.release(state.sliding, rows)
        return DecoderState(paged.release(state.pool, rows), recurrents, sliding=sliding)

    def skip(
        self, state: DecoderState, tokens: jax.Array, length: jax.Array
    ) -> DecoderState | None:
        """Continue rows whose first ``length`` [B] positions are already in their pages.

        Returns None if a row has state outside its pages: recurrent states, or a window.
        """
        del tokens
        if state.recurrent or state.sliding is not None:
            return None
        return dataclasses.replace(state, pool=dataclasses.replace(state.pool, length=length))

    def init_recurrent(self, batch: int) -> tuple[Recurrent, ...]:
        """Return zero states of the delta-net layers."""
        d = self.config.delta_net
        if d is None:
            return ()
        return tuple(
            Recurrent.zeros(
                batch,
                value_heads=d.value_heads,
                key_dim=d.key_dim,
                value_dim=d.value_dim,
                conv_width=d.conv_width,
                channels=d.channels,
                dtype=self.dtype,
            )
            for _ in range(self.config.count("delta_net"))
        )

    def forward(
        self,
        tokens: jax.Array,
        count: jax.Array,
        state: DecoderState,
        *,
        row: jax.Array | None = None,
    ) -> TargetOutput:
        """See :meth:`jaxdraft.base.Target.forward`."""
        return self.decoder()(tokens, count, state, row=row)

    def commit(self, state: DecoderState, count: jax.Array) -> DecoderState:
        """See :meth:`jaxdraft.base.Target.commit`."""
        recurrents = tuple(
            delta_net.commit(m, c, count)
            for m, c in zip(state.recurrent, state.capsules, strict=True)
        )
        pool = dataclasses.replace(state.pool, length=state.pool.length + count)
        sliding = None if state.sliding is None else ring.commit(state.sliding, count)
        return DecoderState(pool, recurrents, sliding=sliding)
