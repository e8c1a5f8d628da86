"""The limits of four programs with four layers: the short selection of these tests.

./run test --gpu tests/gpu/test_limits.py
"""

from __future__ import annotations

import gpu_compile
import pytest

from tests.gpu.programs import LENGTHS, built, count

pytestmark = pytest.mark.gpu

LAUNCHES = {"step": 106, "verify": 109, "round:dflash2": 333, "sampled:dflash2": 455}
"""Most launches; so many there are now, except that XLA may need one or two more at a length."""


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    if why := gpu_compile.unavailable():
        pytest.fail(why)


@pytest.mark.parametrize("name", LAUNCHES)
def test_limits_of_a_program(name: str) -> None:
    """One graph, no wait, few launches, the least bytes, and no array copied."""
    within = 1.08 if name.startswith("sampled") else 1.05  # of few layers; see test_programs.py
    for length in LENGTHS:
        counts = count(name, length)
        assert (counts.graphs, counts.waits) == (1, 0)
        assert counts.launches <= LAUNCHES[name] + 2
        assert counts.joined == counts.rewritten == 0
        assert counts.moved <= within * built(name)[0].least(length)
    assert count(name, 8192).copied == 0
