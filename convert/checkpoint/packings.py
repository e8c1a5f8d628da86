"""The tensors of a quantized matrix, by layout: their expected form, and their numbers.

A matrix ``X.weight`` [out, in] in groups of g inputs, b bits per value, n = 32 / b:

| layout | tensors |
|---|---|
| pack-quantized | ``X.weight_packed`` int32 [out, in / n], ``X.weight_scale`` [out, in / g], ``X.weight_shape``; ``X.weight_zero_point`` int32 [out / n, in / g], packed along the rows; ``X.weight_g_idx`` |
| int-quantized | ``X.weight`` int8, ``X.weight_scale`` and perhaps ``X.weight_zero_point`` [out, in / g] |
| float-quantized | ``X.weight`` float8 e4m3, ``X.weight_scale`` [out / r, in / g] |
| fp8 | ``X.weight`` float8 e4m3, ``X.weight_scale_inv`` [out / r, in / g], a factor in spite of its name |
| awq | ``X.qweight`` int32 [in, out / n], ``X.qzeros`` int32 [in / g, out / n], ``X.scales`` [in / g, out]; the nibbles of a word, low first, are columns 0 2 4 6 1 3 5 7 |
| gptq | ``X.qweight`` int32 [in / n, out], ``X.qzeros`` as above, low bits first and one lower, ``X.scales``, ``X.g_idx`` int32 [in] |
| mxfp4 | experts ``X`` [E, in, out]: ``X_blocks`` uint8 [E, out, in / 32, 16], low half first, and ``X_scales`` uint8 [E, out, in / 32], exponents and 127 |

If one scale serves a whole row, or all rows, the last axis is 1, or absent.
"""  # noqa: E501 - a table

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

import ml_dtypes
import numpy as np

from convert.checkpoint.quantization import Scheme
from convert.packed import Source, pack_values
from convert.tensors import FLOAT8, FLOATS, INT8, INT32, INT64, UINT8, Array, Tensor
from jaxdraft.checkpoint.forms import Form
from jaxdraft.checkpoint.layout import blocks_of, packed_of, scales_of, shape_of

Tensors = Mapping[str, Tensor]

