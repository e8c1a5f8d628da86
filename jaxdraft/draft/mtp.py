"""Multi-token prediction, chained: the target's own head, fed its own hidden rows."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import DTypeLike

from jaxdraft.base import (
    NO_TOKEN,
    DrafterDefaults,
    DraftInfo,
    Draw,
    Feed,
    NoDraft,
    Proposal,
    Support,
)
from jaxdraft.budget import DrafterCost, Mirrored
from jaxdraft.checks import whole
from jaxdraft.config import MtpConfig
from jaxdraft.draft.sampled import sampled_token
from jaxdraft.guard import needed
from jaxdraft.nn.linear import Frozen, matmul
from jaxdraft.nn.mtp import Mtp
from jaxdraft.ranking import best_token
from jaxdraft.sizes import check_slots
from jaxdraft.state import paged
from jaxdraft.state.paged import PagedPool

DRAFT_TOKENS = 3
"""K unless asked otherwise: the artifact does not say how far its head is chained."""

CANDIDATES = 32
"""Tokens that a drawn draft may be: the best so many of the vocabulary."""

INGEST_ROWS = 128
"""Rows that may be ingested at once; a dense pool keeps room for that many scratch rows."""


@struct.dataclass
class MtpState:
    """State of the head.

    It runs on pairs (hidden row of position p, token of p + 1), and the last position's next token
    is not known before the anchor is. So n ingested positions are n - 1 cached pairs and one
    pending hidden row.
    """

    pool: PagedPool  # one layer; its length counts pairs
    pending: jax.Array  # [B, D], the hidden row of position length - 1
    length: jax.Array  # [B] int32, positions ingested
    whole: jax.Array  # [B] bool: every committed row so far was ingested
    denied: jax.Array  # [B] bool: found no page; no drafts until the row is released
    misses: jax.Array  # [] int32: how often that happened


@struct.dataclass
class MtpDrafter(DrafterDefaults):
    """A multi-token-prediction head as a :class:`jaxdraft.base.Drafter`.

    The embedding and the head are the target's own arrays.
    """

    mtp: Frozen[Mtp]
    embedding: jax.Array  # [V, D]
    head: jax.Array  # [V, D]
    config: MtpConfig = struct.field(pytree_node=False)
    dtype: jnp.dtype = struct.field(pytree_node=False)
    draft_tokens: int = struct.field(pytree_node=False, default=DRAFT_TOKENS)

    @property
    def overlap(self) -> int:
        """1, because the last pair of a page includes the token that follows the page."""
        return 1

    def with_draft_tokens(self, draft_tokens: int) -> MtpDrafter:
        """Return the same head with another K; one layer can be chained any number of times."""
        return replace(self, draft_tokens=draft_tokens)

    def init(self, batch: int, capacity: int) -> MtpState:
        """Return an empty state: one page per row for ``capacity`` positions, as in the target."""
        a = self.config.attention
        pool = PagedPool.one_page_a_row(
            a.kv_shape(1, self.dtype),
            batch=batch,
            capacity=paged.room(capacity, max(INGEST_ROWS, self.draft_tokens)),
        )
        return self._start(pool)

    def init_pool(
        self, batch: int, *, pages: int, page_size: int, columns: int | None = None
    ) -> MtpState:
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
        check_slots("the drafter's pool", whole("pages", pages), whole("page_size", page_size))
        a = self.config.attention
        return self._start(
            PagedPool.zeros(
                a.kv_shape(1, self.dtype),
                batch=whole("batch", batch),
                pages=pages,
                page_size=page_size,
                columns=pages if columns is None else whole("columns", columns),
            )
        )

    def cost(self) -> DrafterCost:
        """Return its memory cost in an engine."""
        return cost(self.config, self.dtype)

    def misses(self, state: MtpState) -> jax.Array:
        """Count how often a row found no page."""
        return state.misses

    def release(self, state: MtpState, rows: jax.Array) -> MtpState:
        """Free everything owned by the rows where ``rows`` [B] is true."""
        chex.assert_shape(rows, state.length.shape)
        if state.pool.dense:  # a row keeps its page, and forgets what it holds
            pool = replace(state.pool, length=jnp.where(rows, 0, state.pool.length))
        else:
            pool = paged.release(state.pool, rows)
        return replace(
            state,
            pool=pool,
            length=jnp.where(rows, 0, state.length),
            whole=state.whole | rows,
            denied=state.denied & ~rows,
        )

    def ingest(self, state: MtpState, feed: Feed) -> MtpState:
        """See :meth:`jaxdraft.base.Drafter.ingest`; ``feed.anchor`` need not be known.

        Rows must follow the ones ingested before, or start again at position 0. A row that does
        neither has a hole: it ingests nothing and proposes nothing until it starts again. In a
        pool, a row takes pages as it grows.

        Example: rows h0 h1 h2 of tokens a b c, then h3 of d. The first call caches (h0, b), (h1, c)
        and keeps h2; the second caches (h2, d) and keeps h3.
        """
        last = needed(self, "hidden", feed.hidden, self.config.width)
        text = needed(self, "tokens", feed.tokens, None)
        brings = feed.count > 0
        fresh = brings & (feed.first_position == 0)
        follows = fresh | (feed.first_position == state.length)
        intact = fresh | (state.whole & (follows | ~brings))
        count = jnp.where(intact & ~state.denied, feed.count, 0)
        state = self._cover(state, jnp.where(count > 0, feed.first_position + count - 1, 0))
        count = jnp.where(state.denied, 0, count)
        fresh = fresh & (count > 0)
        steps = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
        # What lies past `count` may be anything, even NaN; it must not reach a product.
        hidden = jnp.where((steps < count[:, None])[..., None], last, 0).astype(self.dtype)
        rows = jnp.concatenate([state.pending[:, None], hidden], axis=1)  # [B, 1 + T, D]
        # Row t of `rows` meets token t, except where nothing waited: there row t + 1 meets t + 1.
        paired = jnp.where(fresh[:, None, None], rows[:, 1:], rows[:, :-1])
        tokens = jnp.where(fresh[:, None], jnp.roll(text, -1, axis=1), text)
        pairs = count - fresh.astype(jnp.int32)
        pool = replace(state.pool, length=jnp.where(fresh, 0, state.pool.length))
        # Only keys and values are kept; the rest of the layer is never computed.
        _, written = self.mtp()(self.embed(tokens), paired, pairs, pool)
        return replace(
            state,
            pool=replace(written, length=pool.length + pairs),
            pending=jnp.take_along_axis(rows, count[:, None, None], axis=1)[:, 0],
            length=jnp.where(count > 0, feed.first_position + count, state.length),
            whole=intact,
        )

    def propose(self, state: MtpState, feed: Feed) -> tuple[MtpState, Proposal, DraftInfo]:
        """See :meth:`jaxdraft.base.Drafter.propose`.

        The first pass runs the pending row with the anchor. Each later pass runs on the previous
        pass's hidden row and best token (or, when drafts are drawn, one of its best), one position
        further. As many passes run as the widest row can use. Their keys are scratch: the pool's
        length does not change.
        """
        wants = feed.wants_draft & (feed.limit > 0)
        fits = self.config.context_length - state.pool.length
        reason = jnp.select(
            [~wants, state.denied, ~state.whole | (state.length == 0), fits <= 0],
            [NoDraft.UNWANTED, NoDraft.DENIED, NoDraft.HOLE, NoDraft.CONTEXT],
            NoDraft.DRAFTED,
        )
        limit = jnp.minimum(jnp.minimum(feed.limit, self.draft_tokens), fits)
        limit = jnp.where(reason == NoDraft.DRAFTED, limit, 0).astype(jnp.int32)
        state = self._cover(state, jnp.where(limit > 0, state.pool.length + limit, 0))
        reason = jnp.where(state.denied & (limit > 0), NoDraft.DENIED, reason)
        limit = jnp.where(state.denied, 0, limit)
        pool, tokens, finite, support = _chain(self, state, feed.anchor, limit, feed.draw)
        reason = jnp.where((limit > 0) & ~finite, NoDraft.NONFINITE, reason).astype(jnp.int32)
        length = jnp.where(finite, limit, 0)
        kept = jnp.arange(self.draft_tokens, dtype=jnp.int32)[None] < length[:, None]
        state = replace(state, pool=replace(pool, length=state.pool.length))
        proposal = Proposal(jnp.where(kept, tokens, NO_TOKEN), length, support=support)
        return state, proposal, DraftInfo(reason, jnp.max(limit, initial=0))

    def logits(self, rows: jax.Array) -> jax.Array:
        """Return the logits of the draft head's rows: [..., D] -> [..., V] float32."""
        return matmul(rows, self.head, out_dtype=jnp.float32)

    def _start(self, pool: PagedPool) -> MtpState:
        batch = pool.length.shape[0]
        none = jnp.zeros((batch,), bool)
        return MtpState(
            pool=pool,
            pending=jnp.zeros((batch, self.config.width), self.dtype),
            length=jnp.zeros((batch,), jnp.int32),
            whole=~none,
            denied=none,
            misses=jnp.zeros((), jnp.int32),
        )

    def _cover(self, state: MtpState, pairs: jax.Array) -> MtpState:
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

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [...] -> vectors [..., D]."""
        return jnp.take(self.embedding, tokens, axis=0, mode="clip")


@struct.dataclass
class _Chain:
    """State passed from one pass of the head to the next."""

    pool: PagedPool
    hidden: jax.Array  # [B, D]
    token: jax.Array  # [B] int32
    tokens: jax.Array  # [B, K] int32, the drafts so far
    finite: jax.Array  # [B] bool
    support: Support | None


@jax.custom_jvp
def _chain(
    drafter: MtpDrafter, state: MtpState, anchor: jax.Array, limit: jax.Array, draw: Draw | None
) -> tuple[PagedPool, jax.Array, jax.Array, Support | None]:
    """Chain the head as often as the widest row needs; other than on a CPU, always K times.

    A loop whose number of passes only the device knows would end a CUDA graph, and make the host
    wait before every pass.

    Args:
      drafter: the drafter.
      state: its state.
      anchor: [B] int32.
      limit: [B] int32, drafts of every row, at most K.
      draw: how drafts are drawn; None: the best token.

    Returns:
      The pool with scratch keys, drafts [B, K], whether all scores were finite [B], and the
      distributions that the drafts were drawn from, if they were.
    """

    def link(number: jax.Array, chain: _Chain) -> _Chain:
        return _link(drafter, state, limit, draw, number, chain)

    def until_done(chain: _Chain) -> _Chain:
        return lax.fori_loop(0, jnp.max(limit, initial=0), link, chain)

    def written_out(chain: _Chain) -> _Chain:
        numbers = jnp.arange(drafter.draft_tokens, dtype=jnp.int32)
        return lax.scan(lambda c, i: (link(i, c), None), chain, numbers, unroll=True)[0]

    start = _first(drafter, state, anchor, draw)
    return _unpack(lax.platform_dependent(start, cpu=until_done, default=written_out))


@_chain.defjvp
def _chain_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """Differentiate a loop of K passes that skips those that no row needs.

    Reverse mode does not allow the dynamic end of the other loop.
    """
    return jax.jvp(_whole_chain, primals, tangents)


def _whole_chain(
    drafter: MtpDrafter, state: MtpState, anchor: jax.Array, limit: jax.Array, draw: Draw | None
) -> tuple[PagedPool, jax.Array, jax.Array, Support | None]:
    """Compute what :func:`_chain` does, in a loop whose length is static."""
    passes = jnp.max(limit, initial=0)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(chain: _Chain, number: jax.Array) -> tuple[_Chain, None]:
        link = functools.partial(_link, drafter, state, limit, draw, number)
        return lax.cond(number < passes, link, lambda chain: chain, chain), None

    numbers = jnp.arange(drafter.draft_tokens, dtype=jnp.int32)
    return _unpack(lax.scan(step, _first(drafter, state, anchor, draw), numbers)[0])


def _first(drafter: MtpDrafter, state: MtpState, anchor: jax.Array, draw: Draw | None) -> _Chain:
    """Start from the pending row and the anchor."""
    shape = (anchor.shape[0], drafter.draft_tokens)
    support = None
    if draw is not None:
        wide = (*shape, min(CANDIDATES, drafter.config.vocab_size))
        support = Support(jnp.zeros(wide, jnp.int32), jnp.zeros(wide, jnp.float32))
    return _Chain(
        pool=state.pool,
        hidden=state.pending,
        token=anchor.astype(jnp.int32),
        tokens=jnp.full(shape, NO_TOKEN, jnp.int32),
        finite=jnp.ones(shape[:1], bool),
        support=support,
    )


def _link(
    drafter: MtpDrafter,
    state: MtpState,
    limit: jax.Array,
    draw: Draw | None,
    number: jax.Array,
    chain: _Chain,
) -> _Chain:
    """Run pass ``number`` [] int32; the other arguments as in :func:`_chain`."""
    drafts = number < limit
    rows, pool = drafter.mtp()(
        drafter.embed(chain.token)[:, None],
        chain.hidden[:, None],
        drafts.astype(jnp.int32),
        replace(chain.pool, length=state.pool.length + number),
    )
    logits = drafter.logits(rows[:, 0])
    # The best one and not the maximum, from which XLA's CPU backend may drop a NaN.
    token = best_token(logits)
    top = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    support = chain.support
    if support is not None:
        assert draw is not None
        token, among, probs = sampled_token(logits, draw, number, support.tokens.shape[2])
        support = Support(
            support.tokens.at[:, number].set(among), support.probs.at[:, number].set(probs)
        )
    return _Chain(
        pool=pool,
        hidden=rows[:, 0],
        token=token,
        tokens=chain.tokens.at[:, number].set(token),
        finite=chain.finite & (jnp.isfinite(top) | ~drafts),
        support=support,
    )


def _unpack(chain: _Chain) -> tuple[PagedPool, jax.Array, jax.Array, Support | None]:
    return chain.pool, chain.tokens, chain.finite, chain.support


def cost(config: MtpConfig, dtype: DTypeLike) -> DrafterCost:
    """Return the memory cost of a multi-token-prediction head: one layer's page per target page.

    Args:
      config: its description.
      dtype: type of its keys and values.
    """
    return Mirrored(cache=config.attention.kv_shape(1, dtype))
