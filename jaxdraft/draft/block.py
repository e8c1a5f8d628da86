"""Block drafters: committed rows into a cache, one block, one lattice or chain, one walk."""

from __future__ import annotations

from collections.abc import Callable
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
    Guide,
    Lattice,
    NoDraft,
    Proposal,
    Support,
)
from jaxdraft.budget import DrafterCost, Mirrored, Mixed, Windowed
from jaxdraft.checks import check_int
from jaxdraft.config import BlockDrafterConfig, KvShape
from jaxdraft.draft.block_chain import Chain, chain
from jaxdraft.draft.lattice import PROPOSALS, path_tokens
from jaxdraft.draft.links import leading
from jaxdraft.draft.sampled import guided_walk, sampled_walk
from jaxdraft.draft.wrapper import check_numbers
from jaxdraft.guard import needed
from jaxdraft.nn.block_drafter import BlockBackbone
from jaxdraft.nn.linear import Frozen, take
from jaxdraft.nn.packed import PackedMatrix
from jaxdraft.ranking import largest_first
from jaxdraft.sizes import check_slots, page_count, ring_pages
from jaxdraft.state import paged, ring
from jaxdraft.state.paged import PagedPool, Source
from jaxdraft.state.ring import Ring

INGEST_ROWS = 128
"""Rows that may be ingested at once; a dense pool keeps room for that many scratch rows."""

RING_PAGE = 128
"""Slots of a ring's page in a fixed batch."""


@struct.dataclass
class BlockState:
    """State of a block drafter."""

    ring: Ring | None  # of the layers with a window; None: there are none
    pages: PagedPool | None  # of the layers that see everything; None: there are none
    intact: jax.Array  # [B] bool: every committed row so far was ingested
    denied: jax.Array  # [B] bool: found no ring or page; no drafts until the row is released
    misses: jax.Array  # [] int32: how often that happened

    @property
    def cache(self) -> Ring | PagedPool:
        """The pages if there are any, else the ring. Both have the same length."""
        cache = self.ring if self.pages is None else self.pages
        assert cache is not None
        return cache

    @property
    def length(self) -> jax.Array:
        """Positions ingested, [B] int32."""
        return self.cache.length


