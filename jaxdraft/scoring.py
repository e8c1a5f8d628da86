"""Numbers of given tokens: logits, hidden states, log-probabilities. Differentiable."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxdraft import guard
from jaxdraft import prompts as given
from jaxdraft.base import Target, full_target, mesh_of
from jaxdraft.meshes import traced_for
from jaxdraft.model import Model
from jaxdraft.prompts import Prompts, positive_per_row, traced
from jaxdraft.ranking import best_token
from jaxdraft.scan import checkpointed_scan
from jaxdraft.sizes import PREFILL_CHUNK

_SCORES = 1 << 24
"""Largest number of scores of the vocabulary that :func:`log_probs` holds at once: 64 MB."""


@struct.dataclass
class Scored:
    """Result of one forward pass over given tokens."""

    logits: jax.Array  # [B, T, V] float32; row t predicts token t + 1
    aux_hidden: jax.Array | None  # [B, T, A]
    hidden: jax.Array | None  # [B, T, D], after the final norm


def score(model: Model, tokens: Prompts, lengths: Any = None) -> Scored:
    """Run the target over given tokens, from an empty state.

    Args:
      model: model from :func:`jaxdraft.load` or ``Model.of``.
      tokens: tokens in any form that ``prompts`` of :func:`jaxdraft.generate` accepts.
      lengths: [B], length of each row, for an array. Results past a row's length are meaningless.

    Differentiable with respect to the floats of ``model``, in forward and in reverse mode. Rows are
    recomputed in chunks: with n chunks, a gradient keeps about sqrt(n) copies of the state.

    Returns:
      Logits [B, T, V], auxiliary states [B, T, A] and hidden rows [B, T, D].

    Raises:
      ValueError: as for :func:`jaxdraft.generate`: tokens outside the vocabulary or the context.
    """
    guard.check_target(model.target)
    ids, count = given.arrays(model, tokens, lengths)
    size = ids.shape[1]
    if size > model.info.context_length:
        raise ValueError(
            f"{size} tokens do not fit the context of {model.info.context_length} positions"
        )
    bucket = size if traced(ids) else given.bucket_of(size)
    ids, count = jax.device_put((given.pad(ids, bucket), count))
    given.check_varying(model, ids, count)
    scored = _score(model.target, ids, count)
    # A static slice: Python's would bring its bounds to the device.
    return jax.tree.map(lambda x: lax.slice_in_dim(x, 0, size, axis=1), scored)


def log_probs(
    model: Model, tokens: Prompts, lengths: Any = None, *, temperature: Any = 1.0
) -> jax.Array:
    """Return the log-probability of every token after the first, given those before it.

    Differentiable like :func:`score`, but without its logits: scores of the vocabulary are held for
    a few tokens at a time, also in a gradient. A loss over sequences that were sampled:

        def loss(model):
            found = jaxdraft.log_probs(model, out_and_prompts, lengths)     # [B, T - 1]
            return -jnp.sum(found * weights) / jnp.sum(weights)

    Args:
      model: model from :func:`jaxdraft.load` or ``Model.of``.
      tokens: tokens in any form that ``prompts`` of :func:`jaxdraft.generate` accepts: T per row.
      lengths: [B], length of each row, for an array. Default: all.
      temperature: number above zero that logits are divided by, one or one per row.

    Returns:
      [B, T - 1] float32: entry t is that of token t + 1; 0 from a row's last token on.

    Raises:
      ValueError: as for :func:`score`, or a temperature that is not above zero.
    """
    guard.check_target(model.target)
    ids, count = given.arrays(model, tokens, lengths)
    batch, size = ids.shape
    if size - 1 > model.info.context_length:
        raise ValueError(
            f"{size} tokens do not fit the context of {model.info.context_length} positions, which "
            "all but the last need"
        )
    heat = positive_per_row("temperature", temperature, batch)
    if size == 1:
        return jnp.zeros((batch, 0), jnp.float32)
    bucket = size - 1 if traced(ids) else given.bucket_of(size - 1)
    ids, count, heat = jax.device_put((given.pad(ids, bucket + 1), count, heat))
    given.check_varying(model, ids, count, heat)
    found, _ = token_log_probs(model.target, ids, count - 1, heat)
    return lax.slice_in_dim(found, 0, size - 1, axis=1)


# --------------------------------------------------------------------------- programs


@jax.jit
def _score(target: Target, tokens: jax.Array, lengths: jax.Array) -> Scored:
    tokens, lengths = _by_rows(target, tokens, lengths)
    with traced_for(mesh_of(target)):
        return _scored(target, tokens, lengths)


def _scored(target: Target, tokens: jax.Array, lengths: jax.Array) -> Scored:
    batch, size = tokens.shape
    chunk = min(size, PREFILL_CHUNK)
    padded = given.pad(tokens, size + -size % chunk)
    state = target.init(batch, padded.shape[1])

    def step(carry: tuple[Any, jax.Array], _: None) -> tuple[tuple[Any, jax.Array], Scored]:
        state, offset = carry
        part = lax.dynamic_slice_in_dim(padded, offset, chunk, axis=1)
        count = jnp.clip(lengths - offset, 0, chunk)
        out = guard.forward(target, part, count, state)
        state = guard.commit(target, out.state, count, state)
        return (state, offset + chunk), Scored(out.logits, out.aux, out.hidden)

    start = (state, jnp.asarray(0, jnp.int32))
    _, parts = checkpointed_scan(step, start, padded.shape[1] // chunk)
    # [chunks, B, chunk, X] -> [B, T, X]
    return jax.tree.map(
        lambda x: jnp.swapaxes(x, 0, 1).reshape(batch, -1, x.shape[-1])[:, :size], parts
    )


def _by_rows(target: Target, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Divide arrays [B, ...] by rows if the target is on a mesh."""
    placement = full_target(target).placement
    if placement is None:
        return arrays
    return tuple(placement.constrain(x, placement.rows_axis(x.shape[0])) for x in arrays)


