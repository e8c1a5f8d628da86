"""Conversion of parameters to stored numbers, and back."""

from __future__ import annotations

import enum
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

Array = np.ndarray


class Form(enum.Enum):
    """The stored form of a parameter x."""

    PLAIN = enum.auto()  # x
    OFFSET = enum.auto()  # x - 1: Qwen3.5's norms multiply by 1 + w
    LOG = enum.auto()  # log(-x): A_log, the decay scale being -exp(A_log)
    ZERO = enum.auto()  # not at all: a bias that the architecture lacks
    OFFSETS = enum.auto()  # int64, token x at place i as x - i: EAGLE-3's d2t
    TRANSPOSED = enum.auto()  # the last two axes swapped
    ALTERNATING = enum.auto()  # TRANSPOSED if there are three axes; gate and up in turn


DTYPES = ("float32", "bfloat16", "float16")
"""Types of stored tensors and of modules."""


def float_dtype(dtype: DTypeLike) -> np.dtype:
    """Return one of :data:`DTYPES`.

    Raises:
      ValueError: ``dtype`` is something else.
    """
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        name = repr(dtype) if found is None else repr(found.name)
        raise ValueError(f"dtype is {name}; expected one of {', '.join(DTYPES)}")
    return found


LAID_OUT = (Form.TRANSPOSED, Form.ALTERNATING)
"""Forms that move numbers and change none. Source: transformers' ``gpt_oss``."""


def lay_out(values: Array, form: Form) -> Array:
    """Return a parameter's numbers in the order of the file.

    Example: gate and up [E, 2 I] with rows g0 g1 u0 u1 are stored as g0 u0 g1 u1.

    Args:
      values: [E, X, Y], or [E, X].
      form: one of :data:`LAID_OUT`.
    """
    values = alternate(values) if form is Form.ALTERNATING else values
    return values.swapaxes(1, 2) if values.ndim == 3 else values


def alternate(values: Array) -> Array:
    """Put the first and the second half of axis 1 in turn."""
    halves = values.reshape(values.shape[0], 2, -1, *values.shape[2:])
    return np.swapaxes(halves, 1, 2).reshape(values.shape)


def take_in(stored: Array, form: Form) -> Array:
    """Return the inverse of :func:`lay_out`."""
    values = stored.swapaxes(1, 2) if stored.ndim == 3 else stored
    if form is not Form.ALTERNATING:
        return values
    return np.concatenate([values[:, 0::2], values[:, 1::2]], axis=1)


def encode(values: Array, form: Form, dtype: np.dtype) -> Array:
    """Return a parameter's values in their stored form.

    Values from :func:`decode` survive :func:`encode` and :func:`decode` bit for bit. Other values
    may not: ``1 + w`` has fewer digits left below 1/2, and ``exp`` skips numbers above e.

    Args:
      values: any shape, any float dtype.
      form: not ``ZERO``.
      dtype: type of the stored tensors.

    Raises:
      ValueError: a decay scale is not negative.
    """
    if form is Form.PLAIN:
        return values.astype(dtype)
    if form in LAID_OUT:
        return lay_out(values, form).astype(dtype)
    if form is Form.OFFSETS:
        return values.astype(dtype) - np.arange(len(values), dtype=dtype)
    wide = values.astype(np.float64)
    if form is Form.OFFSET:
        return (wide - 1.0).astype(np.float32).astype(dtype)
    assert form is Form.LOG
    if not np.all(wide < 0):
        raise ValueError(f"a decay scale is {wide.max()}; expected negative numbers")
    # Of the numbers next to the logarithm take the one that comes back best.
    guess = np.log(-wide).astype(np.float32)
    up, down = (np.nextafter(guess, np.float32(to)) for to in (np.inf, -np.inf))
    choices = np.stack([guess, up, down])
    error = np.abs(decode(choices, form, values.dtype).astype(np.float64) - wide)
    best = np.take_along_axis(choices, np.argmin(error, axis=0)[None], axis=0)[0]
    return best.astype(dtype)


def decode(stored: Array, form: Form, dtype: np.dtype) -> Array:
    """Return the parameter's values of stored numbers, rounded once into ``dtype``."""
    if form is Form.PLAIN:
        return stored.astype(dtype)
    if form in LAID_OUT:
        return take_in(stored, form).astype(dtype)
    if form is Form.OFFSETS:
        return (stored + np.arange(len(stored), dtype=stored.dtype)).astype(dtype)
    wide = stored.astype(np.float64)
    return (wide + 1.0 if form is Form.OFFSET else -np.exp(wide)).astype(dtype)


