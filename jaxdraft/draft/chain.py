"""A chained head with one layer: its cache of pairs, and its drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxdraft.base import (
    Drafter,
    DrafterDefaults,
    DraftInfo,
    Draw,
    Feed,
    Guide,
    Proposal,
)
from jaxdraft.budget import DrafterCost, Mirrored
from jaxdraft.checks import check_int
from jaxdraft.config import Eagle3Config, MtpConfig
from jaxdraft.draft.links import Links, check_confidence, no_links, run_chain, with_draft
from jaxdraft.guard import needed
from jaxdraft.nn.chain import ChainLayer
from jaxdraft.sizes import check_slots
from jaxdraft.state import paged
from jaxdraft.state.paged import PagedPool

INGEST_ROWS = 128
"""Rows that may be ingested at once; a dense pool keeps room for that many scratch rows."""


@struct.dataclass
class ChainState:
    """State of the head.

    It runs on pairs (row of position p, token of p + 1), and the last position's next token is not
    known before the anchor is. So n ingested positions are n - 1 cached pairs and one pending row.
    """

    pool: PagedPool  # one layer; its length counts pairs
    pending: jax.Array  # [B, D], the row of position length - 1
    length: jax.Array  # [B] int32, positions ingested
    intact: jax.Array  # [B] bool: every committed row so far was ingested
    denied: jax.Array  # [B] bool: found no page; no drafts until the row is released
    misses: jax.Array  # [] int32: how often that happened


class ChainDrafter(DrafterDefaults):
    """A chained head as a :class:`jaxdraft.base.Drafter`. Subclasses hold its weights."""

    config: Any  # MtpConfig or Eagle3Config
    dtype: jnp.dtype
    draft_tokens: int
    confidence: float | jax.Array | None

    first_link = 0

    def __post_init__(self) -> None:
        check_confidence(self.confidence)

    def layer(self) -> ChainLayer:
        """Return the module."""
        raise NotImplementedError

    def fed(self, feed: Feed) -> jax.Array:
        """Return the target's rows that the head reads, [B, T, ...]."""
        raise NotImplementedError

    def rows(self, fed: jax.Array) -> jax.Array:
        """Return the rows [B, T, D] of the first link, from the result of :meth:`fed`."""
        raise NotImplementedError

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [...] -> vectors [..., D]."""
        raise NotImplementedError

    def logits(self, rows: jax.Array) -> jax.Array:
        """Return the logits of the layer's rows: [..., D] -> [..., V'] float32."""
        raise NotImplementedError

    def vocabulary(self) -> jax.Array | None:
        """Return the token of each score, [V'] int32; None: the index of the score."""
        return None

    @property
    def draftable(self) -> int:
        """Tokens that a draft can be: V', or V."""
        raise NotImplementedError

    @property
    def overlap(self) -> int:
        """1, because the last pair of a page includes the token that follows the page."""
        return 1

    def with_draft_tokens(self, draft_tokens: int) -> Drafter:
        """Return the same head with another K; one layer can be chained any number of times."""
        return replace(cast(Any, self), draft_tokens=draft_tokens)

    def with_confidence(self, confidence: float | None) -> Drafter:
        """Return the same head, proposing drafts up to the first that is too unlikely.

        Args:
          confidence: the least product of the largest probabilities of all passes so far, in 0..1;
            None: no cut.

        Raises:
          ValueError: the number is outside of 0..1.
        """
        return replace(cast(Any, self), confidence=confidence)

    @property
    def declines(self) -> bool:
        """True if drafts are cut by confidence, down to none."""
        return self.confidence is not None

    def init(self, batch: int, capacity: int) -> ChainState:
        """Return an empty state: one page per row for ``capacity`` positions, as in the target."""
        pool = PagedPool.one_page_per_row(
            self.config.attention.kv_shape(1, self.dtype),
            batch=batch,
            capacity=paged.room(capacity, max(INGEST_ROWS, self.draft_tokens)),
        )
        return self._start(pool)

    def init_pool(
        self, batch: int, *, pages: int, page_size: int, columns: int | None = None
    ) -> ChainState:
        """Return an empty state whose rows share a pool that mirrors the target's.

        Pairs and scratch never pass the last position of the target's window, so a row needs
        no more pages than its target row: with as many pages of the same size, pages never run out.
        With fewer, a row that finds no page is *denied*: it owns nothing and proposes nothing until
        it is released.

        Args:
          batch: B.
          pages: P, of the target's pool.
          page_size: Z.
          columns: M, pages of the longest row. Default: all.

        Raises:
          ValueError: a size that is not positive, or more slots than int32 can number.
        """
        check_slots(
            "the drafter's pool", check_int("pages", pages), check_int("page_size", page_size)
        )
        return self._start(
            PagedPool.zeros(
                self.config.attention.kv_shape(1, self.dtype),
                batch=check_int("batch", batch),
                pages=pages,
                page_size=page_size,
                columns=pages if columns is None else check_int("columns", columns),
            )
        )

    def cost(self) -> DrafterCost:
        """Return its memory cost in an engine."""
        return cost(self.config, self.dtype)

    def misses(self, state: ChainState) -> jax.Array:
        """Count how often a row found no page."""
        return state.misses

    def release(self, state: ChainState, rows: jax.Array) -> ChainState:
        """Free everything owned by the rows where ``rows`` [B] is true."""
        chex.assert_shape(rows, state.length.shape)
        if state.pool.dense:  # a row keeps its page, but not the content
            pool = replace(state.pool, length=jnp.where(rows, 0, state.pool.length))
        else:
            pool = paged.release(state.pool, rows)
        return replace(
            state,
            pool=pool,
            length=jnp.where(rows, 0, state.length),
            intact=state.intact | rows,
            denied=state.denied & ~rows,
        )

    def ingest(self, state: ChainState, feed: Feed) -> ChainState:
        """See :meth:`jaxdraft.base.Drafter.ingest`; ``feed.anchor`` need not be known.

        Rows must follow the ones ingested before, or start again at position 0. A row that does
        neither has a hole: it ingests nothing and proposes nothing until it starts again. In a
        pool, a row takes pages as it grows.

        Example: rows h0 h1 h2 of tokens a b c, then h3 of d. The first call caches (h0, b), (h1, c)
        and keeps h2; the second caches (h2, d) and keeps h3. So the rows of accepted drafts are
        made again from the target's rows.
        """
        last = self.fed(feed)
        text = needed(self, "tokens", feed.tokens, None)
        brings = feed.count > 0
        fresh = brings & (feed.first_position == 0)
        follows = fresh | (feed.first_position == state.length)
        intact = fresh | (state.intact & (follows | ~brings))
        count = jnp.where(intact & ~state.denied, feed.count, 0)
        state = self.cover(state, jnp.where(count > 0, feed.first_position + count - 1, 0))
        count = jnp.where(state.denied, 0, count)
        fresh = fresh & (count > 0)
        steps = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
        # Rows past `count` may hold anything, even NaN, and must not reach a product.
        hidden = self.rows(jnp.where((steps < count[:, None])[..., None], last, 0))
        rows = jnp.concatenate([state.pending[:, None], hidden], axis=1)  # [B, 1 + T, D]
        # Row t of `rows` meets token t. If nothing was pending, row t + 1 meets token t + 1.
        paired = jnp.where(fresh[:, None, None], rows[:, 1:], rows[:, :-1])
        tokens = jnp.where(fresh[:, None], jnp.roll(text, -1, axis=1), text)
        pairs = count - fresh.astype(jnp.int32)
        pool = replace(state.pool, length=jnp.where(fresh, 0, state.pool.length))
        # Only keys and values are kept; the rest of the layer is never computed.
        _, written = self.layer()(self.embed(tokens), paired, pairs, pool)
        return replace(
            state,
            pool=replace(written, length=pool.length + pairs),
            pending=jnp.take_along_axis(rows, count[:, None, None], axis=1)[:, 0],
            length=jnp.where(count > 0, feed.first_position + count, state.length),
            intact=intact,
        )

    def propose(self, state: ChainState, feed: Feed) -> tuple[ChainState, Proposal, DraftInfo]:
        """See :meth:`jaxdraft.base.Drafter.propose`.

        The first pass runs the pending row with the anchor. Each later pass runs on the previous
        pass's hidden row and best token (or, when drafts are drawn, one of its best), one position
        further. As many passes run as the widest row can use. Their keys are scratch: the pool's
        length does not change.
        """
        found = run_chain(self, state, feed, state.pool.length, self.config.context_length)
        state = found.state
        state = replace(state, pool=replace(found.links.cache, length=state.pool.length))
        return state, found.proposal, found.info

    def _start(self, pool: PagedPool) -> ChainState:
        batch = pool.length.shape[0]
        none = jnp.zeros((batch,), bool)
        return ChainState(
            pool=pool,
            pending=jnp.zeros((batch, self.config.width), self.dtype),
            length=jnp.zeros((batch,), jnp.int32),
            intact=~none,
            denied=none,
            misses=jnp.zeros((), jnp.int32),
        )

    def cover(self, state: ChainState, pairs: jax.Array) -> ChainState:
        """Provide pages for ``pairs`` [B] per row; a row that cannot get them releases its own."""
        if state.pool.dense:
            return state
        pool, granted = paged.grow(state.pool, pairs)
        missed = (pairs > 0) & ~granted
        return replace(
            state,
            pool=paged.release(pool, missed),
            length=jnp.where(missed, 0, state.length),
            denied=state.denied | missed,
            misses=state.misses + jnp.sum(missed, dtype=jnp.int32),
        )

    def begin(
        self,
        state: ChainState,
        anchor: jax.Array,
        limit: jax.Array,
        draw: Draw | None,
        guide: Guide | None,
    ) -> Links:
        """Start from the pending row and the anchor."""
        del limit
        return no_links(
            state.pool,
            state.pending,
            anchor,
            draw,
            self.draft_tokens,
            self.draftable,
            self.confidence,
            guide,
        )

    def link(
        self,
        state: ChainState,
        limit: jax.Array,
        draw: Draw | None,
        guide: Guide | None,
        number: jax.Array,
        links: Links,
    ) -> Links:
        """Run pass ``number`` [] int32; see :func:`jaxdraft.draft.links.chain`."""
        drafts = number < limit
        assert links.hidden is not None
        rows, pool = self.layer()(
            self.embed(links.token)[:, None],
            links.hidden[:, None],
            drafts.astype(jnp.int32),
            replace(links.cache, length=state.pool.length + number),
        )
        links = replace(links, cache=pool, hidden=rows[:, 0])
        logits = self.logits(rows[:, 0])
        return with_draft(links, logits, drafts, draw, guide, number, self.vocabulary())


def cost(config: MtpConfig | Eagle3Config, dtype: DTypeLike) -> DrafterCost:
    """Return the memory cost of a chained head: one layer's page per target page.

    Args:
      config: its description.
      dtype: type of its keys and values.
    """
    return Mirrored(cache=config.attention.kv_shape(1, dtype))
