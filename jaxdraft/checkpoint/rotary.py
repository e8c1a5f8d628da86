"""Rotary tables compared with descriptions of them, in both directions.

:mod:`jaxdraft.rope` makes tables from a description.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxdraft.checkpoint.layout import ROTARY
from jaxdraft.checkpoint.layout import Path as ParameterPath
from jaxdraft.rope import Rope

Array = np.ndarray

_EPS = {
    np.dtype(dtype): float(ml_dtypes.finfo(dtype).eps)
    for dtype in (ml_dtypes.bfloat16, np.float16, np.float32)
}
"""Resolution of the dtypes of tables, the coarsest first."""


def fits(rope: Rope, cos: Array, sin: Array) -> bool:
    """Return whether tables [positions, rotary_dim / 2] are those of ``rope``, up to rounding.

    Float32 angles are off by a rounding of their own size, so the tolerance grows with the
    position.
    """
    positions, half = cos.shape
    # A float16 artifact's tables are float32 in the module, with only float16 precision.
    eps = next(_EPS[t] for t in _EPS if all(np.array_equal(x, x.astype(t)) for x in (cos, sin)))
    tolerance = 2 * eps + np.arange(positions)[:, None] * 2.0**-22
    tables = rope.tables(positions, 2 * half)
    pairs = zip(tables, (cos, sin), strict=True)
    return all(
        bool(np.all(np.abs(wanted - found.astype(np.float64)) <= tolerance))
        for wanted, found in pairs
    )


def recover(cos: Array, sin: Array) -> Rope | None:
    """Return the plain :class:`Rope` of the tables, or None if there is none.

    One frequency gives theta, to the precision of the table. Of the decimals near it, the
    shortest that fits every entry is taken, since typical values are 10000 and 500000.
    """
    positions, half = cos.shape
    if half == 1 or positions == 1:  # the only frequency is 1, or only position 0 is known
        plain = Rope(theta=10000.0)
        return plain if fits(plain, cos, sin) else None
    channel = max(1, round(half / 12))  # theta**-x is most sensitive at x = 1 / log(theta)
    turn, position = 0.0, 1
    while position < positions:  # the last angle gives the whole turns of the next
        angle = math.atan2(float(sin[position, channel]), float(cos[position, channel]))
        turns = round((position * turn - angle) / (2 * math.pi))
        turn = (angle + 2 * math.pi * turns) / position
        position *= 2
    if turn < 1e-6:  # not a base in use
        return None
    estimate = turn ** (-half / channel)
    for digits in range(1, 10):
        rope = Rope(theta=float(f"{estimate:.{digits - 1}e}"))
        if rope.theta > 0 and fits(rope, cos, sin):
            return rope
    return None


def tables_of(
    folder: str, found: Mapping[ParameterPath, Any], module: str = ROTARY[0]
) -> tuple[Array, Array]:
    """Return the rotary tables among the parameters of a module.

    Args:
      folder: name of the folder to be written, for messages.
      found: the parameters.
      module: one of :data:`jaxdraft.checkpoint.layout.ROTARY`.

    Raises:
      ValueError: there are none.
    """
    paths = (module, "cos"), (module, "sin")
    if any(path not in found for path in paths):
        raise ValueError(f"{folder}: there are no rotary tables; a checkpoint must describe some")
    cos, sin = (np.asarray(found[path]) for path in paths)
    return cos, sin


def check_tables(
    folder: str, found: Mapping[ParameterPath, Any], rope: Rope, module: str = ROTARY[0]
) -> None:
    """Raise if the tables of :func:`tables_of` are not those of ``rope``."""
    if not fits(rope, *tables_of(folder, found, module)):
        raise ValueError(f"{folder}: the rotary tables are not those of {rope}")
