"""Read the text of an optimized XLA module: its instructions, where they come from, what they move.

The cost of a launch is the bytes of its operands and results. Slices, gathers and updates in place
count what they touch. What a cache holds is not modelled: small operands are cheaper than counted.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"\b(pred|token|opaque|[subf]f?\d+[a-z0-9]*|c64|c128)\[([0-9,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")

_VIEWS = ("bitcast", "get-tuple-element", "copy-done")
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")


def shape_bytes(shape: str) -> int:
    """Return the bytes of a shape. Example: ``(bf16[2,3]{1,0}, s4[3])`` has 14."""
    bits = 0
    for dtype, sizes in _SHAPE.findall(shape):
        each = _BITS.get(dtype)
        if each is None:
            digits = re.search(r"\d+", dtype)
            assert digits is not None
            each = int(digits.group())
        count = 1
        for size in filter(None, sizes.split(",")):
            count *= int(size)
        bits += -(-each * count // 8) * 8
    return bits // 8


def dimensions(shape: str) -> tuple[int, ...]:
    """Return the sizes of an array's shape. Example: ``bf16[2,3]{1,0}`` has (2, 3)."""
    found = _SHAPE.search(shape)
    if found is None:
        raise ValueError(f"shape is {shape!r}; expected that of an array")
    return tuple(int(size) for size in found.group(2).split(",") if size)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str  # attributes, metadata and configuration
    inside: str  # text in the parentheses
    root: bool
    computation: str

    @cached_property
    def bytes(self) -> int:
        """Bytes of the result."""
        return shape_bytes(self.shape)

    def attribute(self, key: str) -> str | None:
        """Return the value of ``key=%value``."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.rest)
        return found.group(1) if found else None

    @property
    def trips(self) -> int | None:
        """Number of runs of a loop's body, if the compiler knows it."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.rest)
        return int(found.group(1)) if found else None

    @property
    def branches(self) -> list[str]:
        """Computations of a conditional."""
        found = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        if found:
            return _NAME.findall(found.group(1))
        return [self.attribute(f"{side}_computation") or "" for side in ("false", "true")]


class Module:
    """The instructions of a module, by computation."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        current: dict[str, Instruction] | None = None
        title = ""
        for line in text.splitlines():
            if header := _HEADER.match(line):
                title = header.group(2)
                current = self.computations[title] = {}
                self.entry = title if header.group(1) else self.entry
            elif line.startswith("}"):
                current = None
            elif current is not None and (match := _LINE.match(line)):
                parsed = _parse(match.group(2), match.group(3), bool(match.group(1)), title)
                if parsed is not None:
                    current[parsed.name] = parsed
        self._by_name = {n: i for ops in self.computations.values() for n, i in ops.items()}
        self._callers = {
            called: op
            for op in self._by_name.values()
            if op.opcode in ("while", "conditional", "call")
            for called in _called(op)
        }
        self._frames = _Frames(text)

    def __getitem__(self, name: str) -> Instruction:
        return self._by_name[name]

    def instructions(self) -> Iterator[Instruction]:
        """Return all instructions of all computations."""
        return iter(self._by_name.values())

    def fused(self, op: Instruction) -> dict[str, Instruction]:
        """Return the instructions inside a fusion."""
        called = op.attribute("calls")
        assert called is not None
        return self.computations[called]

    def contains(self, op: Instruction, opcode: str) -> bool:
        """Return whether a launch is, or contains, an instruction of this kind."""
        if op.opcode == opcode:
            return True
        return op.opcode == "fusion" and any(
            self.contains(inner, opcode) for inner in self.fused(op).values()
        )

    def source(self, op: Instruction, package: str = "jaxdraft/") -> str:
        """Source line: ``nn/attention.py:118 attend``; "" if not in the package."""
        found = self._frames.innermost(op.rest, package)
        if found or op.opcode != "fusion":
            return found
        inner = (self.source(part, package) for part in reversed(self.fused(op).values()))
        return next(filter(None, inner), "")

    def parameter(self, op: Instruction) -> int | None:
        """Return the number of the program's argument that this views; None if it is computed.

        Follows bitcasts, and the operands of loops, whose carried arguments keep their places.
        """
        at: int | None = None  # element of a tuple
        while True:
            if op.opcode == "parameter":
                if op.computation == self.entry:
                    return int(op.inside)
                caller = self._callers.get(op.computation)
                if caller is None or caller.opcode != "while" or at is None:
                    return None
                op = self[caller.operands[0]]
            elif op.opcode == "get-tuple-element" and at is None:
                at = int(op.attribute("index") or 0)
                op = self[op.operands[0]]
            elif op.opcode == "tuple" and at is not None:
                op, at = self[op.operands[at]], None
            elif op.opcode == "bitcast":
                op = self[op.operands[0]]
            else:
                return None

    def reads(self, op: Instruction) -> list[int]:
        """Return the bytes that one launch reads of each of its operands."""
        if op.opcode == "fusion":
            found = dict(_read(self.fused(op)))
            return [found[number] for number in range(len(op.operands))]
        if op.opcode in _SLICES:
            return [op.bytes] + [self[name].bytes for name in op.operands[1:]]
        return [self[name].bytes for name in op.operands]

    def moved(self, op: Instruction) -> tuple[int, int]:
        """Return the bytes that one launch reads and writes."""
        if op.opcode == "fusion":
            return sum(self.reads(op)), sum(_written(self.fused(op)))
        if op.opcode == "dynamic-update-slice":
            update = self[op.operands[1]].bytes
            return update, update
        if op.opcode in _SLICES:
            return op.bytes, op.bytes
        if op.opcode in ("while", "conditional", "call"):
            return 0, 0
        read = sum(self.reads(op))
        if op.opcode == "custom-call":  # without a library's scratch: a flat array of s8
            return read, shape_bytes(re.sub(r"s8\[\d+\]", "", op.shape))
        return read, op.bytes


def _parse(name: str, text: str, root: bool, computation: str) -> Instruction | None:
    """Parse ``f32[8]{0} add(%a, %b), metadata=...``; None if the line is not an instruction."""
    if text.startswith("("):
        end = _closing(text, 0)
        shape, text = text[: end + 1], text[end + 2 :]
    else:
        shape, _, text = text.partition(" ")
    start = re.match(r"([\w\-]+)\(", text)
    if start is None:
        return None
    end = _closing(text, start.end() - 1)
    inside = text[start.end() : end]
    operands = tuple(_NAME.findall(inside))
    rest = text[end + 1 :]
    return Instruction(name, shape, start.group(1), operands, rest, inside, root, computation)


def _closing(text: str, start: int) -> int:
    """Return the position at which the parenthesis that opens at ``start`` closes."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
    raise ValueError(f"unbalanced parentheses: {text[:80]}")


