"""The kernels of thin products, interpreted, against float64 and against the XLA path."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdraft.kernels import linear as fused
from jaxdraft.kernels.linear import MOST_ROWS, Form
from jaxdraft.nn.packed import PackedLinear, multiply
from tests.examples import examples

WITHIN = 2e-6
"""Relative to the sum of the magnitudes of the terms of an output."""


@functools.partial(jax.jit, static_argnames=("form", "kernels"))
def run(form: Form, kernels: bool, x: jax.Array, weights: tuple[jax.Array, ...]) -> jax.Array:
    if kernels:
        return fused.product(form, x, weights, xla=multiply)
    return multiply(form, x, weights)


def draw(rng: np.random.Generator, form: Form) -> tuple[tuple[jax.Array, ...], np.ndarray]:
    """The stored arrays of a random matrix, and the matrix in float64, unpacked by numpy."""
    if not form.bits:
        weight = rng.standard_normal((form.outputs, form.inputs)).astype(np.float32)
        stored = jnp.asarray(weight, form.dtype)
        return (stored,), np.asarray(stored.astype(jnp.float32), np.float64)
    blocks, each = -(-form.inputs // form.block), 8 // form.bits
    packed = rng.integers(0, 256, (form.outputs, blocks, form.block // each))
    groups = -(-form.outputs // form.rows)
    scales = rng.standard_normal((groups, blocks)).astype(np.float16)
    if form.values == "e4m3":  # all but the two that are no numbers
        packed = np.where(packed & 0x7F == 0x7F, 0, packed)
    values = np.stack([packed >> (form.bits * i) & (2**form.bits - 1) for i in range(each)], -1)
    values = values.reshape(form.outputs, blocks, form.block)
    if form.values == "e4m3":
        values = values.astype(np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)
    else:
        values = values - 2 ** (form.bits - 1)
    matrix = values * scales.astype(np.float64).repeat(form.rows, 0)[: form.outputs, :, None]
    matrix = matrix.reshape(form.outputs, -1)[:, : form.inputs]
    rounded = jnp.asarray(matrix, jnp.float32).astype(form.dtype).astype(jnp.float32)
    stored = (jnp.asarray(packed, jnp.uint8), jnp.asarray(scales))
    return stored, np.asarray(rounded, np.float64)


FORMS = {
    "int2": Form(70, 45, jnp.float32, bits=2, block=32),
    "int4": Form(256, 64, jnp.float32, bits=4, block=16),
    "int8": Form(70, 45, jnp.float32, bits=8, block=24),
    "fp8": Form(70, 45, jnp.float32, bits=8, block=32, values="e4m3", rows=16),
    "fp8_by_output": Form(70, 45, jnp.float32, bits=8, block=70, values="e4m3"),
    "gated": Form(100, 90, jnp.float32, gated=True),
    "gated_int4": Form(70, 90, jnp.float32, bits=4, block=32, gated=True),
    "gated_fp8": Form(70, 90, jnp.float32, bits=8, block=32, values="e4m3", rows=16, gated=True),
}


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=examples(4))
@given(rows=st.sampled_from([(1,), (2, 3), (5, 7)]), seed=st.integers(0, 2**31 - 1))
def test_kernel_equals_float64_and_the_xla_path(
    name: str, rows: tuple[int, ...], seed: int
) -> None:
    """Inputs that end within a block, outputs that end within a tile, bytes that mean nothing."""
    form = FORMS[name]
    rng = np.random.default_rng(seed)
    weights, matrix = draw(rng, form)
    x = rng.standard_normal((*rows, form.inputs)).astype(np.float32)
    expected = x.astype(np.float64) @ matrix.T
    scale = np.abs(x) @ np.abs(matrix).T
    if form.gated:
        (gate, up), (a, b) = np.split(expected, 2, axis=-1), np.split(scale, 2, axis=-1)
        with np.errstate(over="ignore"):
            expected = gate / (1 + np.exp(-gate)) * up
        # The slope of silu is at most 1.1, and its magnitude at most that of its argument.
        scale = 1.1 * a * np.abs(up) + np.abs(gate) * b
    found = run(form, True, jnp.asarray(x), weights)
    assert found.shape == expected.shape and found.dtype == jnp.float32
    within = WITHIN * scale + 1e-6
    assert (np.abs(found - expected) <= within).all()
    other = run(form, False, jnp.asarray(x), weights)
    assert (np.abs(found - other) <= within).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_multiplies_the_rounded_matrix(dtype: str) -> None:
    form = dataclasses.replace(FORMS["int4"], dtype=jnp.dtype(dtype))
    rng = np.random.default_rng(0)
    weights, matrix = draw(rng, form)
    x = jnp.asarray(rng.standard_normal((3, form.inputs)), jnp.float32).astype(dtype)
    exact = np.asarray(x.astype(jnp.float32), np.float64) @ matrix.T
    found = run(form, True, x, weights)
    assert found.dtype == dtype
    np.testing.assert_allclose(
        found.astype(jnp.float32), exact, atol=1e-4, rtol=float(jnp.finfo(dtype).eps)
    )


def test_fp8_that_is_no_number_stays_none() -> None:
    form = FORMS["fp8"]
    (packed, scales), _ = draw(np.random.default_rng(0), form)
    packed = packed.at[3, 1, 4].set(0xFF)
    found = run(form, True, jnp.ones((1, form.inputs), jnp.float32), (packed, scales))
    assert np.isnan(found).nonzero()[1].tolist() == [3]


def test_vmap_and_gradients() -> None:
    form = FORMS["gated"]
    rng = np.random.default_rng(1)
    weights, _ = draw(rng, form)
    x = jnp.asarray(rng.standard_normal((3, 2, form.inputs)), jnp.float32)
    found = jax.vmap(lambda x: run(form, True, x, weights))(x)
    np.testing.assert_allclose(found, run(form, True, x, weights), rtol=1e-5, atol=1e-5)

    def loss(kernels: bool, x: jax.Array, weights: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.sum(jnp.sin(run(form, kernels, x, weights)))

    grads = [jax.grad(functools.partial(loss, k), (0, 1))(x, weights) for k in (True, False)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), *grads)


def test_a_packed_layer_runs_its_kernel_for_few_rows() -> None:
    """The layer with kernels equals the layer without, and wide inputs take the XLA path."""
    form = FORMS["int8"]
    rng = np.random.default_rng(2)
    (weight_q, scales), _ = draw(rng, form)
    layer = PackedLinear(
        weight_q, scales, bits=8, block=form.block, inputs=form.inputs, dtype=jnp.float32
    )
    for rows in (3, MOST_ROWS + 1):
        x = jnp.asarray(rng.standard_normal((rows, form.inputs)), jnp.float32)
        expected = layer(x)
        layer.implementation = "pallas"
        text = str(jax.make_jaxpr(layer)(x))
        assert ("pallas_call" in text) == (rows <= MOST_ROWS)
        np.testing.assert_allclose(layer(x), expected, rtol=1e-4, atol=1e-2)
        del layer.implementation
    assert not fused.serves(jnp.zeros((0, form.inputs)))
