"""The way from a kernel to a program: compiled on GPUs, interpreted on CPUs, XLA elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

LEAST = 16
"""Rows and columns of the smallest matrix product of a GPU's tensor cores."""


def launch(
    kernel: Callable[..., None],
    arrays: Sequence[jax.Array],
    out: Sequence[tuple[tuple[int, ...], Any]],
    *,
    grid: tuple[int, ...],
    interpret: bool,
    name: str,
    warps: int = 4,
    stages: int = 2,
    aliases: dict[int, int] | None = None,
) -> list[jax.Array]:
    """Run ``kernel`` once per point of ``grid`` over whole arrays.

    Args:
      kernel: a function of a reference to each of ``arrays``, then to each result.
      arrays: the operands.
      out: shape and dtype of each result.
      grid: programs along each axis.
      interpret: run on the host, one program after the other.
      name: name of the launch in profiles.
      warps: warps per program, of 32 threads each.
      stages: depth of the software pipeline of loops.
      aliases: operands that a result overwrites, as {operand: result}.
    """
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in out],
        grid=grid,
        interpret=interpret,
        name=name,
        input_output_aliases=aliases or {},
        compiler_params=None
        if interpret
        else plgpu.CompilerParams(num_warps=warps, num_stages=stages),
    )(*arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def by_platform(run: Callable[..., Any], xla: Callable[..., Any], plan: Any, *arrays: Any) -> Any:
    """Call a kernel where there is one: compiled on GPUs, interpreted on CPUs.

    Other platforms take ``xla``, and so does differentiation, for value and gradient alike. Equal
    calls in one program, as of equal layers, are traced once.

    Args:
      run: a function of ``plan`` and ``arrays`` with a keyword ``interpret``.
      xla: the same function without a kernel, and without that keyword.
      plan: the static part of the call, hashable.
      *arrays: pytrees of arrays.
    """

    @jax.custom_jvp
    def chosen(*arrays: Any) -> Any:
        return lax.platform_dependent(
            *arrays,
            cpu=functools.partial(run, plan, interpret=True),
            cuda=functools.partial(run, plan, interpret=False),
            default=functools.partial(xla, plan),
        )

    @chosen.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(functools.partial(xla, plan), primals, tangents)

    return chosen(*arrays)


def iota(size: int, first: jax.Array | int = 0) -> jax.Array:
    """Return ``first + [0, 1, ..., size - 1]``, int32."""
    return first + jnp.arange(size, dtype=jnp.int32)


def ceil_div(a: jax.Array, b: jax.Array | int) -> jax.Array:
    """Divide non-negative int32 numbers, rounding up."""
    b = jnp.asarray(b, jnp.int32)
    return lax.div(a + b - 1, b)


def div(a: jax.Array, b: int) -> jax.Array:
    """Divide a non-negative int32 number, rounding down. Plain ``//`` takes care of signs."""
    return lax.div(a, jnp.asarray(b, jnp.int32))


def rem(a: jax.Array, b: int) -> jax.Array:
    """Return the remainder of a non-negative int32 number."""
    return lax.rem(a, jnp.asarray(b, jnp.int32))
