"""Block-quantized weights to numbers, exactly: ``(q - zero_point) * scale`` in float32.

Layouts of ``com.microsoft`` MatMulNBits, GatherBlockQuantized and QMoE (onnxruntime 1.32). A row of
K values is cut into blocks of ``block`` values, the last one padded; a block has one scale and one
zero point. Values are packed low bits first. Scales may be negative.

Example, 4 bits, block 4, one row: bytes ``21 43`` hold 1 2 3 4; with scale 0.5 and the implied zero
point 8 the row is -3.5 -3.0 -2.5 -2.0.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

Array = np.ndarray

_CHUNK_VALUES = 1 << 20
"""Values worked on at once: the indices of a chunk take eight times that many bytes."""

_CARRIERS = {4: np.uint32, 8: np.uint64, 16: np.complex128}
"""A numpy type of as many bytes."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the rows of a quantized matrix are stored.

    Attributes:
      bits: of a value: 2, 4 or 8.
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
        """Bytes of a row when every block is stored whole."""
        return self.count * self.block * self.bits // 8

    @property
    def zero_bytes(self) -> int:
        """Bytes of a row's packed zero points; the last byte may be part padding."""
        return -(-self.count * self.bits // 8)


def values_per_byte(bits: int, *, signed: bool = False, zero: int = 0) -> Array:
    """``[256, 8 / bits]`` float32: the values, less ``zero``, that each byte holds."""
    byte = np.arange(256)[:, None] >> np.arange(0, 8, bits)
    value = byte & ((1 << bits) - 1)
    if signed:
        half = 1 << (bits - 1)
        value = (value ^ half) - half
    return (value - zero).astype(np.float32)


def unpack_zero_points(packed: Array, blocks: Blocks) -> Array:
    """Zero points ``[n, count]`` float32 from packed bytes ``[n, zero_bytes]``.

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
      packed: ``[n, row_bytes]`` uint8, or fewer bytes a row where the padding is not stored.
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
    # One fetch a byte: the numbers it holds travel as one element of their joint size.
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


def as_float32(values: Array) -> Array:
    """Any float dtype promoted to float32, which is exact."""
    if values.dtype == np.float32:
        return values
    if values.dtype == ml_dtypes.bfloat16:  # the upper half of a float32
        bits = np.left_shift(values.view(np.uint16).astype(np.uint32), 16)
        return bits.view(np.float32)
    return values.astype(np.float32)
