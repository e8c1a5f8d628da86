"""Count what a compiled program does: launches, CUDA graphs, waits for the host, bytes.

The list of thunks has the launches and the contents of CUDA graphs. Every thunk names an
instruction of the module, from which follow the bytes it moves and the passes of a loop. A loop or
a conditional outside of a graph is run by the host, which waits for the device to know its
predicate. Where the number of passes is not in the program, it follows from the length of the
text, and :class:`Trips` has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields

from gpu_compile import Compiled
from gpu_hlo import Instruction, Module, dimensions

LARGE = 1_000_000
"""Bytes from which on a copy is counted."""

KEYS = "keys of the attention kernel"
"""Argument of :data:`Trips` for the keys that attention reads, per request."""

_MOVING = frozenset(
    "parameter bitcast copy transpose convert reshape concatenate pad broadcast constant tuple "
    "get-tuple-element slice iota".split()
)
_THUNK = re.compile(r"^(\s*)(\d+): (k\w+)")
_LABEL = re.compile(r"^(\s*)(\w+):\s*$")

Trips = Callable[[str], int]
"""Source line of a loop -> passes."""

Branches = Callable[[str, int], int | None]
"""Source line of a conditional, number of its branches -> the branch that is taken; None: the
largest, SMALLEST: the smallest."""

SMALLEST = -1
"""XLA may exchange the branches of a conditional of two, which so have no numbers of their own."""


def _largest(source: str, number: int) -> None:
    del source, number


@dataclass
class Counts:
    """Counts of one run of a program."""

    launches: int = 0  # kernels and copies
    graphs: int = 0  # CUDA graphs started by the host
    waits: int = 0  # predicates that the host waits for
    read: int = 0  # bytes
    written: int = 0
    joined: int = 0  # bytes moved to concatenate weights
    rewritten: int = 0  # bytes moved to copy, transpose or convert weights
    copied: int = 0  # bytes moved to copy large arrays that are no weights

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    def add(self, other: Counts, times: int = 1) -> None:
        """Count ``other`` so many times."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + times * getattr(other, one.name))


@dataclass
class Thunk:
    """One entry of the list of thunks, with those inside it."""

    number: int
    kind: str
    parts: dict[str, list[Thunk]] = field(default_factory=dict)  # by label; "": a graph's own

    @property
    def size(self) -> int:
        """Launches in all parts."""
        inside = sum(thunk.size for part in self.parts.values() for thunk in part)
        return inside if self.parts else 1


def parse_thunks(text: str) -> list[Thunk]:
    """Return the list as a tree.

    Example::

      000: kCommandBuffer
          001: kCopy
      002: kWhile
      condition:
          003: kCustomKernel
        body:
          004: kCustomKernel
    """
    top: list[Thunk] = []
    open_: list[tuple[int, list[Thunk]]] = [(-1, top)]  # indentation of the list's thunks
    last: dict[int, Thunk] = {}  # by indentation
    newest: Thunk | None = None
    expects: list[Thunk] | None = top
    # An empty part is described in words, without a line break after it.
    for line in text.replace("No thunks.", "No thunks.\n").splitlines():
        if match := _THUNK.match(line):
            indent = len(match.group(1))
            while open_[-1][0] > indent:
                open_.pop()
            if open_[-1][0] < indent:
                if expects is None:  # a graph's thunks follow it without a label
                    assert newest is not None
                    expects = newest.parts.setdefault("", [])
                open_.append((indent, expects))
            newest = last[indent] = Thunk(int(match.group(2)), match.group(3))
            open_[-1][1].append(newest)
            expects = None
        elif match := _LABEL.match(line):
            # "condition:" is at the left margin and right behind its loop; the other labels
            # are indented by two below what they belong to.
            label, indent = match.group(2), len(match.group(1))
            owner = newest if label == "condition" else last[indent - 2]
            assert owner is not None
            while open_[-1][0] > (indent - 2 if label != "condition" else open_[-1][0]):
                open_.pop()
            expects = owner.parts.setdefault(label, [])
    return top


