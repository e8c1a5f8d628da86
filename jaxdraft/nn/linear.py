"""Matrices: the product, the embeddings, and the frozen form in which modules cross ``jit``."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

M = TypeVar("M", bound=nnx.Module)


def precision(dtype: DTypeLike) -> lax.Precision:
    """Full float32 products for float32 operands.

    On CPUs this changes nothing. On GPUs the default would round float32 operands to TF32, ten
    bits of mantissa, and no golden would hold.
    """
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else lax.Precision.DEFAULT


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

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] -> [..., out], in the dtype of the weights."""
        return matmul(x, self.weight[...])


def matmul(x: jax.Array, weight: jax.Array, *, out_dtype: DTypeLike | None = None) -> jax.Array:
    """[..., in] x [out, in] -> [..., out].

    Args:
      x: rows; cast to the dtype of ``weight``.
      weight: [out, in].
      out_dtype: dtype of the sums and of the result; default: that of ``weight``.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(weight.dtype)
    product = lax.platform_dependent(
        weight,
        rows,
        cpu=functools.partial(_product_in_halves, out_dtype=out_dtype),
        default=functools.partial(_product, out_dtype=out_dtype),
    )
    return product.T.reshape(*x.shape[:-1], weight.shape[0])


def _product(weight: jax.Array, rows: jax.Array, *, out_dtype: DTypeLike | None) -> jax.Array:
    """[out, in] x [rows, in] -> [out, rows]: the long axis first, one pass over the weights."""
    return lax.dot_general(
        weight,
        rows,
        (((1,), (1,)), ((), ())),
        precision=precision(weight.dtype),
        preferred_element_type=out_dtype,
    )


def _product_in_halves(
    weight: jax.Array, rows: jax.Array, *, out_dtype: DTypeLike | None
) -> jax.Array:
    """The same, as a batch of two: XLA runs one thin product on one core, a batch on several.

    With 8 rows on two cores this takes 0.69 of the time of :func:`_product`, with 1 row as long
    (``experiments/linear_forms.py``). Splitting [out, in] along ``out`` moves nothing in memory.
    """
    outputs, inputs = weight.shape
    if outputs % 2:
        return _product(weight, rows, out_dtype=out_dtype)
    halves = lax.dot_general(
        weight.reshape(2, outputs // 2, inputs),
        jnp.broadcast_to(rows[None], (2, *rows.shape)),
        (((2,), (2,)), ((0,), (0,))),
        precision=precision(weight.dtype),
        preferred_element_type=out_dtype,
    )
    return halves.reshape(outputs, rows.shape[0])


class Embedding(nnx.Module):
    """A table [V, D] of token vectors."""

    def __init__(self, vocab_size: int, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (vocab_size, width), jnp.float32)
        self.weight = nnx.Param(table.astype(dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Token ids [...] -> vectors [..., D].

        Ids outside 0..V-1 give the vector of the nearest id: padding may hold anything, and
        nothing of a padded row is ever committed.
        """
        return jnp.take(self.weight[...], tokens, axis=0, mode="clip")


class Table(nnx.Variable):
    """Constants of an artifact that no optimizer touches (rotary tables)."""


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Frozen(Generic[M]):
    """A Flax module split once: its arrays are leaves, its structure is static.

    Passing a module itself through ``jit`` costs milliseconds a call in traversal; its plain
    arrays cost a tenth of one. ``frozen()`` gives the module back, inside the trace.
    """

    params: Any
    structure: Structure

    @classmethod
    def of(cls, module: M) -> Frozen[M]:
        """Split ``module``."""
        graphdef, state = nnx.split(module)
        return cls(nnx.to_pure_dict(state), Structure(graphdef))

    def __call__(self) -> M:
        """The module, sharing these arrays."""
        return nnx.merge(self.structure.graphdef, self.params)

    def tree_flatten(self) -> tuple[tuple[Any], Structure]:
        """One child, the arrays."""
        return (self.params,), self.structure

    @classmethod
    def tree_unflatten(cls, structure: Structure, children: tuple[Any]) -> Frozen[M]:
        """The inverse of ``tree_flatten``."""
        return cls(children[0], structure)


class Structure:
    """A graph definition that hashes once.

    ``jit`` hashes and compares the static part of its arguments at every call; a graph definition
    of a few hundred variables would take longer to hash than a small step takes to run.
    """

    __slots__ = ("_hash", "graphdef")

    def __init__(self, graphdef: Any):
        self.graphdef = graphdef
        self._hash = hash(graphdef)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Structure) and self.graphdef == other.graphdef
