"""Products of a few rows with a matrix that is read once, optionally packed or gated.

A program makes some of the outputs from all of the inputs. Of a packed matrix it reads bytes and
scales and makes floats of them in registers, so no float matrix exists in memory. The product
behind a gated feed-forward part makes rows of gate and up together and multiplies them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxdraft.kernels.form import Form
from jaxdraft.kernels.launch import LEAST, by_platform, div, iota, launch
from jaxdraft.sizes import power_of_two

MOST_ROWS = 64
"""Rows, of all requests together, of the widest product."""

_OUTPUTS = 32
_INPUTS = 64
"""Outputs of a program, and columns, or bytes of packed columns, of one step of its loop."""


def serves(x: jax.Array) -> bool:
    """Return whether :func:`product` can take these rows, [..., K]."""
    return 0 < math.prod(x.shape[:-1]) <= MOST_ROWS


def product(
    form: Form, x: jax.Array, weights: tuple[jax.Array, ...], *, xla: Callable[..., jax.Array]
) -> jax.Array:
    """Multiply rows with a matrix: [..., K] -> [..., results].

    Args:
      form: the matrix's form.
      x: rows, at most :data:`MOST_ROWS`; cast to ``form.dtype``.
      weights: (weight [out, K],), or (weight_q, scales) as in
        :class:`jaxdraft.nn.linear.PackedLinear`.
      xla: the equivalent without a kernel, a function of ``form``, ``x`` and ``weights``.
    """
    return by_platform(_run, _reference, (form, xla), x, weights)


def _reference(
    plan: tuple[Form, Callable[..., jax.Array]], x: jax.Array, weights: tuple[jax.Array, ...]
) -> jax.Array:
    form, xla = plan
    return xla(form, x, weights)


def _run(
    plan: tuple[Form, Any], x: jax.Array, weights: tuple[jax.Array, ...], *, interpret: bool
) -> jax.Array:
    form, _ = plan
    rows = x.reshape(-1, form.inputs).astype(form.dtype)
    flat = [weight.reshape(weight.shape[0], -1) for weight in weights]
    (out,) = launch(
        functools.partial(_kernel, form=form, count=rows.shape[0]),
        [rows, *flat],
        [((rows.shape[0], form.results), form.dtype)],
        grid=(-(-form.results // _OUTPUTS),),
        interpret=interpret,
        name="packed_product" if form.bits else "product",
        stages=3,
    )
    return out.reshape(*x.shape[:-1], form.results)


def _kernel(x: Any, *refs: Any, form: Form, count: int) -> None:
    """Compute some outputs of all rows."""
    *weights, out = refs
    row = iota(power_of_two(count, least=LEAST))
    real = row < count
    output = iota(_OUTPUTS, _OUTPUTS * pl.program_id(0))
    inside = output < form.results
    matrices = (output, form.results + output) if form.gated else (output,)
    make = _packed_step if form.bits else _plain_step
    columns = weights[0].shape[1]  # or bytes

    def step(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        column = iota(_INPUTS, index * _INPUTS)
        added = [make(form, x, weights, row, real, output, inside, column) for output in matrices]
        return tuple(a + b for a, b in zip(sums, added, strict=True))

    zero = jnp.zeros((row.shape[0], _OUTPUTS), jnp.float32)
    steps = jnp.int32(-(-columns // _INPUTS))
    sums = lax.fori_loop(jnp.int32(0), steps, step, (zero,) * len(matrices))
    if form.gated:  # both products are rounded, as they would be in memory
        gate, up = (part.astype(form.dtype).astype(jnp.float32) for part in sums)
        result = gate / (1.0 + jnp.exp(-gate)) * up
    else:
        (result,) = sums
    mask = real[:, None] & inside[None, :]
    plgpu.store(out.at[row[:, None], output[None, :]], result.astype(out.dtype), mask=mask)


def _plain_step(
    form: Form,
    x: Any,
    weights: list[Any],
    row: jax.Array,
    real: jax.Array,
    output: jax.Array,
    inside: jax.Array,
    column: jax.Array,
) -> jax.Array:
    """Return [rows, outputs] from some columns."""
    there = column < form.inputs
    w = plgpu.load(
        weights[0].at[output[:, None], column[None, :]],
        mask=inside[:, None] & there[None, :],
        other=0,
    )
    return _dot(_rows(form, x, row, real, column), w)


def _packed_step(
    form: Form,
    x: Any,
    weights: list[Any],
    row: jax.Array,
    real: jax.Array,
    output: jax.Array,
    inside: jax.Array,
    column: jax.Array,
) -> jax.Array:
    """Return [rows, outputs] from some bytes.

    Plane p of the bytes has every (8 / bits)th value. Example, 4 bits: byte 5 holds value 10 in its
    low half (plane 0) and value 11 in its high half (plane 1).
    """
    packed, scales = weights
    planes = 8 // form.bits
    mask = inside[:, None] & (column < packed.shape[1])[None, :]
    raw = plgpu.load(packed.at[output[:, None], column[None, :]], mask=mask, other=0)
    block = div(column, form.block // planes)
    group = div(output, form.rows)
    scale = plgpu.load(scales.at[group[:, None], block[None, :]], mask=mask, other=0)
    raw, scale = raw.astype(jnp.int32), scale.astype(jnp.float32)
    total = jnp.zeros((row.shape[0], output.shape[0]), jnp.float32)
    for plane in range(planes):
        value = (raw >> (plane * form.bits)) & ((1 << form.bits) - 1)
        if form.values == "e4m3":
            w = _e4m3(value) * scale
        else:
            w = (value - (1 << (form.bits - 1))).astype(jnp.float32) * scale
        columns = column * planes + plane
        total = total + _dot(_rows(form, x, row, real, columns), w.astype(form.dtype))
    return total


def _e4m3(raw: jax.Array) -> jax.Array:
    """Return fp8 numbers, eight bits each: a sign, four of the exponent, three of the mantissa.

    Shifted into their places in a float32, exponent and mantissa give the number with a bias that
    is 120 too great. Example: 0x39, 0 0111 001 in bits, is 1.125 * 2**(7 - 7). Cards before 8.9
    have no such conversion.
    """
    size = raw & 0x7F
    normal = lax.bitcast_convert_type((size << 20) + (120 << 23), jnp.float32)
    value = jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, normal)
    value = jnp.where(size == 0x7F, jnp.nan, value)
    return jnp.where(raw > 0x7F, -value, value)


def _rows(form: Form, x: Any, row: jax.Array, real: jax.Array, column: jax.Array) -> jax.Array:
    """Return some columns of the rows, zero past ``inputs``, where a packed matrix has padding."""
    mask = real[:, None] & (column < form.inputs)[None, :]
    return plgpu.load(x.at[row[:, None], column[None, :]], mask=mask, other=0)


def _dot(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """[rows, k] x [outputs, k] -> [rows, outputs] float32."""
    return lax.dot_general(
        rows,
        weight,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