@struct.dataclass
class BlockDrafter(DrafterDefaults):
    """A DFlash, DFlash2 or DSpark backbone as a :class:`jaxdraft.base.Drafter`.

    The embedding and the head are the target's own arrays. Of the head, a drafter with a draft
    vocabulary has the rows of those tokens, unless it has a head of its own; see :meth:`of`.

    ``path`` selects the lattice path that is proposed when drafts are not drawn: "walk", the
    greedy walk, or "best", "probable" or "longest"; see :data:`jaxdraft.draft.lattice.PROPOSALS`.
    A path is chosen over the drafts that the row can use, so that a step that will not be verified
    cannot justify a worse one that will. So a different ``limit`` may change the whole path, while
    a walk is only cut short. A chained drafter has no lattice, and walks.

    ``first`` is the number K of a block's drafts in use; None: all. See
    :meth:`with_draft_tokens`.

    ``confidence`` is for drafters with a trained confidence head (DSpark). It gives each draft the
    probability c that it is accepted if those before it are; the product of c up to a draft is the
    probability that the draft is emitted. Drafts are verified up to the first whose product is
    below ``confidence``. None, the default, verifies all: a window costs the same however many of
    its rows are used, so cutting pays only where a round is left without drafts in all rows, which
    costs a plain step. The number is dynamic: changing it does not recompile. See
    :meth:`with_confidence`.

    The cut leaves the distribution of sampled output unchanged. c of draft k depends on the block's
    rows and on the draft before, and not on draft k or later ones. So whether draft k is verified
    is decided by emitted text alone: if it is verified, it is accepted or replaced by the rule that
    gives the target's distribution whatever the text before is; if not, the token there is drawn
    from the target. A cut that depended on the draft itself, or a number of drafts chosen from all
    of c at once, would let the drawn drafts decide which of them are verified: likely ones would be
    emitted too often. (``tests/properties/test_trust.py`` finds both mistakes.)
    """

    backbone: Frozen[BlockBackbone]
    embedding: jax.Array | PackedMatrix  # [V, D]
    head: jax.Array | PackedMatrix  # [V, D], or [V', D]
    config: BlockDrafterConfig = struct.field(pytree_node=False)
    dtype: jnp.dtype = struct.field(pytree_node=False)
    path: str = struct.field(pytree_node=False, default="walk")
    first: int | None = struct.field(pytree_node=False, default=None)
    confidence: float | jax.Array | None = None

    def __post_init__(self) -> None:
        block = self.config.draft_tokens
        if self.first is not None and not 1 <= self.first <= block:
            raise ValueError(f"draft_tokens is {self.first}; this drafter's block has 1 to {block}")
        if self.path not in PROPOSALS:
            raise ValueError(f"path is {self.path!r}; expected one of {', '.join(PROPOSALS)}")
        if self.config.chained and self.path != "walk":
            raise ValueError(
                f"path is {self.path!r}; this drafter chooses its drafts one after another and has "
                "no lattice: expected 'walk'"
            )
        if self.confidence is not None:
            if self.config.confidence is None:
                raise ValueError("confidence is given, and this drafter has no confidence head")
            check_numbers(self, {"confidence": (0, 1)})

    @classmethod
    def of(
        cls,
        backbone: Frozen[BlockBackbone],
        embedding: jax.Array | PackedMatrix,
        head: jax.Array | PackedMatrix,
        config: BlockDrafterConfig,
        dtype: jnp.dtype,
    ) -> BlockDrafter:
        """Return a drafter for the target with this full ``embedding`` and ``head`` [V, D]."""
        return cls(backbone, embedding, draft_head(backbone, head, config), config, dtype)

    @property
    def draft_tokens(self) -> int:
        """K."""
        return self.config.draft_tokens if self.first is None else self.first

    def with_draft_tokens(self, draft_tokens: int) -> BlockDrafter:
        """Return the same block, proposing only its first ``draft_tokens`` drafts.

        This shortens the target's window, which a smaller ``limit`` does not.

        Raises:
          ValueError: the block has fewer drafts.
        """
        return replace(self, first=draft_tokens)

    def with_confidence(self, confidence: float | None) -> BlockDrafter:
        """Return the same drafter, cutting its drafts by its confidence head.

        Args:
          confidence: the least probability, in 0..1, of a draft to be emitted; None: no cut.

        Raises:
          ValueError: there is no confidence head, or the number is outside of 0..1.
        """
        return replace(self, confidence=confidence)

    @property
    def declines(self) -> bool:
        """True if drafts are cut by confidence, down to none."""
        return self.confidence is not None

    def init(self, batch: int, capacity: int) -> BlockState:
        """Return an empty state. A windowed drafter's does not depend on ``capacity``."""
        c = self.config
        rings = pages = None
        if c.ring_layers:
            rings = Ring.zeros(
                self._kv_shape(c.ring_layers),
                batch=batch,
                window=c.attention.window,
                block=c.block_size,
                page_size=RING_PAGE,
            )
        if c.page_layers:
            pages = PagedPool.one_page_per_row(
                self._kv_shape(c.page_layers),
                batch=batch,
                capacity=paged.room(capacity, INGEST_ROWS),
            )
        return _start(rings, pages)

    def _kv_shape(self, layers: tuple[int, ...]) -> KvShape:
        return self.config.attention.kv_shape(len(layers), self.dtype)

    def init_pool(
        self,
        batch: int,
        *,
        rings: int | None = None,
        pages: int | None = None,
        page_size: int,
        columns: int | None = None,
    ) -> BlockState:
        """Return an empty state whose rows share a pool. All other methods work as with ``init``.

        A windowed drafter has ``rings`` rings: a row gets one when its first row comes in. One that
        sees everything mirrors the target's ``pages`` pages, with ``ceil(block / Z)`` spill pages
        per row too. Rows take pages as they grow. A row that finds none is *denied*: it owns
        nothing and proposes nothing until it is released. A drafter with layers of both kinds is
        given pages, and has a ring for every row.

        Args:
          batch: B.
          rings: rings in the pool; windowed drafters only.
          pages: pages of the target's pool; other drafters only.
          page_size: Z.
          columns: M, pages of the longest row; goes with ``pages``. Default: all of them.

        Raises:
          ValueError: the arguments of the other kind of drafter, a size that is not positive, or
            more slots than int32 can number.
        """
        c, a = self.config, self.config.attention
        check_int("batch", batch)
        check_int("page_size", page_size)
        if c.windowed != (rings is not None) or c.windowed == (pages is not None):
            kind = f"has a window of {a.window}" if c.windowed else "sees everything"
            needs = "rings" if c.windowed else "pages"
            raise ValueError(
                f"the drafter {kind}: its pool is given in {needs}, but rings is {rings!r} and "
                f"pages is {pages!r}"
            )
        if c.windowed and columns is not None:
            raise ValueError(f"columns is {columns}; in a pool of rings the window decides them")
        ring = pool = None
        if c.ring_layers:
            count = batch if rings is None else check_int("rings", rings)
            total = count * ring_pages(a.window, c.block_size, page_size)
            check_slots("the drafter's pool", total, page_size)
            ring = Ring.pool(
                self._kv_shape(c.ring_layers),
                batch=batch,
                rings=count,
                window=a.window,
                block=c.block_size,
                page_size=page_size,
            )
        if c.page_layers:
            total = check_int("pages", pages) + batch * page_count(c.block_size, page_size)
            check_slots("the drafter's pool", total, page_size)
            pool = PagedPool.zeros(
                self._kv_shape(c.page_layers),
                batch=batch,
                pages=total,
                page_size=page_size,
                columns=total if columns is None else check_int("columns", columns),
            )
        return _start(ring, pool)

    @property
    def windowed(self) -> bool:
        """Whether its pool is given in rings."""
        return self.config.windowed

    def cost(self) -> DrafterCost:
        """Return its memory cost in an engine."""
        return cost(self.config, self.dtype)

    def misses(self, state: BlockState) -> jax.Array:
        """Count how often a row found no ring or page."""
        return state.misses

    def admit(self, state: BlockState, rows: jax.Array) -> BlockState:
        """Give the rows where ``rows`` [B] is true a ring, or their first page.

        ``ingest`` does this for rows that start at position 0; call it to get the result earlier.
        Rows are served in order; a row that finds nothing is denied. Rows of a fixed batch already
        have theirs.
        """
        if state.cache.dense:
            return state
        rows = rows & ~state.denied
        return self._cover(state, jnp.where(rows, state.length + 1, 0))

    def release(self, state: BlockState, rows: jax.Array) -> BlockState:
        """Free everything owned by the rows where ``rows`` [B] is true.

        They can be admitted anew, denied or not. Releasing a row twice has no further effect.
        """
        chex.assert_shape(rows, state.denied.shape)

        def free(cache: Any) -> Any:
            if cache.dense:  # a row keeps its pages, but not their content
                return replace(cache, length=jnp.where(rows, 0, cache.length))
            return paged.release(cache, rows)

        state = _each(free, state)
        return replace(state, intact=state.intact | rows, denied=state.denied & ~rows)

    def skip(self, state: BlockState, tokens: jax.Array, length: jax.Array) -> BlockState | None:
        """Continue rows whose first ``length`` [B] positions are already in their pages.

        Returns None for layers with a window: a ring holds more than pages that others can share.
        """
        del tokens
        if state.ring is not None:
            return None
        return _each(lambda cache: replace(cache, length=length), state)

    def ingest(self, state: BlockState, feed: Feed) -> BlockState:
        """See :meth:`jaxdraft.base.Drafter.ingest`.

        Rows must follow the ones ingested before, or start again at position 0. A row that does
        neither has a hole: it ingests nothing and proposes nothing until it starts again. In a
        pool, a row that starts is admitted, and one that grows takes pages; whether it wants drafts
        in this round plays no part, so that no hole appears.
        """
        taps = needed(self, "aux", feed.aux, self.config.aux_width)
        brings = feed.count > 0
        fresh = brings & (feed.first_position == 0)
        follows = fresh | (feed.first_position == state.length)
        intact = fresh | (state.intact & (follows | ~brings))
        count = jnp.where(intact, feed.count, 0)
        if not state.cache.dense:
            count = jnp.where(state.denied, 0, count)
            state = self._cover(state, jnp.where(count > 0, feed.first_position + count, 0))
            count = jnp.where(state.denied, 0, count)
        first = jnp.where(count > 0, feed.first_position, state.length)
        steps = jnp.arange(taps.shape[1], dtype=jnp.int32)[None]
        # What lies past `count` may be anything, even NaN; it must not reach a product.
        aux = jnp.where((steps < count[:, None])[..., None], taps, 0)
        keys, values = self.backbone().context(aux, first[:, None] + steps)
        rings, pages, config = state.ring, state.pages, self.config
        if rings is not None:
            mine = config.ring_layers
            own_keys, own_values = (tuple(x[i] for i in mine) for x in (keys, values))
            rings = ring.write(rings, own_keys, own_values, first, count)
        if pages is not None:
            pages = replace(pages, length=first)
            for place, layer in enumerate(config.page_layers):
                pages = paged.write(pages, place, keys[layer], values[layer], count)
            pages = replace(pages, length=first + count)
        return replace(state, ring=rings, pages=pages, intact=intact)

    def _cover(self, state: BlockState, positions: jax.Array) -> BlockState:
        """Provide pages for ``positions`` [B] of every row.

        A row that cannot get them is denied and releases its pages: it would never read them again,
        and another row may use them.
        """
        wants = positions > 0
        granted = jnp.ones_like(wants)
        rings, pages = state.ring, state.pages
        if rings is not None:
            rings, granted = ring.admit(rings, wants)
        if pages is not None:
            pages, paid = paged.grow(pages, positions)
            granted = granted & paid
        missed = wants & ~granted
        state = _each(
            lambda cache: paged.release(cache, missed), replace(state, ring=rings, pages=pages)
        )
        return replace(
            state,
            denied=state.denied | missed,
            misses=state.misses + jnp.sum(missed, dtype=jnp.int32),
        )

    def propose(self, state: BlockState, feed: Feed) -> tuple[BlockState, Proposal, DraftInfo]:
        """See :meth:`jaxdraft.base.Drafter.propose`. The state is read, never written."""
        config = self.config
        limit = jnp.minimum(feed.limit, self.draft_tokens)
        reason = jnp.where(feed.wants_draft & (limit > 0), NoDraft.DRAFTED, NoDraft.UNWANTED)
        reason = _unless(reason, state.denied, NoDraft.DENIED)
        reason = _unless(reason, ~state.intact, NoDraft.HOLE)
        past = state.length + config.block_size > config.context_length
        reason = _unless(reason, past, NoDraft.CONTEXT)
        drafts = reason == NoDraft.DRAFTED
        anchor = feed.anchor
        lattice = found = None
        if config.chained:
            found, rows = self._chain(state, feed, jnp.any(drafts))
            usable = leading(found.finite)
        else:
            lattice, rows = self._lattice(state, anchor, jnp.any(drafts))
            finite = jnp.all(jnp.isfinite(lattice.scores), axis=(1, 2, 3))
            usable = jnp.where(finite, self.draft_tokens, 0)
        limit = jnp.minimum(limit, usable)
        reason = _unless(reason, usable == 0, NoDraft.NONFINITE).astype(jnp.int32)
        length = jnp.where(reason == NoDraft.DRAFTED, limit, 0).astype(jnp.int32)
        if lattice is not None:
            tokens, support = self._choose(lattice, length, feed.draw, feed.guide)
        else:
            assert found is not None
            tokens, support = found.tokens, found.support
        if rows is not None:
            length = jnp.minimum(length, self._trusted(rows, anchor, tokens))
            reason = _unless(reason, length == 0, NoDraft.PAUSED).astype(jnp.int32)
        kept = jnp.arange(self.draft_tokens, dtype=jnp.int32)[None] < length[:, None]
        proposal = Proposal(jnp.where(kept, tokens, NO_TOKEN), length, lattice, support)
        return state, proposal, DraftInfo(reason, jnp.any(drafts).astype(jnp.int32))

    def _lattice(
        self, state: BlockState, anchor: jax.Array, needed: jax.Array
    ) -> tuple[Lattice, jax.Array | None]:
        """Return the lattice, or zeros unless ``needed`` [], and the rows that trust reads."""
        shape = (anchor.shape[0], self.draft_tokens, self.config.candidates)

        def nothing() -> tuple[Lattice, jax.Array | None]:
            scores = jnp.zeros((*shape, shape[2]), jnp.float32)
            return Lattice(jnp.zeros(shape, jnp.int32), scores), self._no_rows(shape[0])

        def drafted() -> tuple[Lattice, jax.Array | None]:
            known = self._known(anchor)
            features = self.features(state, known)
            return self._edges(features, known), self._rows(features)

        return lax.cond(needed, drafted, nothing)

    def _chain(
        self, state: BlockState, feed: Feed, needed: jax.Array
    ) -> tuple[Chain, jax.Array | None]:
        """Return the chain, or zeros unless ``needed`` [], and the rows that trust reads."""
        draw, batch = feed.draw, feed.anchor.shape[0]

        def nothing() -> tuple[Chain, jax.Array | None]:
            wide = None if draw is None else self.config.candidates
            return Chain.zeros(batch, self.draft_tokens, wide), self._no_rows(batch)

        def drafted() -> tuple[Chain, jax.Array | None]:
            backbone, known = self.backbone(), self._known(feed.anchor)
            features = self.features(state, known)
            logits = backbone.logits(features, self.head)
            found = chain(backbone, features, logits, known, draw, feed.guide)
            return found, self._rows(features)

        return lax.cond(needed, drafted, nothing)

    def _rows(self, features: jax.Array) -> jax.Array | None:
        """Return the rows if drafts are cut by confidence."""
        return None if self.confidence is None else features

    def _no_rows(self, batch: int) -> jax.Array | None:
        shape = (batch, self.draft_tokens, self.config.width)
        return self._rows(jnp.zeros(shape, self.dtype))

    def _trusted(self, rows: jax.Array, anchor: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return the number of drafts before the first that is unlikely to be emitted, [B] int32.

        Example, confidence 0.5: probabilities .9 .8 .6 .9 have the products .9 .72 .43 .39, which
        leaves two drafts.

        Args:
          rows: [B, K, D], from :meth:`features`.
          anchor: [B] int32.
          tokens: [B, K] int32, the drafts. The last one is not read, nor is draft k for the
            decision about draft k: see the class.
        """
        assert self.confidence is not None
        backbone = self.backbone()
        before = jnp.concatenate([self._known(anchor)[:, None], tokens[:, :-1]], axis=1)
        trust = jax.nn.sigmoid(backbone.trust(rows, backbone.predecessors(before)))
        reached = jnp.cumprod(trust, axis=1) >= jnp.asarray(self.confidence, jnp.float32)
        return jnp.sum(reached, axis=1, dtype=jnp.int32)

    def _choose(
        self, lattice: Lattice, length: jax.Array, draw: Draw | None, guide: Guide | None
    ) -> tuple[jax.Array, Support | None]:
        """Return tokens [B, K] and the distributions they were drawn from.

        Rows with a structure walk step by step, whatever the path of others is.
        """
        if draw is None:
            tokens = path_tokens(lattice, PROPOSALS[self.path](lattice, length))
            if guide is None:
                return tokens, None
            return jnp.where(guide.free[:, None], tokens, guided_walk(lattice, guide)), None
        tokens, support = sampled_walk(lattice, draw, guide)
        if self.path == "walk":  # which is what a draw at temperature zero is
            return tokens, support
        certain = path_tokens(lattice, PROPOSALS[self.path](lattice, length))
        greedy = (draw.truncation.temperature == 0)[:, None]
        greedy = greedy if guide is None else greedy & guide.free[:, None]
        hit = lattice.candidates == certain[..., None]
        probs = jnp.where(greedy[..., None], hit.astype(jnp.float32), support.probs)
        return jnp.where(greedy, certain, tokens), replace(support, probs=probs)

    def lattice(self, state: BlockState, anchor: jax.Array) -> Lattice:
        """Return the candidates and edge scores after ``anchor`` [B], for every row."""
        anchor = self._known(anchor)
        return self._edges(self.features(state, anchor), anchor)

    def _known(self, anchor: jax.Array) -> jax.Array:
        """Return tokens of the vocabulary; rows without drafts may hold any."""
        return jnp.clip(anchor, 0, self.config.vocab_size - 1)

    def features(self, state: BlockState, anchor: jax.Array) -> jax.Array:
        """Return the block's final-normed rows after ``anchor`` [B], one per draft: [B, K, D]."""
        config = self.config
        masks = jnp.full((anchor.shape[0], config.block_size - 1), config.mask_token, jnp.int32)
        block = jnp.concatenate([anchor[:, None], masks], axis=1)
        embedded = take(self.embedding, block)
        rows = self.backbone().block(embedded, state.length, self._context(state))
        return rows[:, : self.draft_tokens]

    def _edges(self, features: jax.Array, anchor: jax.Array) -> Lattice:
        backbone, width = self.backbone(), self.config.candidates
        logits = backbone.logits(features, self.head)  # [B, K, V']
        values, candidates = largest_first(logits, width)
        tokens = backbone.tokens(candidates)
        start = backbone.predecessors(anchor)[:, None, None]
        start = jnp.broadcast_to(start, (anchor.shape[0], 1, width))
        # Codes of predecessors lie by token if the head is the drafter's own, else by place.
        after = tokens if self.config.own_head else candidates
        previous = jnp.concatenate([start, after[:, :-1]], axis=1)
        pairs = backbone.pair_scores(features, previous, candidates)
        return Lattice(tokens, pairs + values[:, :, None, :])

    def _context(self, state: BlockState) -> Callable[[int], Source]:
        config = self.config

        def source(layer: int) -> Source:
            if layer in config.page_layers:
                assert state.pages is not None
                place = config.page_layers.index(layer)
                return paged.source(state.pages, place, state.length)
            assert state.ring is not None
            return ring.source(state.ring, config.ring_layers.index(layer))

        return source


def cost(config: BlockDrafterConfig, dtype: DTypeLike) -> DrafterCost:
    """Return the memory cost of a block drafter: rings per row, pages per target page, or both.

    Args:
      config: its description.
      dtype: type of its keys and values.
    """
    a = config.attention
    rings, pages, block = config.ring_layers, config.page_layers, config.block_size
    windowed = (
        Windowed(cache=a.kv_shape(len(rings), dtype), window=a.window, block=block)
        if rings
        else None
    )
    mirrored = Mirrored(cache=a.kv_shape(len(pages), dtype), block=block) if pages else None
    if mirrored is None:
        assert windowed is not None
        return windowed
    return mirrored if windowed is None else Mixed(windowed=windowed, mirrored=mirrored)


def draft_head(
    backbone: Frozen[BlockBackbone], head: jax.Array | PackedMatrix, config: BlockDrafterConfig
) -> jax.Array | PackedMatrix:
    """Return the head's rows [V, D] that score drafts: all, or the draft vocabulary's.

    A drafter with a head of its own reads none of them.
    """
    if config.draft_vocab_size is None or config.own_head:
        return head
    vocabulary = backbone.params["vocabulary"]
    if isinstance(head, PackedMatrix):
        return head.select(vocabulary)
    return jnp.take(head, vocabulary, axis=0)


def _each(change: Callable[[Any], Any], state: BlockState) -> BlockState:
    """Change every cache of a state."""
    rings = None if state.ring is None else change(state.ring)
    pages = None if state.pages is None else change(state.pages)
    return replace(state, ring=rings, pages=pages)


def _start(rings: Ring | None, pages: PagedPool | None) -> BlockState:
    cache = rings if pages is None else pages
    assert cache is not None
    none = jnp.zeros(cache.length.shape, bool)
    return BlockState(rings, pages, ~none, none, jnp.asarray(0, jnp.int32))


def _unless(reason: jax.Array, condition: jax.Array, why: NoDraft) -> jax.Array:
    """Return ``why`` where a row would have drafted and ``condition`` holds, else ``reason``."""
    return jnp.where((reason == NoDraft.DRAFTED) & condition, int(why), reason)
