"""Stored numbers and back: what came from a checkpoint goes back to it without a bit changed."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdraft.checkpoint.forms import Form, decode, difference, encode

F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def floats(low: float, high: float) -> st.SearchStrategy[np.ndarray]:
    numbers = st.floats(low, high, width=32, allow_subnormal=False)
    return st.lists(numbers, min_size=1, max_size=20).map(lambda x: np.asarray(x, np.float32))


@given(floats(-4.0, 4.0))
def test_a_norm_that_was_stored_comes_back(stored: np.ndarray) -> None:
    weight = decode(stored, Form.OFFSET, F32)
    np.testing.assert_array_equal(weight, stored + np.float32(1))
    again = encode(weight, Form.OFFSET, F32)
    assert difference(weight, again, Form.OFFSET) == 0.0
    np.testing.assert_array_equal(decode(again, Form.OFFSET, F32), weight)


@given(floats(-12.0, 6.0))
def test_a_decay_that_was_stored_comes_back(stored: np.ndarray) -> None:
    scale = decode(stored, Form.LOG, F32)
    np.testing.assert_allclose(scale, -np.exp(stored.astype(np.float64)), rtol=1e-7)
    again = encode(scale, Form.LOG, F32)
    np.testing.assert_array_equal(decode(again, Form.LOG, F32), scale)


@given(floats(-3.0, 3.0))
def test_bfloat16_norms_are_exact_in_float32(values: np.ndarray) -> None:
    values[np.abs(values) < 2.0**-16] = 0.0  # eight digits more reach below those of 1 + w
    weight = values.astype(BF16)
    stored = encode(weight, Form.OFFSET, F32)
    assert difference(weight, stored, Form.OFFSET) == 0.0


@given(floats(0.5, 100.0))
def test_any_norm_from_one_half_on_is_exact(weight: np.ndarray) -> None:
    assert difference(weight, encode(weight, Form.OFFSET, F32), Form.OFFSET) == 0.0


def test_what_is_rounded_is_measured() -> None:
    # 0.1 has digits below 2**-24, which 1 + w has not: 0.1 -> -0.9 -> 0.100000024.
    weight = np.asarray([0.1, 1.5], np.float32)
    stored = encode(weight, Form.OFFSET, F32)
    back = decode(stored, Form.OFFSET, F32)
    assert 0 < abs(float(back[0] - weight[0])) < 2**-24
    assert difference(weight, stored, Form.OFFSET) == abs(float(back[0] - weight[0]))


@pytest.mark.parametrize("bad", [0.0, 1.0, np.nan])
def test_a_decay_scale_is_negative(bad: float) -> None:
    with pytest.raises(ValueError, match="expected negative numbers"):
        encode(np.asarray([-1.0, bad], np.float32), Form.LOG, F32)