_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of a word that holds column 0, 1, ... of its eight."""

_POWERS = np.dtype(ml_dtypes.float8_e8m0fnu)
"""Powers of two, stored as the exponent and 127."""

_UINT8, _INT16 = np.dtype(np.uint8), np.dtype(np.int16)


@dataclasses.dataclass(frozen=True)
class Expected:
    """Expected form of a tensor."""

    shapes: tuple[tuple[int, ...], ...]
    types: Collection[int]
    wanted: str

    @classmethod
    def of(cls, *shape: int, types: Collection[int] = FLOATS, note: str = "") -> Expected:
        return cls((shape,), types, f"shape {list(shape)}{note}")


def companions(scheme: Scheme, name: str) -> dict[str, str]:
    """Return the names of the tensors of a quantized matrix, by their role."""
    stem = name.removesuffix(".weight")
    if scheme.layout in ("awq", "gptq"):
        return {
            "values": f"{stem}.qweight",
            "scales": f"{stem}.scales",
            "zeros": f"{stem}.qzeros",
            **({"groups": f"{stem}.g_idx"} if scheme.layout == "gptq" else {}),
        }
    if scheme.layout == "mxfp4":
        values, scales = blocks_of(name)
        return {"values": values, "scales": scales}
    if scheme.layout == "fp8":
        return {"values": name, "scales": f"{name}_scale_inv"}
    found = {"values": name, "scales": scales_of(name)}
    if scheme.layout == "pack-quantized":
        found |= {"values": packed_of(name), "shape": shape_of(name)}
    if scheme.zeros:
        found["zeros"] = f"{name}_zero_point"
    if scheme.reordered:
        found["groups"] = f"{name}_g_idx"
    return found


def is_quantized(scheme: Scheme, name: str, tensors: Tensors) -> bool:
    """Return whether tensors of a quantized matrix of this name are present."""
    if name in tensors and tensors[name].data_type in (INT8, FLOAT8):
        return True
    return any(each in tensors for each in companions(scheme, name).values() if each != name)


def expected(scheme: Scheme, name: str, shape: tuple[int, ...]) -> dict[str, Expected]:
    """Return the expected form of the tensors of a quantized matrix, by name."""
    if scheme.layout == "mxfp4":
        return _expected_experts(scheme, name, shape)
    rows, columns = shape
    names, bits, each = companions(scheme, name), scheme.bits, 32 // scheme.bits
    group = scheme.group or columns
    blocks = -(-columns // group)
    scales = _expected_scales(scheme, rows, columns, blocks)
    note = f", {_COUNTS[each]} of the {columns} numbers of a row in each"
    found: dict[str, Expected]
    if scheme.layout in ("awq", "gptq"):
        words, zero_words = -(-columns // each), -(-rows // each)
        values = Expected.of(words, rows, types=(INT32,))
        if scheme.layout == "awq":
            values = Expected.of(columns, zero_words, types=(INT32,))
        found = {
            names["values"]: values,
            names["scales"]: dataclasses.replace(scales, shapes=((blocks, rows),)),
            names["zeros"]: Expected.of(blocks, zero_words, types=(INT32,)),
        }
        if (rows if scheme.layout == "awq" else columns) % each:
            found[names["values"]] = Expected((), (), f"a multiple of {each} numbers")
    elif scheme.layout == "pack-quantized":
        found = {
            names["values"]: Expected.of(rows, -(-columns // each), types=(INT32,), note=note),
            names["scales"]: scales,
            names["shape"]: Expected.of(2, types=(INT64,)),
        }
        if scheme.zeros:
            found[names["zeros"]] = Expected.of(-(-rows // each), blocks, types=(INT32,))
    else:
        stored = INT8 if scheme.layout == "int-quantized" else FLOAT8
        found = {names["values"]: Expected.of(*shape, types=(stored,)), names["scales"]: scales}
        if scheme.zeros:
            found[names["zeros"]] = dataclasses.replace(scales, types=(INT8,))
    if scheme.reordered:
        found[names["groups"]] = Expected.of(columns, types=(INT32,))
    if scheme.group and scheme.rows == 1 and (columns % group or group * bits % 8):
        wanted = f"groups of {group} that make {columns} inputs"
        found[names["scales"]] = Expected((), (), wanted)
    return found


def _expected_experts(scheme: Scheme, name: str, shape: tuple[int, ...]) -> dict[str, Expected]:
    names, group = companions(scheme, name), scheme.group or 32
    experts, columns, rows = shape
    if columns % group:
        wanted = f"groups of {group} that make {columns} inputs"
        return {each: Expected((), (), wanted) for each in names.values()}
    blocks = (experts, rows, columns // group)
    note = f", two of {group} numbers in one"
    return {
        names["values"]: Expected.of(*blocks, group // 2, types=(UINT8,), note=note),
        names["scales"]: Expected.of(*blocks, types=(UINT8,)),
    }


_COUNTS = {4: "four", 8: "eight", 16: "sixteen"}


def _expected_scales(scheme: Scheme, rows: int, columns: int, blocks: int) -> Expected:
    if scheme.group is None and scheme.layout in ("int-quantized", "float-quantized"):
        forms = (rows, 1), (rows,), (1,), (), (1, 1)
        return Expected(forms, FLOATS, f"shape [{rows}, 1], a scale per row, or [1], one for all")
    size = scheme.group or columns
    if scheme.rows != 1:
        high = -(-rows // (scheme.rows or rows))
        return Expected.of(high, blocks, note=f", a scale per {scheme.rows} x {size}")
    return Expected.of(rows, blocks, note=f", a scale per {size} numbers")


def optional(scheme: Scheme, name: str) -> set[str]:
    """Return the names of tensors that may be present and are then checked by :func:`groups_of`."""
    names = companions(scheme, name)
    return {names["groups"]} if "groups" in names and not scheme.reordered else set()


def groups_of(scheme: Scheme, name: str, tensors: Tensors) -> Array | None:
    """Return the group of each input, [in], unless inputs lie in the order of their groups."""
    tensor = tensors.get(companions(scheme, name).get("groups", ""))
    if tensor is None:
        return None
    groups = tensor.read()
    size = scheme.group or max(1, len(groups))
    return None if np.array_equal(groups, np.arange(len(groups)) // size) else groups


def source(scheme: Scheme, name: str, shape: tuple[int, ...], tensors: Tensors) -> Source:
    """Return the numbers of a quantized matrix whose tensors are as :func:`expected`."""
    stored = {
        role: tensors[each] for role, each in companions(scheme, name).items() if each in tensors
    }
    makers: Mapping[str, Callable[..., Source]] = {
        "pack-quantized": _pack_quantized,
        "int-quantized": _int_quantized,
        "float-quantized": _float_quantized,
        "fp8": _float_quantized,
        "awq": _awq,
        "gptq": _gptq,
    }
    made = makers[scheme.layout](scheme, (shape[0], shape[1]), stored)
    groups = groups_of(scheme, name, tensors)
    return made if groups is None else reordered(made, groups, stored["groups"])


def experts_source(
    scheme: Scheme, name: str, shape: tuple[int, ...], form: Form, tensors: Tensors
) -> Source:
    """Return the matrices of all experts, one below the other, as one quantized matrix.

    Args:
      scheme: the layout "mxfp4".
      name: name of the experts' tensor, if it were not quantized.
      shape: its shape, [E, in, out].
      form: its form; with ``ALTERNATING`` the rows of gate and up are stored in turn.
      tensors: stored tensors, by name.
    """
    names = companions(scheme, name)
    values, scales = tensors[names["values"]], tensors[names["scales"]]
    experts, columns, rows = shape

    def read(part: str, start: int, stop: int) -> Array:
        expert, row = np.divmod(np.arange(start, stop), rows)
        if form is Form.ALTERNATING:  # example, 6 rows: 0 2 4 are gates, 1 3 5 are up
            row = row % (rows // 2) * 2 + row // (rows // 2)
        if part == "weight_q":
            return values.read()[expert, row]
        return scales.read()[expert, row].view(_POWERS)

    return Source(
        outputs=experts * rows,
        inputs=columns,
        bits=scheme.bits,
        block=scheme.group or 32,
        types={"weight_q": _UINT8, "scales": _POWERS},
        read=read,
        tensors={"weight_q": (values,), "scales": (scales,)},
        values="e2m1",
    )


def _source(
    scheme: Scheme,
    shape: tuple[int, int],
    stored: Mapping[str, Tensor],
    *,
    values: Callable[[int, int], Array],
    scales: Callable[[int, int], Array],
    zeros: Callable[[int, int], Array] | None = None,
    kind: str = "integer",
    rows: int = 1,
) -> Source:
    """Return a source from functions of the first and the end row.

    Values are bytes, [n, bytes]; scales and zeros are [n / rows, blocks].
    """
    bits, per = scheme.bits, 8 // scheme.bits
    block = scheme.group or -(-shape[1] // per) * per
    blocks = -(-shape[1] // block)

    def read(part: str, start: int, stop: int) -> Array:
        if part == "weight_q":
            flat = values(start, stop)
            width = blocks * block // per
            flat = np.pad(flat[:, :width], ((0, 0), (0, max(0, width - flat.shape[1]))))
            return flat.reshape(stop - start, blocks, block // per)
        return scales(start, stop) if part == "scales" else zeros_of(start, stop)

    def zeros_of(start: int, stop: int) -> Array:
        assert zeros is not None
        return zeros(start, stop)

    types = {"weight_q": _UINT8, "scales": FLOATS[stored["scales"].data_type]}
    tensors = {"weight_q": (stored["values"],), "scales": (stored["scales"],)}
    if zeros is not None:
        # A zero point of eight bits that is stored one lower can be 256.
        types["zeros"] = _INT16 if scheme.lowered and bits == 8 else _UINT8
        tensors["zeros"] = (stored["zeros"],)
    return Source(
        outputs=shape[0],
        inputs=shape[1],
        bits=bits,
        block=block,
        types=types,
        read=read,
        tensors=tensors,
        values=kind,
        rows=rows,
    )


def _by_row(tensor: Tensor, rows: int, each: int) -> Callable[[int, int], Array]:
    """Return a reader of numbers per group of ``each`` rows, [n, blocks]. One may serve all."""

    def read(start: int, stop: int) -> Array:
        found = tensor.read()
        if found.size == 1:
            found = np.broadcast_to(found.reshape(1, 1), (-(-rows // each), 1))
        elif found.ndim == 1:
            found = found[:, None]
        return found[start // each : -(-stop // each)]

    return read


def _pack_quantized(scheme: Scheme, shape: tuple[int, int], stored: Mapping[str, Tensor]) -> Source:
    each = 32 // scheme.bits

    def values(start: int, stop: int) -> Array:
        return stored["values"].read()[start:stop].view(np.uint8)

    def zeros(start: int, stop: int) -> Array:
        words = stored["zeros"].read()[start // each : -(-stop // each)]
        return _unpack(words, scheme.bits, axis=0)[start % each :][: stop - start]

    return _source(
        scheme,
        shape,
        stored,
        values=values,
        scales=_by_row(stored["scales"], shape[0], 1),
        zeros=zeros if scheme.zeros else None,
    )


def _int_quantized(scheme: Scheme, shape: tuple[int, int], stored: Mapping[str, Tensor]) -> Source:
    def values(start: int, stop: int) -> Array:
        return stored["values"].read()[start:stop].view(np.uint8) ^ np.uint8(0x80)

    def zeros(start: int, stop: int) -> Array:
        found = _by_row(stored["zeros"], shape[0], 1)(start, stop)
        return np.ascontiguousarray(found).view(np.uint8) ^ np.uint8(0x80)

    return _source(
        scheme,
        shape,
        stored,
        values=values,
        scales=_by_row(stored["scales"], shape[0], 1),
        zeros=zeros if scheme.zeros else None,
    )


def _float_quantized(
    scheme: Scheme, shape: tuple[int, int], stored: Mapping[str, Tensor]
) -> Source:
    def values(start: int, stop: int) -> Array:
        return stored["values"].read()[start:stop].view(np.uint8)

    rows = scheme.rows or 1
    scales = _by_row(stored["scales"], shape[0], rows)
    return _source(scheme, shape, stored, values=values, scales=scales, kind="e4m3", rows=rows)


def _awq(scheme: Scheme, shape: tuple[int, int], stored: Mapping[str, Tensor]) -> Source:
    def columns(tensor: Tensor, start: int, stop: int) -> Array:
        """Return some columns of a matrix of words, [rows, stop - start]."""
        words = tensor.read()[:, start // 8 : -(-stop // 8)]
        nibbles = _unpack(words, 4, axis=1).reshape(len(words), -1, 8)[..., _AWQ_NIBBLES]
        return nibbles.reshape(len(words), -1)[:, start % 8 :][:, : stop - start]

    return _source(
        scheme,
        shape,
        stored,
        values=lambda start, stop: pack_values(columns(stored["values"], start, stop).T, 4),
        scales=lambda start, stop: stored["scales"].read()[:, start:stop].T,
        zeros=lambda start, stop: columns(stored["zeros"], start, stop).T,
    )


def _gptq(scheme: Scheme, shape: tuple[int, int], stored: Mapping[str, Tensor]) -> Source:
    bits, each = scheme.bits, 32 // scheme.bits

    def values(start: int, stop: int) -> Array:
        words = stored["values"].read()[:, start:stop]
        return np.ascontiguousarray(words.T).view(np.uint8)

    def zeros(start: int, stop: int) -> Array:
        words = stored["zeros"].read()[:, start // each : -(-stop // each)]
        found = _unpack(words, bits, axis=1)[:, start % each :][:, : stop - start].T
        lowered = int(scheme.lowered)
        return (found.astype(np.int16) + lowered).astype(_INT16 if bits == 8 else _UINT8)

    return _source(
        scheme,
        shape,
        stored,
        values=values,
        scales=lambda start, stop: stored["scales"].read()[:, start:stop].T,
        zeros=zeros,
    )


def _unpack(words: Array, bits: int, *, axis: int) -> Array:
    """Unpack int32 words to uint8, low bits first, ``32 / bits`` times as many along ``axis``.

    Example, 4 bits: the word 0x21 is 1 2 0 0 0 0 0 0.
    """
    places = np.arange(0, 32, bits, dtype=np.uint32)
    each = np.expand_dims(np.ascontiguousarray(words).view(np.uint32), axis + 1)
    shape = [1] * each.ndim
    shape[axis + 1] = len(places)
    values = each >> places.reshape(shape) & np.uint32((1 << bits) - 1)
    size = list(words.shape)
    size[axis] *= len(places)
    return values.astype(np.uint8).reshape(size)


def reordered(plain: Source, groups: Array, tensor: Tensor) -> Source:
    """Return a matrix whose inputs are in the groups that ``groups`` [in] names.

    Its columns are sorted by their group, and the inputs' order is one of its arrays. Groups that
    are not all full have a scale per input instead, which only serves to make floats.
    """
    order = np.argsort(groups, kind="stable").astype(np.int32)
    whole = np.array_equal(groups[order], np.arange(len(groups)) // plain.block)
    bits = plain.bits

    def unpacked(start: int, stop: int) -> Array:
        raw = plain.read("weight_q", start, stop).reshape(stop - start, -1)
        places = np.arange(0, 8, bits, dtype=np.uint8)
        values = raw[..., None] >> places & np.uint8((1 << bits) - 1)
        return values.reshape(stop - start, -1)[:, : plain.inputs]

    def read(part: str, start: int, stop: int) -> Array:
        if part == "order":
            return order
        if part != "weight_q":
            found = plain.read(part, start, stop)
            return found if whole else found[:, groups]
        values = unpacked(start, stop)
        if not whole:
            implied = 0 if "zeros" in plain.types else 128 - (1 << (bits - 1))
            return (values + np.uint8(implied))[:, :, None]
        packed = pack_values(values[:, order], bits)
        return packed.reshape(stop - start, plain.blocks, -1)

    if whole:
        types = {**plain.types, "order": np.dtype(np.int32)}
        tensors = {**plain.tensors, "order": (tensor,)}
        return dataclasses.replace(plain, types=types, tensors=tensors, read=read)
    return dataclasses.replace(plain, bits=8, block=1, read=read, loose=True)
