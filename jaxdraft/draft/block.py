"""DFlash2 and DSpark as drafters: committed rows into a cache, one block, one lattice, one walk."""

from __future__ import annotations

from dataclasses import replace

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
    Lattice,
    NoDraft,
    Proposal,
    Support,
)
from jaxdraft.budget import DrafterCost, Mirrored, Windowed
from jaxdraft.checks import check_int
from jaxdraft.config import BlockDrafterConfig, KvShape
from jaxdraft.draft.lattice import PROPOSALS, path_tokens
from jaxdraft.draft.sampled import sampled_walk
from jaxdraft.guard import needed
from jaxdraft.nn.block_drafter import BlockBackbone
from jaxdraft.nn.linear import Frozen, matmul, take
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

    cache: Ring | PagedPool  # a ring when the drafter has a window, pages otherwise
    intact: jax.Array  # [B] bool: every committed row so far was ingested
    denied: jax.Array  # [B] bool: found no ring or page; no drafts until the row is released
    misses: jax.Array  # [] int32: how often that happened

    @property
    def length(self) -> jax.Array:
        """Positions ingested, [B] int32."""
        return self.cache.length


@struct.dataclass
class BlockDrafter(DrafterDefaults):
    """A DFlash2 or DSpark backbone as a :class:`jaxdraft.base.Drafter`.

    The embedding and the head are the target's own arrays. Of the head, a drafter with a draft
    vocabulary has the rows of those tokens; see :meth:`of`.

    ``path`` selects the lattice path that is proposed when drafts are not drawn: "walk", the
    greedy walk, or "best", "probable" or "longest"; see :data:`jaxdraft.draft.lattice.PROPOSALS`.
    A path is chosen over the drafts that the row can use, so that a step that will not be verified
    cannot justify a worse one that will. So a different ``limit`` may change the whole path, while
    a walk is only cut short.

    ``first`` is the number K of a block's drafts in use; None: all. See
    :meth:`with_draft_tokens`.
    """

    backbone: Frozen[BlockBackbone]
    embedding: jax.Array | PackedMatrix  # [V, D]
    head: jax.Array | PackedMatrix  # [V, D], or [V', D]
    config: BlockDrafterConfig = struct.field(pytree_node=False)
    dtype: jnp.dtype = struct.field(pytree_node=False)
    path: str = struct.field(pytree_node=False, default="walk")
    first: int | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self) -> None:
        block = self.config.draft_tokens
        if self.first is not None and not 1 <= self.first <= block:
            raise ValueError(f"draft_tokens is {self.first}; this drafter's block has 1 to {block}")
        if self.path not in PROPOSALS:
            raise ValueError(f"path is {self.path!r}; expected one of {', '.join(PROPOSALS)}")

    @classmethod
    def of(
        cls,
        backbone: Frozen[BlockBackbone],
        embedding: jax.Array | PackedMatrix,
        head: jax.Array | PackedMatrix,
        config: BlockDrafterConfig,
        dtype: jnp.dtype,
    ) -> BlockDrafter:
        """A drafter beside the target whose ``embedding`` and ``head`` [V, D] are given whole."""
        return cls(backbone, embedding, draft_head(backbone, head, config), config, dtype)

    @property
    def draft_tokens(self) -> int:
        """K."""
        return self.config.draft_tokens if self.first is None else self.first

    @property
    def _kv_shape(self) -> KvShape:
        return self.config.attention.kv_shape(self.config.layers, self.dtype)

    def with_draft_tokens(self, draft_tokens: int) -> BlockDrafter:
        """Return the same block, proposing only its first ``draft_tokens`` drafts.

        This shortens the target's window, which a smaller ``limit`` does not.

        Raises:
          ValueError: the block has fewer drafts.
        """
        return replace(self, first=draft_tokens)

    def init(self, batch: int, capacity: int) -> BlockState:
        """Return an empty state. A windowed drafter's does not depend on ``capacity``."""
        c, a = self.config, self.config.attention
        if c.windowed:
            cache: Ring | PagedPool = Ring.zeros(
                self._kv_shape,
                batch=batch,
                window=a.window,
                block=c.block_size,
                page_size=RING_PAGE,
            )
        else:
            cache = PagedPool.one_page_per_row(
                self._kv_shape, batch=batch, capacity=paged.room(capacity, INGEST_ROWS)
            )
        return _start(cache)

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
        nothing and proposes nothing until it is released.

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
        if rings is not None:
            if columns is not None:
                raise ValueError(
                    f"columns is {columns}; in a pool of rings the window decides them"
                )
            total = check_int("rings", rings) * ring_pages(a.window, c.block_size, page_size)
            check_slots("the drafter's pool", total, page_size)
            return _start(
                Ring.pool(
                    self._kv_shape,
                    batch=batch,
                    rings=rings,
                    window=a.window,
                    block=c.block_size,
                    page_size=page_size,
                )
            )
        total = check_int("pages", pages) + batch * page_count(c.block_size, page_size)
        check_slots("the drafter's pool", total, page_size)
        return _start(
            PagedPool.zeros(
                self._kv_shape,
                batch=batch,
                pages=total,
                page_size=page_size,
                columns=total if columns is None else check_int("columns", columns),
            )
        )

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
        cache = state.cache
        if cache.dense:  # a row keeps its pages, and forgets what they hold
            cache = replace(cache, length=jnp.where(rows, 0, cache.length))
        else:
            cache = paged.release(cache, rows)
        return replace(state, cache=cache, intact=state.intact | rows, denied=state.denied & ~rows)

    def skip(self, state: BlockState, tokens: jax.Array, length: jax.Array) -> BlockState | None:
        """Continue rows whose first ``length`` [B] positions are already in their pages.

        Returns None for a windowed drafter: a ring holds more than pages that others can share.
        """
        del tokens
        if isinstance(state.cache, Ring):
            return None
        return replace(state, cache=replace(state.cache, length=length))

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
        cache = state.cache
        if isinstance(cache, Ring):
            cache = ring.write(cache, keys, values, first, count)
        else:
            cache = replace(cache, length=first)
            for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
                cache = paged.write(cache, layer, k, v, count)
            cache = replace(cache, length=first + count)
        return replace(state, cache=cache, intact=intact)

    def _cover(self, state: BlockState, positions: jax.Array) -> BlockState:
        """Provide pages for ``positions`` [B] of every row.

        A row that cannot get them is denied and releases its pages: it would never read them again,
        and another row may use them.
        """
        cache = state.cache
        if isinstance(cache, Ring):
            cache, granted = ring.admit(cache, positions > 0)
        else:
            cache, granted = paged.grow(cache, positions)
        missed = (positions > 0) & ~granted
        return replace(
            state,
            cache=paged.release(cache, missed),
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
        batch = feed.anchor.shape[0]
        shape = (batch, self.draft_tokens, config.candidates)

        def nothing() -> Lattice:
            scores = jnp.zeros((*shape, config.candidates), jnp.float32)
            return Lattice(jnp.zeros(shape, jnp.int32), scores)

        lattice = lax.cond(jnp.any(drafts), lambda: self.lattice(state, feed.anchor), nothing)
        finite = jnp.all(jnp.isfinite(lattice.scores), axis=(1, 2, 3))
        reason = _unless(reason, ~finite, NoDraft.NONFINITE).astype(jnp.int32)
        length = jnp.where(reason == NoDraft.DRAFTED, limit, 0).astype(jnp.int32)
        tokens, support = self._choose(lattice, length, feed.draw)
        kept = jnp.arange(self.draft_tokens, dtype=jnp.int32)[None] < length[:, None]
        proposal = Proposal(jnp.where(kept, tokens, NO_TOKEN), length, lattice, support)
        return state, proposal, DraftInfo(reason, jnp.any(drafts).astype(jnp.int32))

    def _choose(
        self, lattice: Lattice, length: jax.Array, draw: Draw | None
    ) -> tuple[jax.Array, Support | None]:
        """Return tokens [B, K] and the distributions they were drawn from."""
        if draw is None:
            return path_tokens(lattice, PROPOSALS[self.path](lattice, length)), None
        tokens, support = sampled_walk(lattice, draw)
        if self.path == "walk":  # which is what a draw at temperature zero is
            return tokens, support
        certain = path_tokens(lattice, PROPOSALS[self.path](lattice, length))
        greedy = (draw.truncation.temperature == 0)[:, None]
        hit = lattice.candidates == certain[..., None]
        probs = jnp.where(greedy[..., None], hit.astype(jnp.float32), support.probs)
        return jnp.where(greedy, certain, tokens), replace(support, probs=probs)

    def lattice(self, state: BlockState, anchor: jax.Array) -> Lattice:
        """Return the candidates and edge scores after ``anchor`` [B], for every row."""
        config, backbone = self.config, self.backbone()
        batch, width = anchor.shape[0], config.candidates
        anchor = jnp.clip(anchor, 0, config.vocab_size - 1)
        masks = jnp.full((batch, config.block_size - 1), config.mask_token, jnp.int32)
        block = jnp.concatenate([anchor[:, None], masks], axis=1)
        embedded = take(self.embedding, block)
        features = backbone.block(embedded, state.length, self._context(state))
        features = features[:, : self.draft_tokens]
        logits = matmul(features, self.head, out_dtype=jnp.float32)  # [B, K, V]
        values, candidates = largest_first(logits, width)
        start = backbone.draft_ids(anchor)[:, None, None]
        start = jnp.broadcast_to(start, (batch, 1, width))
        previous = jnp.concatenate([start, candidates[:, :-1]], axis=1)
        pairs = backbone.pair_scores(features, previous, candidates)
        return Lattice(backbone.tokens(candidates), pairs + values[:, :, None, :])

    def _context(self, state: BlockState):  # noqa: ANN202 - int -> Source
        def source(layer: int) -> Source:
            if isinstance(state.cache, Ring):
                return ring.source(state.cache, layer)
            return paged.source(state.cache, layer, state.length)

        return source


def cost(config: BlockDrafterConfig, dtype: DTypeLike) -> DrafterCost:
    """Return the memory cost of a block drafter: a ring per row if windowed, else per target page.

    Args:
      config: its description.
      dtype: type of its keys and values.
    """
    a = config.attention
    cache = a.kv_shape(config.layers, dtype)
    if config.windowed:
        return Windowed(cache=cache, window=a.window, block=config.block_size)
    return Mirrored(cache=cache, block=config.block_size)


def draft_head(
    backbone: Frozen[BlockBackbone], head: jax.Array | PackedMatrix, config: BlockDrafterConfig
) -> jax.Array | PackedMatrix:
    """Return the head's rows [V, D] that score drafts: all, or the draft vocabulary's."""
    if config.draft_vocab_size is None:
        return head
    vocabulary = backbone.params["vocabulary"]
    if isinstance(head, PackedMatrix):
        return head.select(vocabulary)
    return jnp.take(head, vocabulary, axis=0)


def _start(cache: Ring | PagedPool) -> BlockState:
    batch = cache.length.shape[0]
    none = jnp.zeros((batch,), bool)
    return BlockState(cache, ~none, none, jnp.asarray(0, jnp.int32))


def _unless(reason: jax.Array, condition: jax.Array, why: NoDraft) -> jax.Array:
    """``why`` where the row would have drafted and ``condition`` holds."""
    return jnp.where((reason == NoDraft.DRAFTED) & condition, int(why), reason)
