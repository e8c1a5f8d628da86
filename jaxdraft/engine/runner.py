"""The device side of an engine: its state, and the programs that a step runs on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdraft import rounds
from jaxdraft.base import NO_PAGE, Drafter, Status, Target, full_drafter, full_target
from jaxdraft.checks import check_int, parse_memory
from jaxdraft.draft.wrapper import pool_of
from jaxdraft.engine import programs
from jaxdraft.engine.programs import (
    BatchRows,
    Buckets,
    Columns,
    PromptChunk,
    Report,
    RowText,
    bucket,
)
from jaxdraft.engine.rules import RulesTable
from jaxdraft.engine.scheduler import Work
from jaxdraft.engine.sequence import Phase, Sequence
from jaxdraft.model import Model
from jaxdraft.plan import plan
from jaxdraft.rounds import RoundState
from jaxdraft.sharding.states import divide_state
from jaxdraft.state import rows


class Runner:
    """A state of B rows, and the operations on it.

    Args:
      target: the target.
      drafter: the drafter.
      batch: B, number of rows.
      pages: P, number of pages if the target has pages.
      page_size: Z, positions per page.
      columns: M, columns of the page tables.
      context: S, tokens of the longest row.
      buckets: sizes that programs are compiled for.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        batch: int,
        pages: int,
        page_size: int,
        columns: int,
        context: int,
        buckets: Buckets,
    ) -> None:
        self.target, self.drafter, self.batch, self.buckets = target, drafter, batch, buckets
        self._sizes = dict(pages=pages, page_size=page_size, columns=columns)
        self._columns, self._context = columns, context
        self.table = RulesTable(batch, target.vocab_size)
        self.compiled: set[tuple[Any, ...]] = set()
        shape = jax.eval_shape(lambda: self._make(batch))
        self.paged = rows.has_pages((shape.target, shape.drafter))
        self.drafter_paged = rows.has_pages(shape.drafter)
        self.skips = self._can_skip()
        statistics = jax.eval_shape(full_drafter(drafter).row_statistics, shape.drafter)
        self.learns = bool(jax.tree.leaves(statistics))
        self._parts = rows.layout(lambda b: _states(self._make(b)), batch)
        # A drawing drafter also returns its support, so proposals have one while any row samples.
        self._support = self._support_shape(shape)
        self._where = {
            drawn: rows.layout(lambda b, drawn=drawn: self._formed(self._make(b), drawn), batch)
            for drawn in (False, True)
        }
        self._new_row = jax.jit(lambda *parts: self._make(1, *parts))
        self._new_state = jax.jit(lambda *parts: self._make(batch, *parts))
        self.update(target, drafter)

    def update(self, target: Target, drafter: Drafter) -> None:
        """Take other weights of the same form, and an empty state. Programs stay compiled."""
        self.target, self.drafter = target, drafter
        one = self._new_row(target, drafter)
        self._blank = {d: rows.own(self._formed(one, d), self._where[d]) for d in (False, True)}
        self.reset()

    def reset(self) -> None:
        """Replace the state with an empty one."""
        self.state: RoundState = self._new_state(self.target, self.drafter)
        self._drawn = False

    @property
    def misses(self) -> int:
        """Number of times a row found no room in the drafter's cache."""
        return int(full_drafter(self.drafter).misses(self.state.drafter))

    def run(
        self, work: Work, active: Mapping[int, Sequence]
    ) -> tuple[tuple[Columns, Report] | None, tuple[Columns, Report] | None]:
        """Run the programs of a step, and fetch all their reports at once.

        Args:
          work: the work of the step, from the scheduler.
          active: the sequence of each used row.

        Returns:
          Report of the round in the order of ``work.running``, and report of the chunk in the
          order of ``work.reading``.
        """
        self.table.update(active)
        if self.learns:
            for sequence, row in work.lost:
                sequence.saved_drafts = (self._save_drafts(row), sequence.pending)
        if work.stopped:
            gone = np.zeros(self.batch, bool)
            gone[work.stopped] = True
            self.state = programs.stop(self.state, gone)
        if self.table.form.random != self._drawn:
            self._drawn = self.table.form.random
            self.state = self._formed(self.state, self._drawn)
        reports: list[Report | None] = [None, None]
        order: list[int] = []
        if work.running:
            everyone = sum(r.phase is Phase.RUNNING for r in active.values())
            reports[0], order = self._round(work.running, everyone)
        for source, to in work.copies:
            pair = np.asarray([[source], [to]], np.int32)
            self.state = programs.copy(self.state, *pair)
        for admission in work.admitted:
            self._admit(admission.sequence, admission.checkpoint)
        if work.reading:
            reports[1] = self._chunk(work.reading)
            for sequence, count in work.reading:
                if sequence.read + count in sequence.checkpoint_positions:
                    sequence.pending_checkpoints[sequence.read + count] = self.save(sequence)
                if sequence.saved_drafts is not None and sequence.read + count == sequence.goal:
                    self._restore_drafts(sequence)
        fetched: list[Report | None] = jax.device_get(reports)
        k = self.drafter.draft_tokens
        reported = [None if r is None else (Columns(np.asarray(r.numbers), k), r) for r in fetched]
        if reported[0] is not None:
            reported[0] = (
                reported[0][0].rows(order),
                jax.tree.map(lambda x: x[order], reported[0][1]),
            )
        return reported[0], reported[1]

    def check(self, active: Mapping[int, Sequence], stopping: list[int]) -> None:
        """Check that the device agrees with the host.

        Args:
          active: the sequences that have rows.
          stopping: rows that may still run on the device.

        Raises:
          AssertionError: if they disagree.
        """
        status, length = jax.device_get((self.state.status, self.state.length))
        for row in range(self.batch):
            sequence, runs = active.get(row), status[row] == Status.RUNNING
            if sequence is None:
                assert not runs or row in stopping, f"row {row} runs without a sequence"
            elif sequence.phase is Phase.RUNNING:
                assert runs and length[row] == len(sequence.ids), (
                    sequence,
                    status[row],
                    length[row],
                )
                assert sequence.read == len(sequence.ids) - 1, (sequence, sequence.read)
            else:
                assert not runs and length[row] == sequence.read, (sequence, length[row])

    def save(self, sequence: Sequence) -> Any:
        """Return the state of a sequence's row beside its pages."""
        row = np.asarray([sequence.row], np.int32)
        where = self._where[self._drawn]
        return programs.save(self.state, row, where=where, parts=self._parts)

    def _save_drafts(self, row: int) -> Any:
        at, where = np.asarray([row], np.int32), self._where[self._drawn]
        return programs.save_drafts(self.drafter, self.state, at, where=where)

    def _restore_drafts(self, sequence: Sequence) -> None:
        assert sequence.saved_drafts is not None
        at, where = np.asarray([sequence.row], np.int32), self._where[self._drawn]
        self.state = programs.restore_drafts(
            self.drafter, self.state, at, sequence.saved_drafts[0], where=where
        )

    # ------------------------------------------------------------------ programs

    def _round(self, sequences: list[Sequence], everyone: int) -> tuple[Report, list[int]]:
        """Run a round, and return its report and the place of each sequence in it."""
        size = bucket(self.buckets.rows, len(sequences))
        # When the whole state takes part anyway, nothing has to be moved.
        all_rows = size >= self.batch and len(sequences) == everyone
        batch = self._batch_rows(sequences, list(range(self.batch)) if all_rows else None, size)
        plain = self.buckets.plain and not any(r.pending for r in sequences)
        self._count("round", batch, all_rows, plain)
        self.state, report = programs.run_round(
            self.target, self.drafter, self.state, self.table.rules, batch,
            where=self._where[self._drawn], all_rows=all_rows, plain=plain,
            logprobs=self._alternatives(),
        )  # fmt: skip
        order = [r.row if all_rows else place for place, r in enumerate(sequences)]
        return report, order  # type: ignore[bad-return]

    def _chunk(self, reading: list[tuple[Sequence, int]]) -> Report:
        sequences = [sequence for sequence, _ in reading]
        size = bucket(self.buckets.rows, len(sequences))
        width = bucket(self.buckets.chunks, max(count for _, count in reading))
        tokens, counts = np.zeros((size, width), np.int32), np.zeros(size, np.int32)
        begins, resumes = np.zeros(size, bool), np.zeros(size, bool)
        for place, (sequence, count) in enumerate(reading):
            tokens[place, :count] = sequence.ids[sequence.read : sequence.read + count]
            counts[place] = count
            ends = sequence.read + count == sequence.goal
            begins[place], resumes[place] = ends and not sequence.known, ends and sequence.known
        batch = self._batch_rows(sequences, None, size)
        self._count("chunk", batch, width)
        self.state, report = programs.run_chunk(
            self.target, self.drafter, self.state, self.table.rules, batch,
            PromptChunk(tokens, counts, begins, resumes),  # type: ignore[bad-argument-type]
            where=self._where[self._drawn], logprobs=self._alternatives(),
        )  # fmt: skip
        return report

    def _admit(self, sequence: Sequence, checkpoint: Any) -> None:
        row: Any = np.asarray([sequence.row], np.int32)
        tokens: Any = np.zeros((1, self._context), np.int32)
        tokens[0, : len(sequence.ids)] = sequence.ids
        counts = [
            sequence.read, sequence.emitted, sequence.failed_before, sequence.stop_state,
            sequence.structure_state,
        ]  # fmt: skip
        column: Any = np.asarray(counts, np.int32)[:, None]
        leaves, rings = (None, ()) if checkpoint is None else checkpoint
        text = RowText(row, tokens, column, self._blank[self._drawn], leaves, rings)
        self.state = programs.admit(
            self.target, self.drafter, self.state, text,
            where=self._where[self._drawn], parts=self._parts, skips=self.skips,
        )  # fmt: skip

    def _batch_rows(
        self, sequences: list[Sequence], order: list[int] | None, size: int
    ) -> BatchRows:
        """Return the rows ``order``, or those of the sequences, padded to ``size``."""
        places: Any = [r.row for r in sequences] if order is None else order
        rows_of = np.full(size, self.batch, np.int32)
        rows_of[: len(places)] = places
        most = max(len(r.pages) for r in sequences)
        columns = bucket(self.buckets.columns, most) if self.paged else 0
        table = np.full((size, columns), NO_PAGE, np.int32)
        place_of = {row: place for place, row in enumerate(places)}
        for sequence in sequences:
            table[place_of[sequence.row], : len(sequence.pages)] = sequence.pages
        return BatchRows(rows_of, rows_of < self.batch, table)  # type: ignore[bad-argument-type]

    def _alternatives(self) -> int | None:
        wanted = self.table.form.logprobs
        return None if wanted is None else min(wanted, self.target.vocab_size)

    def _count(self, name: str, batch: BatchRows, *shape: Any) -> None:
        self.compiled.add((name, np.shape(batch.table), self.table.form, *shape))

    # ------------------------------------------------------------------ the state's shape

    def _make(self, batch: int, *parts: Any) -> RoundState:
        """Return an empty state of ``parts``, target and drafter. Default: the runner's own."""
        own, drafts = parts or (self.target, self.drafter)
        target, drafter = empty_states(own, drafts, batch, **self._sizes)
        state = rounds.empty(
            target,
            drafter,
            batch=batch,
            size=self._context,
            draft_tokens=self.drafter.draft_tokens,
        )
        placement = full_target(self.target).placement
        return state if placement is None else divide_state(placement, state, batch)

    def _can_skip(self) -> bool:
        """Return whether rows can start after full pages without a checkpoint."""

        def ask() -> Any:
            state, zero = self._make(1), jnp.zeros((1,), jnp.int32)
            return programs.skip(self.target, self.drafter, _states(state), state.tokens, zero)

        return all(part is not None for part in jax.eval_shape(ask))

    def _support_shape(self, shape: RoundState) -> Any:
        """Return the shape of a proposal's support.

        Raises:
          ValueError: if a result of the target or the drafter breaks its contract.
        """
        rules = self.table.neutral(random=True)

        def ask(state: RoundState) -> Any:
            none = jnp.full((self.batch, self._columns), NO_PAGE, jnp.int32)
            batch = BatchRows(
                jnp.arange(self.batch, dtype=jnp.int32), jnp.ones((self.batch,), bool), none
            )
            state = programs.bound(state, batch)
            zeros = jnp.zeros((self.batch, 1), jnp.int32)
            state, _ = rounds.read(self.target, self.drafter, state, zeros, zeros[:, 0])
            vocab = self.target.vocab_size
            return rounds.propose(self.drafter, state, rules, vocab_size=vocab)[0]

        return jax.eval_shape(ask, shape).proposal.support

    def _formed(self, state: RoundState, drawn: bool) -> RoundState:
        """Return the state in the form of greedy programs, or of programs that draw."""
        support = None
        if drawn and self._support is not None:
            batch = state.anchor.shape[0]
            support = jax.tree.map(
                lambda s: jnp.zeros((batch, *s.shape[1:]), s.dtype), self._support
            )
        return replace(state, proposal=replace(state.proposal, support=support))


