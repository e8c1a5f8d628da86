"""A chain of drafts, each from a pass that reads the previous draft: its loop and its results."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxdraft.base import NO_TOKEN, DraftInfo, Draw, Feed, Guide, NoDraft, Proposal, Support
from jaxdraft.draft.sampled import sampled_token
from jaxdraft.ranking import best_token

DRAFT_TOKENS = 3
"""K unless chosen otherwise: no file states how far a head is chained."""

CANDIDATES = 32
"""Number of best tokens of the vocabulary from which a draft is drawn."""


@struct.dataclass
class Links:
    """State passed from one pass to the next."""

    cache: Any  # keys and values, with those of the chain's own rows
    hidden: jax.Array | None  # [B, D], the row that the next pass reads; None: only the token
    token: jax.Array  # [B] int32, the token that the next pass reads
    tokens: jax.Array  # [B, K] int32, the drafts so far
    finite: jax.Array  # [B, K] bool: the scores of each pass were finite; True before it
    support: Support | None
    trust: jax.Array | None  # [B, K] float32, largest probability of each pass; 1 before it
    place: jax.Array | None = None  # [B] int32, state of the row's structure, if rows have any


class Linked(Protocol):
    """A drafter whose drafts are a chain. A pytree."""

    @property
    def draft_tokens(self) -> int:
        """K."""
        ...

    @property
    def confidence(self) -> float | jax.Array | None:
        """The least probability of a draft to be proposed; None: all drafts are."""
        ...

    def cover(self, state: Any, positions: jax.Array, /) -> Any:
        """Provide pages for ``positions`` [B] per row; a row that cannot get them is denied."""
        ...

    def begin(
        self,
        state: Any,
        anchor: jax.Array,
        limit: jax.Array,
        draw: Draw | None,
        guide: Guide | None,
    ) -> Links:
        """Return the state before pass ``first_link``."""
        ...

    @property
    def first_link(self) -> int:
        """Number of the first pass in the loop: 1 if :meth:`begin` runs pass 0, else 0."""
        ...

    def link(
        self,
        state: Any,
        limit: jax.Array,
        draw: Draw | None,
        guide: Guide | None,
        number: jax.Array,
        links: Links,
    ) -> Links:
        """Run pass ``number`` [] int32."""
        ...


class Chained(NamedTuple):
    """The result of :func:`run_chain`."""

    state: Any  # with the pages of the chain's rows, and otherwise as before
    links: Links
    limit: jax.Array  # [B] int32, drafts that were made per row, also by chains that failed
    proposal: Proposal
    info: DraftInfo


def run_chain(
    drafter: Linked, state: Any, feed: Feed, used: jax.Array, context_length: int
) -> Chained:
    """Draft with a chain in every row that may draft and has room for the drafts.

    Args:
      drafter: the drafter.
      state: its state, with ``intact``, ``denied`` and ``length`` [B].
      feed: see :class:`jaxdraft.base.Feed`.
      used: [B] int32, positions of the cache in front of the chain.
      context_length: positions that fit into the cache.
    """
    wants = feed.wants_draft & (feed.limit > 0)
    fits = context_length - used
    reason = jnp.select(
        [~wants, state.denied, ~state.intact | (state.length == 0), fits <= 0],
        [NoDraft.UNWANTED, NoDraft.DENIED, NoDraft.HOLE, NoDraft.CONTEXT],
        NoDraft.DRAFTED,
    )
    limit = jnp.minimum(jnp.minimum(feed.limit, drafter.draft_tokens), fits)
    limit = jnp.where(reason == NoDraft.DRAFTED, limit, 0).astype(jnp.int32)
    state = drafter.cover(state, jnp.where(limit > 0, used + limit, 0))
    reason = jnp.where(state.denied & (limit > 0), NoDraft.DENIED, reason)
    limit = jnp.where(state.denied, 0, limit)
    links = chain(drafter, state, feed.anchor, limit, feed.draw, feed.guide)
    length, passes = jnp.minimum(limit, leading(links.finite)), limit
    failed = (limit > 0) & (length == 0)
    reason = jnp.where(failed, NoDraft.NONFINITE, reason).astype(jnp.int32)
    if links.trust is not None:
        trusted = jnp.sum(_trusted(drafter, links), axis=1, dtype=jnp.int32)
        passes = jnp.minimum(limit, trusted + 1)
        pauses = (length > 0) & (trusted == 0)
        reason = jnp.where(pauses, NoDraft.PAUSED, reason).astype(jnp.int32)
        length = jnp.minimum(length, trusted)
    kept = jnp.arange(drafter.draft_tokens, dtype=jnp.int32)[None] < length[:, None]
    proposal = Proposal(jnp.where(kept, links.tokens, NO_TOKEN), length, support=links.support)
    return Chained(state, links, limit, proposal, DraftInfo(reason, jnp.max(passes, initial=0)))


def leading(finite: jax.Array) -> jax.Array:
    """Return the number of drafts before the first whose scores are not finite, [B] int32.

    The scores of a pass depend on the drafts before it. So the drafts before a pass that fails are
    kept: if a failure took them away, drawn drafts would decide whether they are verified, and
    sampling would not be exact.

    Example: scores finite, finite, not, finite leave two drafts.

    Args:
      finite: [B, K] bool.
    """
    return jnp.sum(jnp.cumprod(finite.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _trusted(drafter: Linked, links: Links) -> jax.Array:
    """Return which drafts come before the first that is too unlikely, [B, K].

    A draft's probability is the product of the largest probabilities up to its pass. They belong
    to the distributions that drafts are drawn from, before the draw. So whether a draft is verified
    depends only on the drafts before it, and sampling stays exact.

    Example, confidence 0.5: largest probabilities .9 .8 .6 have the products .9 .72 .43, and two
    drafts are proposed.
    """
    assert links.trust is not None and drafter.confidence is not None
    return jnp.cumprod(links.trust, axis=1) >= jnp.asarray(drafter.confidence, jnp.float32)


@jax.custom_jvp
def chain(
    drafter: Linked,
    state: Any,
    anchor: jax.Array,
    limit: jax.Array,
    draw: Draw | None,
    guide: Guide | None = None,
) -> Links:
    """Run as many passes as the row with most drafts needs; on devices other than CPUs, always K.

    A loop whose number of passes only the device knows would end a CUDA graph, and make the host
    wait before every pass.

    Args:
      drafter: the drafter.
      state: its state.
      anchor: [B] int32.
      limit: [B] int32, drafts of every row, at most K.
      draw: how drafts are drawn; None: the best token.
      guide: what the rows' structures allow.
    """

    def link(number: jax.Array, links: Links) -> Links:
        step = functools.partial(drafter.link, state, limit, draw, guide, number)
        if links.trust is None:
            return step(links)
        goes = _trusted(drafter, links)[:, -1] & (number < limit)  # passes to come count as 1
        return lax.cond(jnp.any(goes), step, lambda links: links, links)

    def until_done(links: Links) -> Links:
        return lax.fori_loop(drafter.first_link, jnp.max(limit, initial=0), link, links)

    def written_out(links: Links) -> Links:
        numbers = jnp.arange(drafter.first_link, drafter.draft_tokens, dtype=jnp.int32)
        return lax.scan(lambda c, i: (link(i, c), None), links, numbers, unroll=True)[0]

    start = drafter.begin(state, anchor, limit, draw, guide)
    return lax.platform_dependent(start, cpu=until_done, default=written_out)


@chain.defjvp
def _chain_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """Differentiate a loop of K passes that skips those that no row needs.

    Reverse mode does not allow the dynamic end of the other loop.
    """
    return jax.jvp(_whole_chain, primals, tangents)


def _whole_chain(
    drafter: Linked,
    state: Any,
    anchor: jax.Array,
    limit: jax.Array,
    draw: Draw | None,
    guide: Guide | None = None,
) -> Links:
    """Compute what :func:`chain` does, in a loop whose length is static."""
    passes = jnp.max(limit, initial=0)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(links: Links, number: jax.Array) -> tuple[Links, None]:
        link = functools.partial(drafter.link, state, limit, draw, guide, number)
        return lax.cond(number < passes, link, lambda links: links, links), None

    numbers = jnp.arange(drafter.first_link, drafter.draft_tokens, dtype=jnp.int32)
    return lax.scan(step, drafter.begin(state, anchor, limit, draw, guide), numbers)[0]


def no_links(
    cache: Any,
    hidden: jax.Array | None,
    anchor: jax.Array,
    draw: Draw | None,
    draft_tokens: int,
    draftable: int,
    confidence: float | jax.Array | None,
    guide: Guide | None,
) -> Links:
    """Return a chain without drafts.

    Args:
      cache: keys and values.
      hidden: [B, D], the row that pass 0 reads, or None.
      anchor: [B] int32, the token that pass 0 reads.
      draw: how drafts are drawn; None: the best token.
      draft_tokens: K.
      draftable: tokens that a draft can be.
      confidence: least probability of a draft; see :class:`Linked`.
      guide: what the rows' structures allow.
    """
    shape = (anchor.shape[0], draft_tokens)
    support = None
    if draw is not None:
        wide = (*shape, min(CANDIDATES, draftable))
        support = Support(jnp.zeros(wide, jnp.int32), jnp.zeros(wide, jnp.float32))
    return Links(
        cache=cache,
        hidden=hidden,
        token=anchor.astype(jnp.int32),
        tokens=jnp.full(shape, NO_TOKEN, jnp.int32),
        finite=jnp.ones(shape, bool),
        support=support,
        trust=None if confidence is None else jnp.ones(shape, jnp.float32),
        place=None if guide is None else guide.state,
    )


def with_draft(
    links: Links,
    logits: jax.Array,
    drafts: jax.Array,
    draw: Draw | None,
    guide: Guide | None,
    number: jax.Array,
    tokens: jax.Array | None = None,
) -> Links:
    """Return the links with the draft of pass ``number``: the best token, or a drawn one.

    Args:
      links: links before the pass.
      logits: [B, V'] float32, scores of the pass.
      drafts: [B] bool: whether the row uses the draft.
      draw: how drafts are drawn; None: the best token.
      guide: what the rows' structures allow.
      number: [] int32.
      tokens: [V'] int32, token of each score. Default: the index of the score.
    """

    def ids(places: jax.Array) -> jax.Array:
        return places if tokens is None else jnp.take(tokens, places, axis=0, mode="clip")

    place = links.place
    if guide is not None and place is not None:
        guide = guide.at(place)
        logits = guide.scores(logits, tokens)
    # The best one and not the maximum, from which XLA's CPU backend may drop a NaN.
    best = best_token(logits)
    top = jnp.take_along_axis(logits, best[:, None], axis=-1)[:, 0]
    token, support = ids(best), links.support
    if support is not None:
        assert draw is not None
        drawn, among, probs = sampled_token(logits, draw, number, support.tokens.shape[2])
        token = ids(drawn)
        support = Support(
            support.tokens.at[:, number].set(ids(among)), support.probs.at[:, number].set(probs)
        )
    if guide is not None:
        place = guide.after(token).state
    trust = links.trust
    if trust is not None:
        largest = jnp.exp(top - jax.nn.logsumexp(logits, axis=-1))
        trust = trust.at[:, number].set(jnp.where(jnp.isfinite(largest), largest, 0.0))
    return replace(
        links,
        token=token,
        tokens=links.tokens.at[:, number].set(token),
        finite=links.finite.at[:, number].set(jnp.isfinite(top) | ~drafts),
        support=support,
        trust=trust,
        place=place,
    )


def check_confidence(confidence: Any) -> None:
    """Check the least probability of a draft to be proposed. Arrays are not checked.

    Raises:
      ValueError: it is outside of 0..1.
    """
    if isinstance(confidence, int | float) and not 0 <= confidence <= 1:
        raise ValueError(f"confidence is {confidence}; expected in 0..1")
