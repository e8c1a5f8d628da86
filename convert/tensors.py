"""Stored tensors: their types, the place of their bytes, and reading without a copy."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

Array = np.ndarray

FLOAT, UINT8, INT8, INT32, INT64, BOOL = 1, 2, 3, 6, 7, 9

FLOAT16, BFLOAT16, FLOAT8, UINT4, INT4 = 10, 16, 17, 21, 22

TYPES = {
    FLOAT: "FLOAT",
    UINT8: "UINT8",
    INT8: "INT8",
    4: "UINT16",
    5: "INT16",
    INT32: "INT32",
    INT64: "INT64",
    8: "STRING",
    BOOL: "BOOL",
    FLOAT16: "FLOAT16",
    11: "DOUBLE",
    12: "UINT32",
    13: "UINT64",
    14: "COMPLEX64",
    15: "COMPLEX128",
    BFLOAT16: "BFLOAT16",
    FLOAT8: "FLOAT8E4M3FN",
    18: "FLOAT8E4M3FNUZ",
    19: "FLOAT8E5M2",
    20: "FLOAT8E5M2FNUZ",
    UINT4: "UINT4",
    INT4: "INT4",
    23: "FLOAT4E2M1",
}
"""ONNX's element types, number -> name: written out, so that reading a checkpoint does
not import onnx. A test compares them."""

FLOATS: dict[int, np.dtype] = {
    FLOAT: np.dtype(np.float32),
    FLOAT16: np.dtype(np.float16),
    BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
"""ONNX float types that hold weights, and their numpy dtypes."""

DTYPES: dict[int, np.dtype] = {
    **FLOATS,
    UINT8: np.dtype(np.uint8),
    INT32: np.dtype(np.int32),
    INT64: np.dtype(np.int64),
}

_STORED = {
    **DTYPES,
    INT8: np.dtype(np.int8),
    BOOL: np.dtype(np.bool_),
    FLOAT8: np.dtype(ml_dtypes.float8_e4m3fn),
}
"""Types of stored tensors; int8, booleans and float8 exist in checkpoints only."""

NIBBLES: dict[int, np.dtype] = {INT4: np.dtype(np.int8), UINT4: np.dtype(np.uint8)}


def type_name(data_type: int) -> str:
    """Return the name of a type: ``1`` -> ``"FLOAT"``."""
    return TYPES.get(data_type, f"type {data_type}")


def stored_bytes(data_type: int, shape: Iterable[int]) -> int:
    """Return the bytes of a stored tensor; in INT4 and UINT4 two elements share a byte.

    Example: five INT4 elements take three bytes.
    """
    elements = math.prod(shape)
    if data_type in NIBBLES:
        return (elements + 1) // 2
    return elements * _STORED[data_type].itemsize


def unpack_nibbles(packed: Array, count: int, *, signed: bool) -> Array:
    """Return the elements of a packed 4-bit tensor, low nibble first, one per byte: [count].

    Example: ``0xF8`` is (-8, -1) signed and (8, 15) unsigned.
    """
    pair = np.stack([packed & 0x0F, packed >> 4], axis=-1).reshape(-1)[:count]
    if not signed:
        return pair
    return (pair.astype(np.int8) ^ 8) - np.int8(8)


class DataFiles:
    """The data files of one folder, each mapped once, for any number of graphs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    def size(self, path: Path) -> int:
        """Return the bytes in the file, without a map."""
        return path.stat().st_size

    def view(self, path: Path, offset: int, length: int) -> Array:
        """Return bytes [length] of the file, as a read-only view of the map."""
        if length == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(self._map(path), np.uint8, length, offset)

    def drop(self, path: Path, offset: int, length: int) -> None:
        """Release the resident pages of a range. A later access reads them from disk again."""
        held = self._maps.get(path)
        if held is None or not hasattr(held, "madvise") or not hasattr(mmap, "MADV_DONTNEED"):
            return
        # Only whole pages: the first and last may hold a neighbour's bytes, which costs at most a
        # page fault, never a value.
        page = mmap.PAGESIZE
        start = offset // page * page
        end = min(-(-(offset + length) // page) * page, len(held))
        if end > start:
            held.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Unmap the files that no view uses any more."""
        for held in self._maps.values():
            with contextlib.suppress(BufferError):  # a view lives on; the map goes with it
                held.close()
        self._maps.clear()

    def _map(self, path: Path) -> mmap.mmap:
        with self._lock:
            held = self._maps.get(path)
            if held is None:
                with open(path, "rb") as file:
                    held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                if hasattr(held, "madvise") and hasattr(mmap, "MADV_WILLNEED"):
                    held.madvise(mmap.MADV_WILLNEED)
                self._maps[path] = held
            return held


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a tensor's bytes in a data file."""

    path: Path
    location: str  # as the graph spells it
    offset: int
    length: int


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A stored tensor. Reading maps its bytes and copies only where necessary."""

    name: str
    data_type: int
    shape: tuple[int, ...]
    file: str  # of the graph, for messages
    place: Place | None  # None: inline
    inline: Array | None  # decoded values, when inline
    files: DataFiles

    @property
    def type_name(self) -> str:
        """Name of the type, for reports and messages."""
        return type_name(self.data_type)

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        if self.place is not None:
            return self.place.length
        return stored_bytes(self.data_type, self.shape)

    def read(self) -> Array:
        """Return the values in the tensor's own dtype and shape; 4-bit types one element per byte.

        The result is a read-only view of the map where the bytes need no conversion.
        """
        if self.inline is not None:
            return self.inline
        assert self.place is not None
        raw = self.files.view(self.place.path, self.place.offset, self.place.length)
        return decode_bytes(raw, self.data_type, self.shape)

    @property
    def is_nibbles(self) -> bool:
        """Whether two elements share a byte."""
        return self.data_type in NIBBLES

    def raw(self) -> Array:
        """Return the stored bytes of a 4-bit tensor in the graph's data file or in the graph."""
        if self.inline is not None:
            nibbles = self.inline.reshape(-1).astype(np.uint8) & 0x0F
            if nibbles.size % 2:
                nibbles = np.append(nibbles, np.uint8(0))
            return nibbles[0::2] | nibbles[1::2] << 4
        assert self.place is not None
        return self.files.view(self.place.path, self.place.offset, self.place.length)

    def release(self, start: int = 0, length: int | None = None) -> None:
        """Drop the resident pages of this tensor, or of a range of its bytes."""
        if self.place is not None:
            size = self.place.length - start if length is None else length
            self.files.drop(self.place.path, self.place.offset + start, size)


def decode_bytes(raw: Array, data_type: int, shape: tuple[int, ...]) -> Array:
    if data_type in NIBBLES:
        values = unpack_nibbles(raw, math.prod(shape), signed=data_type == INT4)
        return values.reshape(shape)
    return raw.view(_STORED[data_type]).reshape(shape)


_COMPARED = 1 << 20
"""Number of bytes compared at once."""


def same_numbers(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors hold the same numbers, compared in the coarser type.

    Reads a few rows at a time and stops at the first difference.
    """
    if first.shape != second.shape:
        return False
    if first.data_type != second.data_type and not {first.data_type, second.data_type} <= {*FLOATS}:
        return False
    digits = {t: ml_dtypes.finfo(dtype).nmant for t, dtype in FLOATS.items()}
    fine, coarse = sorted((first, second), key=lambda t: -digits.get(t.data_type, 0))
    rows = max(1, _COMPARED // max(1, first.nbytes // max(1, first.shape[0] if first.shape else 1)))
    for left, right in zip(_slices(fine, rows), _slices(coarse, rows), strict=True):
        # Bytes, so that a number that is none equals itself.
        if left.dtype == right.dtype and left.tobytes() == right.tobytes():
            continue
        with np.errstate(over="ignore"):
            if fine.data_type not in FLOATS or not np.array_equal(left.astype(right.dtype), right):
                return False
    return True


def _slices(tensor: Tensor, rows: int) -> Iterator[Array]:
    """Yield the rows of a tensor in chunks, and drop the pages of each chunk after its use.

    Types that no parameter uses are yielded as bytes.
    """
    assert tensor.place is not None
    count = tensor.shape[0] if tensor.shape else 1
    width = tensor.nbytes // max(1, count)
    dtype = FLOATS.get(tensor.data_type, np.dtype(np.uint8))
    for start in range(0, count, rows):
        size = min(rows, count - start) * width
        at = tensor.place.offset + start * width
        yield tensor.files.view(tensor.place.path, at, size).view(dtype)
        tensor.release(start * width, size)
