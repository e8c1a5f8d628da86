"""Scheduling of sequences, rows and pages. Plain Python, no device arrays.

First come, first served. Every running sequence takes part in the next round. In the same step some
prompts are read further, within a budget of tokens. A sequence is admitted when a row is free and
so are pages for its prompt and its first round; no later sequence overtakes it. When pages run out
later, cached pages that no sequence uses are evicted first. Then the youngest sequence is preempted
and recomputed when there is room. The oldest is never preempted and fits alone, so it always
makes progress.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import OrderedDict
from typing import Any

from jaxdraft.engine.pages import Pages as PagePool
from jaxdraft.engine.pages import PrefixCache
from jaxdraft.engine.sequence import Phase, Sequence


@dataclasses.dataclass
class Work:
    """The work of one step, in this order."""

    lost: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)  # their rows
    stopped: list[int] = dataclasses.field(default_factory=list)  # rows to stop on the device
    running: list[Sequence] = dataclasses.field(default_factory=list)  # one round
    copies: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # page onto page
    admitted: list[Admission] = dataclasses.field(default_factory=list)
    reading: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)  # tokens each


@dataclasses.dataclass
class Admission:
    """Admission of a sequence to a row."""

    sequence: Sequence
    checkpoint: Any  # state of the row after the cached positions, if it is needed


class Scheduler:
    """Rows and pages of an engine, and the sequences that have or wait for them.

    Args:
      rows: B, number of rows.
      pages: the pool.
      lookahead: number of positions past those of a round that a drafter may write.
      chunk: maximum number of prompt tokens per row in one step.
      budget: maximum number of prompt tokens per step, over all rows.
      prefixes: whether full pages are cached by content.
      checkpointed: whether a prefix needs a checkpoint beside its pages.
      checkpoints: maximum number of checkpoints.
      overlap: as in :class:`PrefixCache`.
    """

    def __init__(
        self,
        *,
        rows: int,
        pages: PagePool,
        lookahead: int,
        chunk: int,
        budget: int,
        prefixes: bool,
        checkpointed: bool,
        checkpoints: int,
        overlap: int,
    ) -> None:
        self.rows, self.pages = rows, pages
        self.lookahead, self.chunk, self.budget = lookahead, chunk, budget
        self.prefixes = prefixes and pages.count > 0
        self.checkpointed = checkpointed
        self.cache = PrefixCache(pages, checkpoints=checkpoints, overlap=overlap)
        self.active: dict[int, Sequence] = {}  # by row
        self.kept: OrderedDict[int, Sequence] = OrderedDict()  # done, with pages; least used first
        self._free = list(range(rows))
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._serial = itertools.count()
        self.lost: list[tuple[Sequence, int]] = []  # preempted since the last step
        self.stopping: list[int] = []  # rows not yet stopped on the device

    # ------------------------------------------------------------------ sequences come and go

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by its order; a preempted one comes before all younger ones."""
        sequence.phase = Phase.WAITING
        heapq.heappush(self._waiting, (sequence.order, next(self._serial), sequence))

    @property
    def waiting(self) -> list[Sequence]:
        """The waiting sequences, in order of arrival."""
        found = (r for *_, r in sorted(self._waiting, key=lambda w: w[:2]))
        return list(dict.fromkeys(r for r in found if r.phase is Phase.WAITING))

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.active) or self._next() is not None

    def needed(self, sequence: Sequence) -> int:
        """Return the maximum number of pages that the sequence can come to hold."""
        return self.pages.needed(sequence.cap) if self.pages.count else 0

    def release(self, sequence: Sequence, *, stop: bool, remember: bool = True) -> None:
        """Free the row and the pages of a sequence, except pages cached by content.

        Args:
          sequence: the sequence, with or without a row.
          stop: whether the row must still be stopped on the device.
          remember: whether the content of its pages can be trusted.
        """
        if sequence.row is not None:
            self._vacate(sequence, stop)
            if remember:
                self.remember(sequence)
        self.free(sequence)

    def _vacate(self, sequence: Sequence, stop: bool) -> None:
        row, sequence.row = sequence.row, None
        assert row is not None
        del self.active[row]
        heapq.heappush(self._free, row)
        if stop:
            self.stopping.append(row)

    def free(self, sequence: Sequence) -> None:
        """Free the pages and the kept state of a sequence."""
        self.pages.drop(sequence.pages)
        sequence.pages, sequence.read, sequence.checkpoint = [], 0, None
        sequence.checkpoint_positions, sequence.pending_checkpoints = [], {}
        self.kept.pop(sequence.number, None)

    def retain(self, sequence: Sequence, checkpoint: Any, *, stop: bool) -> None:
        """Free the row of a sequence, and keep its used pages until they are needed elsewhere."""
        self._vacate(sequence, stop)
        self.remember(sequence)
        self.truncate(sequence, sequence.read)
        sequence.checkpoint = checkpoint
        self.kept[sequence.number] = sequence

    def truncate(self, sequence: Sequence, positions: int) -> None:
        """Cut a sequence back to its first ``positions`` positions, and free later pages."""
        held = self.pages.needed(positions) if self.pages.count else 0
        self.pages.drop(sequence.pages[held:])
        del sequence.pages[held:]
        sequence.read = positions

    def preempt(self, sequence: Sequence) -> None:
        """Preempt a sequence; its computed pages stay cached while there is room."""
        if sequence.phase is Phase.RUNNING and sequence.row is not None:
            self.lost.append((sequence, sequence.row))
        self.release(sequence, stop=True)
        sequence.preemptions += 1
        sequence.settle()
        self.add(sequence)

    def remember(self, sequence: Sequence) -> None:
        """Cache the full pages of a sequence by content, with their checkpoints."""
        if not self.prefixes:
            return
        full = self.cache.full(sequence.read)
        nodes = self.cache.insert(sequence.ids, sequence.pages[:full])
        for position, checkpoint in list(sequence.pending_checkpoints.items()):
            number = position // self.pages.size
            if number <= full:
                self.cache.keep(nodes[number - 1], checkpoint)
                del sequence.pending_checkpoints[position]

    def restart(self) -> None:
        """Discard all device state; sequences with a row wait again, with all their tokens."""
        for sequence in list(self.active.values()):
            sequence.settle()
            sequence.saved_drafts = None
            self.release(sequence, stop=False, remember=False)
            self.add(sequence)
        for sequence in list(self.kept.values()):
            self.free(sequence)
        self.cache.clear()
        self.stopping.clear()
        self.lost.clear()

    # ------------------------------------------------------------------ pages

    def _reserve(self, sequence: Sequence, count: int, spare: int = 0) -> list[int] | None:
        """Take ``count`` pages and leave ``spare`` more free; None if that is impossible.

        Pages cached by content are freed first, then those that finished sequences keep.
        """
        pages, wanted = self.pages, count + spare
        if pages.free < wanted:
            used = {p for r in (*self.active.values(), sequence) for p in r.pages}
            if wanted > pages.count - len(used):
                return None  # evict nothing, since it would not help
            while pages.free + self.cache.evictable() < wanted and self.kept:
                self.free(next(iter(self.kept.values())))
            self.cache.evict(wanted - pages.free)
            if pages.free < wanted:
                return None
        return pages.take(count)

    def _cover(self, sequence: Sequence, positions: int) -> bool:
        """Add pages for the first ``positions`` positions, and return whether that succeeded."""
        need = self.pages.needed(positions) - len(sequence.pages)
        if not self.pages.count or need <= 0:
            return True
        pages = self._reserve(sequence, need)
        if pages is None:
            return False
        sequence.pages += pages
        return True

    # ------------------------------------------------------------------ one step

    def next_step(self, alone: Sequence | None = None) -> Work:
        """Return the work of the next step. Rows and pages are allocated and freed here.

        Args:
          alone: the only sequence that may run, if there is one.
        """
        work = Work()
        rows = sorted(self.active.values(), key=lambda r: r.order)
        running = [r for r in rows if r.phase is Phase.RUNNING and alone in (None, r)]
        for sequence in running:
            reach = min(len(sequence.ids) + sequence.pending + self.lookahead, sequence.cap)
            while sequence.row is not None and not self._cover(sequence, reach):
                # Preempt the youngest, which may be this sequence. The oldest always fits alone.
                self.preempt(self._youngest())
        work.running = [r for r in running if r.row is not None]
        left = self.budget
        for sequence in rows:
            if sequence.row is not None and sequence.phase is Phase.READING:
                if alone in (None, sequence):
                    left -= self._read(work, sequence, left)
        if alone is not None:
            if alone.row is None:
                self._waiting = [w for w in self._waiting if w[2] is not alone]
                while not self._admit(work, alone, 0):
                    self.preempt(self._youngest())
                self._read(work, alone, left)
        else:
            later = []
            while left > 0 and self._free and (sequence := self._next()) is not None:
                if self._read_by_another(sequence):
                    later.append(heapq.heappop(self._waiting))
                    continue
                # Each running sequence may soon need one more page.
                spare = sum(r.phase is Phase.RUNNING for r in self.active.values())
                if not self._admit(work, sequence, spare):
                    break
                heapq.heappop(self._waiting)
                left -= self._read(work, sequence, left)
            for entry in later:
                heapq.heappush(self._waiting, entry)
        work.lost, self.lost = self.lost, []
        work.stopped, self.stopping = self.stopping, []
        return work

    def _read(self, work: Work, sequence: Sequence, left: int) -> int:
        """Plan to read a text up to the next checkpoint, and return the number of tokens."""
        ends = [sequence.goal, *(m for m in sequence.checkpoint_positions if m > sequence.read)]
        count = max(0, min(left, self.chunk, min(ends) - sequence.read))
        if count:
            work.reading.append((sequence, count))
        return count

    def _read_by_another(self, sequence: Sequence) -> bool:
        """Return whether a row reads pages now that ``sequence`` can share once they are read.

        They must be worth the wait: at least half of what that row still has to read.
        """
        if not self.prefixes or sequence.read:
            return False
        size = self.pages.size
        most = (sequence.goal - 1) // size
        cached = None
        for other in self.active.values():
            if other.phase is not Phase.READING:
                continue
            full = min(most, self.cache.full(other.goal))
            shared = self.cache.common(sequence.ids, other.ids, full)
            if not shared or self.checkpointed and shared * size not in other.checkpoint_positions:
                continue
            if cached is None:
                cached = len(self.cache.match(sequence.ids, most))
            if 2 * (shared - cached) * size >= max(other.goal - other.read, 1):
                return True
        return False

    def _admit(self, work: Work, sequence: Sequence, spare: int) -> bool:
        """Give a sequence a row and pages for its text and first round, if they are available."""
        if not self._free:
            return False
        was_kept = self.kept.pop(sequence.number, None) is not None  # or it might be freed below
        checkpoint, reused = sequence.checkpoint, sequence.read
        if not reused and self.prefixes:
            reused, checkpoint = self._match(sequence)
        if not self.pages.count:
            copies: list[tuple[int, int]] | None = []
        else:
            copies = self._provide(sequence, reused, spare)
        if copies is None:
            if was_kept:
                self.kept[sequence.number] = sequence
            else:
                self.free(sequence)
            return False
        work.copies += copies
        row = heapq.heappop(self._free)
        self.active[row] = sequence
        sequence.row, sequence.phase, sequence.checkpoint = row, Phase.READING, None
        sequence.read, sequence.reused = reused, sequence.reused + reused
        work.admitted.append(Admission(sequence, checkpoint))
        return True

    def _match(self, sequence: Sequence) -> tuple[int, Any]:
        """Share the cached pages that begin its text, leaving at least one position to run."""
        size = self.pages.size
        most = (sequence.goal - 1) // size
        path = self.cache.match(sequence.ids, most)
        usable, checkpoint = len(path), None
        if self.checkpointed:
            while usable and path[usable - 1].checkpoint is None:
                usable -= 1
            checkpoint = path[usable - 1].checkpoint if usable else None
            if self.cache.checkpoints:
                # The end of the shared prefix, and the last page that a later text could reuse.
                sequence.checkpoint_positions = sorted(
                    n * size for n in {len(path), most} if n > usable
                )
        sequence.pages = [node.page for node in path[:usable]]
        self.pages.share(sequence.pages)
        return usable * size, checkpoint

    def _provide(self, sequence: Sequence, reused: int, spare: int) -> list[tuple[int, int]] | None:
        """Add pages to run the text after ``reused`` positions.

        Returns:
          The page copies to make, or None if there is no room.
        """
        pages, mine = self.pages, sequence.pages
        # Positions written from here on must be in pages that no other holder shares.
        first = max(reused - self.cache.overlap, 0) // pages.size
        split = [n for n in range(first, len(mine)) if pages.held[mine[n]] > 1]
        reach = max(sequence.goal, min(sequence.goal + self.lookahead, sequence.cap))
        more = max(pages.needed(reach) - len(mine), 0)
        got = self._reserve(sequence, more + len(split), spare)
        if got is None:
            return None
        copies = []
        for number in split:
            copies.append((mine[number], got.pop()))
            pages.drop([mine[number]])
            mine[number] = copies[-1][1]
        mine.extend(got)
        return copies

    def _youngest(self) -> Sequence:
        return max(self.active.values(), key=lambda r: r.order)

    def _next(self) -> Sequence | None:
        """Return the first waiting sequence."""
        while self._waiting and self._waiting[0][2].phase is not Phase.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][2] if self._waiting else None

    # ------------------------------------------------------------------ invariants

    def check(self) -> None:
        """Check that page counts match their holders, and each row has at most one sequence.

        Raises:
          AssertionError: if the check fails.
        """
        holders = [*self.active.values(), *self.kept.values()]
        self.pages.check([self.cache.held(), *(r.pages for r in holders)])
        self.cache.check()
        assert sorted([*self._free, *self.active]) == list(range(self.rows)), self._free
        for row, sequence in self.active.items():
            assert sequence.row == row and sequence.phase in (Phase.READING, Phase.RUNNING), (
                sequence
            )
            if self.pages.count:
                assert len(sequence.pages) >= self.pages.needed(sequence.read), sequence
                first = max(sequence.read - self.cache.overlap, 0) // self.pages.size
                shared = [p for p in sequence.pages[first:] if self.pages.held[p] != 1]
                assert not shared, f"{sequence} would write pages {shared}"
        for number, sequence in self.kept.items():
            assert sequence.row is None and sequence.number == number
            assert sequence.phase in (Phase.DONE, Phase.WAITING), sequence
        for sequence in self.waiting:
            assert sequence.row is None and (sequence.number in self.kept or not sequence.pages)
