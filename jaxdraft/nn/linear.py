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

from jaxdraft.kernels import PALLAS, XLA
from jaxdraft.kernels import linear as fused

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

    XLA fuses a broadcast with what makes ``rows``, a norm or an activation, and computes that
    ``times`` times; a product takes them as they are, and writes fast. The row of zeros keeps it a
    product: one over a single number is turned into a broadcast.
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


_MANY_ROWS = 512
"""From here on, as in training, the plain product with rows first: the others are for few rows."""


def matmul(x: jax.Array, weight: jax.Array, *, out_dtype: DTypeLike | None = None) -> jax.Array:
    """[..., in] x [out, in] -> [..., out].

    Args:
      x: rows; cast to the dtype of ``weight``.
      weight: [out, in].
      out_dtype: dtype of the sums and of the result; default: that of ``weight``.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(weight.dtype)
    many = rows.shape[0] >= _MANY_ROWS
    product = lax.platform_dependent(
        weight,
        rows,
        cpu=functools.partial(_rows_first if many else _product_in_halves, out_dtype=out_dtype),
        default=functools.partial(_product_apart, out_dtype=out_dtype),
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


def _product_apart(weight: jax.Array, rows: jax.Array, *, out_dtype: DTypeLike | None) -> jax.Array:
    """Compute the product without merging it with another product of the same rows.

    XLA's GPU compiler makes one product of several that share their rows, and concatenates their
    weights for it in every call: at 27B, 16 GB per round. Behind the barrier the rows of every
    product are an array of its own.

    A single row of float16 gets a row of zeros beside it. For GPUs before Ampere the compiler has
    no product of a matrix and one such row, and would make float32 of the matrix in every call.
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


