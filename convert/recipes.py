"""Recipes of parameters: stored tensors, and the conversion of their numbers to rows.

A *piece* has a shape, the tensors it reads, and a method that writes it into a buffer. A *recipe*
describes a parameter: pieces one after another in memory, which is both concatenation along the
first axis and stacking. Everything here is exact up to the one rounding into the parameter's dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import ml_dtypes
import numpy as np

from convert.tensors import Array, Tensor
from jaxdraft.checkpoint.forms import Form, decode

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

_ROWS, _COLUMNS = 576, 768
"""Block of a stored matrix that is transposed at once. Staged in a buffer of its own it stays in a
core's cache, and its columns do not fall on the same few cache lines as those of a matrix whose
width is a power of two: three to six times faster than assigning ``stored.T``, measured."""

_PAD = 4
"""Columns by which the staging buffer is wider, for the same reason."""


class Piece(Protocol):
    """Part of a parameter."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the buffer that ``write`` fills."""
        ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Stored tensors that it reads."""
        ...

    def write(self, out: Array) -> None:
        """Fill ``out`` [*shape], of any float dtype."""
        ...


class Matrix(Piece, Protocol):
    """A piece [out, in] with access to ranges of rows."""

    def rows(self, start: int, stop: int) -> Matrix:
        """Return rows ``start..stop``."""
        ...


def convert_into(out: Array, values: Array) -> None:
    """Set ``out[...] = values``, rounded once and from the exact value."""
    if values.dtype == out.dtype:
        _bits(out)[...] = _bits(values)
    elif out.dtype == np.float32 and _is_bfloat16(values):
        # bfloat16 is the upper half of a float32: shifting is an order faster than casting.
        np.left_shift(values.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
    elif out.dtype == np.float32:
        out[...] = values
    else:
        _bits(out)[...] = _bits(as_float32(values).astype(out.dtype))


def _bits(values: Array) -> Array:
    """View bfloat16 as integers, because numpy copies its own types much faster."""
    return values.view(np.uint16) if _is_bfloat16(values) else values


def _is_bfloat16(values: Array) -> bool:
    return values.dtype == _BFLOAT16


def transpose_into(out: Array, stored: Array) -> None:
    """Set ``out[...] = stored.T``, rounded once, through a staging buffer.

    Args:
      out: [n, k], any float dtype.
      stored: [k, n], rows contiguous.
    """
    k, n = stored.shape
    height = -(-k // -(-k // _ROWS))
    staged = np.empty((height, min(n, _COLUMNS) + _PAD), out.dtype)
    target = _bits(out)
    for j in range(0, k, height):
        for i in range(0, n, _COLUMNS):
            block = stored[j : j + height, i : i + _COLUMNS]
            part = staged[: block.shape[0], : block.shape[1]]
            convert_into(part, block)
            target[i : i + _COLUMNS, j : j + height] = _bits(part).T


@dataclasses.dataclass(frozen=True)
class Plain:
    """An unchanged tensor, in a shape of as many elements."""

    tensor: Tensor
    shape: tuple[int, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    def write(self, out: Array) -> None:
        convert_into(out, self.tensor.read().reshape(self.shape))


_PIECE = 64 << 20
"""Bytes of a stored matrix that are copied before their pages are dropped."""


@dataclasses.dataclass(frozen=True)
class Dense:
    """A stored matrix, [in, out] when ``transposed``, rows ``start..stop`` of [out, in]."""

    tensor: Tensor
    transposed: bool
    start: int
    stop: int

    @classmethod
    def of(cls, tensor: Tensor, *, transposed: bool) -> Dense:
        """Return a piece of all rows of a tensor."""
        rows = tensor.shape[-1] if transposed else math.prod(tensor.shape[:-1])
        return cls(tensor, transposed, 0, rows)

    @property
    def shape(self) -> tuple[int, ...]:
        width = self.tensor.shape[0 if self.transposed else -1]
        return (self.stop - self.start, width)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    def rows(self, start: int, stop: int) -> Dense:
        return Dense(self.tensor, self.transposed, self.start + start, self.start + stop)

    def write(self, out: Array) -> None:
        """Copy chunks of stored rows and release each: a vocabulary's matrix takes gigabytes."""
        stored = self.tensor.read().reshape(-1, self.tensor.shape[-1])
        width = stored[:1].nbytes
        step = max(1, _PIECE // max(1, width))
        first, last = (0, len(stored)) if self.transposed else (self.start, self.stop)
        for start in range(first, last, step):
            stop = min(start + step, last)
            if self.transposed:
                transpose_into(out[:, start:stop], stored[start:stop, self.start : self.stop])
            else:
                convert_into(out[start - first : stop - first], stored[start:stop])
            if last - first > step:
                self.tensor.release(start * width, (stop - start) * width)


def as_float32(values: Array) -> Array:
    """Return values of any float dtype as float32, which is exact."""
    if values.dtype == np.float32:
        return values
    if values.dtype == ml_dtypes.bfloat16:  # the upper half of a float32
        bits = np.left_shift(values.view(np.uint16).astype(np.uint32), 16)
        return bits.view(np.float32)
    return values.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A tensor stored in another form; see :class:`jaxdraft.checkpoint.forms.Form`."""

    tensor: Tensor
    form: Form

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    def write(self, out: Array) -> None:
        out[...] = decode(self.tensor.read(), self.form, out.dtype)


@dataclasses.dataclass(frozen=True)
class ExpertMatrices:
    """Matrices of experts that lie in the file in one of the forms of ``LAID_OUT``.

    They are copied expert by expert, and the pages of each are dropped.

    Attributes:
      tensor: [E, in, out].
      form: the form.
    """

    tensor: Tensor
    form: Form

    @property
    def shape(self) -> tuple[int, ...]:
        experts, inputs, outputs = self.tensor.shape
        return (experts, outputs, inputs)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    def write(self, out: Array) -> None:
        stored = self.tensor.read()
        for expert, (target, source) in enumerate(zip(out, stored, strict=True)):
            if self.form is Form.ALTERNATING:
                half = len(target) // 2
                transpose_into(target[:half], source[:, 0::2])
                transpose_into(target[half:], source[:, 1::2])
            else:
                transpose_into(target, source)
            self.tensor.release(expert * source.nbytes, source.nbytes)


@dataclasses.dataclass(frozen=True)
class Made:
    """Computed numbers, which no file holds."""

    shape: tuple[int, ...]
    make: Callable[[], Array]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def write(self, out: Array) -> None:
        convert_into(out, self.make())


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A parameter: its shape, and its pieces in memory order."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, piece: Piece) -> Recipe:
        """Return a parameter of one piece."""
        return cls(piece.shape, (piece,))

    @classmethod
    def rows(cls, pieces: Sequence[Matrix]) -> Recipe:
        """Return matrices of one width, concatenated along the first axis."""
        height = sum(p.shape[0] for p in pieces)
        return cls((height, *pieces[0].shape[1:]), tuple(pieces))

    @classmethod
    def stack(cls, shape: tuple[int, ...], pieces: Sequence[Piece]) -> Recipe:
        """Return pieces laid out along the leading axes of ``shape``."""
        assert sum(math.prod(p.shape) for p in pieces) == math.prod(shape)
        return cls(shape, tuple(pieces))

    @property
    def nbytes(self) -> int:
        """Stored bytes read."""
        return sum(t.nbytes for piece in self.pieces for t in piece.tensors)

    def write(self, out: Array) -> None:
        """Fill ``out`` [*shape]."""
        flat = out.reshape(-1)
        start = 0
        for piece in self.pieces:
            size = math.prod(piece.shape)
            piece.write(flat[start : start + size].reshape(piece.shape))
            start += size


Recipes = dict[tuple[str | int, ...], Recipe]


def shortest(value: float) -> float:
    """Return the shortest decimal that rounds to the same float32: 9.99999997e-07 -> 1e-06."""
    return float(str(np.float32(value)))
