"""The programs of an engine: the pieces of a round, run on some rows of a larger state.

Each is compiled once per shape. Shapes come from :class:`Buckets`, so there are few of them. The
logic of a round is elsewhere: these functions take rows out of the state, bind them to their pages,
call :mod:`jaxdraft.rounds`, and put the rows back.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxdraft import rounds
from jaxdraft.base import NO_TOKEN, Drafter, Status, Target, full_drafter, full_target, mesh_of
from jaxdraft.meshes import traced_for
from jaxdraft.rounds import Logprobs, RoundInfo, RoundState, Rules
from jaxdraft.sizes import power_of_two
from jaxdraft.state import rows as rows_
from jaxdraft.state.rows import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """The sizes that programs are compiled for, each in ascending order. Work is padded up.

    Attributes:
      rows: numbers of rows per step.
      chunks: numbers of prompt tokens per row in one step.
      columns: numbers of columns M of the page tables.
      plain: whether a step without drafts has a separate program, of one position per request.
        (There is no width between that and K, since the draws of a round depend on its width.)
    """

    rows: tuple[int, ...]
    chunks: tuple[int, ...]
    columns: tuple[int, ...]
    plain: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "chunks", "columns"):
            sizes = getattr(self, name)
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 0:
                raise ValueError(f"{name} is {sizes}; expected ascending sizes")

    @classmethod
    def of(cls, *, max_batch: int, chunk: int, columns: int) -> Buckets:
        """Return powers of two for rows, and steps of four for chunks and columns.

        This keeps the number of programs small. The cost of a step depends on its rows and its
        chunk. The columns only decide how much of the tables goes to the device: attention reads
        up to the longest row, whatever the number of columns.
        """
        return cls(
            rows=_powers(max_batch, 2, 1),
            chunks=_powers(chunk, 4, 8),
            columns=_powers(columns, 4, 32),
            plain=True,
        )


def bucket(sizes: tuple[int, ...], wanted: int) -> int:
    """Return the smallest of ``sizes`` that is at least ``wanted``."""
    return next(size for size in sizes if size >= wanted)


def _powers(most: int, factor: int, least: int) -> tuple[int, ...]:
    sizes = [most]
    while sizes[0] // factor >= least:
        sizes.insert(0, power_of_two(-(-sizes[0] // factor)))
        if len(sizes) > 1 and sizes[0] >= sizes[1]:
            sizes.pop(0)
            break
    return tuple(sizes)


@struct.dataclass
class BatchRows:
    """The rows of one step, and their pages."""

    rows: jax.Array  # [R] int32 rows of the state; past its end for padding
    live: jax.Array  # [R] bool: False for padding
    table: jax.Array  # [R, M] int32


@struct.dataclass
class PromptChunk:
    """The next tokens of some prompts, for T tokens per row."""

    tokens: jax.Array  # [R, T] int32
    count: jax.Array  # [R] int32, number of tokens of each row
    begins: jax.Array  # [R] bool: the prompt ends here, and the token that follows is emitted
    resumes: jax.Array
    """[R] bool: the text ends here except for its last token. That token was emitted before the row
    was preempted and is already in ``state.tokens``."""


@struct.dataclass
class RowText:
    """A text to be put into a row, and the saved state of its first positions."""

    row: jax.Array  # [1] int32
    tokens: jax.Array  # [1, S] int32, the tokens of the text so far
    counts: jax.Array
    """[5, 1] int32: positions already in the pages, emitted tokens, failures of the drafter, states
    of the automata of stop strings and of the structure."""
    blank: tuple[jax.Array, ...]  # the row leaves of an empty row
    checkpoint: tuple[jax.Array, ...] | None  # those after the first positions; see `save`
    rings: tuple[jax.Array, ...]  # the contents of the row's rings


@struct.dataclass
class Report:
    """Results of a step for the host, in one array of integers; see :class:`Columns`."""

    numbers: jax.Array  # [R, W] int32
    logprobs: Logprobs | None = None


class Columns:
    """The columns of a :class:`Report`, for drafts of K tokens."""

    NAMES = (
        "status", "length", "emitted", "count", "accepted", "pending", "failures", "stop_state",
        "structure_state", "target_forwards", "drafter_forwards", "rounds", "row_emitted",
        "proposed",
    )  # fmt: skip

    def __init__(self, numbers: np.ndarray, draft_tokens: int) -> None:
        self._numbers = numbers
        k, fixed = draft_tokens, len(self.NAMES)
        for place, name in enumerate(self.NAMES):
            setattr(self, name, numbers[:, place])
        self.tokens, self.evaluated_at, self.accepted_at, self.undrafted = np.split(
            numbers[:, fixed:], (k + 1, 2 * k + 1, 3 * k + 1), axis=1
        )

    def rows(self, order: list[int]) -> Columns:
        """Return the columns with the rows in ``order`` only, in that order."""
        return Columns(self._numbers[order], self.tokens.shape[1] - 1)

    status: np.ndarray
    length: np.ndarray
    emitted: np.ndarray
    count: np.ndarray
    accepted: np.ndarray
    pending: np.ndarray
    failures: np.ndarray
    stop_state: np.ndarray
    structure_state: np.ndarray
    target_forwards: np.ndarray
    drafter_forwards: np.ndarray
    rounds: np.ndarray
    row_emitted: np.ndarray
    proposed: np.ndarray


def _report(state: RoundState, info: RoundInfo, draft_tokens: int) -> Report:
    step = jnp.arange(draft_tokens + 1, dtype=jnp.int32)[None]
    place = (state.length - info.emitted)[:, None] + step
    tokens = jnp.take_along_axis(state.tokens, place, axis=1, mode="clip")
    tokens = jnp.where(step < info.emitted[:, None], tokens, NO_TOKEN)
    stats = state.stats
    every = jnp.zeros_like(state.length)
    one = (
        state.status, state.length, state.emitted, info.emitted, info.accepted,
        state.proposal.length, state.failures, state.stop_state,
        state.structure_state, every + stats.target_forwards,
        every + stats.drafter_forwards, stats.rounds, stats.emitted, stats.proposed,
    )  # fmt: skip
    wide = (tokens, stats.evaluated_at, stats.accepted_at, stats.undrafted)
    numbers = jnp.concatenate([jnp.stack(one, axis=1), *wide], axis=1)
    return Report(numbers, info.logprobs)


def _gather(state: RoundState, rules: Rules, batch: BatchRows, where: Layout) -> Any:
    part = rows_.take(state, where, batch.rows)
    part = replace(part, status=jnp.where(batch.live, part.status, Status.EMPTY).astype(jnp.int32))
    mine = jax.tree.map(lambda x: jnp.take(x, batch.rows, axis=0, mode="clip"), _of_rows(rules))
    return bound(part, batch), _with_rows(rules, mine)


def bound(state: RoundState, batch: BatchRows) -> RoundState:
    """Return the state with the pages of its rows."""
    both = (state.target, state.drafter)
    target, drafter = rows_.bind_pages(both, batch.table, batch.rows)
    return replace(state, target=target, drafter=drafter)


def _unbound(state: RoundState) -> RoundState:
    target, drafter = rows_.unbind_pages((state.target, state.drafter))
    return replace(state, target=target, drafter=drafter)


def _of_rows(rules: Rules) -> Rules:
    """Return the rules without the automata, which belong to no row."""
    none: Any = None
    if rules.stop_text is not None:
        rules = replace(rules, stop_text=replace(rules.stop_text, table=none))
    if rules.structures is not None:
        rules = replace(rules, structures=replace(rules.structures, table=none, classes=none))
    return rules


def _with_rows(rules: Rules, mine: Rules) -> Rules:
    stop, structures = rules.stop_text, rules.structures
    if stop is not None and mine.stop_text is not None:
        mine = replace(mine, stop_text=replace(stop, which=mine.stop_text.which))
    if structures is not None and mine.structures is not None:
        mine = replace(mine, structures=replace(structures, which=mine.structures.which))
    return mine


@functools.partial(
    jax.jit, static_argnames=("where", "all_rows", "plain", "logprobs"), donate_argnames=("state",)
)
def run_round(
    target: Target,
    drafter: Drafter,
    state: RoundState,
    rules: Rules,
    batch: BatchRows,
    *,
    where: Layout,
    all_rows: bool,
    plain: bool,
    logprobs: int | None,
) -> tuple[RoundState, Report]:
    """Run one round of some rows.

    Args:
      target: the target.
      drafter: the drafter.
      state: state of all rows.
      rules: rules of all rows.
      batch: the rows that take part.
      where: layout of the state: the leaves that belong to rows.
      all_rows: whether all rows take part, in their order, so that nothing is moved.
      plain: whether the round has no drafts.
      logprobs: as in :func:`jaxdraft.rounds.round`.
    """
    with traced_for(mesh_of(target)):
        return _run_round(target, drafter, state, rules, batch, where, all_rows, plain, logprobs)


def _run_round(
    target: Target,
    drafter: Drafter,
    state: RoundState,
    rules: Rules,
    batch: BatchRows,
    where: Layout,
    all_rows: bool,
    plain: bool,
    logprobs: int | None,
) -> tuple[RoundState, Report]:
    if all_rows:
        part, mine = bound(state, batch), rules
    else:
        part, mine = _gather(state, rules, batch, where)
    if plain:
        none = jax.tree.map(lambda x: x[:, :0], (part.proposal.tokens, part.proposal.support))
        part = replace(part, proposal=replace(part.proposal, tokens=none[0], support=none[1]))
    # When no row has drafts, the host chooses the plain program.
    part, info = rounds.round(target, drafter, part, mine, logprobs=logprobs, drafted=True)
    report = _report(part, info, drafter.draft_tokens)
    part = _unbound(part)
    return (part if all_rows else rows_.put(state, part, where, batch.rows)), report


@functools.partial(jax.jit, static_argnames=("where", "logprobs"), donate_argnames=("state",))
def run_chunk(
    target: Target,
    drafter: Drafter,
    state: RoundState,
    rules: Rules,
    batch: BatchRows,
    chunk: PromptChunk,
    *,
    where: Layout,
    logprobs: int | None,
) -> tuple[RoundState, Report]:
    """Run the next tokens of some prompts, and the first proposal of those that end here.

    Args:
      target, drafter, state, rules, batch, where, logprobs: as in :func:`run_round`.
      chunk: the tokens.
    """
    with traced_for(mesh_of(target)):
        return _run_chunk(target, drafter, state, rules, batch, chunk, where, logprobs)


def _run_chunk(
    target: Target,
    drafter: Drafter,
    state: RoundState,
    rules: Rules,
    batch: BatchRows,
    chunk: PromptChunk,
    where: Layout,
    logprobs: int | None,
) -> tuple[RoundState, Report]:
    begins, resumes = chunk.begins, chunk.resumes
    part, mine = _gather(state, rules, batch, where)
    part, last = rounds.read(target, drafter, part, chunk.tokens, chunk.count)
    logits = rounds.logits_after(target, last, needed=jnp.any(begins))
    part = replace(part, status=jnp.where(begins, Status.RUNNING, part.status).astype(jnp.int32))
    part, first = rounds.emit_first_token(part, logits, mine, logprobs=logprobs)
    last_token = jnp.take_along_axis(part.tokens, part.length[:, None], axis=1, mode="clip")[:, 0]
    part = replace(
        part,
        anchor=jnp.where(resumes, last_token, part.anchor),
        length=part.length + resumes.astype(jnp.int32),
        status=jnp.where(resumes, Status.RUNNING, part.status).astype(jnp.int32),
    )
    part, info = rounds.propose(drafter, part, mine, vocab_size=target.vocab_size)
    report = _report(part, replace(first, draft=info), drafter.draft_tokens)
    return rows_.put(state, _unbound(part), where, batch.rows), report


@functools.partial(jax.jit, static_argnames=("where", "parts", "skips"), donate_argnames=("state",))
def admit(
    target: Target,
    drafter: Drafter,
    state: RoundState,
    text: RowText,
    *,
    where: Layout,
    parts: Layout,
    skips: bool,
) -> RoundState:
    """Put a text into a row: clear the row, then restore the cached state of the text.

    Args:
      target: the target.
      drafter: the drafter.
      state: state of all rows.
      text: the text, its row and its saved state.
      where: layout of the state: the leaves that belong to rows.
      parts: layout of (target, drafter) alone.
      skips: whether pages alone are enough to continue after the first positions.
    """
    part = rows_.with_own(rows_.take(state, where, text.row), where, text.blank)
    length, emitted, failures, stop_state, structure_state = text.counts
    both = (part.target, part.drafter)
    if text.checkpoint is not None:
        fresh = full_drafter(drafter).row_statistics(
            both[1]
        )  # these belong to another text or turn
        both = rows_.with_own(both, parts, text.checkpoint)
        both = (both[0], full_drafter(drafter).with_row_statistics(both[1], fresh))
        if text.rings:
            nowhere = jnp.zeros((1, 0), jnp.int32)
            both = rows_.bind_pages(both, nowhere, text.row)
            both = rows_.with_ring_contents(both, text.rings)
            both = rows_.unbind_pages(both)
    elif skips:
        both = skip(target, drafter, both, text.tokens, length)
    part = replace(
        part,
        target=both[0],
        drafter=both[1],
        tokens=text.tokens,
        length=length,
        emitted=emitted,
        failures=failures,
        stop_state=stop_state,
        structure_state=structure_state,
    )
    return rows_.put(state, part, where, text.row)


def skip(
    target: Target, drafter: Drafter, both: tuple[Any, Any], tokens: jax.Array, length: jax.Array
) -> tuple[Any, Any]:
    """Start after the first ``length`` [B] positions; None for a part that cannot."""
    one, two = full_target(target), full_drafter(drafter)
    return one.skip(both[0], tokens, length), two.skip(both[1], tokens, length)


@functools.partial(jax.jit, static_argnames=("where",))
def save_drafts(drafter: Drafter, state: RoundState, row: jax.Array, *, where: Layout) -> Any:
    """Return the state that a preempted row needs later: its drafts and its statistics."""
    part = rows_.take(state, where, row)
    return part.proposal, full_drafter(drafter).row_statistics(part.drafter)


@functools.partial(jax.jit, static_argnames=("where",), donate_argnames=("state",))
def restore_drafts(
    drafter: Drafter, state: RoundState, row: jax.Array, saved_drafts: Any, *, where: Layout
) -> RoundState:
    """Restore the result of :func:`save_drafts` to a row that has read its text again."""
    part = rows_.take(state, where, row)
    proposal, known = saved_drafts
    if proposal.support is None or part.proposal.support is None:  # no row sampled then, or now
        proposal = replace(proposal, support=part.proposal.support)
    restored = full_drafter(drafter).with_row_statistics(part.drafter, known)
    part = replace(part, proposal=proposal, drafter=restored)
    return rows_.put(state, part, where, row)


@functools.partial(jax.jit, static_argnames=("where", "parts"))
def save(
    state: RoundState, row: jax.Array, *, where: Layout, parts: Layout
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Return the state of one row beside its pages, and the contents of its rings."""
    part = rows_.take(state, where, row)
    both = (part.target, part.drafter)
    nowhere = jnp.zeros((1, 0), jnp.int32)
    rings = rows_.ring_contents(rows_.bind_pages(both, nowhere, row))
    return rows_.own(both, parts), rings


@functools.partial(jax.jit, donate_argnames=("state",))
def stop(state: RoundState, rows: jax.Array) -> RoundState:
    """Stop the rows where ``rows`` [B] is true."""
    status = jnp.where(rows, Status.EMPTY, state.status).astype(jnp.int32)
    proposal = replace(state.proposal, length=jnp.where(rows, 0, state.proposal.length))
    return replace(state, status=status, proposal=proposal)


@functools.partial(jax.jit, donate_argnames=("state",))
def copy(state: RoundState, source: jax.Array, to: jax.Array) -> RoundState:
    """Copy pages ``source`` [C] onto pages ``to`` [C]."""
    target, drafter = rows_.copy_pages((state.target, state.drafter), source, to)
    return replace(state, target=target, drafter=drafter)
