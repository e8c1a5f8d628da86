"""Quantized matrices that stay packed in memory, and their products.

One description, :class:`jaxdraft.kernels.form.Form`, serves every format that is read. A matrix W
[out, in] is stored as named arrays, of which the first two always exist. A row is cut into blocks
of ``form.block`` inputs; the last block is stored whole, and its values past ``in`` are ignored.
R is ``ceil(out / form.rows)``, the number of groups of outputs that share their scales.

| array | shape | meaning |
|---|---|---|
| ``weight_q`` | [out, blocks, block * bits / 8] uint8 | values q, packed low bits first |
| ``scales`` | [R, blocks], floats or integers | s |
| ``zeros`` | [R, blocks], integers | zero points z |
| ``minima`` | [R, blocks], floats or integers | m |
| ``coarse`` | [R, ceil(blocks / fine)], floats | factors of the scales, one for ``fine`` blocks |
| ``coarse_minima`` | [R, ceil(blocks / fine)], floats | factors of the minima |
| ``order`` | [in] int32 | input that each stored column belongs to |

``W[o, order[k]] = (q[o, k] - z) * s + m``, in float32 and rounded once to ``form.dtype``. Integers
without ``zeros`` and ``minima`` have the zero point ``2**(bits - 1)``. :data:`DECODERS` lists the
kinds of values.

| format | bits | block | rows | further arrays |
|---|---|---|---|---|
| ``MatMulNBits`` of ``com.microsoft`` | 2, 4, 8 | any | 1 | |
| compressed-tensors, AWQ, GPTQ | 4, 8 | group, or in | 1 | zeros; order |
| fp8 | 8 (``e4m3``) | 128, or in | 128, or 1 | |
| GGUF Q4_0, Q8_0 | 4, 8 | 32 | 1 | |
| GGUF Q4_1, Q5_0, Q5_1 | 4, 8 | 32 | 1 | minima (Q4_1, Q5_1) |
| GGUF Q4_K, Q5_K | 4, 8 | 32 | 1 | minima, coarse, coarse_minima |
| GGUF Q6_K | 8 | 16 | 1 | coarse |
| MXFP4 | 4 (``e2m1``) | 32 | 1 | |

Scales of MXFP4 are powers of two, of the type float8_e8m0fnu.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax import lax
from jax.typing import DTypeLike

from jaxdraft.kernels import PALLAS, XLA
from jaxdraft.kernels.form import Form
from jaxdraft.meshes import on_a_mesh
from jaxdraft.native import product as native
from jaxdraft.nn.product import multiply_dense, precision, product_in_halves

Arrays = Mapping[str, Any]
"""Stored arrays by name, or their shapes and types."""

PARTS = ("weight_q", "scales", "zeros", "minima", "coarse", "coarse_minima", "order")
"""Names of all arrays that a packed matrix can have, in order."""


def _integers(raw: jax.Array) -> jax.Array:
    return raw.astype(jnp.float32)


def _e4m3(raw: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(raw, jnp.float8_e4m3fn).astype(jnp.float32)


def _e2m1(raw: jax.Array) -> jax.Array:
    """Return 0, 0.5, 1, 1.5, 2, 3, 4, 6 for the lower three bits, negative if the fourth is set.

    From 1 on, exponent and mantissa are the last three bits of a float32's, whose bias is 126
    greater. Example: 5, 101 in bits, has exponent 10 and mantissa 1: 1.5 * 2**(2 - 1) = 3.
    """
    size = (raw & jnp.uint8(7)).astype(jnp.uint32)
    wide = lax.bitcast_convert_type((size << 22) + jnp.uint32(126 << 23), jnp.float32)
    value = jnp.where(size < 2, size.astype(jnp.float32) * 0.5, wide)
    return jnp.where(raw > 7, -value, value)


DECODERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "integer": _integers,
    "e4m3": _e4m3,
    "e2m1": _e2m1,
}
"""Values of few bits, uint8, as float32. ``e4m3`` has eight bits, ``e2m1`` four: sign, exponent,
mantissa."""


class Packed(nnx.Variable):
    """An array of a packed matrix; no optimizer touches it."""


@struct.dataclass
class PackedMatrix:
    """A matrix W [out, in] that stays quantized in memory; see :mod:`jaxdraft.nn.packed`.

    It can replace a dense array as an embedding or a head.
    """

    arrays: dict[str, jax.Array]
    form: Form = struct.field(pytree_node=False)

    @property
    def weights(self) -> tuple[jax.Array, ...]:
        """The arrays in the order of ``form.parts``, as kernels read them."""
        return tuple(self.arrays[name] for name in self.form.parts)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.form.outputs, self.form.inputs

    @property
    def dtype(self) -> Any:
        """Type of the products and of gathered rows."""
        return self.form.dtype

    def dequantized(self) -> jax.Array:
        """Return W, [out, in] in ``dtype``."""
        planes = _planes(self.form, self.arrays)
        values = jnp.moveaxis(planes, 0, -1).reshape(planes.shape[1], -1)[:, : self.form.inputs]
        order = self.arrays.get("order")
        return values if order is None else values[:, jnp.argsort(order)]

    def select(self, outputs: jax.Array) -> PackedMatrix:
        """Return the matrix of some outputs, [n], in the given order. Indices are clipped."""
        found = jnp.clip(outputs, 0, self.form.outputs - 1)
        arrays = {
            name: array
            if name == "order"
            else jnp.take(array, found if name == "weight_q" else found // self.form.rows, axis=0)
            for name, array in self.arrays.items()
        }
        return PackedMatrix(arrays, dataclasses.replace(self.form, outputs=len(found), rows=1))

    def take(self, outputs: jax.Array) -> jax.Array:
        """Return the rows [..., in] of outputs [...], in ``dtype``. Indices are clipped."""
        rows = self.select(outputs.reshape(-1)).dequantized()
        return rows.reshape(*outputs.shape, self.form.inputs)

    def matmul(self, x: jax.Array, *, out_dtype: DTypeLike | None = None) -> jax.Array:
        """[..., in] -> [..., out], in ``out_dtype``, or else in ``dtype``."""
        form, out = self.form, out_dtype or self.form.dtype
        count = math.prod(x.shape[:-1])
        if native.serves(form, count, out, self.weights):
            rows = x.reshape(count, form.inputs).astype(form.dtype)
            stored, rows, arrays = native.in_order(form, rows, self.arrays)
            weights = tuple(arrays[name] for name in stored.parts)
            product = native.multiply(stored, out, rows, weights, _multiply_rows)
            return product.reshape(*x.shape[:-1], form.outputs)
        planes = self._rows(x)
        few = planes.shape[1] <= _FEW_ROWS
        product = lax.platform_dependent(
            self.arrays,
            planes,
            cpu=functools.partial(_product_by_blocks, form, out_dtype),
            default=functools.partial(_product_by_sums if few else _product_apart, form, out_dtype),
        )
        return product.T.reshape(*x.shape[:-1], form.outputs)

    def matmul_as_sum(self, x: jax.Array) -> jax.Array:
        """[in] -> [out] float32, as a sum that XLA's GPU compiler fuses with the decoding.

        So no float matrix exists in memory, even where the arrays are gathered.
        """
        planes = _planes(self.form, self.arrays).astype(jnp.float32)
        return jnp.sum(planes * self._rows(x[None]).astype(jnp.float32), axis=(0, 2))

    def _rows(self, x: jax.Array) -> jax.Array:
        """Return rows [..., in] as [planes, rows, bytes], in the order of the stored columns.

        Plane p holds every (8 / bits)th value; picking the same columns of x needs no unpacking.
        """
        form = self.form
        rows = x.reshape(-1, x.shape[-1]).astype(form.dtype)
        if "order" in self.arrays:
            rows = jnp.take(rows, self.arrays["order"], axis=1)
        blocks = self.arrays["weight_q"].shape[1]
        rows = jnp.pad(rows, ((0, 0), (0, blocks * form.block - form.inputs)))
        planes = rows.reshape(rows.shape[0], -1, 8 // form.bits)
        return jnp.transpose(planes, (2, 0, 1))


def _multiply_rows(
    form: Form, out_dtype: DTypeLike, rows: jax.Array, *weights: jax.Array
) -> jax.Array:
    """[rows, in] -> [rows, out], by XLA."""
    arrays = dict(zip(form.parts, weights, strict=True))
    return PackedMatrix(arrays, form).matmul(rows, out_dtype=out_dtype)


def _planes(form: Form, arrays: Arrays) -> jax.Array:
    """Return W as [planes, out, bytes]: plane p holds values p, p + 8 / bits, ... of a row.

    Flat rows and repeated scales, because XLA's CPU backend runs this on vectors and the same
    over blocks (``q[o, b, i] * scale[o, b]``) number by number, five times slower.
    """
    outputs, _, width = arrays["weight_q"].shape
    raw = arrays["weight_q"].reshape(1, outputs, -1)
    if form.bits < 8:
        shifts = jnp.arange(0, 8, form.bits, dtype=jnp.uint8).reshape(-1, 1, 1)
        raw = jnp.right_shift(raw, shifts) & jnp.uint8((1 << form.bits) - 1)
    values = DECODERS[form.values](raw)

    def spread(name: str) -> jax.Array:
        """An array of blocks, [R, blocks], for every byte: [1, out, bytes], or [1, out, 1]."""
        each = arrays[name].astype(jnp.float32)
        coarse = {"scales": "coarse", "minima": "coarse_minima"}.get(name)
        if coarse in arrays:
            factors = jnp.repeat(arrays[coarse].astype(jnp.float32), form.fine, axis=1)
            each = each * factors[:, : each.shape[1]]
        if form.rows > 1:
            each = jnp.repeat(each, form.rows, axis=0)[:outputs]
        return (jnp.repeat(each, width, axis=1) if each.shape[1] > 1 else each)[None]

    if "zeros" in arrays:
        values = values - spread("zeros")
    elif "minima" not in arrays and form.values == "integer":
        values = values - (1 << (form.bits - 1))
    values = values * spread("scales")
    if "minima" in arrays:
        values = values + spread("minima")
    return values.astype(form.dtype)


def _product(
    form: Form, out_dtype: DTypeLike | None, arrays: Arrays, planes: jax.Array
) -> jax.Array:
    """[planes, rows, bytes] -> [out, rows]: a batch over the planes, then their sum."""
    weight = _planes(form, arrays)
    if form.bits == 8 and weight.shape[1] % 2 == 0:  # one plane: see product_in_halves
        return product_in_halves(weight[0], planes[0], out_dtype=out_dtype)
    parts = lax.dot_general(
        weight,
        planes,
        (((2,), (2,)), ((0,), (0,))),
        precision=precision(form.dtype),
        preferred_element_type=jnp.float32,
    )
    # One by one: XLA's CPU backend takes five times as long for jnp.sum(parts, axis=0).
    return functools.reduce(jnp.add, list(parts)).astype(out_dtype or form.dtype)


_AT_ONCE = 1 << 20
"""Numbers of a matrix that are decoded at once on CPUs, few enough to stay in the cache."""


def _product_by_blocks(
    form: Form, out_dtype: DTypeLike | None, arrays: Arrays, planes: jax.Array
) -> jax.Array:
    """Compute the product some outputs at a time, if the matrix has many numbers.

    No float matrix is then written to memory and read again: on one CPU, 12288 x 2048 numbers of
    four bits take no more time than the dense product, and in one piece ten times that
    (``experiments/packed_products.md``).

    Example, 10 outputs, 4 at a time: a loop over outputs 0-3 and 4-7, then 8 and 9.
    """
    height = max(1, _AT_ONCE // max(1, form.inputs) // form.rows) * form.rows
    count = form.outputs // height
    if count < 2 or on_a_mesh():  # a loop over outputs would gather them
        return _product_in_turn(form, out_dtype, arrays, planes)

    def part(start: Any, size: int) -> jax.Array:
        some = {}
        for name, array in arrays.items():
            each = 1 if name == "weight_q" else form.rows
            some[name] = array
            if name != "order":
                some[name] = lax.dynamic_slice_in_dim(array, start // each, -(-size // each))
        return _product(dataclasses.replace(form, outputs=size), out_dtype, some, planes)

    starts = height * jnp.arange(count, dtype=jnp.int32)
    blocks = lax.map(lambda start: part(start, height), starts)
    product = blocks.reshape(count * height, planes.shape[1])
    left = form.outputs - count * height
    if not left:
        return product
    return jnp.concatenate([product, part(count * height, left)])


_FEW_ROWS = 8
"""Maximum number of rows for which GPUs compute a packed product as sums."""


def _product_by_sums(
    form: Form, out_dtype: DTypeLike | None, arrays: Arrays, planes: jax.Array
) -> jax.Array:
    """Compute the product of a few rows as sums of products.

    XLA's GPU compiler fuses the decoding with sums, one launch for all rows, and reads packed bytes
    alone. For its matrix products it writes the decoded matrix to memory and reads it again: eight
    times the bytes of int4. More rows are worth that, since sums do not run on tensor cores.
    """
    # The barrier makes the rows one array: without it, each would have a launch of its own.
    rows = lax.optimization_barrier(jnp.swapaxes(planes, 0, 1).astype(jnp.float32))
    weight = _planes(form, arrays).astype(jnp.float32)
    sums = [jnp.sum(weight * row[:, None], axis=(0, 2)) for row in rows]
    return jnp.stack(sums, axis=1).astype(out_dtype or form.dtype)


def _product_apart(
    form: Form, out_dtype: DTypeLike | None, arrays: Arrays, planes: jax.Array
) -> jax.Array:
    """Compute the product without merging it with others: see :mod:`jaxdraft.nn.product`."""
    return _product(form, out_dtype, arrays, lax.optimization_barrier(planes))


def _product_in_turn(
    form: Form, out_dtype: DTypeLike | None, arrays: Arrays, planes: jax.Array
) -> jax.Array:
    """Compute the product, no earlier than ``planes`` is known.

    Otherwise XLA's scheduler moves the dequantized matrices, which depend only on weights, out of
    their order, and the program holds those of all layers at once: as many bytes as without
    packing, and four times the time. Adding a zero that XLA cannot foresee keeps them in turn;
    an ``optimization_barrier`` is removed before scheduling.
    """
    first = planes.reshape(-1)[:1].astype(jnp.float32)
    bits = lax.bitcast_convert_type(first, jnp.uint32)
    zero = jnp.right_shift(jnp.right_shift(bits, jnp.uint32(16)), jnp.uint32(16))
    weight_q = arrays["weight_q"] ^ zero.astype(jnp.uint8).reshape(1, 1, 1)
    return _product(form, out_dtype, {**arrays, "weight_q": weight_q}, planes)


def check_arrays(form: Form, arrays: Arrays) -> None:
    """Check that the arrays of a packed matrix fit its form.

    Raises:
      ValueError: an array is missing, unknown or of another shape; the values do not fill bytes.
    """
    if form.bits not in (2, 4, 8) or form.block < 1 or form.block * form.bits % 8:
        raise ValueError(f"blocks of {form.block} values of {form.bits} bits do not fill bytes")
    if form.values not in DECODERS:
        raise ValueError(f"values are {form.values!r}; expected one of {', '.join(DECODERS)}")
    blocks, groups = -(-form.inputs // form.block), -(-form.outputs // form.rows)
    each = (groups, blocks)
    coarse = (groups, -(-blocks // max(1, form.fine)))
    wanted = {
        "weight_q": (form.outputs, blocks, form.block * form.bits // 8),
        "scales": each,
        "zeros": each,
        "minima": each,
        "coarse": coarse,
        "coarse_minima": coarse,
        "order": (form.inputs,),
    }
    if tuple(arrays) != form.parts or not set(wanted) >= set(arrays):
        raise ValueError(f"arrays are {list(arrays)}; expected {list(form.parts)}")
    found = {name: tuple(array.shape) for name, array in arrays.items()}
    if any(shape != wanted[name] for name, shape in found.items()):
        expected = {name: wanted[name] for name in found}
        raise ValueError(
            f"arrays have the shapes {found}; expected {expected} for {form.inputs} inputs in "
            f"blocks of {form.block}"
        )


class PackedLinear(nnx.Module):
    """A :class:`jaxdraft.nn.linear.Linear` whose weights stay quantized in memory.

    The matrix is bit for bit the one that dequantizing on load gives; with ``minima`` it may differ
    by one rounding, where a device multiplies and adds in one step.

    Args:
      weight_q, scales: the arrays that every packed matrix has; see :mod:`jaxdraft.nn.packed`.
      bits: bits per value: 2, 4 or 8.
      block: number of values that share a scale.
      inputs: K, the width of the input rows.
      dtype: type of the products and of the result.
      values: kind of the values, a key of :data:`DECODERS`.
      rows: number of outputs that share their scales.
      fine: number of blocks that share an entry of ``coarse``.
      further: the other arrays, by name.

    Raises:
      ValueError: the arrays do not fit ``bits``, ``block``, ``inputs`` and ``rows``.
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
        values: str = "integer",
        rows: int = 1,
        fine: int = 0,
        **further: Any,
    ):
        given = {"weight_q": weight_q, "scales": scales, **further}
        arrays = {name: given[name] for name in sorted(given, key=_place)}
        self.form = Form(
            inputs,
            weight_q.shape[0],
            jnp.dtype(dtype),
            bits,
            block,
            values=values,
            rows=rows,
            fine=fine,
            parts=tuple(arrays),
        )
        check_arrays(self.form, arrays)
        for name, array in arrays.items():
            setattr(self, name, Packed(array))

    @property
    def bits(self) -> int:
        """Bits per value."""
        return self.form.bits

    @property
    def block(self) -> int:
        """Number of values that share a scale."""
        return self.form.block

    @property
    def table(self) -> PackedMatrix:
        """The matrix as one pytree, sharing these arrays."""
        arrays = {name: getattr(self, name)[...] for name in self.form.parts}
        return PackedMatrix(arrays, self.form)

    def __call__(self, x: jax.Array, *, out_dtype: DTypeLike | None = None) -> jax.Array:
        """[..., in] -> [..., out], in ``out_dtype``, or else in ``dtype``."""
        table, form = self.table, self.form
        if self.implementation == PALLAS and form.served and out_dtype in (None, form.dtype):
            from jaxdraft.kernels import linear as fused  # Pallas is slow to import

            if fused.serves(x):
                return fused.product(form, x, table.weights, xla=multiply)
        return table.matmul(x, out_dtype=out_dtype)

    def dequantized(self) -> jax.Array:
        """Return W, [out, in] in ``dtype``."""
        return self.table.dequantized()


