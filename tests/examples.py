"""How many examples a property is tried with."""

from __future__ import annotations

import os

LONG = os.environ.get("JAXDRAFT_LONG_TESTS") == "1"
"""Whether this is ``./run test --long``: other examples in every run, and many more."""

FACTOR = 24 if LONG else 1


def examples(count: int) -> int:
    """Returns how many examples to draw where an ordinary run draws ``count``."""
    return count * FACTOR