class Program:
    """A compiled program, to be counted.

    Args:
      compiled: from :func:`gpu_compile.compile_for`.
      weights: numbers of the program's arguments that are weights.
    """

    def __init__(self, compiled: Compiled, weights: range):
        self.compiled = compiled
        self.module = Module(compiled.hlo)
        self.thunks = parse_thunks(compiled.thunks)
        self.weights = weights

    def count(self, trips: Trips, part: str | None = None, branches: Branches = _largest) -> Counts:
        """Count the whole program, or one pass of the outermost loop that ``part`` names.

        A pass includes the wait of the host for the condition, unless the compiler knows how many
        passes there are.

        Args:
          trips: passes of the loops of which the compiler does not know them.
          branches: branches that conditionals take.
          part: the end of a source line, for example ``"generate.py body"``. Default: everything.
        """
        loop = None if part is None else self._loop(part)
        thunks = self.thunks if loop is None else loop.parts["body"]
        counts = self._count(thunks, trips, branches, inside=False)
        if loop is not None and self._instruction(loop).trips is None:
            condition = loop.parts.get("condition", [])
            counts.add(self._count(condition, trips, branches, inside=False))
            counts.waits += 1
        return counts

    def lines(
        self, trips: Trips, part: str | None = None, branches: Branches = _largest
    ) -> list[tuple[str, Counts]]:
        """Return counts by the source line that a launch comes from, most launches first.

        Args:
          trips: as for :meth:`count`.
          part: as for :meth:`count`.
          branches: as for :meth:`count`.
        """
        found: dict[str, Counts] = {}

        def visit(thunks: list[Thunk], times: int) -> None:
            for thunk in thunks:
                if thunk.parts:
                    loop = self._instruction(thunk) if thunk.kind == "kWhile" else None
                    passes = 1
                    if loop is not None:
                        passes = loop.trips or trips(self.module.source(loop))
                    taken = list(thunk.parts.values())
                    if thunk.kind == "kConditional":
                        taken = [self._branch(thunk, branches)]
                    for inner in taken:
                        visit(inner, times * passes)
                else:
                    source = self.module.source(self._instruction(thunk))
                    found.setdefault(source, Counts()).add(self._launch(thunk, trips), times)

        visit(self._part(part), 1)
        return sorted(found.items(), key=lambda item: -item[1].launches)

    def loops(self) -> Iterator[tuple[Thunk, str]]:
        """Return the outermost loops and their source lines."""
        for thunk in self.thunks:
            if thunk.kind == "kWhile":
                yield thunk, self.module.source(self._instruction(thunk))

    def _part(self, part: str | None) -> list[Thunk]:
        return self.thunks if part is None else self._loop(part).parts["body"]

    def _loop(self, part: str) -> Thunk:
        found = [thunk for thunk, source in self.loops() if _matches(source, part)]
        if len(found) != 1:
            names = [source for _, source in self.loops()]
            raise ValueError(f"found {len(found)} loops {part!r} among {names}; expected one")
        return found[0]

    def _instruction(self, thunk: Thunk) -> Instruction:
        return self.module[self.compiled.thunk_names[thunk.number]]

    def _branch(self, thunk: Thunk, branches: Branches) -> list[Thunk]:
        """The launches of the branch that a conditional takes."""
        parts = list(thunk.parts.values())
        index = branches(self.module.source(self._instruction(thunk)), len(parts))
        by_size = sorted(parts, key=lambda part: sum(inner.size for inner in part))
        if index is None or index == SMALLEST:
            return by_size[-1 if index is None else 0]
        return parts[index]

    def _count(
        self, thunks: list[Thunk], trips: Trips, branches: Branches, *, inside: bool
    ) -> Counts:
        total = Counts()
        for thunk in thunks:
            if thunk.kind == "kCommandBuffer":
                total.graphs += not inside
                total.add(self._count(thunk.parts[""], trips, branches, inside=True))
            elif thunk.kind == "kWhile":
                self._add_loop(total, thunk, trips, branches, inside)
            elif thunk.kind == "kConditional":
                total.waits += not inside
                branch = self._branch(thunk, branches)
                total.add(self._count(branch, trips, branches, inside=inside))
            else:
                total.add(self._launch(thunk, trips))
        return total

    def _add_loop(
        self, total: Counts, thunk: Thunk, trips: Trips, branches: Branches, inside: bool
    ) -> None:
        loop = self._instruction(thunk)
        passes = loop.trips
        if passes is None:
            passes = trips(self.module.source(loop))
            condition = thunk.parts.get("condition", [])
            condition = self._count(condition, trips, branches, inside=inside)
            total.add(condition, passes + 1)
            total.waits += 0 if inside else passes + 1
        body = self._count(thunk.parts["body"], trips, branches, inside=inside)
        total.add(body, passes)

    def _launch(self, thunk: Thunk, trips: Trips) -> Counts:
        op = self._instruction(thunk)
        read, written = self.module.moved(op)
        if "/attention/pallas_call" in op.rest:
            read -= self._unread(op, trips(KEYS))
        count = Counts(launches=1, read=read, written=written)
        product = op.opcode == "custom-call" or any(
            self.module.contains(op, opcode) for opcode in ("dot", "reduce")
        )
        if written >= LARGE and not product:
            reads = zip(op.operands, self.module.reads(op), strict=True)
            if any(self._is_weight(name, bytes_read) for name, bytes_read in reads):
                if self.module.contains(op, "concatenate"):
                    count.joined = read + written
                else:
                    count.rewritten = read + written
            elif self._only_moves(op):
                count.copied = read + written
        return count

    def _unread(self, op: Instruction, used: int) -> int:
        """Return the bytes of keys and values [P, G, Z, H] that the attention kernel leaves out.

        It reads the keys in use and no others. They are its third and fourth operands.
        """
        unread = 0
        for name in op.operands[2:4]:
            cache = self.module[name]
            pages, _, slots, _ = dimensions(cache.shape)
            unread += cache.bytes * max(0, pages * slots - used) // (pages * slots)
        return unread

    def _is_weight(self, name: str, bytes_read: int) -> bool:
        """Whether this is a weight of which a launch reads half or more, and not some rows."""
        op = self.module[name]
        most = 2 * bytes_read >= op.bytes >= LARGE
        return most and self.module.parameter(op) in self.weights

    def _only_moves(self, op: Instruction) -> bool:
        if op.opcode != "fusion":
            return op.opcode in _MOVING
        return all(inner.opcode in _MOVING for inner in self.module.fused(op).values())


def _matches(source: str, part: str) -> bool:
    """Return whether ``generate.py body`` names the line ``generate.py:310 body``."""
    return re.sub(r":\d+", "", source) == part
