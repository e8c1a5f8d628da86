"""Contracts of targets and drafters. Read this file first: the others build on these names.

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
commits, feeds the drafter and proposes. *Rollback* is never an action: a round commits only the
accepted rows.

Targets and drafters are *pytrees with methods*: their weights are leaves, everything else is
static. They are passed through ``jit`` as arguments like any array, so no weight becomes a constant
of a program.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
from flax import struct
from jax.typing import DTypeLike

from jaxdraft.sizes import PREFILL_CHUNK

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxdraft.budget import DrafterCost
    from jaxdraft.sharding.placement import Placement

NO_PAGE = 2**30
"""Page id that means "no page". It lies past every pool, so
``mode="drop"`` drops the write; -1 would wrap around
to the last page (jax-ml/jax#21708)."""

NO_TOKEN = -1
"""Token id that means "no token" in results. Never passed to a model."""

MASKED = -1e30
"""Score of banned entries: large, negative and finite, so no ``inf - inf`` arises."""


class Status(enum.IntEnum):
    """Status of a row. Under ``jit``, a failure is reported as data."""

    RUNNING = 0
    STOP = 1  # a stop id was emitted
    LENGTH = 2  # max_new_tokens were emitted
    CONTEXT = 3  # the sequence fills the context
    NONFINITE = 4  # the target's logits are not finite; the row emits nothing from them
    EMPTY = 5  # a padding row: it never ran
    STOP_STRING = 6  # the text of the output contains a stop string
    COMPLETE = 7  # the structure is complete, and the row has no stop id that may follow
    DEAD_END = 8  # no token may follow: structure, masks and bans allow none

    @property
    def reason(self) -> str:
        """Lower-case word for display: ``"stop"``, ``"length"``, ..."""
        return self.name.lower()


class NoDraft(enum.IntEnum):
    """Reason a row has no drafts in a round."""

    DRAFTED = 0
    UNWANTED = 1  # the row is finished, or its limit is zero
    HOLE = 2  # committed rows are missing from the drafter's cache
    CONTEXT = 3  # the block would pass the drafter's rotary table
    NONFINITE = 4  # a score was not finite
    DENIED = 5  # no ring or page was free when the row was admitted
    NO_MATCH = 6  # the row's end occurs nowhere before
    OFF = 7  # holes or non-finite scores in too many rounds: switched off for the row
    PAUSED = 8  # drafts would not pay: recent acceptance or the drafter's confidence is low
    INVALID = 9  # the drafter broke its contract; drafts before the violation are kept


@struct.dataclass
class Lattice:
    """C candidates for each of K steps, and a score for every pair of neighbours.

    ``scores[b, k, i, j]`` scores candidate j of step k after candidate i of step k - 1. Step 0
    follows the anchor, so all rows of ``scores[b, 0]`` are equal.
    """

    candidates: jax.Array  # [B, K, C] int32
    scores: jax.Array  # [B, K, C, C] float32


@struct.dataclass
class Support:
    """Distributions that drafts were drawn from: draft k from ``probs[b, k]`` over ``tokens``.

    The representation is sparse: all other tokens have probability zero. The probabilities of a
    step sum to one. A token listed twice has the sum of both probabilities. Entries of probability
    zero may hold any token. The support of a step may depend on the drafts drawn before the step,
    and on nothing drawn later.
    """

    tokens: jax.Array  # [B, K, C] int32
    probs: jax.Array  # [B, K, C] float32


@struct.dataclass
class Proposal:
    """Drafts for each row.

    Entries of ``tokens`` at or past ``length`` are ``NO_TOKEN``. Without a ``support`` every draft
    counts as proposed with probability one, which is correct for drafts of any origin. Integers may
    have any width. :func:`jaxdraft.guard.sanitize` cuts a proposal before the first draft that
    violates these rules.
    """

    tokens: jax.Array  # [B, K] int32
    length: jax.Array  # [B] int32, 0..K
    lattice: Lattice | None = None
    support: Support | None = None


@struct.dataclass
class Truncation:
    """Temperature, top-k, top-p and min-p, which apply to a row of logits in this order."""

    temperature: jax.Array  # [B] float32; 0: always the best token
    top_k: jax.Array  # [B] int32; 0: off
    top_p: jax.Array  # [B] float32; 1: off
    min_p: jax.Array  # [B] float32; 0: off


@struct.dataclass
class Draw:
    """Rules and keys for drawing drafts.

    A drafter that draws its drafts reports the distributions in ``Proposal.support``. A drafter may
    ignore these rules and propose as in greedy decoding: the output stays lossless.
    """

    truncation: Truncation
    keys: jax.Array  # [B] PRNG keys, for this proposal only


class Guide(Protocol):
    """The place of each row in its structure (:mod:`jaxdraft.structure`). A pytree.

    A drafter may ignore it. One that follows it has more drafts accepted.
    """

    @property
    def state(self) -> jax.Array:
        """The place itself, [B] int32."""
        ...

    @property
    def free(self) -> jax.Array:
        """Rows without a structure, [B] bool."""
        ...

    def scores(self, scores: jax.Array, tokens: jax.Array | None = None) -> jax.Array:
        """Return scores of the next draft, MASKED where the structure allows others only.

        If it allows none of the tokens, the scores are returned as they are: the draft will be
        rejected whatever it is.

        Args:
          scores: [B, C] float32.
          tokens: [B, C] or [C] int32, the token of each score. Default: tokens 0..C-1.
        """
        ...

    def after(self, token: jax.Array) -> Guide:
        """Return the guide after the draft ``token`` [B]."""
        ...

    def at(self, state: jax.Array) -> Guide:
        """Return the guide at another place [B]."""
        ...


@struct.dataclass
class Feed:
    """Committed rows for a drafter, and the drafts requested from it.

    Row b of the batch provides ``count[b]`` committed rows at positions ``first_position[b] + t``.
    Entries at or past ``count`` are ignored. A drafter reads the members it needs.
    """

    aux: jax.Array | None  # [B, T, A] auxiliary states of the committed rows
    count: jax.Array  # [B] int32
    first_position: jax.Array  # [B] int32
    anchor: jax.Array  # [B] int32, the token that follows the last committed row
    wants_draft: jax.Array  # [B] bool
    limit: jax.Array  # [B] int32, maximum number of drafts for the row
    hidden: jax.Array | None = None  # [B, T, D] rows after the target's final norm
    tokens: jax.Array | None = None  # [B, T] the committed tokens themselves
    draw: Draw | None = None  # None: greedy drafts
    guide: Guide | None = None  # what structured output allows; a drafter may ignore it


@struct.dataclass
class DraftInfo:
    """Diagnostics of a drafter's step. Nothing depends on them."""

    reason: jax.Array  # [B] int32, a NoDraft
    forwards: jax.Array  # [] int32, forward passes for proposals


@struct.dataclass
class TargetOutput:
    """Result of one forward pass of a target over T token rows.

    ``state`` is *tentative*: none of its rows is valid until ``commit`` sets how many are accepted.
    """

    logits: jax.Array  # [B, T, V] float32; [B, 1, V] when one row was requested
    aux: jax.Array | None  # [B, T, A]
    hidden: jax.Array | None  # [B, T, D]
    state: Any


@runtime_checkable
class Target(Protocol):
    """Model whose output must not change. A pytree; see the module docstring."""

    @property
    def vocab_size(self) -> int:
        """V; tokens are 0..V-1."""
        ...

    @property
    def context_length(self) -> int:
        """Maximum number of positions."""
        ...

    def init(self, batch: int, capacity: int) -> Any:
        """Return an empty state of ``batch`` rows with room for ``capacity`` positions each."""
        ...

    def forward(
        self, tokens: jax.Array, count: jax.Array, state: Any, *, row: jax.Array | None = None
    ) -> TargetOutput:
        """Run rows ``tokens[b, :count[b]]`` after the committed ones.

        Args:
          tokens: [B, T] int32. Entries at or past ``count`` are ignored.
          count: [B] int32, 0..T.
          state: state from ``init`` or ``commit``. It is not changed.
          row: [B] int32, the only row to return logits of, as [B, 1, V]. Default: all rows.
        """
        ...

    def commit(self, state: Any, count: jax.Array) -> Any:
        """Commit the first ``count[b]`` rows of the last ``forward`` and discard the others.

        Args:
          state: the tentative state of a ``TargetOutput``.
          count: [B] int32, 0..T; at most the number of rows that were run.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. A bad drafter slows generation down but never changes its output.

    A drafter is a pytree; see the module docstring. It needs only these members. The optional ones
    are in :class:`DrafterDefaults`, with their default values.
    """

    @property
    def draft_tokens(self) -> int:
        """K, the maximum number of tokens per proposal."""
        ...

    def init(self, batch: int, capacity: int) -> Any:
        """Return an empty state of ``batch`` rows, each for up to ``capacity`` positions."""
        ...

    def ingest(self, state: Any, feed: Feed) -> Any:
        """Ingest committed rows. Rejected rows never reach a drafter."""
        ...

    def propose(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        """Draft the tokens after ``feed.anchor`` from everything ingested so far."""
        ...

    def step(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        """Run ``ingest``, then ``propose``."""
        ...


class Head(NamedTuple):
    """Last step of a target's forward pass, from a hidden row to logits."""

    width: int  # D, of ``TargetOutput.hidden``
    dtype: DTypeLike  # of ``TargetOutput.hidden``
    logits: Callable[[jax.Array], jax.Array]  # [B, 1, D] -> [B, 1, V] float32


class TargetDefaults:
    """Optional members of a target, with their defaults. Inherit or override them.

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
    def prompt_rows(self) -> int:
        """Maximum number of a prompt's rows that ``forward`` takes at once, in a state of ``init``.

        They lie within the state's capacity, up to 128 of them behind it. Chunks of a prompt have
        as many rows if the device is faster so; see :func:`jaxdraft.devices.prompt_chunk`.
        """
        return PREFILL_CHUNK

    @property
    def placement(self) -> Placement | None:
        """The mesh that the target is divided over; None by default: it is on one device."""
        return None

    @property
    def head(self) -> Head | None:
        """Separate head, so that a prompt of many chunks runs it only once.

        None by default: the logits of every chunk are computed.
        """
        return None

    def skip(self, state: Any, tokens: jax.Array, length: jax.Array) -> Any:
        """Start rows after positions whose pages are already filled.

        Args:
          state: state of rows without any committed position.
          tokens: [B, S] int32, the tokens of the rows.
          length: [B] int32, number of positions in the filled pages.

        Returns:
          The state, or None if the state of a row includes more than its pages. The default is
          None, unless the state is empty.
        """
        del tokens, length
        return None if jax.tree.leaves(state) else state


class DrafterDefaults:
    """Optional members of a drafter, with their defaults. Inherit or override them.

    A drafter that does not inherit them is completed by :func:`full_drafter`.
    """

    @property
    def declines(self) -> bool:
        """Whether the drafter often proposes nothing.

        If true, rounds without drafts in any row cost a plain step, but the program is twice as
        large.
        """
        return False

    @property
    def overlap(self) -> int:
        """Number of tokens after a page that the content of the page depends on."""
        return 0

    @property
    def windowed(self) -> bool:
        """Whether ``init_pool`` takes ``rings`` and ``page_size`` instead of pages."""
        return False

    def with_draft_tokens(self, draft_tokens: int) -> Drafter:
        """Return the same drafter with another K.

        Raises:
          ValueError: the drafter does not support this K. By default only its own is supported.
        """
        part = cast(Drafter, self)
        if draft_tokens == part.draft_tokens:
            return part
        raise ValueError(
            f"draft_tokens is {draft_tokens}; the K of this {type(self).__name__} is fixed "
            f"at {part.draft_tokens}: pass draft_limit to use fewer drafts"
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
        """Start rows after positions with filled pages; see :meth:`TargetDefaults.skip`."""
        del tokens, length
        return None if jax.tree.leaves(state) else state

    def row_statistics(self, state: Any) -> Any:
        """Return the part of the state that cannot be rebuilt from tokens, for example acceptance.

        :meth:`with_row_statistics` restores it for a row that was evicted from an engine.

        Returns:
          A pytree of arrays [B, ...]. By default an empty one.
        """
        del state
        return ()

    def with_row_statistics(self, state: Any, statistics: Any) -> Any:
        """Return the state with the values from :meth:`row_statistics` restored."""
        del statistics
        return state

    def misses(self, state: Any) -> jax.Array | int:
        """Count how often the drafter's pool had no room for a row. The default is 0."""
        del state
        return 0

    def cost(self) -> DrafterCost | None:
        """Return the memory cost in an engine. None means the size of what ``init`` allocates."""
        return None

    def step(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        """Run ``ingest``, then ``propose``, as one compiled program."""
        return _step(cast(Drafter, self), state, feed)


@jax.jit
def _step(drafter: Drafter, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
    return drafter.propose(drafter.ingest(state, feed), feed)


class FullTarget(TargetDefaults, Target):
    """Target with all members, as returned by :func:`full_target`."""


class FullDrafter(DrafterDefaults, Drafter):
    """Drafter with all members, as returned by :func:`full_drafter`."""


class _Completed:
    """Target or drafter whose missing optional members come from ``defaults``."""

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


def mesh_of(target: Target) -> Mesh | None:
    """Return the mesh that a target is divided over; None: it is on one device."""
    placement = full_target(target).placement
    return None if placement is None else placement.mesh


def full_drafter(drafter: Drafter) -> FullDrafter:
    """Return ``drafter`` with every member of :class:`DrafterDefaults`: its own, or the default."""
    if isinstance(drafter, DrafterDefaults):
        return cast(FullDrafter, drafter)
    return cast(FullDrafter, _Completed(drafter, DrafterDefaults))
