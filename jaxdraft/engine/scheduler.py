"""Which sequence runs next, on which row and in which pages. Plain Python, no device arrays.

First come, first served. Every running sequence gets the next round; beside it some prompts are
read on, within a budget of tokens. A sequence is admitted when a row is free, and pages for its
prompt and its first round are; no later one overtakes it. When pages run out later, remembered
pages that no sequence uses go first. Then the youngest sequence loses its place and is computed
anew when there is room. The oldest never does, and fits alone, so it always gets on.
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
    """What one step does, in this order."""

    lost: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)  # their rows
    stopped: list[int] = dataclasses.field(default_factory=list)  # rows that run no more
    running: list[Sequence] = dataclasses.field(default_factory=list)  # one round
    copies: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # page onto page
    admitted: list[Admission] = dataclasses.field(default_factory=list)
    reading: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)  # tokens each


@dataclasses.dataclass
class Admission:
    """A sequence takes a row."""

    sequence: Sequence
    checkpoint: Any  # what its row remembers behind the positions that are there, if that is needed


class Scheduler:
    """Rows and pages of an engine, and the sequences that have or want them.

    Args:
      rows: B.
      pages: the pool.
      lookahead: positions past a round's own that a drafter may write.
      chunk: the most prompt tokens of a row in one step.
      budget: the most prompt tokens of a step, of all rows.
      prefixes: whether full pages are remembered.
      checkpointed: whether a prefix needs a checkpoint beside its pages.
      checkpoints: the most of them.
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
        self.kept: OrderedDict[int, Sequence] = OrderedDict()  # over, with pages; least used first
        self._free = list(range(rows))
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._serial = itertools.count()
        self.lost: list[tuple[Sequence, int]] = []  # who lost its row since the last step
        self.stopping: list[int] = []  # rows that the device believes to run

    # ------------------------------------------------------------------ sequences come and go

    def add(self, sequence: Sequence) -> None:
        """It waits for its turn; one that lost its place comes before all younger ones."""
        sequence.phase = Phase.WAITING
        heapq.heappush(self._waiting, (sequence.order, next(self._serial), sequence))

    @property
    def waiting(self) -> list[Sequence]:
        """Who waits, first come first."""
        found = (r for *_, r in sorted(self._waiting, key=lambda w: w[:2]))
        return list(dict.fromkeys(r for r in found if r.phase is Phase.WAITING))

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.active) or self._next() is not None

    def needed(self, sequence: Sequence) -> int:
        """Pages it can come to hold."""
        return self.pages.needed(sequence.cap) if self.pages.count else 0

    def leave(self, sequence: Sequence, *, stop: bool, remember: bool = True) -> None:
        """Its row is free again, and its pages are, but for those remembered by content.

        Args:
          sequence: with a row or without.
          stop: the device does not know yet that the row runs no more.
          remember: whether what its pages hold can be trusted.
        """
        if sequence.row is not None:
            self._vacate(sequence, stop)
            if remember:
                self.remember(sequence)
        self.forget(sequence)

    def _vacate(self, sequence: Sequence, stop: bool) -> None:
        row, sequence.row = sequence.row, None
        assert row is not None
        del self.active[row]
        heapq.heappush(self._free, row)
        if stop:
            self.stopping.append(row)

    def forget(self, sequence: Sequence) -> None:
        """Its pages, and what was kept of it, are free."""
        self.pages.drop(sequence.pages)
        sequence.pages, sequence.read, sequence.checkpoint = [], 0, None
        sequence.checkpoint_positions, sequence.pending_checkpoints = [], {}
        self.kept.pop(sequence.number, None)

    def keep(self, sequence: Sequence, checkpoint: Any, *, stop: bool) -> None:
        """Its row is free; the pages in use stay with it until they are needed elsewhere."""
        self._vacate(sequence, stop)
        self.remember(sequence)
        self.trim(sequence, sequence.read)
        sequence.checkpoint = checkpoint
        self.kept[sequence.number] = sequence

    def trim(self, sequence: Sequence, positions: int) -> None:
        """It goes back to its first ``positions`` positions; pages past them are free."""
        held = self.pages.needed(positions) if self.pages.count else 0
        self.pages.drop(sequence.pages[held:])
        del sequence.pages[held:]
        sequence.read = positions

    def preempt(self, sequence: Sequence) -> None:
        """It loses its place; what it computed is remembered as long as there is room."""
        if sequence.phase is Phase.RUNNING and sequence.row is not None:
            self.lost.append((sequence, sequence.row))
        self.leave(sequence, stop=True)
        sequence.preemptions += 1
        sequence.settle()
        self.add(sequence)

    def remember(self, sequence: Sequence) -> None:
        """Its full pages can be found by content from now on, and its checkpoints with them."""
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
        """Forget what the device holds: a sequence with a row waits again, with all its tokens."""
        for sequence in list(self.active.values()):
            sequence.settle()
            sequence.saved_drafts = None
            self.leave(sequence, stop=False, remember=False)
            self.add(sequence)
        for sequence in list(self.kept.values()):
            self.forget(sequence)
        self.cache.clear()
        self.stopping.clear()
        self.lost.clear()

    # ------------------------------------------------------------------ pages

    def _reserve(self, sequence: Sequence, count: int, spare: int = 0) -> list[int] | None:
        """``count`` pages, with ``spare`` more left over; None if that cannot be had.

        What is remembered by content goes first, then what finished sequences keep.
        """
        pages, wanted = self.pages, count + spare
        if pages.free < wanted:
            used = {p for r in (*self.active.values(), sequence) for p in r.pages}
            if wanted > pages.count - len(used):
                return None  # nothing is forgotten in vain
            while pages.free + self.cache.evictable() < wanted and self.kept:
                self.forget(next(iter(self.kept.values())))
            self.cache.evict(wanted - pages.free)
            if pages.free < wanted:
                return None
        return pages.take(count)

    def _cover(self, sequence: Sequence, positions: int) -> bool:
        """Pages for the first ``positions`` positions."""
        need = self.pages.needed(positions) - len(sequence.pages)
        if not self.pages.count or need <= 0:
            return True
        pages = self._reserve(sequence, need)
        if pages is None:
            return False
        sequence.pages += pages
        return True

    # ------------------------------------------------------------------ one step

    def plan(self, alone: Sequence | None = None) -> Work:
        """Return what the next step does. Rows and pages are given and taken here.

        Args:
          alone: the only sequence that may run, if there is one.
        """
        work = Work()
        rows = sorted(self.active.values(), key=lambda r: r.order)
        running = [r for r in rows if r.phase is Phase.RUNNING and alone in (None, r)]
        for sequence in running:
            reach = min(len(sequence.ids) + sequence.pending + self.lookahead, sequence.cap)
            while sequence.row is not None and not self._cover(sequence, reach):
                # The youngest goes, perhaps the one that asks. The oldest fits when it is alone.
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
            while left > 0 and (sequence := self._next()) is not None:
                # Each that runs may soon want one page more.
                spare = sum(r.phase is Phase.RUNNING for r in self.active.values())
                if not self._admit(work, sequence, spare):
                    break
                heapq.heappop(self._waiting)
                left -= self._read(work, sequence, left)
        work.lost, self.lost = self.lost, []
        work.stopped, self.stopping = self.stopping, []
        return work

    def _read(self, work: Work, sequence: Sequence, left: int) -> int:
        """Read on in its text, up to the next checkpoint."""
        ends = [sequence.goal, *(m for m in sequence.checkpoint_positions if m > sequence.read)]
        count = max(0, min(left, self.chunk, min(ends) - sequence.read))
        if count:
            work.reading.append((sequence, count))
        return count

    def _admit(self, work: Work, sequence: Sequence, spare: int) -> bool:
        """Give it a row, and the pages of its text and first round, if they can be had."""
        if not self._free:
            return False
        was_kept = (
            self.kept.pop(sequence.number, None) is not None
        )  # or it might be forgotten below
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
                self.forget(sequence)
            return False
        work.copies += copies
        row = heapq.heappop(self._free)
        self.active[row] = sequence
        sequence.row, sequence.phase, sequence.checkpoint = row, Phase.READING, None
        sequence.read, sequence.reused = reused, sequence.reused + reused
        work.admitted.append(Admission(sequence, checkpoint))
        return True

    def _match(self, sequence: Sequence) -> tuple[int, Any]:
        """Hold the known pages that begin its text; at least one position is left to run."""
        size = self.pages.size
        most = (sequence.goal - 1) // size
        path = self.cache.match(sequence.ids, most)
        usable, checkpoint = len(path), None
        if self.checkpointed:
            while usable and path[usable - 1].checkpoint is None:
                usable -= 1
            checkpoint = path[usable - 1].checkpoint if usable else None
            if self.cache.checkpoints:
                # Where others got to, and where this text could be met again.
                sequence.checkpoint_positions = sorted(
                    n * size for n in {len(path), most} if n > usable
                )
        sequence.pages = [node.page for node in path[:usable]]
        self.pages.share(sequence.pages)
        return usable * size, checkpoint

    def _provide(self, sequence: Sequence, reused: int, spare: int) -> list[tuple[int, int]] | None:
        """Pages to run the text after ``reused`` positions; the copies to make, None: no room."""
        pages, mine = self.pages, sequence.pages
        # What is written from here on must be in pages of nobody else.
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
        """The first who waits."""
        while self._waiting and self._waiting[0][2].phase is not Phase.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][2] if self._waiting else None

    # ------------------------------------------------------------------ invariants

    def check(self) -> None:
        """Every page is free or held by whom its count says; every row has one sequence or none.

        Raises:
          AssertionError: it is not so.
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
