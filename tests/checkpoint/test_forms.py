"""Stored numbers and back: what came from a checkpoint goes back to it without a bit changed."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdraft.checkpoint.forms import Form, decode, difference, encode, from_int8, to_int8

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


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(st.lists(st.floats(-9, 9, width=32), min_size=n, max_size=n), min_size=1)
    ),
    st.sampled_from([F32, BF16]),
)
def test_eight_bits_are_half_a_step_away(rows: list[list[float]], dtype: np.dtype) -> None:
    """Half a scale, and what a scale in bfloat16 may fall short of the largest number."""
    matrix = np.asarray(rows, np.float32)
    values, scale = to_int8(matrix, dtype)
    assert values.dtype == np.int8 and scale.dtype == dtype and scale.shape == (len(rows), 1)
    step = scale.astype(np.float32)
    short = np.abs(matrix).max(axis=1, keepdims=True) - 127 * step
    error = np.abs(from_int8(values, scale) - matrix)
    assert (error <= np.maximum(step / 2, short) * (1 + 1e-5) + 1e-37).all()


def test_eight_bits_by_hand() -> None:
    matrix = np.asarray([[0.5, -1.27], [0.0, 0.0]], np.float32)
    values, scale = to_int8(matrix, F32)
    assert values.tolist() == [[50, -127], [0, 0]]
    np.testing.assert_allclose(scale, [[0.01], [0.0]], rtol=1e-6)
    np.testing.assert_allclose(from_int8(values, scale), matrix, rtol=1e-6)
    # One scale for all rows, as the strategy "tensor" has it.
    np.testing.assert_array_equal(from_int8(values, np.float32(0.5)), values * np.float32(0.5))


def test_tokens_are_stored_as_offsets() -> None:
    """EAGLE-3's d2t: tokens 2, 5, 9 at places 0, 1, 2."""
    tokens = np.asarray([2, 5, 9], np.int32)
    stored = encode(tokens, Form.OFFSETS, np.dtype(np.int64))
    assert stored.tolist() == [2, 4, 7] and stored.dtype == np.int64
    again = decode(stored, Form.OFFSETS, np.dtype(np.int32))
    assert again.tolist() == [2, 5, 9] and again.dtype == np.int32