def _product_in_halves(
    weight: jax.Array, rows: jax.Array, *, out_dtype: DTypeLike | None
) -> jax.Array:
    """Compute it as a batch of two: XLA runs one thin product on one core, a batch on several.

    With 8 rows on two cores this takes three quarters of the time of :func:`_product`, with 1 row
    no more (``experiments/linear_forms.md``). Splitting [out, in] along ``out`` moves nothing in
    memory.
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


class Packed(nnx.Variable):
    """Quantized numbers, packed into bytes, or their scales; no optimizer touches them."""


class PackedLinear(nnx.Module):
    """A :class:`Linear` whose weights stay quantized in memory.

    ``W[o, k] = (q[o, k] - 2**(bits - 1)) * scale[o, k // block]``, in float32 and rounded once to
    ``dtype``: bit for bit the matrix that dequantizing on load gives. Source: ``MatMulNBits`` of
    ``com.microsoft`` without zero points.

    Args:
      weight_q: [out, blocks, block * bits / 8] uint8, values packed low bits first. The last block
        is stored whole; values past ``inputs`` are ignored.
      scales: [out, blocks], any float dtype.
      bits: bits per value: 2, 4 or 8.
      block: number of values that share a scale.
      inputs: K, the width of the input rows.
      dtype: type of the products and of the result.

    Raises:
      ValueError: the arrays do not fit ``bits``, ``block`` and ``inputs``.
    """

    implementation = XLA

    def __init__(
        self,
        weight_q: jax.Array | jax.ShapeDtypeStruct,
        scales: jax.Array | jax.ShapeDtypeStruct,
        *,
        bits: int,
        block: int,
        inputs: int,
        dtype: DTypeLike,
    ):
        if bits not in (2, 4, 8) or block < 1 or block * bits % 8:
            raise ValueError(f"blocks of {block} values of {bits} bits do not fill bytes")
        blocks = -(-inputs // block)
        wanted = (*scales.shape[:1], blocks, block * bits // 8)
        if weight_q.shape != wanted or scales.shape != wanted[:2]:
            raise ValueError(
                f"weight_q is {weight_q.shape} and scales are {scales.shape}; expected {wanted} "
                f"and {wanted[:2]} for {inputs} inputs in blocks of {block}"
            )
        self.weight_q = Packed(weight_q)
        self.scales = Packed(scales)
        self.bits = bits
        self.block = block
        self.inputs = inputs
        self.dtype = jnp.dtype(dtype)

    @property
    def form(self) -> fused.Form:
        """The matrix's form, as kernels read it."""
        return fused.Form(self.inputs, self.scales[...].shape[0], self.dtype, self.bits, self.block)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] -> [..., out], in ``dtype``."""
        weight_q, scales = self.weight_q[...], self.scales[...]
        if self.implementation == PALLAS and fused.serves(x):
            return fused.product(self.form, x, (weight_q, scales), xla=multiply)
        rows = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        count, blocks = rows.shape[0], scales.shape[1]
        rows = jnp.pad(rows, ((0, 0), (0, blocks * self.block - self.inputs)))
        # Plane p holds every (8 / bits)th value; picking the same columns of x needs no unpacking.
        planes = rows.reshape(count, -1, 8 // self.bits)
        planes = jnp.transpose(planes, (2, 0, 1))  # [planes, rows, bytes]
        product = lax.platform_dependent(
            weight_q, scales, planes, cpu=self._product_in_turn, default=self._product
        )
        return product.T.reshape(*x.shape[:-1], scales.shape[0])

    def dequantized(self) -> jax.Array:
        """W, [out, in] in ``dtype``."""
        planes = self._planes(self.weight_q[...], self.scales[...])
        values = jnp.moveaxis(planes, 0, -1).reshape(planes.shape[1], -1)
        return values[:, : self.inputs]

    def _planes(self, weight_q: jax.Array, scales: jax.Array) -> jax.Array:
        """W as [planes, out, bytes]: plane p holds values p, p + 8 / bits, ... of a row.

        Flat rows and repeated scales, because XLA's CPU backend runs this on vectors and the same
        over blocks (``q[o, b, i] * scale[o, b]``) number by number, five times slower.
        """
        outputs, _, width = weight_q.shape
        shifts = jnp.arange(0, 8, self.bits, dtype=jnp.uint8).reshape(-1, 1, 1)
        values = jnp.right_shift(weight_q.reshape(1, outputs, -1), shifts)
        values = values & jnp.uint8((1 << self.bits) - 1)
        centred = values.astype(jnp.float32) - (1 << (self.bits - 1))
        factors = jnp.repeat(scales.astype(jnp.float32), width, axis=1)
        return (centred * factors[None]).astype(self.dtype)

    def _product(self, weight_q: jax.Array, scales: jax.Array, planes: jax.Array) -> jax.Array:
        """[planes, rows, bytes] -> [out, rows]: a batch over the planes, then their sum."""
        weight = self._planes(weight_q, scales)
        if self.bits == 8 and weight.shape[1] % 2 == 0:  # one plane: see _product_in_halves
            return _product_in_halves(weight[0], planes[0], out_dtype=None)
        parts = lax.dot_general(
            weight,
            planes,
            (((2,), (2,)), ((0,), (0,))),
            precision=precision(self.dtype),
            preferred_element_type=jnp.float32,
        )
        # One by one: XLA's CPU backend takes five times as long for jnp.sum(parts, axis=0).
        return functools.reduce(jnp.add, list(parts)).astype(self.dtype)

    def _product_in_turn(
        self, weight_q: jax.Array, scales: jax.Array, planes: jax.Array
    ) -> jax.Array:
        """Compute the product, no earlier than ``planes`` is known.

        Else XLA's scheduler takes the dequantized matrices, which depend on weights alone, out of
        their order, and one program holds those of all layers at once: as many bytes as without
        packing, and four times the time. Adding a zero that XLA cannot foresee keeps them in turn;
        an ``optimization_barrier`` is gone before the scheduler looks.
        """
        first = planes.reshape(-1)[:1].astype(jnp.float32)
        bits = lax.bitcast_convert_type(first, jnp.uint32)
        zero = jnp.right_shift(jnp.right_shift(bits, jnp.uint32(16)), jnp.uint32(16))
        weight_q = weight_q ^ zero.astype(jnp.uint8).reshape(1, 1, 1)
        return self._product(weight_q, scales, planes)


def matrix(linear: Linear | PackedLinear) -> tuple[fused.Form, tuple[jax.Array, ...]]:
    """The form and the arrays of a matrix, as kernels and :func:`multiply` read them."""
    if isinstance(linear, PackedLinear):
        return linear.form, (linear.weight_q[...], linear.scales[...])
    weight = linear.weight[...]
    outputs, inputs = weight.shape
    return fused.Form(inputs, outputs, weight.dtype), (weight,)


def multiply(form: fused.Form, x: jax.Array, weights: tuple[jax.Array, ...]) -> jax.Array:
    """[..., in] -> [..., results] with a matrix of this form, without a kernel."""
    if form.gated:
        plain = dataclasses.replace(form, gated=False)
        gate, up = jnp.split(multiply(plain, x, weights), 2, axis=-1)
        return jax.nn.silu(gate) * up
    if not form.bits:
        return matmul(x, weights[0])
    linear = PackedLinear(
        *weights, bits=form.bits, block=form.block, inputs=form.inputs, dtype=form.dtype
    )
    return linear(x)


class Embedding(nnx.Module):
    """A table [V, D] of token vectors."""

    def __init__(self, vocab_size: int, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (vocab_size, width), jnp.float32)
        self.weight = nnx.Param(table.astype(dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Token ids [...] -> vectors [..., D].

        Ids outside 0..V-1 give the vector of the nearest id: padding may hold any value,
        and a padded row is never committed.
        """
        return jnp.take(self.weight[...], tokens, axis=0, mode="clip")


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
