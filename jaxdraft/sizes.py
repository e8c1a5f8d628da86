"""Sizes of buffers that programs are compiled for."""

from __future__ import annotations


def power_of_two(size: int, *, least: int = 1) -> int:
    """Return the smallest power of two that is at least ``size`` and ``least``."""
    return max(least, 1 << max(size - 1, 0).bit_length())