def _called(op: Instruction) -> list[str]:
    if op.opcode == "conditional":
        return op.branches
    keys = ("condition", "body") if op.opcode == "while" else ("to_apply",)
    return [name for key in keys if (name := op.attribute(key))]


def _read(inner: dict[str, Instruction]) -> Iterator[tuple[int, int]]:
    """Return the bytes read per parameter of a fusion: only the slices of sliced ones."""
    users: dict[str, list[Instruction]] = defaultdict(list)
    for op in inner.values():
        for name in op.operands:
            users[name].append(op)

    def uses(name: str) -> Iterator[tuple[Instruction, str]]:  # through views
        for user in users[name]:
            if user.opcode in _VIEWS and users[user.name]:
                yield from uses(user.name)
            else:
                yield user, name

    for op in inner.values():
        if op.opcode != "parameter":
            continue
        found = list(uses(op.name))
        sliced = [u for u, via in found if u.opcode in _SLICES and u.operands[0] == via]
        updated = [u for u, via in found if u.opcode in _UPDATES and u.operands[0] == via]
        if found and len(sliced) + len(updated) == len(found):
            yield int(op.inside), sum(min(u.bytes, op.bytes) for u in sliced)
        else:
            yield int(op.inside), op.bytes


def _written(inner: dict[str, Instruction]) -> Iterator[int]:
    """Return the bytes written per result of a fusion: only the updates if made in place."""
    root = next(op for op in inner.values() if op.root)
    results = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    for op in results:
        while op.opcode == "bitcast":
            op = inner[op.operands[0]]
        if op.opcode in _UPDATES:
            op = inner[op.operands[1 if op.opcode == "dynamic-update-slice" else 2]]
        yield op.bytes


class _Frames:
    """The tables of source lines at the head of a module."""

    def __init__(self, text: str):
        def table(title: str) -> dict[int, str]:
            found = re.search(rf"^{title}\n((?:\d+ .*\n)+)", text, re.MULTILINE)
            lines = found.group(1).splitlines() if found else []
            return {int(n): rest for n, _, rest in (line.partition(" ") for line in lines)}

        self.files, self.functions = table("FileNames"), table("FunctionNames")
        self.locations, self.frames = table("FileLocations"), table("StackFrames")

    def innermost(self, metadata: str, package: str) -> str:
        """Return file, line and function of the innermost frame inside the package."""
        frame = _number(metadata, "stack_frame_id")
        while frame in self.frames:
            text = self.frames[frame]
            location = self.locations.get(_number(text, "file_location_id"), "")
            path = self.files.get(_number(location, "file_name_id"), "").strip('"')
            if package in path and "site-packages" not in path:
                name = self.functions.get(_number(location, "function_name_id"), "").strip('"')
                line = _number(location, "line")
                return f"{path.split(package)[-1]}:{line} {name.split('.')[-1]}"
            frame = _number(text, "parent_frame_id") - 1  # the text counts "none" as 1
        return ""


def _number(text: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", text)
    return int(found.group(1)) if found else 0
