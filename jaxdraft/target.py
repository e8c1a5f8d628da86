"""A decoder as a target: its pools, and the calls of a round."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from jaxdraft.base import Head, TargetOutput
from jaxdraft.config import TargetConfig
from jaxdraft.nn import delta_net
from jaxdraft.nn.decoder import Decoder
from jaxdraft.nn.linear import BlockedLinear, Embedding, Frozen, add_blocks, fits_blocks
from jaxdraft.sharding.placement import Placement
from jaxdraft.sharding.states import divide_pages, divide_recurrent
from jaxdraft.sizes import GPU_CHUNK, PREFILL_CHUNK
from jaxdraft.state import paged, recurrent, ring
from jaxdraft.state.decoder import DecoderState
from jaxdraft.state.paged import PagedPool
from jaxdraft.state.recurrent import Recurrent
from jaxdraft.state.ring import Ring


@struct.dataclass
class DecoderTarget:
    """A decoder as a :class:`jaxdraft.base.Target`."""

    decoder: Frozen[Decoder]
    config: TargetConfig = struct.field(pytree_node=False)
    dtype: jnp.dtype = struct.field(pytree_node=False)
    placement: Placement | None = struct.field(pytree_node=False, default=None)
    """The mesh that the decoder is divided over; None: it is on one device."""

    @classmethod
    def of(cls, decoder: Decoder) -> DecoderTarget:
        """Freeze ``decoder``."""
        return cls(Frozen.of(decoder), decoder.config, decoder.embed.table.dtype)

    def blocked(self) -> DecoderTarget:
        """Return the target with its matrices in blocks, too, for short windows on CPUs.

        This takes twice the memory. Experts, and matrices whose outputs do not divide into blocks,
        are left as they are. See :class:`jaxdraft.nn.linear.BlockedLinear`.
        """
        decoder = self.decoder()
        add_blocks(decoder)
        dense = isinstance(decoder.embed, Embedding)
        if dense and decoder.own_head is None and fits_blocks(self.vocab_size):
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
    def prompt_rows(self) -> int:
        """See :attr:`jaxdraft.base.TargetDefaults.prompt_rows`.

        Rings have room for ``PREFILL_CHUNK`` rows beside their window.
        """
        return PREFILL_CHUNK if self.config.count("sliding") else GPU_CHUNK

    @property
    def head(self) -> Head:
        """See :attr:`jaxdraft.base.TargetDefaults.head`."""
        return Head(self.config.width, self.dtype, self.decoder().logits)

    def init(self, batch: int, capacity: int) -> DecoderState:
        """Return a state: one page per row with room for ``capacity`` positions and scratch rows.

        Layers with a window keep a ring of pages per row instead, whatever the capacity.
        """
        pool = PagedPool.one_page_per_row(
            self.config.kv_shape("attention", self.dtype),
            batch=batch,
            capacity=paged.room(capacity, PREFILL_CHUNK),
        )
        sliding = self._rings(Ring.zeros, capacity, page_size=paged.CHUNK, batch=batch)
        return self._placed(DecoderState(pool, self.init_recurrent(batch), sliding=sliding))

    def _placed(self, state: DecoderState) -> DecoderState:
        """Return an empty state, divided over the mesh if there is one."""
        if self.placement is None:
            return state
        place, net, parts = self.placement, self.config.delta_net, self.placement.parts
        divided = net is not None and not (net.key_heads % parts or net.value_heads % parts)
        return dataclasses.replace(
            state,
            pool=divide_pages(place, state.pool),
            sliding=None if state.sliding is None else divide_pages(place, state.sliding),
            recurrent=tuple(divide_recurrent(place, one, divided) for one in state.recurrent),
        )

    def init_pool(
        self, batch: int, *, pages: int, page_size: int, columns: int, rows: int = PREFILL_CHUNK
    ) -> DecoderState:
        """Return an empty state whose rows share a pool; a row owns nothing before :meth:`grow`.

        Layers with a window have a pool of their own, which holds ``R`` pages for every row
        (:func:`jaxdraft.sizes.window_pages`): a row that gets its pages of ``pages``
        always gets those too.

        Args:
          batch: B.
          pages: P, pages of the layers without a window.
          page_size: Z.
          columns: M, pages of the longest row.
          rows: rows that are fed at once.
        """
        pool = PagedPool.zeros(
            self.config.kv_shape("attention", self.dtype),
            batch=batch,
            pages=pages,
            page_size=page_size,
            columns=columns,
        )
        sliding = self._rings(
            functools.partial(Ring.pool, rings=batch),
            columns * page_size,
            page_size=page_size,
            batch=batch,
            rows=rows,
        )
        return self._placed(DecoderState(pool, self.init_recurrent(batch), sliding=sliding))

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
            self.config.kv_shape("sliding", self.dtype),
            batch=batch,
            window=shape.window,
            rows=rows,
            capacity=capacity,
            page_size=page_size,
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
