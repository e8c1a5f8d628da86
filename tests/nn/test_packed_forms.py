"""All forms of packed storage, against plain loops in numpy, and as embedding and head."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxdraft.nn import packed
from jaxdraft.nn.linear import matmul, take
from jaxdraft.nn.packed import PackedEmbedding, PackedLinear, PackedMatrix

OUT = 7

FORMS: dict[str, dict[str, Any]] = {
    "zero points": dict(bits=4, block=8, inputs=24, zeros=np.uint8),
    "zero points past a byte": dict(bits=8, block=4, inputs=12, zeros=np.int16),
    "a scale per row": dict(bits=8, block=10, inputs=10),
    "an odd row of halves": dict(bits=4, block=12, inputs=11, zeros=np.uint8),
    "float minimum": dict(bits=4, block=8, inputs=20, minima=np.float16),
    "two levels": dict(bits=4, block=4, inputs=36, fine=2, minima=np.uint8, levels=2),
    "two levels of scales": dict(bits=8, block=4, inputs=24, fine=8, levels=1),
    "groups of inputs out of order": dict(bits=4, block=8, inputs=24, zeros=np.uint8, order=True),
    "fp8 in squares": dict(bits=8, block=4, inputs=10, values="e4m3", rows=3),
    "fp8 per row": dict(bits=8, block=10, inputs=10, values="e4m3"),
}


def made(
    bits: int,
    block: int,
    inputs: int,
    *,
    zeros: Any = None,
    minima: Any = None,
    fine: int = 0,
    levels: int = 0,
    order: bool = False,
    values: str = "integer",
    rows: int = 1,
    dtype: str = "float32",
    kind: Any = PackedLinear,
) -> tuple[Any, np.ndarray]:
    """A packed matrix of random numbers and, from a loop over its values, the matrix itself."""
    rng = np.random.default_rng(0)
    blocks, groups = math.ceil(inputs / block), math.ceil(OUT / rows)
    raw = rng.integers(0, 256, (OUT, blocks, block * bits // 8), dtype=np.uint8)
    if values == "e4m3":
        raw[raw & 0x7F == 0x7F] = 0x7E  # a value that is no number
        raw[0, 0, :2] = 0x01, 0x87  # two that are below the normal ones
    shape, coarse = (groups, blocks), (groups, math.ceil(blocks / max(1, fine)))
    small = lambda *s: rng.uniform(0.5, 2.0, s).astype(np.float16)  # noqa: E731
    scales = rng.integers(1, 64, shape).astype(np.uint8) if levels else small(*shape)
    further: dict[str, Any] = {}
    if zeros is not None:
        further["zeros"] = rng.integers(0, 17 if bits == 4 else 257, shape).astype(zeros)
    if minima is not None:
        further["minima"] = rng.integers(0, 64, shape).astype(minima)
    for name in ("coarse", "coarse_minima")[:levels]:
        further[name] = small(*coarse) * (-1 if name == "coarse_minima" else 1)
    if order:
        further["order"] = rng.permutation(inputs).astype(np.int32)
    module = kind(
        jnp.asarray(raw),
        jnp.asarray(scales),
        bits=bits,
        block=block,
        inputs=inputs,
        dtype=dtype,
        values=values,
        rows=rows,
        fine=fine,
        **{name: jnp.asarray(array) for name, array in further.items()},
    )
    wide = np.zeros((OUT, inputs), np.float32)
    f = lambda name, *at: np.float32(further[name][at])  # noqa: E731
    for o in range(OUT):
        for k in range(inputs):
            at = (o // rows, k // block)
            byte = int(raw[o, k // block, k % block * bits // 8])
            q = byte >> (k % (8 // bits) * bits) & (1 << bits) - 1
            value = np.float32(q)
            if values == "e4m3":
                value = np.float32(np.uint8(q).view(ml_dtypes.float8_e4m3fn))
            elif zeros is not None:
                value -= f("zeros", *at)
            elif minima is None:
                value -= np.float32(1 << (bits - 1))
            high = (at[0], at[1] // max(1, fine))
            value *= np.float32(scales[at]) * (f("coarse", *high) if levels else np.float32(1))
            if minima is not None:
                value += f("minima", *at) * (f("coarse_minima", *high) if levels else np.float32(1))
            wide[o, further["order"][k] if order else k] = value
    return module, wide


@pytest.mark.parametrize("name", FORMS)
def test_numbers_equal_plain_loops(name: str) -> None:
    module, expected = made(**FORMS[name])
    within = 1e-6 * np.abs(expected).max() if "minima" in FORMS[name] else 0  # fused multiply-add
    np.testing.assert_allclose(module.dequantized(), expected, rtol=0, atol=within)
    x = np.random.default_rng(1).standard_normal((2, 3, expected.shape[1])).astype(np.float32)
    exact = x.astype(np.float64) @ expected.T.astype(np.float64)
    atol = 1e-6 * (np.abs(x) @ np.abs(expected).T).max()
    np.testing.assert_allclose(module(jnp.asarray(x)), exact, rtol=0, atol=atol)
    through = jax.jit(lambda table, x: matmul(x, table))(module.table, jnp.asarray(x))
    np.testing.assert_allclose(through, exact, rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["two levels", "fp8 in squares"])
def test_a_table_serves_as_embedding_and_as_head(name: str) -> None:
    """Ids are clipped, rows have the type of the products, and logits are float32 sums."""
    module, expected = made(**FORMS[name], dtype="bfloat16", kind=PackedEmbedding)
    ids = jnp.asarray([[3, 0], [OUT + 5, -2]])
    found = module(ids)
    assert found.shape == (2, 2, expected.shape[1]) and found.dtype == jnp.bfloat16
    rounded = module.dequantized()
    np.testing.assert_array_equal(found, rounded[jnp.asarray([[3, 0], [OUT - 1, 0]])])
    np.testing.assert_allclose(rounded.astype(np.float32), expected, rtol=0.01, atol=0.01)
    assert isinstance(module.table, PackedMatrix) and module.table.shape == expected.shape
    np.testing.assert_array_equal(take(module.table, ids), found)
    some = module.table.select(jnp.asarray([5, 1]))
    np.testing.assert_array_equal(some.dequantized(), rounded[jnp.asarray([5, 1])])
    x = jnp.ones((1, expected.shape[1]), jnp.bfloat16)
    logits = matmul(x, module.table, out_dtype=jnp.float32)
    exact = np.asarray(rounded, np.float64).sum(axis=1)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[0], exact, rtol=1e-5, atol=1e-4)


def test_gradients_are_those_of_the_matrix() -> None:
    weights = jnp.linspace(-2, 3, OUT)[None]
    for name in ("two levels", "fp8 in squares"):
        module, _ = made(**FORMS[name])
        x = jnp.linspace(-1, 1, module.form.inputs)[None]
        table = module.table

        def loss(
            scales: jax.Array, x: jax.Array, table: Any = table, weights: Any = weights
        ) -> jax.Array:
            arrays = {**table.arrays, "scales": scales}
            return jnp.sum(weights * dataclasses.replace(table, arrays=arrays).matmul(x))

        def plain(
            scales: jax.Array, x: jax.Array, table: Any = table, weights: Any = weights
        ) -> jax.Array:
            whole = dataclasses.replace(table, arrays={**table.arrays, "scales": scales})
            return jnp.sum(weights * (x @ whole.dequantized().T))

        scales = table.arrays["scales"].astype(jnp.float32)
        for found, expected in zip(
            jax.jit(jax.grad(loss, (0, 1)))(scales, x),
            jax.jit(jax.grad(plain, (0, 1)))(scales, x),
            strict=True,
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_kernels_leave_forms_that_they_do_not_know_to_xla() -> None:
    module, expected = made(**FORMS["zero points"])
    module.implementation = "pallas"
    x = jnp.ones((1, 24))
    assert "pallas_call" not in str(jax.make_jaxpr(module)(x))
    np.testing.assert_allclose(module(x)[0], expected.sum(axis=1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(rows=2), "shapes"),
        (dict(values="e5m2"), "e4m3"),
        (dict(zeros=jnp.zeros((OUT, 1), jnp.uint8)), "zeros"),
        (dict(shift=jnp.zeros((OUT, 3))), "'shift'"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, Any], match: str) -> None:
    table = made(bits=4, block=8, inputs=24)[0].table
    given: dict[str, Any] = dict(bits=4, block=8, inputs=24, dtype="float32") | changes
    with pytest.raises(ValueError, match=match):
        PackedLinear(table.arrays["weight_q"], table.arrays["scales"], **given)


@pytest.mark.parametrize("name", ["fp8 in squares", "groups of inputs out of order"])
def test_a_large_matrix_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some outputs at a time, and the rest after them; gradients, too."""
    module, expected = made(**FORMS[name])
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, expected.shape[1])), jnp.float32)
    weights = jnp.arange(3 * OUT, dtype=jnp.float32).reshape(3, OUT)

    def grads(x: jax.Array) -> jax.Array:
        return jax.jit(jax.grad(lambda x: jnp.sum(weights * module(x))))(x)

    whole, gradient = module(x), grads(x)
    monkeypatch.setattr(packed, "_AT_ONCE", 3 * expected.shape[1])
    text = str(jax.make_jaxpr(module)(x))
    assert "scan" in text
    np.testing.assert_allclose(module(x), whole, rtol=1e-6, atol=1e-4)
    np.testing.assert_allclose(grads(x), gradient, rtol=1e-6, atol=1e-3)
