"""Products of rows with dense matrices, in the fastest order for each device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxdraft.kernels.form import Form
from jaxdraft.meshes import on_a_mesh
from jaxdraft.native import product as native


def precision(dtype: DTypeLike) -> lax.Precision:
    """Return the precision of products: full float32 for float32 operands.

    On CPUs this changes nothing. On GPUs the default would round float32 operands to TF32, ten
    bits of mantissa, and no golden would hold.
    """
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else lax.Precision.DEFAULT


_MANY_ROWS = 512
"""Number of rows from which the plain product with rows first is used, as in training."""


def multiply_dense(
    x: jax.Array, weight: jax.Array, *, out_dtype: DTypeLike | None = None
) -> jax.Array:
    """[..., in] x [out, in] -> [..., out].

    Args:
      x: rows; cast to the dtype of ``weight``.
      weight: [out, in].
      out_dtype: dtype of the sums and of the result; default: that of ``weight``.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(weight.dtype)
    outputs, inputs = weight.shape
    form, out = Form(inputs, outputs, weight.dtype), out_dtype or weight.dtype
    if native.serves(form, rows.shape[0], out, (weight,)):
        product = native.multiply(form, out, rows, (weight,), _multiply)
    else:
        product = _multiply(form, out_dtype, rows, weight)
    return product.reshape(*x.shape[:-1], outputs)


def _multiply(
    form: Form, out_dtype: DTypeLike | None, rows: jax.Array, weight: jax.Array
) -> jax.Array:
    """[rows, in] x [out, in] -> [rows, out], by XLA."""
    del form
    on_cpu = _rows_first if rows.shape[0] >= _MANY_ROWS else product_in_halves
    product = lax.platform_dependent(
        weight,
        rows,
        cpu=functools.partial(on_cpu, out_dtype=out_dtype),
        default=functools.partial(_product_apart, out_dtype=out_dtype),
    )
    return product.T


def _product(weight: jax.Array, rows: jax.Array, *, out_dtype: DTypeLike | None) -> jax.Array:
    """[out, in] x [rows, in] -> [out, rows]: the long axis first, one pass over the weights."""
    return lax.dot_general(
        weight,
        rows,
        (((1,), (1,)), ((), ())),
        precision=precision(weight.dtype),
        preferred_element_type=out_dtype,
    )


def _product_apart(weight: jax.Array, rows: jax.Array, *, out_dtype: DTypeLike | None) -> jax.Array:
    """Compute the product without merging it with another product of the same rows.

    XLA's GPU compiler merges products that share their rows, and concatenates their
    weights in every call: at 27B, 16 GB per round. Behind the barrier the rows of every
    product are an array of its own.

    A single row of float16 is padded with a row of zeros. For GPUs before Ampere the compiler has
    no product of a matrix and one such row, and would convert the matrix to float32 in every call.
    """
    single = rows.shape[0] == 1 and weight.dtype == jnp.float16
    if single:
        rows = jnp.pad(rows, ((0, 1), (0, 0)))
    weight, rows = lax.optimization_barrier((weight, rows))
    return _product(weight, rows, out_dtype=out_dtype)[:, : 1 if single else None]


def _rows_first(weight: jax.Array, rows: jax.Array, *, out_dtype: DTypeLike | None) -> jax.Array:
    """Compute the product as [rows, out]."""
    product = lax.dot_general(
        rows,
        weight,
        (((1,), (1,)), ((), ())),
        precision=precision(weight.dtype),
        preferred_element_type=out_dtype,
    )
    return product.T


def product_in_halves(
    weight: jax.Array, rows: jax.Array, *, out_dtype: DTypeLike | None
) -> jax.Array:
    """Compute the product as a batch of two: XLA runs one thin product on one core only.

    With 8 rows on two cores this takes three quarters of the time of :func:`_product`, with 1 row
    no more (``experiments/linear_forms.md``). Splitting [out, in] along ``out`` moves nothing in
    memory. On a mesh every device has outputs of its own, and halves of all would be moved.
    """
    outputs, inputs = weight.shape
    if outputs % 2 or on_a_mesh():
        return _product(weight, rows, out_dtype=out_dtype)
    halves = lax.dot_general(
        weight.reshape(2, outputs // 2, inputs),
        jnp.broadcast_to(rows[None], (2, *rows.shape)),
        (((2,), (2,)), ((0,), (0,))),
        precision=precision(weight.dtype),
        preferred_element_type=out_dtype,
    )
    return halves.reshape(outputs, rows.shape[0])
