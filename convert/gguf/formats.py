"""The numbers of GGUF files: blocks of bytes -> the arrays of a packed matrix.

A row is blocks of ``values`` numbers in ``size`` bytes. d is a float16 factor, and m a float16
minimum, of a block. The K formats have sub-blocks with small integers as scales s and minima u:
their numbers are ``q * s * d - u * m``. Bits and halves of bytes lie apart: in Q4_0 the low halves
are the first 16 values, and the high halves the other 16. Source: ``ggml-quants.c`` of ggml.

| format | values | bytes, in order |
|---|---|---|
| Q4_0 | 32 | d, 16 halves |
| Q4_1 | 32 | d, m, 16 halves |
| Q5_0, Q5_1 | 32 | d (m), 4 of fifth bits, 16 halves |
| Q8_0 | 32 | d, 32 int8 |
| Q2_K | 256 | 16 of s and u (halves), 64 quarters, d, m |
| Q3_K | 256 | 32 of third bits, 64 quarters, 12 of s (six bits), d |
| Q4_K | 256 | d, m, 12 of s and u (six bits), 128 halves |
| Q5_K | 256 | d, m, 12 of s and u, 32 of fifth bits, 128 halves |
| Q6_K | 256 | 128 halves, 64 quarters, 16 int8 of s, d |

Values of five and six bits take eight in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from convert.packed import QuantizedTensor, Source, pack_values
from convert.tensors import BFLOAT16, FLOAT, FLOAT16, UINT8, Array, DataFiles, Place

_HALF, _UINT8, _INT8 = np.dtype(np.float16), np.dtype(np.uint8), np.dtype(np.int8)

Part = Callable[[Array], Array]
"""Function of blocks [n, size] uint8, which gives one array of them, [n, ...]."""


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of quantized numbers.

    Attributes:
      name: its name.
      values: numbers per block.
      size: bytes per block.
      bits: bits per value in memory.
      block: numbers that share a scale.
      unpack: the values, one per byte.
      arrays: the other arrays of :mod:`jaxdraft.nn.packed`, and their types.
    """

    name: str
    values: int
    size: int
    bits: int
    block: int
    unpack: Part
    arrays: dict[str, tuple[np.dtype, Part]]

    @property
    def fine(self) -> int:
        """Blocks that share a coarse scale; 0: there are none."""
        return self.values // self.block if "coarse" in self.arrays else 0


