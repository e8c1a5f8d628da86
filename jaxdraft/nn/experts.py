"""Products of rows with the experts that they chose."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdraft.config import MoeConfig
from jaxdraft.nn.product import multiply_dense, precision
from jaxdraft.sizes import power_of_two

_SLOPE = 1.702
"""Slope of the sigmoid in the clamped activation."""

_TILE = 16
"""Rows that an expert multiplies at once, at least, where there are so many."""


class Experts(NamedTuple):
    """The weights of the experts of a layer."""

    gate_up: jax.Array  # [E, gate rows then up rows, D]
    down: jax.Array  # [E, D, I]
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


def activate(config: MoeConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return ``silu(gate) * up``; with a limit, gpt-oss's clamped form of it."""
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
    exact = precision(rows.dtype)
    inner = jnp.einsum("eid,td->eti", experts.gate_up, rows, precision=exact)
    if experts.gate_up_bias is not None:
        inner = inner + experts.gate_up_bias[:, None]
    gate, up = jnp.split(inner, 2, axis=-1)
    active = activate(config, gate, up) * weight.T[..., None].astype(rows.dtype)
    out = jnp.einsum("edi,eti->td", experts.down, active, precision=exact)
    if experts.down_bias is None:
        return out
    return out + jnp.einsum(
        "te,ed->td", weight.astype(rows.dtype), experts.down_bias, precision=exact
    )


def chosen_experts(
    config: MoeConfig, rows: jax.Array, share: jax.Array, chosen: jax.Array, experts: Experts
) -> jax.Array:
    """Compute :func:`run_experts` from the chosen experts alone, in parallel.

    Written as sums and not as products: XLA's GPU compiler reads a gathered matrix in place
    when a sum follows, and copies it for a product.
    """
    flat = chosen.reshape(-1)

    def product(
        matrices: jax.Array, bias: jax.Array | None, vectors: jax.Array
    ) -> jax.Array:  # [E, X, Y], [E, X], [R k, Y]
        picked = jnp.take(matrices, flat, axis=0, mode="clip").astype(jnp.float32)
        summed = jnp.sum(picked * vectors[:, None].astype(jnp.float32), axis=-1)
        if bias is not None:
            summed = summed + jnp.take(bias, flat, axis=0, mode="clip").astype(jnp.float32)
        return summed.astype(rows.dtype)  # [R k, X]

    repeated = jnp.repeat(rows, chosen.shape[1], axis=0)
    gate, up = jnp.split(product(experts.gate_up, experts.gate_up_bias, repeated), 2, axis=-1)
    each = product(experts.down, experts.down_bias, activate(config, gate, up))  # [R k, D]
    each = each.reshape(*chosen.shape, -1).astype(jnp.float32)
    return jnp.sum(each * share[..., None], axis=1).astype(rows.dtype)


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

    XLA's CPU backend takes no slice of bfloat16 and would widen all experts, once before the loop
    around this call. The barrier makes them depend on the loop's index, so that a slice is widened.
    """
    experts, index = lax.optimization_barrier((experts, index))
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), experts)


def _one_expert(config: MoeConfig, rows: jax.Array, expert: Experts) -> jax.Array:
    """Run one expert over rows [R, D]; ``expert`` has no axis of experts."""
    inner = multiply_dense(rows, expert.gate_up)
    if expert.gate_up_bias is not None:
        inner = inner + expert.gate_up_bias[None]
    gate, up = jnp.split(inner, 2, axis=-1)
    out = multiply_dense(activate(config, gate, up), expert.down)
    return out if expert.down_bias is None else out + expert.down_bias[None]


@experts_in_turn.defjvp
def _in_turn_jvp(config: MoeConfig, primals: tuple, tangents: tuple) -> tuple:
    return jax.jvp(functools.partial(all_experts, config), primals, tangents)