@functools.partial(jax.jit, static_argnames=("best",))
def token_log_probs(
    target: Target,
    tokens: jax.Array,
    count: jax.Array,
    temperature: jax.Array,
    *,
    best: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Return log-probabilities [B, S] float32 of the tokens that follow each token.

    Args:
      target: the target.
      tokens: [B, S + 1].
      count: [B] int32, tokens that are read: those before the last.
      temperature: [B] float32.
      best: also return [B, S] bool, whether the token that follows is the best one.
    """
    tokens, count, temperature = _by_rows(target, tokens, count, temperature)
    with traced_for(mesh_of(target)):
        return _chunks_of_log_probs(target, tokens, count, temperature, best)


def _chunks_of_log_probs(
    target: Target, tokens: jax.Array, count: jax.Array, temperature: jax.Array, best: bool
) -> tuple[jax.Array, jax.Array | None]:
    batch, size = tokens.shape[0], tokens.shape[1] - 1
    chunk = min(size, PREFILL_CHUNK)
    padded = given.pad(tokens, size + -size % chunk + 1)
    state = target.init(batch, padded.shape[1] - 1)
    Carry = tuple[Any, jax.Array]

    def step(carry: Carry, _: None) -> tuple[Carry, tuple[jax.Array, jax.Array | None]]:
        state, offset = carry
        part = lax.dynamic_slice_in_dim(padded, offset, chunk, axis=1)
        following = lax.dynamic_slice_in_dim(padded, offset + 1, chunk, axis=1)
        here = jnp.clip(count - offset, 0, chunk)
        there = jnp.arange(chunk, dtype=jnp.int32)[None] < here[:, None]
        if full_target(target).head is None:
            out = guard.forward(target, part, here, state)
            found = _log_probs_of(out.logits, following, there, temperature, best)
        else:
            out = guard.forward(target, part, here, state, jnp.zeros_like(here))
            assert out.hidden is not None, "a target with a head gives its hidden rows"
            found = _through_head(target, out.hidden, following, there, temperature, best)
        state = guard.commit(target, out.state, here, state)
        return (state, offset + chunk), found

    start = (state, jnp.asarray(0, jnp.int32))
    _, parts = checkpointed_scan(step, start, (padded.shape[1] - 1) // chunk)
    # [chunks, B, chunk] -> [B, S]
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(batch, -1)[:, :size], parts)


def _through_head(
    target: Target,
    hidden: jax.Array,
    following: jax.Array,
    there: jax.Array,
    temperature: jax.Array,
    best: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the log-probabilities [B, T] of tokens after hidden rows [B, T, D], in blocks.

    The scores of a block are recomputed for its gradient. Example, T = 128 and room for the scores
    of 48 rows: blocks of 48, 48 and 32.
    """
    head = full_target(target).head
    assert head is not None
    batch, rows, width = hidden.shape
    vocab = target.vocab_size

    def block(hidden: jax.Array, following: jax.Array, there: jax.Array) -> Any:
        logits = head.logits(hidden.reshape(-1, 1, width))
        logits = guard.check_logits(target, logits, (hidden[..., 0].size, 1, vocab))
        logits = logits.reshape(*following.shape, vocab)
        return _log_probs_of(logits, following, there, temperature, best)

    size = max(1, _SCORES // (batch * vocab))
    if size >= rows:
        return block(hidden, following, there)
    count = -(-rows // size)

    def divided(x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [blocks, B, size, ...]."""
        x = jnp.pad(x, ((0, 0), (0, count * size - rows), *[(0, 0)] * (x.ndim - 2)))
        return jnp.swapaxes(x.reshape(batch, count, size, *x.shape[2:]), 0, 1)

    body = jax.checkpoint(lambda _, xs: (None, block(*xs)), prevent_cse=False)
    _, parts = lax.scan(body, None, tuple(map(divided, (hidden, following, there))))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(batch, -1)[:, :rows], parts)


def _log_probs_of(
    logits: jax.Array, tokens: jax.Array, there: jax.Array, temperature: jax.Array, best: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Return log-probabilities [B, T] of tokens under logits [B, T, V]; 0 where not ``there``."""
    # Zeros first: rows past the end may hold anything, and a gradient must not touch a NaN.
    logits = jnp.where(there[..., None], logits, 0.0)
    greedy = (best_token(logits) == tokens) if best else None
    tempered = logits / temperature[:, None, None]
    own = jnp.take_along_axis(tempered, tokens[..., None], axis=-1)[..., 0]
    return jnp.where(there, own - jax.nn.logsumexp(tempered, axis=-1), 0.0), greedy
