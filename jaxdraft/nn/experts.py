"""Products of rows with the experts that they chose.

The matrices of the experts of a layer are one array [E, out, in], or a :class:`PackedMatrix` each
of whose arrays has a first axis of experts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxdraft.config import MoeConfig
from jaxdraft.kernels.form import Form
from jaxdraft.native.product import without
from jaxdraft.nn.fused import split
from jaxdraft.nn.linear import matmul
from jaxdraft.nn.packed import Packed, PackedMatrix, check_arrays
from jaxdraft.nn.product import precision
from jaxdraft.sizes import power_of_two

_SLOPE = 1.702
"""Slope of the sigmoid in the clamped activation."""

_TILE = 16
"""Minimum number of rows that an expert multiplies at once, if there are that many."""


Matrices = jax.Array | PackedMatrix


class PackedExperts(nnx.Module):
    """The matrices [out, in] of all experts, quantized in memory.

    Args:
      arrays: arrays of :mod:`jaxdraft.nn.packed`, each with a first axis of experts.
      form: form of the matrix of one expert.

    Raises:
      ValueError: the arrays do not fit ``form``, or each other.
    """

    def __init__(self, arrays: Mapping[str, Any], form: Form):
        self.form = form
        counts = {array.shape[0] for array in arrays.values()}
        if len(counts) != 1:
            raise ValueError(f"arrays have {sorted(counts)} experts; expected one number")
        one = {n: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for n, a in arrays.items()}
        check_arrays(form, one)
        for name, array in arrays.items():
            setattr(self, name, Packed(array))

    @property
    def table(self) -> PackedMatrix:
        """The matrices as one pytree, sharing these arrays."""
        return PackedMatrix({n: getattr(self, n)[...] for n in self.form.parts}, self.form)


class Experts(NamedTuple):
    """The weights of the experts of a layer."""

    gate_up: Matrices  # [E, gate rows then up rows, D]
    down: Matrices  # [E, D, I]
    gate_up_bias: jax.Array | None = None  # [E, 2 I]
    down_bias: jax.Array | None = None  # [E, D]


def run_experts(
    config: MoeConfig, rows: jax.Array, share: jax.Array, chosen: jax.Array, experts: Experts
) -> jax.Array:
    """Sum the outputs of the chosen experts of each row, weighted.

    Args:
      config: number of experts, and their activation.
      rows: [R, D].
      share: [R, k] float32, the weights of the experts of each row.
      chosen: [R, k] int32, indices of those experts.
      experts: their weights.

    Returns:
      [R, D].
    """
    few = rows.shape[0] * config.active < config.experts
    return lax.platform_dependent(
        rows,
        share,
        chosen,
        experts,
        cpu=functools.partial(experts_in_turn, config),
        default=functools.partial(chosen_experts if few else all_experts, config),
    )


def activate(config: MoeConfig, both: jax.Array) -> jax.Array:
    """[..., 2 I] -> [..., I]: ``silu(gate) * up``; with a limit, gpt-oss's clamped form of it."""
    gate, up = split(both, (both.shape[-1] // 2,) * 2, config.shards)
    if not config.limit:
        return jax.nn.silu(gate) * up
    gate = jnp.minimum(gate, config.limit)
    up = jnp.clip(up, -config.limit, config.limit)
    return (up + 1) * gate * jax.nn.sigmoid(_SLOPE * gate)


def all_experts(
    config: MoeConfig, rows: jax.Array, share: jax.Array, chosen: jax.Array, experts: Experts
) -> jax.Array:
    """Compute :func:`run_experts` with every expert over every row."""
    which = jax.nn.one_hot(chosen, config.experts, dtype=jnp.float32)
    weight = jnp.sum(which * share[..., None], axis=1)  # [R, E]
    if any(map(_is_packed, experts)):
        return _all_one_by_one(config, rows, weight, experts)
    assert isinstance(experts.gate_up, jax.Array) and isinstance(experts.down, jax.Array)
    exact = precision(rows.dtype)
    inner = jnp.einsum("eid,td->eti", experts.gate_up, rows, precision=exact)
    if experts.gate_up_bias is not None:
        inner = inner + experts.gate_up_bias[:, None]
    active = activate(config, inner) * weight.T[..., None].astype(rows.dtype)
    out = jnp.einsum("edi,eti->td", experts.down, active, precision=exact)
    if experts.down_bias is None:
        return out
    return out + jnp.einsum(
        "te,ed->td", weight.astype(rows.dtype), experts.down_bias, precision=exact
    )


def _all_one_by_one(
    config: MoeConfig, rows: jax.Array, weight: jax.Array, experts: Experts
) -> jax.Array:
    """Compute :func:`all_experts` with the floats of one expert in memory.

    Args:
      config: number of experts, and their activation.
      rows: [R, D].
      weight: [R, E] float32.
      experts: their weights.
    """

    fixed = lambda part: lax.stop_gradient(part) if _is_packed(part) else part  # noqa: E731
    experts = jax.tree.map(fixed, experts, is_leaf=_is_packed)

    def step(total: jax.Array, part: tuple[Experts, jax.Array]) -> tuple[jax.Array, None]:
        expert, weight = part
        added = _one_expert(config, rows, expert).astype(jnp.float32)
        return total + added * weight[:, None], None

    zeros = jnp.zeros(rows.shape, jnp.float32)
    return lax.scan(step, zeros, (experts, weight.T))[0].astype(rows.dtype)


def chosen_experts(
    config: MoeConfig, rows: jax.Array, share: jax.Array, chosen: jax.Array, experts: Experts
) -> jax.Array:
    """Compute :func:`run_experts` from the chosen experts alone, in parallel.

    The products are written as sums: XLA's GPU compiler reads a gathered matrix in place
    when a sum follows, and copies it for a product.
    """
    flat = chosen.reshape(-1)

    def product(matrices: Matrices, bias: jax.Array | None, vectors: jax.Array) -> jax.Array:
        picked = jax.tree.map(lambda x: jnp.take(x, flat, axis=0, mode="clip"), (matrices, bias))
        summed = _product_as_sum(picked[0], vectors)
        if picked[1] is not None:
            summed = summed + picked[1].astype(jnp.float32)
        return summed.astype(rows.dtype)  # [R k, X]

    repeated = jnp.repeat(rows, chosen.shape[1], axis=0)
    active = activate(config, product(experts.gate_up, experts.gate_up_bias, repeated))
    each = product(experts.down, experts.down_bias, active)  # [R k, D]
    each = each.reshape(*chosen.shape, -1).astype(jnp.float32)
    return jnp.sum(each * share[..., None], axis=1).astype(rows.dtype)


def _is_packed(part: Any) -> bool:
    return isinstance(part, PackedMatrix)


def _product_as_sum(matrices: Matrices, vectors: jax.Array) -> jax.Array:
    """[P, X, Y] x [P, Y] -> [P, X] float32, a matrix for each vector."""
    if isinstance(matrices, PackedMatrix):
        return jax.vmap(PackedMatrix.matmul_as_sum)(matrices, vectors)
    wide = matrices.astype(jnp.float32)
    return jnp.sum(wide * vectors[:, None].astype(jnp.float32), axis=-1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def experts_in_turn(
    config: MoeConfig, rows: jax.Array, share: jax.Array, chosen: jax.Array, experts: Experts
) -> jax.Array:
    """Compute :func:`run_experts` with one expert after the other, each read once if at all.

    The rows of an expert are multiplied in tiles. Example, tiles of two rows, one expert per row:
    rows 0 to 3 choose experts 5, 2, 5, 5. In the order of their experts they are 1, 0, 2, 3; the
    tiles are (1), (0, 2) and (3), of the experts 2, 5 and 5.

    Its derivative is that of :func:`all_experts`: reverse mode does not allow a loop whose end the
    data decide.
    """
    count, active = chosen.shape
    tile = min(count, max(_TILE, power_of_two(2 * count * active // config.experts)))
    pairs = chosen.reshape(-1)
    order = jnp.argsort(pairs)  # of (row, choice) pairs, by expert
    held = jnp.zeros((config.experts,), jnp.int32).at[pairs].add(1)
    end = jnp.cumsum(held)  # of the pairs of each expert
    tiles = (held + (tile - 1)) // tile
    last = jnp.cumsum(tiles)
    weights = share.reshape(-1)

    def step(index: jax.Array, total: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(last, index, side="right").astype(jnp.int32)
        within = index - (last[expert] - tiles[expert])
        place = end[expert] - held[expert] + within * tile + jnp.arange(tile, dtype=jnp.int32)
        pair = order.at[place].get(mode="clip")
        row = jnp.where(place < end[expert], pair // active, count)  # past the end: dropped
        part = _expert(experts, expert)
        added = _one_expert(config, rows.at[row].get(mode="clip"), part)
        added = added.astype(jnp.float32) * weights[pair][:, None]
        return total.at[row].add(added, mode="drop")

    total = lax.fori_loop(0, last[-1], step, jnp.zeros(rows.shape, jnp.float32))
    return total.astype(rows.dtype)


def _expert(experts: Experts, index: jax.Array) -> Experts:
    """Return one expert, without the axis of experts.

    XLA's CPU backend does not slice bfloat16 and would widen all experts, once before the loop
    around this call. The barrier makes them depend on the loop's index, so only a slice is widened.
    """
    experts, index = lax.optimization_barrier((experts, index))
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), experts)


def _one_expert(config: MoeConfig, rows: jax.Array, expert: Experts) -> jax.Array:
    """Run one expert over rows [R, D]; ``expert`` has no axis of experts."""
    with without():  # XLA reads its slice in place; a native product would read a copy
        return _one_expert_by_xla(config, rows, expert)


def _one_expert_by_xla(config: MoeConfig, rows: jax.Array, expert: Experts) -> jax.Array:
    inner = matmul(rows, expert.gate_up)
    if expert.gate_up_bias is not None:
        inner = inner + expert.gate_up_bias[None]
    out = matmul(activate(config, inner), expert.down)
    return out if expert.down_bias is None else out + expert.down_bias[None]


@experts_in_turn.defjvp
def _in_turn_jvp(config: MoeConfig, primals: tuple, tangents: tuple) -> tuple:
    return jax.jvp(functools.partial(all_experts, config), primals, tangents)
