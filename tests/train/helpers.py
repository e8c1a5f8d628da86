"""What tests of training share."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxdraft.target import DecoderTarget
from jaxdraft.train.losses import Continuations
from jaxdraft.train.sequence import decoder_rows

STEPS = 24


def continuations(target: DecoderTarget) -> Continuations:
    """Two random sequences of 48 tokens' vocabulary, the first called greedy, two blocks each."""
    tokens = jax.random.randint(jax.random.key(0), (2, STEPS), 0, 48)
    rows = jax.jit(lambda d, t: decoder_rows(d(), t))(target.decoder, tokens)
    return Continuations(
        tokens=tokens,
        aux=rows.aux,
        hidden=rows.hidden,
        anchors=jnp.asarray([[3, 14], [7, 18]]),
        greedy=jnp.asarray([True, False]),
    )