def _place(name: str) -> int:
    if name not in PARTS:
        raise ValueError(f"arrays have {name!r}; expected some of {', '.join(PARTS)}")
    return PARTS.index(name)


class PackedEmbedding(PackedLinear):
    """A table [V, D] of token vectors that stays quantized; a tied head multiplies by ``table``."""

    def __call__(self, tokens: jax.Array) -> jax.Array:  # pyrefly: ignore[bad-override]
        """Token ids [...] -> vectors [..., D]; see :class:`jaxdraft.nn.linear.Embedding`."""
        return self.table.take(tokens)


class PackedRows(nnx.Module):
    """Packed matrices of the same inputs one below the other, each stored in its own way.

    Args:
      below: the matrices, in the order of their outputs.
    """

    shards = 1
    """Number of devices for which the outputs are ordered; see :mod:`jaxdraft.nn.fused`."""

    def __init__(self, below: Sequence[PackedLinear]):
        self.below = nnx.List(list(below))

    def __call__(self, x: jax.Array, *, out_dtype: DTypeLike | None = None) -> jax.Array:
        """[..., in] -> [..., out], in ``out_dtype``, or else in the dtype of the matrices."""
        parts = [part(x, out_dtype=out_dtype) for part in self.below]
        if self.shards == 1:
            return jnp.concatenate(parts, axis=-1)
        apart = [part.reshape(*x.shape[:-1], self.shards, -1) for part in parts]
        return jnp.concatenate(apart, axis=-1).reshape(*x.shape[:-1], -1)

    def dequantized(self) -> jax.Array:
        """W, [out, in]."""
        return jnp.concatenate([part.dequantized() for part in self.below])


def multiply(form: Form, x: jax.Array, weights: tuple[jax.Array, ...]) -> jax.Array:
    """[..., in] -> [..., results] with a matrix of this form, without a kernel."""
    if form.gated:
        plain = dataclasses.replace(form, gated=False)
        gate, up = jnp.split(multiply(plain, x, weights), 2, axis=-1)
        return jax.nn.silu(gate) * up
    if not form.bits:
        return multiply_dense(x, weights[0])
    return PackedMatrix(dict(zip(form.parts, weights, strict=True)), form).matmul(x)
