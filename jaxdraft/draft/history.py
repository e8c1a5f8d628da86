"""Lookup in earlier outputs and given documents: propose what followed the text's end there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxdraft.base import NO_TOKEN, DrafterDefaults, DraftInfo, Feed, NoDraft, Proposal
from jaxdraft.checks import check_int
from jaxdraft.draft.ngram import check_ngrams, continued, lookup_reason
from jaxdraft.guard import needed
from jaxdraft.sizes import power_of_two

_BEFORE = -2
"""Token before a row's first. It differs from ``NO_TOKEN``, which ends the documents, so that no
match passes the beginning of either."""

_LEAST = 1024
"""Least default capacity, in tokens."""


@struct.dataclass
class HistoryState:
    """The last committed tokens of each row."""

    recent: jax.Array  # [B, M] int32, M = max_ngram; the newest is the last
    length: jax.Array  # [B] int32
    intact: jax.Array  # [B] bool: every committed row so far was ingested


@struct.dataclass
class HistoryDrafter(DrafterDefaults):
    """Looks up the end of the text in other texts; a :class:`jaxdraft.base.Drafter`.

    The longest suffix of ``min_ngram`` to ``max_ngram`` tokens that occurs in the documents wins;
    of its occurrences the most recent one. The drafts are the tokens that follow there, up to the
    end of the document. :meth:`of` makes one from documents, :meth:`with_text` adds more of them.
    Other documents of the same capacity compile nothing.

        history = jaxdraft.HistoryDrafter.of(documents, capacity=1 << 16)
        out = jaxdraft.generate(model, prompts, drafter=history)
        history = history.with_text([p + o for p, o in zip(prompts, out.ids())])

    Made for the first place of a :class:`jaxdraft.FallbackDrafter`, before a drafter with weights
    or :class:`jaxdraft.NgramDrafter`, which looks up the row's own text.

    Example, suffixes of one or two tokens and the documents ``a b c`` and ``d b e``: a text that
    ends with ``a b`` gets ``c``. After ``f b`` only the suffix ``b`` occurs, twice; ``e`` follows
    the more recent one.

    Source: the idea of drafts from an index of suffixes is of He et al., "REST", arXiv:2311.08252,
    and Oliaro et al., "SuffixDecoding", arXiv:2411.04975.

    Attributes:
      text: [M + S] int32, M times ``NO_TOKEN``, then the documents, each followed by ``NO_TOKEN``.
      ends: [S] int32, one place in the documents for each distinct run of M tokens, in the order of
        these runs when they are read backwards.
      latest: [N, S] int32: with n = min_ngram + row, the last place whose n tokens are those at
        ``ends``.
      groups: [] int32, number of entries of ``ends`` that are used.
      min_ngram: shortest suffix that counts as a match.
      max_ngram: M, longest suffix that is looked up.
      draft_tokens: K.
    """

    text: jax.Array
    ends: jax.Array
    latest: jax.Array
    groups: jax.Array
    min_ngram: int = struct.field(pytree_node=False, default=2)
    max_ngram: int = struct.field(pytree_node=False, default=8)
    draft_tokens: int = struct.field(pytree_node=False, default=7)

    @classmethod
    def of(
        cls,
        documents: Iterable[Sequence[int] | np.ndarray] = (),
        *,
        min_ngram: int = 2,
        max_ngram: int = 8,
        draft_tokens: int = 7,
        capacity: int | None = None,
    ) -> HistoryDrafter:
        """Return a drafter that looks up these documents.

        Args:
          documents: token ids of each document, the oldest first. None at all is allowed.
          min_ngram: shortest suffix that counts as a match.
          max_ngram: longest suffix that is looked up.
          draft_tokens: K.
          capacity: S, room for tokens, with one more per document. The oldest documents are dropped
            if there is too little, and the beginning of the newest if it alone is too long.
            Default: the power of two that holds these documents, at least 1024.

        Raises:
          ValueError: a document is not a sequence of token ids, or a number is too small.
        """
        check_ngrams(min_ngram, max_ngram)
        check_int("draft_tokens", draft_tokens)
        rows = [_document(number, ids) for number, ids in enumerate(documents)]
        if capacity is None:
            capacity = power_of_two(sum(row.size for row in rows), least=_LEAST)
        text = _newest(rows, check_int("capacity", capacity, 2))
        ends, latest, groups = _index(text, min_ngram, max_ngram)
        padded = np.concatenate([np.full((max_ngram,), NO_TOKEN, np.int32), text])
        arrays = jax.device_put((padded, ends, latest, np.asarray(groups, np.int32)))
        return cls(*arrays, min_ngram=min_ngram, max_ngram=max_ngram, draft_tokens=draft_tokens)

    def with_text(self, documents: Iterable[Sequence[int] | np.ndarray]) -> HistoryDrafter:
        """Return a drafter that looks up these documents, too, with the same capacity.

        The index is built anew on the host: about a second for a million tokens.

        Args:
          documents: as for :meth:`of`, newer than those held.

        Raises:
          ValueError: as for :meth:`of`.
        """
        return self.of(
            [*self.documents(), *documents],
            min_ngram=self.min_ngram,
            max_ngram=self.max_ngram,
            draft_tokens=self.draft_tokens,
            capacity=self.ends.shape[0],
        )

    def documents(self) -> list[np.ndarray]:
        """Return the documents, the oldest first."""
        text = np.asarray(jax.device_get(self.text))[self.max_ngram :]
        ends = np.flatnonzero(text == NO_TOKEN)
        starts = np.concatenate([[0], ends + 1])[: ends.size]
        return [text[a:b] for a, b in zip(starts, ends, strict=True) if b > a]

    @property
    def declines(self) -> bool:
        """True, because a text may differ from all documents."""
        return True

    def with_draft_tokens(self, draft_tokens: int) -> HistoryDrafter:
        """Return the same lookup with another K."""
        return replace(self, draft_tokens=draft_tokens)

    def init(self, batch: int, capacity: int) -> HistoryState:
        """Return an empty state. Its size does not depend on ``capacity``."""
        del capacity
        recent = jnp.full((batch, self.max_ngram), _BEFORE, jnp.int32)
        return HistoryState(recent, jnp.zeros((batch,), jnp.int32), jnp.ones((batch,), bool))

    def skip(self, state: HistoryState, tokens: jax.Array, length: jax.Array) -> HistoryState:
        """Start after the first ``length`` [B] of ``tokens`` [B, S], in an empty state."""
        place = length[:, None] - self.max_ngram + jnp.arange(self.max_ngram, dtype=jnp.int32)[None]
        found = jnp.take_along_axis(tokens, jnp.maximum(place, 0), axis=1, mode="clip")
        return HistoryState(jnp.where(place >= 0, found, _BEFORE), length, state.intact)

    def ingest(self, state: HistoryState, feed: Feed) -> HistoryState:
        """See :meth:`jaxdraft.base.Drafter.ingest`.

        Tokens must follow the ones ingested before, or start again at position 0. A row that does
        neither has a hole.
        """
        committed = needed(self, "tokens", feed.tokens, None)
        count, intact = continued(state.length, state.intact, feed)
        fresh = (feed.count > 0) & (feed.first_position == 0)
        before = jnp.where(fresh[:, None], _BEFORE, state.recent)
        # Example, M = 3: x y z and then the tokens a b, of which two count: z a b.
        joined = jnp.concatenate([before, committed.astype(jnp.int32)], axis=1)
        place = count[:, None] + jnp.arange(self.max_ngram, dtype=jnp.int32)[None]
        recent = jnp.take_along_axis(joined, place, axis=1)
        length = jnp.where(count > 0, feed.first_position + count, state.length)
        return HistoryState(recent, length, intact)

    def propose(self, state: HistoryState, feed: Feed) -> tuple[HistoryState, Proposal, DraftInfo]:
        """See :meth:`jaxdraft.base.Drafter.propose`. The state is read, never written."""
        newest = state.recent[:, :0:-1]
        query = jnp.concatenate([feed.anchor[:, None].astype(jnp.int32), newest], axis=1)  # [B, M]
        end, matched = self._find(query)
        reason = lookup_reason(feed, state.intact, matched >= self.min_ngram)
        step = jnp.arange(self.draft_tokens, dtype=jnp.int32)[None]
        place = self.max_ngram + end[:, None] + 1 + step
        tokens = jnp.take(self.text, place, mode="clip")  # the last entry of a text is NO_TOKEN
        inside = jnp.cumprod((tokens != NO_TOKEN).astype(jnp.int32), axis=1).sum(1, dtype=jnp.int32)
        wanted = jnp.minimum(feed.limit, inside).astype(jnp.int32)
        length = jnp.where(reason == NoDraft.DRAFTED, wanted, 0)
        tokens = jnp.where(step < length[:, None], tokens, NO_TOKEN)
        return state, Proposal(tokens, length), DraftInfo(reason, jnp.zeros((), jnp.int32))

    def _find(self, query: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Search the documents for the ends of texts.

        Args:
          query: [B, M], the last tokens of each row, the newest first.

        Returns:
          [B], the place in the documents where the longest match ends, and [B], its length.
        """
        low = jnp.zeros(query.shape[:1], jnp.int32)
        high = jnp.broadcast_to(self.groups, low.shape)
        # The first run that does not come before the query. The number of steps depends on the
        # capacity alone. They are written out: a loop would end a CUDA graph.
        for _ in range(self.ends.shape[0].bit_length()):
            middle = (low + high) // 2
            later = (low < high) & self._compare(query, middle)[1]
            high = jnp.where(later, high, middle)
            low = jnp.where(later, middle + 1, low)
        # Runs that share most with the query are beside the place where it belongs.
        beside = jnp.stack([low - 1, low])  # [2, B]
        exists = (beside >= 0) & (beside < self.groups)
        common = jnp.stack([self._compare(query, place)[0] for place in beside])
        common = jnp.where(exists, common, 0)
        best = jnp.argmax(common, axis=0)
        matched = jnp.take_along_axis(common, best[None], axis=0)[0]
        group = jnp.take_along_axis(beside, best[None], axis=0)[0]
        row = jnp.clip(matched - self.min_ngram, 0, self.latest.shape[0] - 1)
        return self.latest.at[row, group].get(mode="clip"), matched

    def _compare(self, query: jax.Array, group: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Compare queries [B, M] with runs [B].

        Returns:
          [B] int32, number of equal tokens at the beginning, and [B] bool, whether the query comes
          later than the run.
        """
        back = jnp.arange(self.max_ngram, dtype=jnp.int32)[None]
        end = jnp.take(self.ends, group, mode="clip")
        run = jnp.take(self.text, self.max_ngram + end[:, None] - back, mode="clip")  # [B, M]
        same = jnp.cumprod((run == query).astype(jnp.int32), axis=1)
        common = same.sum(1, dtype=jnp.int32)
        at = jnp.minimum(common, self.max_ngram - 1)[:, None]
        ours, theirs = (jnp.take_along_axis(x, at, axis=1)[:, 0] for x in (query, run))
        return common, ours > theirs


def _document(number: int, ids: Any) -> np.ndarray:
    """Return a document as int32, followed by ``NO_TOKEN``."""
    row = np.asarray(jax.device_get(ids))
    if row.ndim == 1 and row.size == 0:
        row = row.astype(np.int32)
    if row.ndim != 1 or not np.issubdtype(row.dtype, np.integer):
        raise ValueError(
            f"document {number} is {row.dtype} of shape {row.shape}; expected a row of token ids"
        )
    if row.size and not (0 <= row.min() and row.max() < 2**31 - 1):
        raise ValueError(f"document {number} has ids {row.min()}..{row.max()}; expected 0..2**31-2")
    return np.append(row.astype(np.int32), np.int32(NO_TOKEN))


def _newest(rows: list[np.ndarray], capacity: int) -> np.ndarray:
    """Return as many of the last documents as fit, padded with ``NO_TOKEN`` [capacity]."""
    kept: list[np.ndarray] = []
    room = capacity
    for row in reversed(rows):
        if row.size > room:
            if not kept:
                kept.append(row[row.size - room :])
            break
        kept.append(row)
        room -= row.size
    text = np.concatenate([*reversed(kept), np.full((capacity,), NO_TOKEN, np.int32)])
    return text[:capacity].astype(np.int32)


def _index(text: np.ndarray, low: int, high: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Sort the runs of tokens of a text that end before another token.

    Args:
      text: [S] int32, documents that end with ``NO_TOKEN``.
      low: shortest run.
      high: longest run.

    Returns:
      ``ends`` [S], ``latest`` [N, S] and the number of groups, as in :class:`HistoryDrafter`.
    """
    size = text.size
    follows = np.append(text[1:] != NO_TOKEN, False)
    places = np.flatnonzero((text != NO_TOKEN) & follows)
    ends, latest = np.zeros((size,), np.int32), np.zeros((high - low + 1, size), np.int32)
    if not places.size:
        return ends, latest, 0
    padded = np.concatenate([np.full((high,), NO_TOKEN, np.int64), text])
    base = int(text.max()) + 2
    # rank[i]: number of the last n tokens at places[i], read backwards, in the order of all of
    # them. Example, n = 2: b c | a c gives the keys (c, b) and (c, a), and the ranks 1 and 0.
    rank, last = np.zeros(places.shape, np.int64), []
    for n in range(1, high + 1):
        key = rank * base + padded[places + high - n + 1] + 1
        rank = np.unique(key, return_inverse=True)[1].reshape(-1)
        if n >= low:
            newest = np.zeros((int(rank.max()) + 1,), np.int32)
            np.maximum.at(newest, rank, places.astype(np.int32))
            last.append(newest[rank])
    groups, first = np.unique(rank, return_index=True)
    ends[: groups.size] = places[first]
    for row, found in enumerate(last):
        latest[row, : groups.size] = found[first]
    return ends, latest, groups.size
