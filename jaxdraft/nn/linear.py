"""Matrices: the product, the embeddings, and the frozen form in which modules cross ``jit``."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jaxdraft.kernels.form import Form
from jaxdraft.nn.packed import PackedLinear, PackedMatrix, PackedRows
from jaxdraft.nn.product import multiply_dense, precision

M = TypeVar("M", bound=nnx.Module)

Weights = tuple[jax.Array, ...]


def along_last(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Reshape [D] to [1, ..., 1, D], with the dtype and rank of ``x``, for sums and products."""
    return vector.astype(x.dtype).reshape((1,) * (x.ndim - 1) + vector.shape)


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    """Return ``cap * tanh(x / cap)``; 0 is no cap. Source: Gemma 2, arXiv:2408.00118, section 2."""
    return cap * jnp.tanh(x / cap) if cap else x


class Linear(nnx.Module):
    """``y = x @ W.T`` with W stored as [out, in].

    The layout is that of PyTorch and of embeddings, so a tied head is one array. On CPUs the
    contraction of both minor dimensions streams W row by row: see :func:`matmul`.
    """

    def __init__(self, inputs: int, outputs: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        scale = inputs**-0.5
        self.weight = nnx.Param(
            jax.random.normal(rngs.params(), (outputs, inputs), jnp.float32).astype(dtype)
            * jnp.asarray(scale, dtype)
        )

    @property
    def table(self) -> jax.Array:
        """W, [out, in]."""
        return self.weight[...]

    def __call__(self, x: jax.Array, *, out_dtype: DTypeLike | None = None) -> jax.Array:
        """[..., in] -> [..., out], in ``out_dtype``, or else in the dtype of the weights."""
        return matmul(x, self.weight[...], out_dtype=out_dtype)


class Blocks(nnx.Variable):
    """A second copy of a matrix, in blocks; no optimizer touches it."""


BLOCK = 64
"""Outputs of a block."""

_FEW_ROWS = range(2, 7)
"""Numbers of rows for which blocks are faster. The kernels process five at a time."""


class BlockedLinear(Linear):
    """A :class:`Linear` that keeps its weights twice: plain, and in blocks of 64 outputs.

    The blocks are [out / 64, in, 64], and windows of two to six rows read them: a block lies in
    memory in the order in which XLA's CPU kernels multiply a few rows, so nothing is repacked, and
    two to five rows take about the time of one (``experiments/linear_forms.md``). A single row,
    wider windows and prompts read the plain form. A gradient is that of the plain form: it is all
    in ``weight``, and zero in ``blocks``.

    Example, blocks of 2 outputs: W = [[1, 2], [3, 4], [5, 6], [7, 8]] lies as [[1, 3], [2, 4]] and
    [[5, 7], [6, 8]].

    Args:
      weight: W, [out, in].

    Raises:
      ValueError: ``out`` does not divide into blocks.
    """

    def __init__(self, weight: jax.Array):
        if weight.ndim != 2 or not fits_blocks(weight.shape[0]):
            raise ValueError(
                f"weight is {weight.shape}; expected [out, in], out a multiple of {BLOCK}"
            )
        self.weight = nnx.Param(weight)
        self.blocks = Blocks(_to_blocks(weight))

    def __call__(self, x: jax.Array, *, out_dtype: DTypeLike | None = None) -> jax.Array:
        """[..., in] -> [..., out], in ``out_dtype``, or else in the dtype of the weights."""
        if math.prod(x.shape[:-1]) not in _FEW_ROWS:
            return super().__call__(x, out_dtype=out_dtype)
        return _matmul_by_blocks(out_dtype, x, self.weight[...], self.blocks[...])


def blocked_matmul(
    x: jax.Array, blocks: jax.Array, *, out_dtype: DTypeLike | None = None
) -> jax.Array:
    """[..., in] x [out / 64, in, 64] -> [..., out].

    Args:
      x: rows; cast to the dtype of ``blocks``.
      blocks: see :class:`BlockedLinear`.
      out_dtype: dtype of the sums and of the result; default: that of ``blocks``.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(blocks.dtype)
    product = lax.dot_general(
        _repeat(rows, blocks.shape[0]),
        blocks,
        (((2,), (1,)), ((0,), (0,))),
        precision=precision(blocks.dtype),
        preferred_element_type=out_dtype,
    )  # [out / 64, rows, 64]
    return jnp.swapaxes(product, 0, 1).reshape(*x.shape[:-1], blocks.shape[0] * blocks.shape[2])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _matmul_by_blocks(
    out_dtype: DTypeLike | None, x: jax.Array, weight: jax.Array, blocks: jax.Array
) -> jax.Array:
    """Compute ``matmul(x, weight)`` from the blocks of ``weight``."""
    del weight
    return blocked_matmul(x, blocks, out_dtype=out_dtype)


@_matmul_by_blocks.defjvp
def _matmul_by_blocks_jvp(
    out_dtype: DTypeLike | None, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    plain = functools.partial(matmul, out_dtype=out_dtype)
    _, tangent = jax.jvp(plain, primals[:2], tangents[:2])
    return _matmul_by_blocks(out_dtype, *primals), tangent


def _repeat(rows: jax.Array, times: int) -> jax.Array:
    """[rows, in] -> [times, rows, in], as a product with ones.

    XLA would fuse a broadcast with the computation of ``rows``, a norm or an activation, and repeat
    it ``times`` times; a product reads its result, and writes fast. The row of zeros keeps this a
    product: XLA turns a product over a single number into a broadcast.
    """
    flat = jnp.pad(rows.reshape(1, -1), ((0, 1), (0, 0)))
    ones = jnp.ones((times, 2), rows.dtype)
    product = lax.dot_general(ones, flat, (((1,), (0,)), ((), ())), precision=precision(rows.dtype))
    return product.reshape(times, *rows.shape)


def fits_blocks(outputs: int) -> bool:
    """Return whether the outputs divide into blocks."""
    return outputs > 0 and outputs % BLOCK == 0


@jax.jit
def _to_blocks(weight: jax.Array) -> jax.Array:
    """[out, in] -> [out / 64, in, 64]."""
    return jnp.swapaxes(weight.reshape(-1, BLOCK, weight.shape[1]), 1, 2)


def add_blocks(module: nnx.Module) -> None:
    """Put a :class:`BlockedLinear` wherever ``module`` has a :class:`Linear` that fits one."""
    for _, part in list(nnx.iter_modules(module)):
        for name, linear in list(vars(part).items()):
            if type(linear) is Linear and fits_blocks(linear.weight[...].shape[0]):
                setattr(part, name, BlockedLinear(linear.weight[...]))


def matmul(
    x: jax.Array, weight: jax.Array | PackedMatrix, *, out_dtype: DTypeLike | None = None
) -> jax.Array:
    """[..., in] x [out, in] -> [..., out].

    Args:
      x: rows; cast to the dtype of ``weight``.
      weight: [out, in], dense or packed.
      out_dtype: dtype of the sums and of the result; default: that of ``weight``.
    """
    if isinstance(weight, PackedMatrix):
        return weight.matmul(x, out_dtype=out_dtype)
    return multiply_dense(x, weight, out_dtype=out_dtype)


def take(table: jax.Array | PackedMatrix, tokens: jax.Array) -> jax.Array:
    """Token ids [...] -> rows [..., D] of a table [V, D], dense or packed.

    Ids outside 0..V-1 give the row of the nearest id: padding may hold any value, and a padded row
    is never committed.
    """
    if isinstance(table, PackedMatrix):
        return table.take(tokens)
    return jnp.take(table, tokens, axis=0, mode="clip")


def matrix(linear: Linear | PackedLinear | PackedRows) -> tuple[Form, Weights] | None:
    """Return the form and the arrays of a matrix, for :func:`jaxdraft.nn.packed.multiply`.

    None for several matrices in different forms.
    """
    if isinstance(linear, PackedRows):
        return None
    if isinstance(linear, PackedLinear):
        return linear.form, linear.table.weights
    weight = linear.weight[...]
    outputs, inputs = weight.shape
    return Form(inputs, outputs, weight.dtype), (weight,)


class Embedding(nnx.Module):
    """A table [V, D] of token vectors."""

    def __init__(self, vocab_size: int, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (vocab_size, width), jnp.float32)
        self.weight = nnx.Param(table.astype(dtype))

    @property
    def table(self) -> jax.Array:
        """[V, D]."""
        return self.weight[...]

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Token ids [...] -> vectors [..., D]; see :func:`take`."""
        return take(self.weight[...], tokens)


class Table(nnx.Variable):
    """Constants of an artifact that no optimizer touches (rotary tables)."""


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Frozen(Generic[M]):
    """A Flax module split once: its arrays are leaves, its structure is static.

    Passing a module itself through ``jit`` costs milliseconds per call in traversal; its plain
    arrays cost a tenth of one. ``frozen()`` returns the module, inside the trace.
    """

    params: Any
    structure: Structure

    @classmethod
    def of(cls, module: M) -> Frozen[M]:
        """Split ``module``."""
        graphdef, state = nnx.split(module)
        return cls(nnx.to_pure_dict(state), Structure(graphdef))

    def __call__(self) -> M:
        """Return the module, sharing these arrays."""
        return nnx.merge(self.structure.graphdef, self.params)

    def tree_flatten(self) -> tuple[tuple[Any], Structure]:
        """Return one child, the arrays, and the structure."""
        return (self.params,), self.structure

    @classmethod
    def tree_unflatten(cls, structure: Structure, children: tuple[Any]) -> Frozen[M]:
        """Undo ``tree_flatten``."""
        return cls(children[0], structure)


class Structure:
    """A graph definition that hashes once.

    ``jit`` hashes and compares the static part of its arguments at every call; a graph definition
    of a few hundred variables would take longer to hash than a small step takes to run.
    """

    __slots__ = ("_hash", "graphdef", "whole")

    def __init__(self, graphdef: Any, whole: Structure | None = None):
        """graphdef: from ``nnx.split``. whole: on a mesh, the structure of the same module on one
        device."""
        self.graphdef = graphdef
        self.whole = whole
        self._hash = hash(graphdef)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Structure) and self.graphdef == other.graphdef
