"""The state of a decoder: keys and values, recurrent states, and the rows of the last window."""

from __future__ import annotations

import jax
from flax import struct

from jaxdraft.state.paged import PagedPool
from jaxdraft.state.recurrent import Capsule, Recurrent
from jaxdraft.state.ring import Ring


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
