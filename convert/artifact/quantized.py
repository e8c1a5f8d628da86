"""Exact dequantization of block-quantized weights: ``(q - zero_point) * scale`` in float32.

Layouts of ``com.microsoft`` MatMulNBits, GatherBlockQuantized and QMoE (onnxruntime 1.32). A row of
K values is cut into blocks of ``block`` values, the last one padded; a block has one scale and one
zero point. Values are packed low bits first. Scales may be negative.

Example, 4 bits, block 4, one row: bytes ``21 43`` hold 1 2 3 4; with scale 0.5 and the implied zero
point 8 the row is -3.5 -3.0 -2.5 -2.0.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from convert.recipes import Dense, as_float32, convert_into
from convert.tensors import Tensor

Array = np.ndarray

_CHUNK_VALUES = 1 << 20
"""Number of values converted at once: the indices of a chunk take eight times that many bytes."""

_CARRIERS = {4: np.uint32, 8: np.uint64, 16: np.complex128}
"""Number of bytes -> numpy type of that size."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The storage of a quantized matrix's rows.

    Attributes:
      bits: bits per value: 2, 4 or 8.
      block: values that share a scale.
      width: K, values of a row; those past it in the last block are padding.
      zero: zero point where none is stored.
      signed: values are two's complement (ONNX INT4).
    """

    bits: int
    block: int
    width: int
    zero: int
    signed: bool = False

    @property
    def count(self) -> int:
        """Blocks of a row."""
        return -(-self.width // self.block)

    @property
    def row_bytes(self) -> int:
        """Bytes per row when every block is stored whole."""
        return self.count * self.block * self.bits // 8

    @property
    def zero_bytes(self) -> int:
        """Bytes of packed zero points per row; the last byte may contain padding."""
        return -(-self.count * self.bits // 8)


def values_per_byte(bits: int, *, signed: bool = False, zero: int = 0) -> Array:
    """Return the values of each byte, less ``zero``: ``[256, 8 / bits]`` float32."""
    byte = np.arange(256)[:, None] >> np.arange(0, 8, bits)
    value = byte & ((1 << bits) - 1)
    if signed:
        half = 1 << (bits - 1)
        value = (value ^ half) - half
    return (value - zero).astype(np.float32)


def unpack_zero_points(packed: Array, blocks: Blocks) -> Array:
    """Return zero points ``[n, count]`` float32 from packed bytes ``[n, zero_bytes]``.

    Example, 4 bits, three blocks: bytes ``98 07`` hold 8 9 7; the last nibble is padding.
    """
    table = values_per_byte(blocks.bits, signed=blocks.signed)
    return table[packed].reshape(len(packed), -1)[:, : blocks.count]


def dequantize(
    packed: Array,
    scales: Array,
    zeros: Array | None,
    blocks: Blocks,
    out: Array,
) -> None:
    """Write rows of numbers.

    Args:
      packed: ``[n, row_bytes]`` uint8, or fewer bytes per row if the padding is not stored.
      scales: ``[n, count]``, any float dtype.
      zeros: ``[n, count]`` float zero points, ``[n, zero_bytes]`` uint8 packed ones, or None for
        the implied one.
      blocks: the layout.
      out: ``[n, width]``, any float dtype; rounded once from float32.
    """
    step = max(1, _CHUNK_VALUES // max(1, packed.shape[1] * 8 // blocks.bits))
    table = values_per_byte(
        blocks.bits, signed=blocks.signed, zero=blocks.zero if zeros is None else 0
    )
    for start in range(0, len(packed), step):
        rows = slice(start, start + step)
        zero = None
        if zeros is not None:
            zero = zeros[rows]
            if zero.dtype == np.uint8:
                zero = unpack_zero_points(zero, blocks)
        values = _scaled(packed[rows], as_float32(scales[rows]), zero, table, blocks)
        out[rows] = values[:, : blocks.width]


def _scaled(
    packed: Array, scales: Array, zeros: Array | None, table: Array, blocks: Blocks
) -> Array:
    n = len(packed)
    # One fetch per byte: its numbers are copied as one element of their joint size.
    joint = table.view(_CARRIERS[table[0].nbytes])[:, 0]
    values = np.take(joint, packed).view(np.float32).reshape(n, -1)  # [n, stored values]
    whole = blocks.count * blocks.block
    if values.shape[1] < whole:
        values = np.pad(values, ((0, 0), (0, whole - values.shape[1])))
    grouped = values[:, :whole].reshape(n, blocks.count, blocks.block)
    if zeros is not None:
        grouped -= as_float32(zeros)[:, :, None]
    grouped *= scales[:, :, None]
    return grouped.reshape(n, whole)


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A block-quantized matrix [out, in].

    ``packed`` reshapes to [rows, bytes]; ``scales`` to [rows, blocks]; ``zeros`` to [rows, blocks]
    floats or [rows, bytes] packed.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    blocks: Blocks
    total: int  # rows of the stored matrix
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, self.blocks.width)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        zeros = () if self.zeros is None else (self.zeros,)
        return (self.packed, self.scales, *zeros)

    def rows(self, start: int, stop: int) -> Quantized:
        return dataclasses.replace(self, start=self.start + start, stop=self.start + stop)

    def write(self, out: Array) -> None:
        part = slice(self.start, self.stop)
        zeros = None
        if self.zeros is not None:
            zeros = packed_bytes(self.zeros).reshape(self.total, -1)[part]
        dequantize(
            packed_bytes(self.packed).reshape(self.total, -1)[part],
            self.scales.read().reshape(self.total, -1)[part],
            zeros,
            self.blocks,
            out,
        )


@dataclasses.dataclass(frozen=True)
class PackedBytes:
    """The stored bytes of a quantized matrix, [out, blocks, bytes of a block] uint8."""

    matrix: Quantized

    @property
    def shape(self) -> tuple[int, ...]:
        blocks = self.matrix.blocks
        return (self.matrix.shape[0], blocks.count, blocks.row_bytes // blocks.count)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.matrix.packed,)

    def write(self, out: Array) -> None:
        m = self.matrix
        stored = packed_bytes(m.packed).reshape(m.total, *self.shape[1:])
        out[...] = stored[m.start : m.stop]


@dataclasses.dataclass(frozen=True)
class Scales:
    """The scales of a quantized matrix, [out, blocks], as they are stored."""

    matrix: Quantized

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.matrix.shape[0], self.matrix.blocks.count)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.matrix.scales,)

    def write(self, out: Array) -> None:
        m = self.matrix
        convert_into(out, m.scales.read().reshape(m.total, -1)[m.start : m.stop])


def packed_bytes(tensor: Tensor) -> Array:
    """Return the stored bytes of an integer tensor (4-bit: two per byte); floats unchanged."""
    return tensor.raw() if tensor.is_nibbles else tensor.read()


@dataclasses.dataclass(frozen=True)
class Experts:
    """Matrices of E experts, stored [E, N, K] row by row: dense, or quantized as E N rows.

    With ``interleaved`` the stored rows alternate gate and up, and are written gate first.
    """

    matrix: Dense | Quantized
    experts: int
    interleaved: bool

    @property
    def shape(self) -> tuple[int, ...]:
        rows, width = self.matrix.shape
        return (self.experts, rows // self.experts, width)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.matrix.tensors

    def write(self, out: Array) -> None:
        rows = self.shape[1]
        for expert in range(self.experts):
            part = self.matrix.rows(expert * rows, (expert + 1) * rows)
            if not self.interleaved:
                part.write(out[expert])
                continue
            whole = np.empty(part.shape, out.dtype)
            part.write(whole)
            out[expert, : rows // 2] = whole[0::2]
            out[expert, rows // 2 :] = whole[1::2]
