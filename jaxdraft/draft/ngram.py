"""Prompt lookup: propose the tokens after an earlier match of the text's end. No weights."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from jaxdraft.base import NO_TOKEN, DrafterDefaults, DraftInfo, Feed, NoDraft, Proposal
from jaxdraft.guard import needed
from jaxdraft.meshes import set_in_rows


@struct.dataclass
class NgramState:
    """Every token so far but the anchor."""

    tokens: jax.Array  # [B, S] int32
    length: jax.Array  # [B] int32
    intact: jax.Array  # [B] bool: every committed row so far was ingested


@struct.dataclass
class NgramDrafter(DrafterDefaults):
    """Looks up the end of the text earlier in the text; a :class:`jaxdraft.base.Drafter`.

    The longest suffix of ``min_ngram`` to ``max_ngram`` tokens that occurs earlier wins; of its
    occurrences the most recent one. The drafts are the tokens that follow there, as many as exist.

    Example: ``a b c d a b`` and K = 4: the suffix ``a b`` also occurs at the front, and ``c d a b``
    is proposed.

    Source: Saxena, "Prompt Lookup Decoding", 2023; LLMA, arXiv:2304.04487, section 3.

    Attributes:
      min_ngram: shortest suffix that counts as a match.
      max_ngram: longest suffix that is tried.
      draft_tokens: K.
    """

    min_ngram: int = struct.field(pytree_node=False, default=2)
    max_ngram: int = struct.field(pytree_node=False, default=4)
    draft_tokens: int = struct.field(pytree_node=False, default=7)

    def __post_init__(self) -> None:
        check_ngrams(self.min_ngram, self.max_ngram)

    @property
    def declines(self) -> bool:
        """True, because most texts rarely repeat themselves."""
        return True

    def with_draft_tokens(self, draft_tokens: int) -> NgramDrafter:
        """Return the same lookup with another K."""
        return replace(self, draft_tokens=draft_tokens)

    def init(self, batch: int, capacity: int) -> NgramState:
        """Return an empty state with room for ``capacity`` tokens and the anchor."""
        tokens = jnp.zeros((batch, capacity + 1), jnp.int32)
        return NgramState(tokens, jnp.zeros((batch,), jnp.int32), jnp.ones((batch,), bool))

    def skip(self, state: NgramState, tokens: jax.Array, length: jax.Array) -> NgramState:
        """Start after the first ``length`` [B] of ``tokens`` [B, S], in an empty state."""
        size = min(tokens.shape[1], state.tokens.shape[1])
        place = jnp.arange(size, dtype=jnp.int32)[None]
        known = jnp.where(place < length[:, None], tokens[:, :size], 0)
        text = state.tokens.at[:, :size].set(known)
        return NgramState(text, length, state.intact)

    def ingest(self, state: NgramState, feed: Feed) -> NgramState:
        """See :meth:`jaxdraft.base.Drafter.ingest`.

        Tokens must follow the ones ingested before, or start again at position 0. A row that does
        neither has a hole; so does a row that outgrows its capacity.
        """
        committed = needed(self, "tokens", feed.tokens, None)
        count, intact = continued(state.length, state.intact, feed)
        size = state.tokens.shape[1]
        step = jnp.arange(committed.shape[1], dtype=jnp.int32)[None]
        place = jnp.where(step < count[:, None], feed.first_position[:, None] + step, size)
        tokens = set_in_rows(state.tokens, place, committed)
        length = jnp.where(count > 0, feed.first_position + count, state.length)
        return NgramState(tokens, length, intact & (length < size))

    def propose(self, state: NgramState, feed: Feed) -> tuple[NgramState, Proposal, DraftInfo]:
        """See :meth:`jaxdraft.base.Drafter.propose`. The state is read, never written."""
        size, last = state.tokens.shape[1], state.length[:, None]
        place = jnp.arange(size, dtype=jnp.int32)[None]
        text = jnp.where(place == last, feed.anchor[:, None], state.tokens)  # [B, S]
        # matched[b, p]: how many tokens that end at p are those that end at the anchor.
        # Example: a b c d a b, at p = 1: b and b, then a and a: 2. At p = 0: a and b differ: 0.
        same, matched = jnp.ones(text.shape, bool), jnp.zeros(text.shape, jnp.int32)
        for back in range(self.max_ngram):
            wanted = jnp.take_along_axis(text, jnp.maximum(last - back, 0), axis=1)
            shifted = jnp.pad(text, ((0, 0), (back, 0)), constant_values=NO_TOKEN)[:, :size]
            same = same & (shifted == wanted) & (last >= back)
            matched = matched + same.astype(jnp.int32)
        matched = jnp.where(place < last, matched, 0)
        end = size - 1 - jnp.argmax(matched[:, ::-1], axis=1)  # the last of the longest
        end = end.astype(jnp.int32)
        found = jnp.max(matched, axis=1) >= self.min_ngram

        reason = lookup_reason(feed, state.intact, found)
        limit = jnp.minimum(jnp.minimum(feed.limit, self.draft_tokens), state.length - end)
        length = jnp.where(reason == NoDraft.DRAFTED, limit, 0).astype(jnp.int32)
        step = jnp.arange(self.draft_tokens, dtype=jnp.int32)[None]
        tokens = jnp.take_along_axis(text, end[:, None] + 1 + step, axis=1, mode="clip")
        tokens = jnp.where(step < length[:, None], tokens, NO_TOKEN)
        return state, Proposal(tokens, length), DraftInfo(reason, jnp.zeros((), jnp.int32))


def check_ngrams(shortest: int, longest: int) -> None:
    """Check the lengths of the suffixes that a lookup tries.

    Raises:
      ValueError: they are not 1 <= shortest <= longest.
    """
    if not 1 <= shortest <= longest:
        raise ValueError(
            f"n-grams of {shortest}..{longest} tokens; expected 1 <= min_ngram <= max_ngram"
        )


def continued(length: jax.Array, intact: jax.Array, feed: Feed) -> tuple[jax.Array, jax.Array]:
    """Return how many of a feed's tokens continue each row, and whether the row has no hole.

    Tokens must follow the ``length`` [B] ingested ones, or start again at position 0.

    Args:
      length: [B] int32, tokens ingested so far.
      intact: [B] bool, rows without a hole so far.
      feed: the committed rows.
    """
    brings = feed.count > 0
    fresh = brings & (feed.first_position == 0)
    follows = fresh | (feed.first_position == length)
    intact = fresh | (intact & (follows | ~brings))
    return jnp.where(intact, feed.count, 0), intact


def lookup_reason(feed: Feed, intact: jax.Array, found: jax.Array) -> jax.Array:
    """Return the ``NoDraft`` [B] of a lookup.

    Args:
      feed: the request for drafts.
      intact: [B] bool, rows without a hole.
      found: [B] bool, rows whose end was found.
    """
    return jnp.select(
        [~(feed.wants_draft & (feed.limit > 0)), ~intact, ~found],
        [NoDraft.UNWANTED, NoDraft.HOLE, NoDraft.NO_MATCH],
        NoDraft.DRAFTED,
    ).astype(jnp.int32)
