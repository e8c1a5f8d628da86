"""The product as a primitive of JAX: native where a program can use it, else the XLA path.

The choice is made when a program is lowered, since only then the platform and the devices are
known.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from jaxdraft.kernels.form import Form
from jaxdraft.meshes import on_a_mesh
from jaxdraft.native import MOST_ROWS, OFF, choice
from jaxdraft.native.build import library

Xla = Callable[..., jax.Array]
"""``xla(form, out_dtype, x, *arrays)``: the same product without native code."""

_FLOATS = (jnp.float32, jnp.bfloat16)

_READABLE = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.uint8, jnp.int8, jnp.float8_e8m0fnu)
"""Types of scales, zero points and minima."""

_MOST_PACKED_ROWS = 16
"""Number of rows up to which packed products are native: for 32, XLA's take less time."""

_VALUES = {"integer": 0, "e4m3": 1, "e2m1": 2}

_LETTERS = {"zeros": "z", "minima": "m", "coarse": "c", "coarse_minima": "d"}

_allowed = jax.make_user_context(None)
"""None, or "no": part of the keys of JAX's caches, so no traced program outlives a change."""


def without() -> Any:
    """Trace with the XLA path alone, inside the returned context."""
    return _allowed("no")


def serves(form: Form, rows: int, out_dtype: DTypeLike, arrays: tuple[jax.Array, ...]) -> bool:
    """Return whether a product may be native, as far as is known while it is traced.

    Args:
      form: form of the matrix; ``bits`` 0 is a dense one.
      rows: number of rows.
      out_dtype: type of the result.
      arrays: the matrix, or the arrays of a packed one, in the order of ``form.parts``.
    """
    if choice() == OFF or _allowed.value is not None or on_a_mesh():
        return False
    if not 0 < rows <= MOST_ROWS or form.gated or form.outputs == 0 or form.inputs == 0:
        return False
    if jnp.dtype(form.dtype) not in _FLOATS or jnp.dtype(out_dtype) not in _FLOATS:
        return False
    if not form.bits:  # one row of floats is memory traffic, which XLA starts sooner
        return rows > 1 or jnp.dtype(form.dtype) == jnp.bfloat16
    if rows > _MOST_PACKED_ROWS:
        return False
    if (form.values == "e4m3" and form.bits != 8) or (form.values == "e2m1" and form.bits != 4):
        return False
    further = zip(form.parts[1:], arrays[1:], strict=True)
    return form.values in _VALUES and all(
        name == "order" or array.dtype in _READABLE for name, array in further
    )


def multiply(
    form: Form, out_dtype: DTypeLike, x: jax.Array, arrays: tuple[jax.Array, ...], xla: Xla
) -> jax.Array:
    """[rows, in] -> [rows, out], for what :func:`serves` allows.

    Args:
      form: form of the matrix.
      out_dtype: type of the result.
      x: rows, in the type of the matrix.
      arrays: see :func:`serves`.
      xla: the same product without native code, a function of a module.
    """
    return product_p.bind(x, *arrays, form=form, out_dtype=jnp.dtype(out_dtype), xla=xla)


product_p = Primitive("jaxdraft_product")


def _plain(x: Any, *arrays: Any, form: Form, out_dtype: Any, xla: Xla) -> jax.Array:
    with without():
        return xla(form, out_dtype, x, *arrays)


@functools.partial(jax.jit, static_argnames=("form", "out_dtype", "xla"))
def _alone(x: jax.Array, *arrays: jax.Array, form: Form, out_dtype: Any, xla: Xla) -> jax.Array:
    return product_p.bind(x, *arrays, form=form, out_dtype=out_dtype, xla=xla)


product_p.def_impl(_alone)


@product_p.def_abstract_eval
def _shape(x: Any, *arrays: Any, form: Form, out_dtype: Any, xla: Xla) -> jax.core.ShapedArray:
    del arrays, xla
    return jax.core.ShapedArray((x.shape[0], form.outputs), out_dtype)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[jax.Array, jax.Array]:
    """Differentiate the XLA path; its value is not needed, and is not computed."""
    out = product_p.bind(*primals, **params)
    plain = functools.partial(_plain, **params)
    _, tangent = jax.jvp(plain, primals, tuple(map(ad.instantiate_zeros, tangents)))
    return out, tangent


ad.primitive_jvps[product_p] = _jvp


def _batch(args: Any, axes: Any, **params: Any) -> tuple[jax.Array, int]:
    """Take a batch of rows as more rows of one product; a batch of matrices takes the XLA path."""
    plain = functools.partial(_plain, **params)
    if any(axis is not None for axis in axes[1:]):
        return jax.vmap(plain, tuple(axes))(*args), 0
    x = jnp.moveaxis(args[0], axes[0], 0)
    rows = x.reshape(-1, x.shape[-1])
    few = rows.shape[0] <= (_MOST_PACKED_ROWS if params["form"].bits else MOST_ROWS)
    found = product_p.bind(rows, *args[1:], **params) if few else plain(rows, *args[1:])
    return found.reshape(*x.shape[:2], found.shape[1]), 0


batching.primitive_batchers[product_p] = _batch


def _devices(context: Any) -> int:
    """Return the number of devices that XLA divides a program over; inside ``shard_map`` one."""
    axes = context.module_context.axis_context
    if isinstance(axes, mlir.SPMDAxisContext):
        return 1 if axes.manual_axes == frozenset(axes.mesh.axis_names) else axes.mesh.size
    return getattr(axes, "num_devices", 1)


def _lower_on_cpu(context: Any, x: Any, *arrays: Any, form: Form, out_dtype: Any, xla: Xla) -> Any:
    exported = context.module_context.lowering_parameters.for_export
    found = None if exported or _devices(context) > 1 else library()
    if found is None or found.handle is None:
        return _lower(context, x, *arrays, form=form, out_dtype=out_dtype, xla=xla)
    if not form.bits:
        return jax.ffi.ffi_lowering(f"jaxdraft_dense_{found.key}")(context, x, *arrays)
    number = np.int64
    rule = jax.ffi.ffi_lowering(f"jaxdraft_packed_{found.key}")
    return rule(
        context,
        x,
        *arrays,
        bits=number(form.bits),
        block=number(form.block),
        group=number(form.rows),
        fine=number(form.fine),
        values=number(_VALUES[form.values]),
        round=jnp.dtype(form.dtype) == jnp.bfloat16,
        parts="".join(_LETTERS[name] for name in form.parts[2:]),
    )


_lower = mlir.lower_fun(_plain, multiple_results=False)
mlir.register_lowering(product_p, _lower)
mlir.register_lowering(product_p, _lower_on_cpu, platform="cpu")


def in_order(form: Form, x: jax.Array, arrays: dict[str, jax.Array]) -> tuple[Form, jax.Array, Any]:
    """Take the columns of ``x`` in the order in which they are stored.

    Returns:
      The form without ``order``, the rows, and the other arrays.
    """
    if "order" not in arrays:
        return form, x, arrays

    rest = {name: array for name, array in arrays.items() if name != "order"}
    parts = tuple(name for name in form.parts if name != "order")
    return dataclasses.replace(form, parts=parts), jnp.take(x, arrays["order"], axis=1), rest
