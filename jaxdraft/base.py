"""The contracts. Read this file first: everything else fills in these names.

Letters, with the same meaning in every shape comment, docstring and einsum:

|   | stands for                   |   | stands for                              |
|---|------------------------------|---|-----------------------------------------|
| B | rows (requests) in a batch   | V | vocabulary                              |
| T | token rows fed in one call   | D | model width                             |
| K | draft tokens of a round      | A | width of the auxiliary states: taps x D |
| C | candidates of a lattice step | N | query heads                             |
| L | layers of one kind           | G | key/value heads                         |
| P | pages in a pool              | H | head width                              |
| Z | slots of a page              | Q | query rows of a drafter's block         |
| M | columns of a page table      | R | pages of a ring                         |

Words. A *page* is a piece of a key/value cache; a *block* is only ever the drafter's block of query
rows. The *anchor* is a row's last token: emitted, not yet in the cache. A *round* verifies,
commits, feeds the drafter and proposes. *Rollback* is never an action: a round commits the accepted
rows, and the rest was never committed.

Targets and drafters are *pytrees with methods*: their weights are leaves, everything else is
static. They cross ``jit`` as arguments like any array, and no weight is baked into a program.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
from flax import struct
from jax.typing import DTypeLike

if TYPE_CHECKING:
    from jaxdraft.state.budget import DrafterCost

NO_PAGE = 2**30
"""Page id of "no page". Past every pool, so ``mode="drop"`` drops the write; -1 would wrap around
to the last page (jax-ml/jax#21708)."""

NO_TOKEN = -1
"""Token id of "no token" in results. Never fed to a model."""

MASKED = -1e30
"""Score of what must not be chosen: large, negative and finite, so no ``inf - inf`` arises."""


class Status(enum.IntEnum):
    """What became of a row. Failure under ``jit`` is data."""

    RUNNING = 0
    STOP = 1  # a stop id was emitted
    LENGTH = 2  # max_new_tokens were emitted
    CONTEXT = 3  # the sequence fills the context
    NONFINITE = 4  # the target's logits are not finite; the row emits nothing from them
    EMPTY = 5  # a padding row: it never ran
    STOP_STRING = 6  # the text of the output came to a stop string

    @property
    def reason(self) -> str:
        """Lower-case word for people: ``"stop"``, ``"length"``, ..."""
        return self.name.lower()


class NoDraft(enum.IntEnum):
    """Why a row has no drafts in a round."""

    DRAFTED = 0
    UNWANTED = 1  # the row is finished, or its limit is zero
    HOLE = 2  # committed rows are missing from the drafter's cache
    CONTEXT = 3  # the block would pass the drafter's rotary table
    NONFINITE = 4  # a score was not finite
    DENIED = 5  # no ring or page was free when the row was admitted
    NO_MATCH = 6  # the row's end occurs nowhere before
    OFF = 7  # holes or non-finite scores in too many rounds: switched off for the row
    PAUSED = 8  # drafts would not pay: acceptance of late is low, or the drafter is not sure
    INVALID = 9  # what the drafter returned breaks its contract; drafts before that are kept


@struct.dataclass
class Lattice:
    """C candidates for each of K steps, and a score for every pair of neighbours.

    ``scores[b, k, i, j]`` scores candidate j of step k after candidate i of step k - 1. Before step
    0 stands the anchor, so all rows of ``scores[b, 0]`` are equal.
    """

    candidates: jax.Array  # [B, K, C] int32
    scores: jax.Array  # [B, K, C, C] float32


@struct.dataclass
class Support:
    """The distributions that drafts were drawn from: draft k from ``probs[b, k]`` over ``tokens``.

    Sparse: everything outside has probability zero. The probabilities of a step sum to one; a token
    that is there twice has the sum of both. Entries of probability zero may hold any token. The
    support of a step may depend on the drafts drawn before the step, and on nothing drawn later.
    """

    tokens: jax.Array  # [B, K, C] int32
    probs: jax.Array  # [B, K, C] float32


@struct.dataclass
class Proposal:
    """What a drafter proposes for each row.

    Entries of ``tokens`` at or past ``length`` are ``NO_TOKEN``. Without a ``support`` every draft
    counts as proposed with probability one, which is right for drafts of any origin. Integers may
    have any width. :func:`jaxdraft.guard.sanitize` ends a proposal before a draft that breaks this.
    """

    tokens: jax.Array  # [B, K] int32
    length: jax.Array  # [B] int32, 0..K
    lattice: Lattice | None = None
    support: Support | None = None


@struct.dataclass
class Truncation:
    """What temperature, top-k, top-p and min-p, in this order, make of a row of logits."""

    temperature: jax.Array  # [B] float32; 0: the best token, always
    top_k: jax.Array  # [B] int32; 0: off
    top_p: jax.Array  # [B] float32; 1: off
    min_p: jax.Array  # [B] float32; 0: off


@struct.dataclass
class Draw:
    """How drafts are drawn.

    A drafter that draws says from what, in ``Proposal.support``. One that ignores this and proposes
    what it always does is lossless too.
    """

    truncation: Truncation
    keys: jax.Array  # [B] PRNG keys, for this proposal only


@struct.dataclass
class Feed:
    """Committed rows for a drafter, and what is asked of it.

    Row b of the batch brings ``count[b]`` committed rows at positions ``first_position[b] + t``.
    Entries at or past ``count`` are ignored. A drafter reads the members it needs.
    """

    aux: jax.Array | None  # [B, T, A] auxiliary states of the committed rows
    count: jax.Array  # [B] int32
    first_position: jax.Array  # [B] int32
    anchor: jax.Array  # [B] int32, the token that follows the last committed row
    wants_draft: jax.Array  # [B] bool
    limit: jax.Array  # [B] int32, the most drafts the row can use
    hidden: jax.Array | None = None  # [B, T, D] rows after the target's final norm
    tokens: jax.Array | None = None  # [B, T] the committed tokens themselves
    draw: Draw | None = None  # None: greedy drafts


@struct.dataclass
class DraftInfo:
    """What happened in a drafter's step. Nothing depends on it."""

    reason: jax.Array  # [B] int32, a NoDraft
    forwards: jax.Array  # [] int32, forward passes of the drafter that proposed


@struct.dataclass
class TargetOutput:
    """One forward pass of a target over T token rows.

    ``state`` is *tentative*: nothing in it counts until ``commit`` says how many rows do.
    """

    logits: jax.Array  # [B, T, V] float32; [B, 1, V] when one row was asked for
    aux: jax.Array | None  # [B, T, A]
    hidden: jax.Array | None  # [B, T, D]
    state: Any


@runtime_checkable
class Target(Protocol):
    """The model whose output must not change. A pytree; see the module docstring."""

    @property
    def vocab_size(self) -> int:
        """V: tokens are 0..V-1."""
        ...

    @property
    def context_length(self) -> int:
        """Positions the target can represent."""
        ...

    def init(self, batch: int, capacity: int) -> Any:
        """An empty state of ``batch`` rows with room for ``capacity`` positions each."""
        ...

    def forward(
        self, tokens: jax.Array, count: jax.Array, state: Any, *, row: jax.Array | None = None
    ) -> TargetOutput:
        """Run rows ``tokens[b, :count[b]]`` after the committed ones.

        Args:
          tokens: [B, T] int32. Entries at or past ``count`` are ignored, whatever they hold.
          count: [B] int32, 0..T.
          state: from ``init`` or ``commit``. Left as it was.
          row: [B] int32: give logits of this row only, as [B, 1, V].
        """
        ...

    def commit(self, state: Any, count: jax.Array) -> Any:
        """The first ``count[b]`` rows of the last ``forward`` happened; the others did not.

        Args:
          state: the tentative state of a ``TargetOutput``.
          count: [B] int32, 0..T; never more rows than were run.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. It can fail to help, never to harm. A pytree; see the module docstring.

    These members are all that a drafter needs. What else it may have is in
    :class:`DrafterDefaults`, with the value that counts for a drafter without it.
    """

    @property
    def draft_tokens(self) -> int:
        """K, the most tokens it proposes."""
        ...

    def init(self, batch: int, capacity: int) -> Any:
        """An empty state of ``batch`` rows; ``capacity`` bounds the positions ever ingested."""
        ...

    def ingest(self, state: Any, feed: Feed) -> Any:
        """Take in committed rows. Rejected rows never reach a drafter."""
        ...

    def propose(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        """Draft from everything ingested so far, after ``feed.anchor``."""
        ...

    def step(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        """``ingest`` then ``propose``."""
        ...


class Head(NamedTuple):
    """The last step of a target's forward pass, from a hidden row to logits, on its own."""

    width: int  # D, of ``TargetOutput.hidden``
    dtype: DTypeLike  # of ``TargetOutput.hidden``
    logits: Callable[[jax.Array], jax.Array]  # [B, 1, D] -> [B, 1, V] float32


class TargetDefaults:
    """The optional members of a target, with their defaults. Inherit them, or write your own.

    A target that does not inherit them is completed by :func:`full_target`.
    """

    def init_pool(self, batch: int, *, pages: int, page_size: int, columns: int) -> Any:
        """Return an empty state for an engine, whose rows share ``pages`` pages.

        By default every row has its whole state, as in ``init``.

        Args:
          batch: B.
          pages: P.
          page_size: Z.
          columns: M, pages of the longest row.
        """
        del pages
        part = cast(Target, self)
        return part.init(batch, min(columns * page_size, part.context_length))

    @property
    def head(self) -> Head | None:
        """The head alone, so that a prompt of many chunks pays for it once.

        By default there is none, and the logits of every chunk are computed.
        """
        return None

    def skip(self, state: Any, tokens: jax.Array, length: jax.Array) -> Any:
        """Start rows behind positions whose pages are filled already.

        Args:
          state: a state of rows that have read nothing.
          tokens: [B, S] int32, the rows' texts.
          length: [B] int32, positions in their pages.

        Returns:
          The state, or None: rows remember more than their pages hold. The default is None, unless
          the state is empty.
        """
        del tokens, length
        return None if jax.tree.leaves(state) else state


class DrafterDefaults:
    """The optional members of a drafter, with their defaults. Inherit them, or write your own.

    A drafter that does not inherit them is completed by :func:`full_drafter`.
    """

    @property
    def declines(self) -> bool:
        """Whether it often proposes nothing.

        Rounds in which no row has drafts then cost a plain step, for a program of twice the size.
        """
        return False

    @property
    def overlap(self) -> int:
        """Tokens after a page of its pool that the page's content depends on."""
        return 0

    @property
    def windowed(self) -> bool:
        """Whether ``init_pool`` takes ``rings`` and ``page_size``, and no pages."""
        return False

    def with_draft_tokens(self, draft_tokens: int) -> Drafter:
        """Return the same drafter with another K.

        Raises:
          ValueError: it has no other K, as by default.
        """
        part = cast(Drafter, self)
        if draft_tokens == part.draft_tokens:
            return part
        raise ValueError(
            f"draft_tokens is {draft_tokens}; this {type(self).__name__} has {part.draft_tokens} "
            "and no other number: draft_limit uses fewer"
        )

    def init_pool(self, batch: int, *, pages: int, page_size: int, columns: int) -> Any:
        """Return an empty state for an engine, whose rows share a pool that mirrors the target's.

        By default every row has its whole state, as in ``init``.

        Args:
          batch: B.
          pages: P.
          page_size: Z.
          columns: M, pages of the longest row.
        """
        del pages
        return cast(Drafter, self).init(batch, columns * page_size)

    def skip(self, state: Any, tokens: jax.Array, length: jax.Array) -> Any:
        """Start rows behind positions whose pages are filled; see :meth:`TargetDefaults.skip`."""
        del tokens, length
        return None if jax.tree.leaves(state) else state

    def learned(self, state: Any) -> Any:
        """Return what the state knows of its rows that no text tells, for example acceptance.

        A row that loses its place in an engine gets it back from :meth:`with_learned`.

        Returns:
          A pytree of arrays [B, ...]. By default an empty one.
        """
        del state
        return ()

    def with_learned(self, state: Any, learned: Any) -> Any:
        """Return the state with what :meth:`learned` gave."""
        del learned
        return state

    def misses(self, state: Any) -> jax.Array | int:
        """Count how often a row found no room in the drafter's pool: 0 by default."""
        del state
        return 0

    def cost(self) -> DrafterCost | None:
        """Tell what it costs in an engine's memory; None: whatever ``init`` allocates."""
        return None

    def step(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        """``ingest`` then ``propose``, as one compiled program."""
        return _step(cast(Drafter, self), state, feed)


@jax.jit
def _step(drafter: Drafter, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
    return drafter.propose(drafter.ingest(state, feed), feed)


class FullTarget(TargetDefaults, Target):
    """A target with all members, as :func:`full_target` returns it."""


class FullDrafter(DrafterDefaults, Drafter):
    """A drafter with all members, as :func:`full_drafter` returns it."""


class _Completed:
    """A target or drafter whose missing optional members are those of ``defaults``."""

    def __init__(self, part: Any, defaults: type) -> None:
        self._part, self._defaults = part, defaults

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._part, name):
            return getattr(self._part, name)
        # A method or property of the part, as if the part inherited it.
        return getattr(self._defaults, name).__get__(self._part)


def full_target(target: Target) -> FullTarget:
    """Return ``target`` with every member of :class:`TargetDefaults`: its own, or the default."""
    if isinstance(target, TargetDefaults):
        return cast(FullTarget, target)
    return cast(FullTarget, _Completed(target, TargetDefaults))


def full_drafter(drafter: Drafter) -> FullDrafter:
    """Return ``drafter`` with every member of :class:`DrafterDefaults`: its own, or the default."""
    if isinstance(drafter, DrafterDefaults):
        return cast(FullDrafter, drafter)
    return cast(FullDrafter, _Completed(drafter, DrafterDefaults))