def difference(values: Array, stored: Array, form: Form) -> float:
    """Return the largest difference between ``values`` and the values read from ``stored``."""
    moved = form is Form.PLAIN or form in LAID_OUT
    if form is Form.OFFSETS or (moved and stored.dtype == values.dtype):
        return 0.0
    back = decode(stored, form, values.dtype).astype(np.float32)
    return float(np.max(np.abs(back - values.astype(np.float32)), initial=0.0))


def to_int8(matrix: Array, scale_dtype: np.dtype) -> tuple[Array, Array]:
    """Round a matrix [out, in] to eight bits: ``matrix ~ values * scale``.

    Symmetric, one scale per row: a row's largest number becomes 127 or -127, and an error is at
    most half a scale. Source: compressed-tensors' format ``int-quantized``, strategy ``channel``.

    Example: the row [0.5, -1.27] has scale 0.01 and the values [50, -127].

    Args:
      matrix: a matrix of any float dtype.
      scale_dtype: type of the scales. Values are rounded with the scale as it is stored.

    Returns:
      int8 [out, in], and scales [out, 1].
    """
    wide = matrix.astype(np.float32)
    scale = (np.abs(wide).max(axis=1, keepdims=True) / 127).astype(scale_dtype)
    step = np.where(scale == 0, 1, scale.astype(np.float32))  # a row of zeros stays zero
    return np.clip(np.rint(wide / step), -127, 127).astype(np.int8), scale


def from_int8(values: Array, scale: Array) -> Array:
    """Return the float32 matrix of :func:`to_int8`. One scale for all, or one per row."""
    return values.astype(np.float32) * scale.astype(np.float32).reshape(-1, 1)


INT4_GROUP = 64
"""Number of inputs that share a scale in written files."""


def to_int4(matrix: Any, group: int = INT4_GROUP) -> tuple[Any, Any]:
    """Round a matrix [out, in] to four bits: ``matrix ~ values * scale``, a scale per group.

    Symmetric: the largest number of a group becomes 7 or -7, and -8 is not used, so that a
    stored matrix is stored the same again. Scales are bfloat16. Source: compressed-tensors' format
    ``pack-quantized``, strategy ``group``.

    Example, groups of two: the row [0.5, -1.75, 0, 0] has the scales [0.25, 0] and the values
    [2, -7, 0, 0].

    Args:
      matrix: float32, of numpy or of jax; the result is of the same library.
      group: number of inputs per scale, a divisor of ``in``.

    Returns:
      int8 [out, in] in -7..7, and bfloat16 scales [out, in / group].

    Raises:
      ValueError: if the rows do not divide into groups.
    """
    rows, columns = matrix.shape
    if columns % group:
        raise ValueError(f"a row has {columns} numbers; expected groups of {group}")
    groups = matrix.reshape(rows, columns // group, group)
    scale = (abs(groups).max(axis=2) / 7).astype(jnp.bfloat16)
    step = scale.astype(np.float32)
    step = step + (step == 0).astype(np.float32)  # a group of zeros stays one
    values = (groups / step[..., None]).round().clip(-7, 7)
    return values.reshape(rows, columns).astype(np.int8), scale


def from_int4(values: Any, scale: Any) -> Any:
    """Return the matrix of :func:`to_int4`: ``values * scale``, exact in float32.

    Args:
      values: int8 [out, in], of numpy or of jax.
      scale: [out, in / group], of the same library; the group follows from the shapes.

    Returns:
      float32 [out, in], of the same library.
    """
    rows, groups = scale.shape
    wide = values.astype(np.float32).reshape(rows, groups, -1)
    return (wide * scale.astype(np.float32)[..., None]).reshape(rows, -1)


def pack_int4(values: Array) -> Array:
    """Pack eight numbers into an int32, each plus 8, the first in the lowest bits, zero-padded.

    Example: [1, -8, 7] is the bits 1111 0000 1001 below others that are zero, 0x0F09.

    Args:
      values: int8 [out, in], in -8..7.

    Returns:
      int32 [out, ceil(in / 8)].
    """
    rows, columns = values.shape
    raised = (values + np.int8(8)).astype(np.uint32)
    raised = np.pad(raised, [(0, 0), (0, -columns % 8)]).reshape(rows, -1, 8)
    places = np.uint32(4) * np.arange(8, dtype=np.uint32)
    return np.bitwise_or.reduce(raised << places, axis=2).view(np.int32)


def unpack_int4(packed: Array, columns: int) -> Array:
    """Undo :func:`pack_int4`: int32 [out, ceil(columns / 8)] -> int8 [out, columns]."""
    places = np.uint32(4) * np.arange(8, dtype=np.uint32)
    raised = packed.view(np.uint32)[..., None] >> places & np.uint32(15)
    values = raised.reshape(packed.shape[0], -1)[:, :columns]
    return values.astype(np.int8) - np.int8(8)