@dataclasses.dataclass(frozen=True, eq=False)
class GgufTensor(QuantizedTensor):
    """A quantized matrix of a GGUF file.

    Attributes:
      form: its format.
      rows: row of the file for each row of the matrix; None: the same.
    """

    form: Any = None
    rows: Array | None = None

    @classmethod
    def of(
        cls,
        name: str,
        shape: tuple[int, ...],
        file: str,
        place: Place,
        files: DataFiles,
        form: Format,
    ) -> GgufTensor:
        """Return the matrix of some bytes."""
        return cls(name, UINT8, shape, file, place, None, files, form=form)

    @property
    def type_name(self) -> str:
        """Name of the format."""
        return self.form.name

    def read(self) -> Array:
        """Return the stored bytes of every row, [out, bytes]."""
        assert self.place is not None
        raw = self.files.view(self.place.path, self.place.offset, self.place.length)
        return raw.reshape(self.shape[0], -1)

    def source(self) -> Source:
        """Return the numbers."""
        form: Format = self.form
        outputs, inputs = self.shape
        per = 8 // form.bits

        def read(name: str, start: int, stop: int) -> Array:
            stored = self.read()
            chosen = stored[start:stop] if self.rows is None else stored[self.rows[start:stop]]
            blocks = chosen.reshape(-1, form.size)
            if name == "weight_q":
                packed = pack_values(form.unpack(blocks), form.bits)
                return packed.reshape(stop - start, inputs // form.block, form.block // per)
            return form.arrays[name][1](blocks).reshape(stop - start, -1)

        types = {"weight_q": _UINT8} | {name: dtype for name, (dtype, _) in form.arrays.items()}
        return Source(
            outputs=outputs,
            inputs=inputs,
            bits=form.bits,
            block=form.block,
            types=types,
            read=read,
            tensors={name: (self,) for name in types},
            fine=form.fine,
        )


def _half(at: int) -> Part:
    """Return the float16 number at a byte of each block, [n, 1]."""
    return lambda blocks: np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _negative(part: Part) -> Part:
    return lambda blocks: -part(blocks)


def _fields(raw: Array, bits: int, run: int) -> Array:
    """Return values of ``bits`` bits: the lowest bits of ``run`` bytes first, then the next higher.

    Example, 4 bits and runs of 2 bytes: 21 43 is 1 3 2 4.

    Args:
      raw: [n, k] uint8.

    Returns:
      [n, k * 8 / bits] uint8.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    runs = raw.reshape(len(raw), -1, 1, run) >> shifts
    return (runs & np.uint8((1 << bits) - 1)).reshape(len(raw), -1)


def _bits_of(raw: Array) -> Array:
    """Bits of bytes, the lowest first: [n, k] -> [n, 8 k]."""
    return np.unpackbits(np.ascontiguousarray(raw), axis=1, bitorder="little")


def _six_bits(raw: Array) -> tuple[Array, Array]:
    """Return eight scales and eight minima of six bits from twelve bytes [n, 12], each [n, 8].

    Bytes 0-3 hold scales 0-3 in their low six bits, bytes 4-7 minima 0-3. Scales and minima 4-7
    have their low four bits in the halves of bytes 8-11, and their high two in the bits that are
    left of bytes 0-3 and 4-7.
    """
    low, mid, high = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    scales = [low & 63, (high & 15) | (low >> 6 << 4)]
    minima = [mid & 63, (high >> 4) | (mid >> 6 << 4)]
    return np.concatenate(scales, axis=1), np.concatenate(minima, axis=1)


def _q3_scales(blocks: Array) -> Array:
    """Sixteen scales of six bits in twelve bytes, less 32: [n, 16] int8.

    The low four bits are the halves of bytes 0-7, the high two the quarters of bytes 8-11.
    """
    raw = blocks[:, 96:108]
    low, high = _fields(raw[:, :8], 4, 8), _fields(raw[:, 8:], 2, 4)
    return (low | high << 4).view(np.int8) - np.int8(32)


def _q5(halves: slice, fifth: slice, add: int) -> Part:
    """Decode five bits: the halves of a block of 32, and the bits of four bytes."""

    def unpack(blocks: Array) -> Array:
        high = _bits_of(blocks[:, fifth])
        return (_fields(blocks[:, halves], 4, 16) | high << 4) + np.uint8(add)

    return unpack


def _q3_k(blocks: Array) -> Array:
    """Decode two bits, less four where the third bit is not set; plus 8, to be at least 0."""
    third = _fields(blocks[:, :32], 1, 32)
    return _fields(blocks[:, 32:96], 2, 32) + np.uint8(4) + (third << 2)


def _q5_k(blocks: Array) -> Array:
    return _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4


def _q6_k(blocks: Array) -> Array:
    """Decode six bits, less 32: plus 96, because they are less 128 in memory."""
    high = _fields(blocks[:, 128:192], 2, 32)
    return (_fields(blocks[:, :128], 4, 64) | high << 4) + np.uint8(96)


def _scales(part: Part) -> dict[str, tuple[np.dtype, Part]]:
    return {"scales": (_HALF, part)}


_K_SCALES = {
    "scales": (_UINT8, lambda blocks: _six_bits(blocks[:, 4:16])[0]),
    "minima": (_UINT8, lambda blocks: _six_bits(blocks[:, 4:16])[1]),
    "coarse": (_HALF, _half(0)),
    "coarse_minima": (_HALF, _negative(_half(2))),
}

_Q2_K = {
    "scales": (_UINT8, lambda blocks: blocks[:, :16] & 15),
    "minima": (_UINT8, lambda blocks: blocks[:, :16] >> 4),
    "coarse": (_HALF, _half(80)),
    "coarse_minima": (_HALF, _negative(_half(82))),
}

FORMATS: dict[int, Format] = {
    2: Format("Q4_0", 32, 18, 4, 32, lambda b: _fields(b[:, 2:], 4, 16), _scales(_half(0))),
    3: Format(
        "Q4_1",
        32,
        20,
        4,
        32,
        lambda b: _fields(b[:, 4:], 4, 16),
        {**_scales(_half(0)), "minima": (_HALF, _half(2))},
    ),
    6: Format("Q5_0", 32, 22, 8, 32, _q5(slice(6, 22), slice(2, 6), 112), _scales(_half(0))),
    7: Format(
        "Q5_1",
        32,
        24,
        8,
        32,
        _q5(slice(8, 24), slice(4, 8), 0),
        {**_scales(_half(0)), "minima": (_HALF, _half(2))},
    ),
    8: Format("Q8_0", 32, 34, 8, 32, lambda b: b[:, 2:] ^ np.uint8(0x80), _scales(_half(0))),
    10: Format("Q2_K", 256, 84, 2, 16, lambda b: _fields(b[:, 16:80], 2, 32), _Q2_K),
    11: Format(
        "Q3_K",
        256,
        110,
        4,
        16,
        _q3_k,
        {"scales": (_INT8, _q3_scales), "coarse": (_HALF, _half(108))},
    ),
    12: Format("Q4_K", 256, 144, 4, 32, lambda b: _fields(b[:, 16:], 4, 32), _K_SCALES),
    13: Format("Q5_K", 256, 176, 8, 32, _q5_k, _K_SCALES),
    14: Format(
        "Q6_K",
        256,
        210,
        8,
        16,
        _q6_k,
        {
            "scales": (_INT8, lambda b: np.ascontiguousarray(b[:, 192:208]).view(np.int8)),
            "coarse": (_HALF, _half(208)),
        },
    ),
}
"""Formats that are read, by their number in files."""

FLOAT_TYPES = {0: FLOAT, 1: FLOAT16, 30: BFLOAT16}
"""Types of plain floats, by their number in files, in ONNX's numbers."""

SIZES = {0: (1, 4), 1: (1, 2), 30: (1, 2)} | {n: (f.values, f.size) for n, f in FORMATS.items()}
"""Values and bytes of a block, by the number of the type."""

NAMES = (
    {0: "F32", 1: "F16", 30: "BF16"}
    | {n: f.name for n, f in FORMATS.items()}
    | {
        9: "Q8_1",
        15: "Q8_K",
        16: "IQ2_XXS",
        17: "IQ2_XS",
        18: "IQ3_XXS",
        19: "IQ1_S",
        20: "IQ4_NL",
        21: "IQ3_S",
        22: "IQ2_S",
        23: "IQ4_XS",
        24: "I8",
        25: "I16",
        26: "I32",
        27: "I64",
        28: "F64",
        29: "IQ1_M",
        34: "TQ1_0",
        35: "TQ2_0",
        39: "MXFP4",
    }
)
"""Names of types, of others than those that are read, too."""
