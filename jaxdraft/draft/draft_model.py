"""A small language model as the drafter of a large one: K plain steps per round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxdraft.base import (
    NO_TOKEN,
    DrafterDefaults,
    DraftInfo,
    Draw,
    Feed,
    Guide,
    Proposal,
)
from jaxdraft.budget import Beside, DrafterCost, Sliding, net_parts, recurrent_bytes
from jaxdraft.config import TargetConfig
from jaxdraft.draft.links import (
    DRAFT_TOKENS,
    Links,
    check_confidence,
    no_links,
    run_chain,
    with_draft,
)
from jaxdraft.guard import needed
from jaxdraft.sizes import PREFILL_CHUNK
from jaxdraft.state import recurrent
from jaxdraft.state.decoder import DecoderState
from jaxdraft.state.recurrent import Capsule, Recurrent
from jaxdraft.target import DecoderTarget


@struct.dataclass
class DraftModelState:
    """State of a language model that drafts.

    ``model`` has the form of a state after a forward pass: the rows of the last proposal (its
    anchor and all drafts but the last) are in the caches and not committed. The next round commits
    those that became the text; the others are overwritten. Only the last draft of a proposal that
    was accepted in full is still to be run. It waits for the first pass of the next
    proposal, where it shares a window with the anchor.
    """

    model: DecoderState
    drafted: jax.Array  # [B, K] int32, tokens of the uncommitted rows; NO_TOKEN: there is none
    pending: jax.Array  # [B] int32, the token of position length - 1, if it waits
    waits: jax.Array  # [B] bool: that token is not in the caches yet
    length: jax.Array  # [B] int32, positions ingested
    intact: jax.Array  # [B] bool: every committed row so far was ingested
    denied: jax.Array  # [B] bool: found no page; no drafts until the row is released
    misses: jax.Array  # [] int32: how often that happened


@struct.dataclass
class _Steps:
    """Caches between the steps of a proposal."""

    model: DecoderState  # after all steps so far
    length: jax.Array  # [B] int32, committed positions
    recurrent: tuple[Recurrent, ...]  # the delta-net layers after the committed positions
    capsules: tuple[Capsule, ...]  # rows of the steps, K each


@struct.dataclass
class DraftModel(DrafterDefaults):
    """A language model as a :class:`jaxdraft.base.Drafter`.

    It reads only the text, no states of the target, and has caches of its own. Both models must
    have the same tokens; :meth:`jaxdraft.Model.with_draft_model` checks that.

    Source: Leviathan et al., arXiv:2211.17192.

    Attributes:
      model: the language model.
      draftable: number of tokens that can be drafts: those below it.
      draft_tokens: K.
      confidence: the least probability of a draft to be proposed, as in :meth:`with_confidence`;
        None: all drafts are.
    """

    model: DecoderTarget
    draftable: int = struct.field(pytree_node=False)
    draft_tokens: int = struct.field(pytree_node=False, default=DRAFT_TOKENS)
    confidence: float | jax.Array | None = None

    first_link = 1

    def __post_init__(self) -> None:
        check_confidence(self.confidence)
        if isinstance(self.draft_tokens, int) and not 1 <= self.draft_tokens <= PREFILL_CHUNK:
            raise ValueError(
                f"draft_tokens is {self.draft_tokens}; a draft model has 1 to {PREFILL_CHUNK}"
            )

    @property
    def config(self) -> TargetConfig:
        """Description of the language model."""
        return self.model.config

    @property
    def overlap(self) -> int:
        """1, because the last token of a page may wait for the next proposal."""
        return 1

    def with_draft_tokens(self, draft_tokens: int) -> DraftModel:
        """Return the same model with another K."""
        return replace(self, draft_tokens=draft_tokens)

    def with_confidence(self, confidence: float | None) -> DraftModel:
        """Return the same model, proposing drafts up to the first that is too unlikely.

        Args:
          confidence: the least product of the largest probabilities of all passes so far, in 0..1;
            None: no cut.

        Raises:
          ValueError: the number is outside of 0..1.
        """
        return replace(self, confidence=confidence)

    @property
    def declines(self) -> bool:
        """True if drafts are cut by confidence, down to none."""
        return self.confidence is not None

    def init(self, batch: int, capacity: int) -> DraftModelState:
        """Return an empty state of ``batch`` rows with room for ``capacity`` positions each."""
        room = min(capacity, self.model.context_length) + self.draft_tokens
        return self._start(self.model.init(batch, room))

    def init_pool(
        self, batch: int, *, pages: int, page_size: int, columns: int | None = None
    ) -> DraftModelState:
        """Return an empty state whose rows share a pool that mirrors the target's.

        A row takes pages as it grows. One that finds none is *denied*: it owns nothing and proposes
        nothing until it is released.

        Args:
          batch: B.
          pages: P, of the target's pool.
          page_size: Z.
          columns: M, pages of the longest row. Default: all.
        """
        columns = pages if columns is None else columns
        sizes = dict(pages=pages, page_size=page_size, columns=columns)
        return self._start(self.model.init_pool(batch, **sizes))

    def cost(self) -> DrafterCost:
        """Return its memory cost in an engine."""
        return cost(self.config, self.model.dtype, self.draft_tokens)

    def misses(self, state: DraftModelState) -> jax.Array:
        """Count how often a row found no page."""
        return state.misses

    def skip(
        self, state: DraftModelState, tokens: jax.Array, length: jax.Array
    ) -> DraftModelState | None:
        """Continue rows whose first ``length`` [B] positions are already in their pages.

        The last of them waits: it may have waited when the pages were kept, and not be in them.

        Returns None if a row has state outside its pages: recurrent states, or a window.
        """
        waits = length > 0
        model = self.model.skip(state.model, tokens, length - waits.astype(jnp.int32))
        if model is None:
            return None
        last = jnp.maximum(length - 1, 0)[:, None]
        pending = jnp.take_along_axis(tokens, last, axis=1, mode="clip")[:, 0]
        return replace(state, model=model, pending=pending, waits=waits, length=length)

    def with_row_statistics(self, state: DraftModelState, statistics: Any) -> DraftModelState:
        """Discard the uncommitted rows: a restored row may lie on other pages."""
        del statistics
        return replace(state, drafted=jnp.full_like(state.drafted, NO_TOKEN))

    def release(self, state: DraftModelState, rows: jax.Array) -> DraftModelState:
        """Free everything owned by the rows where ``rows`` [B] is true."""
        chex.assert_shape(rows, state.length.shape)
        state = self._restart(state, rows)
        if not _dense(state.model):
            model = self.model.release(state.model, rows)
            state = replace(state, model=replace(model, capsules=state.model.capsules))
        return replace(state, intact=state.intact | rows, denied=state.denied & ~rows)

    def ingest(self, state: DraftModelState, feed: Feed) -> DraftModelState:
        """See :meth:`jaxdraft.base.Drafter.ingest`.

        Rows must follow the ones ingested before, or start again at position 0. A row that does
        neither has a hole: it ingests nothing and proposes nothing until it starts again.

        Example, drafts b c d after the anchor a: rows a b c are in the caches. If b and c are
        accepted, rows a b c are committed. If all three are, d waits.
        """
        text = needed(self, "tokens", feed.tokens, None)
        state, count = self._admitted(state, feed)
        steps = text.shape[1]
        place = jnp.arange(steps, dtype=jnp.int32)[None]
        width = min(steps, self.draft_tokens)
        same = (state.drafted[:, :width] == text[:, :width]) & (place[:, :width] < count[:, None])
        known = jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        capsules = state.model.capsules
        model = replace(self.model.commit(state.model, known), capsules=capsules)
        # Example: text [c d e], token b waits, nothing is known: [b c d e] from entry 0.
        # If c is known, nothing waits: [. c d e] from entry 2.
        waits = state.waits.astype(jnp.int32)
        unseen = waits + count - known
        line = jnp.concatenate([state.pending[:, None], text], axis=1)
        first = 1 - waits + known
        window = jnp.take_along_axis(line, first[:, None] + place, axis=1, mode="clip")
        # Not in a row that brings nothing: a step of other rows may not bind it to its pages.
        unseen_now = jnp.where(count > 0, unseen, 0)
        runs = jnp.where(jnp.any(unseen_now > 1), jnp.minimum(unseen_now, steps), 0)

        def run(model: DecoderState) -> DecoderState:
            return replace(self._read(model, window, runs), capsules=capsules)

        some = jnp.any(runs > 0)
        model = lax.cond(some, run, lambda model: model, model)
        last = jnp.take_along_axis(line, count[:, None], axis=1)[:, 0]
        return replace(
            state,
            model=model,
            # A window may be written past the committed rows of any row.
            drafted=jnp.where((some | (count > 0))[:, None], NO_TOKEN, state.drafted),
            pending=jnp.where(count > 0, last, state.pending),
            waits=unseen > runs,
            length=state.length + count,
        )

    def _read(self, model: DecoderState, tokens: jax.Array, count: jax.Array) -> DecoderState:
        """Run and commit ``count`` [B] of ``tokens`` [B, T], as many at once as the model takes."""
        most = self.model.prompt_rows
        for first in range(0, tokens.shape[1], most):
            rows = jnp.clip(count - first, 0, most)
            part = tokens[:, first : first + most]
            out = self.model.forward(part, rows, model, row=jnp.zeros_like(rows))
            model = self.model.commit(out.state, rows)
        return model

    def _admitted(self, state: DraftModelState, feed: Feed) -> tuple[DraftModelState, jax.Array]:
        """Return the state with pages for the rows of a feed, and how many rows are ingested."""
        brings = feed.count > 0
        fresh = brings & (feed.first_position == 0)
        follows = fresh | (feed.first_position == state.length)
        intact = fresh | (state.intact & (follows | ~brings))
        count = jnp.where(intact & ~state.denied, feed.count, 0)
        state = self._restart(state, fresh & (count > 0))
        # Rows past the model's context are counted, and never run.
        fits = state.length + count <= self.model.context_length
        state = self.cover(state, jnp.where(fits & (count > 0), state.length + count, 0))
        count = jnp.where(state.denied, 0, count)
        length = jnp.where(fits, state.length, state.length + count)
        return replace(state, intact=intact, length=length), jnp.where(fits, count, 0)

    def propose(
        self, state: DraftModelState, feed: Feed
    ) -> tuple[DraftModelState, Proposal, DraftInfo]:
        """See :meth:`jaxdraft.base.Drafter.propose`.

        The first pass runs the token that waits, if there is one, and the anchor; each later pass
        the draft before. As many passes run as the widest row can use.
        """
        found = run_chain(self, state, feed, state.length, self.model.context_length)
        rows = jnp.concatenate([feed.anchor[:, None], found.links.tokens[:, :-1]], axis=1)
        # The rows of a failed chain may hold anything: none of them is committed.
        place = jnp.arange(self.draft_tokens, dtype=jnp.int32)[None]
        drafted = jnp.where(place < found.proposal.length[:, None], rows, NO_TOKEN)
        state = replace(
            found.state,
            model=_with_rows(found.links.cache),
            drafted=drafted,
            waits=found.state.waits & (found.limit == 0),
        )
        return state, found.proposal, found.info

    def begin(
        self,
        state: DraftModelState,
        anchor: jax.Array,
        limit: jax.Array,
        draw: Draw | None,
        guide: Guide | None,
    ) -> Links:
        """Run the first pass, over one row or two, if any row drafts."""
        drafts = limit > 0
        model = replace(state.model, capsules=())
        steps = _Steps(model, model.length, model.recurrent, state.model.capsules)
        sizes = self.draft_tokens, self.draftable
        links = no_links(steps, None, anchor, draw, *sizes, self.confidence, guide)
        waits = state.waits.astype(jnp.int32)
        pair = jnp.stack([jnp.where(state.waits, state.pending, anchor), anchor], axis=1)

        def run(links: Links) -> Links:
            count = jnp.where(drafts, 1 + waits, 0)
            out = self.model.forward(pair, count, links.cache.model, row=waits)
            before = self.model.commit(out.state, jnp.where(drafts, waits, 0))
            steps = _Steps(
                self.model.commit(out.state, count),
                before.length,
                before.recurrent,
                _put(links.cache.capsules, out.state.capsules, jnp.int32(0), waits),
            )
            links = replace(links, cache=steps)
            return self._drafted(links, out.logits, drafts, draw, guide, jnp.int32(0))

        return lax.cond(jnp.any(drafts), run, lambda links: links, links)

    def link(
        self,
        state: DraftModelState,
        limit: jax.Array,
        draw: Draw | None,
        guide: Guide | None,
        number: jax.Array,
        links: Links,
    ) -> Links:
        """Run pass ``number`` [] int32; see :func:`jaxdraft.draft.links.chain`."""
        del state
        drafts = number < limit
        count, steps = drafts.astype(jnp.int32), links.cache
        out = self.model.forward(links.token[:, None], count, steps.model)
        capsules = _put(steps.capsules, out.state.capsules, number, jnp.zeros_like(count))
        steps = replace(steps, model=self.model.commit(out.state, count), capsules=capsules)
        links = replace(links, cache=steps)
        return self._drafted(links, out.logits, drafts, draw, guide, number)

    def _drafted(
        self,
        links: Links,
        logits: jax.Array,
        drafts: jax.Array,
        draw: Draw | None,
        guide: Guide | None,
        number: jax.Array,
    ) -> Links:
        """Return the links with the draft of a pass whose logits are [B, 1, V]."""
        logits = logits[:, 0, : self.draftable]
        return with_draft(links, logits, drafts, draw, guide, number)

    def _start(self, model: DecoderState) -> DraftModelState:
        batch = model.length.shape[0]
        zeros, none = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), bool)
        rows = jnp.zeros((batch, self.draft_tokens), jnp.int32)
        shape = jax.eval_shape(lambda: self.model.forward(rows, zeros, model).state.capsules)
        capsules = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
        return DraftModelState(
            model=replace(model, capsules=capsules),
            drafted=rows + NO_TOKEN,
            pending=zeros,
            waits=none,
            length=zeros,
            intact=~none,
            denied=none,
            misses=jnp.zeros((), jnp.int32),
        )

    def _restart(self, state: DraftModelState, rows: jax.Array) -> DraftModelState:
        """Discard the text of the rows where ``rows`` [B] is true; they keep their pages."""
        model = state.model
        sliding = model.sliding
        if sliding is not None:
            sliding = replace(sliding, length=jnp.where(rows, 0, sliding.length))
        model = replace(
            model,
            pool=replace(model.pool, length=jnp.where(rows, 0, model.pool.length)),
            recurrent=tuple(recurrent.reset(m, rows) for m in model.recurrent),
            sliding=sliding,
        )
        return replace(
            state,
            model=model,
            drafted=jnp.where(rows[:, None], NO_TOKEN, state.drafted),
            waits=state.waits & ~rows,
            length=jnp.where(rows, 0, state.length),
        )

    def cover(self, state: DraftModelState, positions: jax.Array) -> DraftModelState:
        """Provide pages for ``positions`` [B] per row.

        A row that cannot get them releases its own.
        """
        if _dense(state.model):
            return state
        grown, granted = self.model.grow(state.model, positions)
        missed = (positions > 0) & ~granted
        state = replace(
            self._restart(replace(state, model=grown), missed),
            denied=state.denied | missed,
            misses=state.misses + jnp.sum(missed, dtype=jnp.int32),
        )
        model = self.model.release(state.model, missed)
        return replace(state, model=replace(model, capsules=state.model.capsules))


def _dense(model: DecoderState) -> bool:
    """Return whether the rows of a state are bound to their pages."""
    return model.pool.dense


def _put(
    capsules: tuple[Capsule, ...], new: tuple[Capsule, ...], number: jax.Array, row: jax.Array
) -> tuple[Capsule, ...]:
    """Set row ``number`` [] of the capsules to row ``row`` [B] of new ones."""

    def put(x: jax.Array, y: jax.Array) -> jax.Array:
        index = row.reshape(-1, *[1] * (y.ndim - 1))
        return x.at[:, number].set(jnp.take_along_axis(y, index, axis=1)[:, 0])

    return jax.tree.map(put, capsules, new)


def _with_rows(steps: _Steps) -> DecoderState:
    """Return the committed state, with the steps' rows uncommitted."""
    model, sliding = steps.model, steps.model.sliding
    return DecoderState(
        pool=replace(model.pool, length=steps.length),
        recurrent=steps.recurrent,
        capsules=steps.capsules,
        sliding=None if sliding is None else replace(sliding, length=steps.length),
    )


def cost(config: TargetConfig, dtype: Any, draft_tokens: int, parts: int = 1) -> DrafterCost:
    """Return the memory cost of a draft model: its pages per target page, and its other layers.

    Args:
      config: its description.
      dtype: type of its activations, keys and values.
      draft_tokens: K.
      parts: devices that share recurrent states.
    """
    s, d, row, sliding = config.sliding, config.delta_net, 0, None
    if s is not None and config.count("sliding"):
        cache = config.kv_shape("sliding", dtype)
        sliding = Sliding(cache=cache, window=s.window, rows=PREFILL_CHUNK)
    if d is not None:
        layers = config.count("delta_net")
        heads = d.value_heads + d.key_heads * d.key_dim + d.value_heads * d.value_dim
        capsule = 4 * heads + d.channels * jnp.dtype(dtype).itemsize
        row = recurrent_bytes(d, layers, dtype) + layers * draft_tokens * capsule
        row //= net_parts(d, parts)
    return Beside(cache=config.kv_shape("attention", dtype), sliding=sliding, recurrent_row=row)
