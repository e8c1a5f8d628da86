"""The number of examples of a property, and the cases of an ordinary run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

LONG = os.environ.get("JAXDRAFT_LONG_TESTS") == "1"
"""Whether this is ``./run test --long``: other examples in every run, and many more."""

FACTOR = 24 if LONG else 1


def examples(count: int) -> int:
    """Returns how many examples to draw where an ordinary run draws ``count``."""
    return count * FACTOR


def first(count: int, cases: Iterable[T]) -> list[T]:
    """Return the first ``count`` cases, or all in a run of ``./run test --long``.

    For matrices of cases that share their code: an ordinary run takes the most telling ones, which
    come first.
    """
    return list(cases if LONG else islice(cases, count))
