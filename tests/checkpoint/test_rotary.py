"""Bases and schemes against tables, both ways."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from jaxdraft.checkpoint import Rope
from jaxdraft.checkpoint.rotary import fits, recover
from jaxdraft.nn.rope import rotary_tables

YARN = Rope(theta=10000.0, kind="yarn", factor=4.0, original_length=32768)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1e6, 1e7, 123456.0])
@pytest.mark.parametrize("dim", [8, 64])
def test_the_base_is_found(theta: float, dim: int, dtype: type) -> None:
    for tables in (Rope(theta=theta).tables, Rope(theta=theta).target_tables):
        cos, sin = (table.astype(dtype) for table in tables(600, dim))
        found = recover(cos, sin)
        assert found is not None
        # A narrow table knows fewer digits; what is found explains every entry of it.
        assert fits(found, cos, sin)
        assert found.theta == pytest.approx(theta, rel=2e-2 if dtype is not np.float32 else 1e-6)
        if dtype is np.float32 or theta != 123456.0:
            assert found.theta == theta


def test_one_frequency_has_no_base() -> None:
    assert recover(*rotary_tables(100, 2, 777.0)) == Rope(theta=10000.0)


def test_drafters_have_the_tables_that_modules_start_with() -> None:
    for ours, theirs in zip(
        Rope(theta=1e4).tables(300, 32), rotary_tables(300, 32, 1e4), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_target_tables_are_of_float32_angles() -> None:
    cos, _ = Rope(theta=1e4).target_tables(100_000, 16)
    exact, _ = Rope(theta=1e4).tables(100_000, 16)
    assert np.abs(cos - exact)[:10].max() < 1e-6
    assert 1e-4 < np.abs(cos - exact).max() < 2e-2  # a rounding of the angle, not of the cosine
    assert cos[50_000, 1] == np.float32(np.cos(np.float64(np.float32(50_000) * frequency())))


def frequency() -> np.float32:
    """The second of eight, in float32 throughout."""
    return np.float32(1) / np.float32(1e4) ** (np.float32(2) / np.float32(16))


def test_yarn() -> None:
    """Numbers of the scheme's definition: high frequencies stay, low ones are divided."""
    np.testing.assert_allclose(YARN.frequencies(8), [1, 0.1, 0.01, 6.25e-4], rtol=1e-6)
    assert YARN.scale == pytest.approx(1.1386294)
    cos, sin = YARN.tables(64, 8)
    np.testing.assert_allclose(cos[0], 1.1386294, rtol=1e-7)
    np.testing.assert_allclose(sin[1], 1.1386294 * np.sin([1, 0.1, 0.01, 6.25e-4]), rtol=1e-6)
    assert cos[0, 0].astype(ml_dtypes.bfloat16) == ml_dtypes.bfloat16(1.140625)


def test_yarn_is_not_taken_for_a_plain_base() -> None:
    tables = YARN.tables(64, 8)
    assert recover(*tables) is None
    assert fits(YARN, *tables)
    for change in ({"factor": 8.0}, {"attention_factor": 1.0}, {"theta": 20000.0}):
        assert not fits(dataclasses.replace(YARN, **change), *tables)


@pytest.mark.parametrize("rope", [Rope(theta=5e5), YARN, dataclasses.replace(YARN, beta_slow=2.0)])
def test_json_and_back(rope: Rope) -> None:
    assert Rope.of_json(rope.json()) == rope


def test_a_table_of_something_else() -> None:
    cos, sin = rotary_tables(200, 16, 1e4)
    cos[150, 3] += 1e-3
    assert recover(cos, sin) is None
    assert recover(np.zeros((4, 4), np.float32), np.zeros((4, 4), np.float32)) is None