def empty_states(
    target: Target,
    drafter: Drafter,
    batch: int,
    *,
    pages: int,
    page_size: int,
    columns: int,
) -> tuple[Any, Any]:
    """Return empty states of target and drafter, in pools where they have an ``init_pool``."""
    sizes = dict(pages=pages, page_size=page_size, columns=columns)
    state = full_target(target).init_pool(batch, **sizes)
    return rows.engine_owned((state, pool_of(drafter, batch, sizes)))


def checkpoint_bytes(target: Target, drafter: Drafter, **sizes: int) -> int:
    """Return the bytes of one row's state beside its pages; the sizes are those of a runner."""
    return rows.row_bytes(lambda b: empty_states(target, drafter, b, **sizes))


def pool_pages(
    model: Model,
    *,
    rows: int,
    columns: int,
    page_size: int,
    context: int,
    memory: int | str | None,
    pages: int | None,
    checkpoints: int,
) -> int:
    """Return P, the pages of a pool.

    Args:
      model: the model, with the drafter that is used.
      rows: B, number of rows.
      columns: M, columns of the page tables.
      page_size: Z, positions per page.
      context: S, tokens of the longest row.
      memory: bytes for everything, instead of ``pages``.
      pages: P itself. Default: all rows at full context.
      checkpoints: maximum number of checkpoints, which count towards ``memory``.

    Raises:
      ValueError: if both are given, or the memory is too small.
    """
    if memory is None:
        return rows * columns if pages is None else check_int("pages", pages)
    if pages is not None:
        raise ValueError(f"memory is {memory!r} and pages is {pages}; expected one of them")
    sizes = dict(pages=columns, page_size=page_size, columns=columns)
    each = checkpoint_bytes(model.target, model.drafter, **sizes)
    left = parse_memory(memory) - checkpoints * each
    if left <= 0:
        raise ValueError(
            f"memory is {memory!r}; {checkpoints} checkpoints of {each} bytes need more"
        )
    found = plan(model, memory=left, max_batch=rows, context=context, page_size=page_size)
    return min(found.pages, rows * columns)


def _states(state: RoundState) -> Any:
    return state.target, state.drafter


__all__ = ["Runner", "checkpoint_bytes", "pool_pages"]
