"""Files that come with the package."""

from pathlib import Path

EMBEDDED = Path(__file__).parent / "family"
"""The checkpoint that comes with the package: a small trained target and its three drafters."""

SMOLLM2_DRAFTER = Path(__file__).parent / "smollm2"
"""A trained DFlash2 drafter for SmolLM2-135M-Instruct; the target does not come with it."""

SHIPPED = {"smollm2": SMOLLM2_DRAFTER}
"""Drafters that ship with the package, for targets that do not, by name."""
