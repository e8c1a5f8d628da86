"""Checks of numbers that callers pass: integers, and amounts of memory."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)")


def parse_memory(memory: int | str) -> int:
    """Return the bytes of ``memory``.

    Strict: a number without a unit is an ``int``, a string has one of B, KB, MB, GB, TB (powers of
    1000), KiB, MiB, GiB, TiB (powers of 1024), written like that; ``"1.5GiB"`` is fine because it
    is a whole number of bytes.

    Raises:
      ValueError: anything else, or not a positive number of bytes.
    """
    if isinstance(memory, str):
        found = _SIZE.fullmatch(memory)
        if found is None or found[2] not in _UNITS:
            raise ValueError(
                f"memory is {memory!r}; expected bytes, or a number with one of the units "
                f"{', '.join(_UNITS)}, like '12GiB'"
            )
        size = Fraction(found[1]) * _UNITS[found[2]]
        if size.denominator != 1:
            raise ValueError(f"memory is {memory!r}: {float(size)} bytes is not a whole number")
        memory = int(size)
    return check_int("memory", memory)


def format_bytes(size: int) -> str:
    """Format ``size`` for display, in powers of 1024 and rounded: ``"40.6 MiB"``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def check_int(name: str, value: Any, low: int = 1) -> int:
    """Return ``value`` as a Python integer of at least ``low``.

    Raises:
      ValueError: it is not an integer (booleans are rejected), or less than ``low``.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} is {value!r}; expected an integer")
    value = int(value.__index__())
    if value < low:
        raise ValueError(f"{name} is {value}; expected at least {low}")
    return value
