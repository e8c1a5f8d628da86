"""Feed-forward parts: a gated MLP, and routed experts beside a shared one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdraft.config import MlpConfig, MoeConfig
from jaxdraft.kernels import PALLAS, XLA
from jaxdraft.kernels import linear as fused
from jaxdraft.nn.linear import Linear, matrix
from jaxdraft.nn.packed import multiply
from jaxdraft.nn.product import precision


class Mlp(nnx.Module):
    """``down(silu(gate(x)) * up(x))``, gate and up in one product."""

    implementation = XLA

    def __init__(self, width: int, hidden: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.gate_up = Linear(width, 2 * hidden, dtype=dtype, rngs=rngs)
        self.down = Linear(hidden, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        form, weights = matrix(self.gate_up)
        if self.implementation == PALLAS and form.served and fused.serves(x):
            gated = dataclasses.replace(form, gated=True)
            return self.down(fused.product(gated, x, weights, xla=multiply))
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Moe(nnx.Module):
    """Softmax over E experts, the best k kept and renormalised, plus a gated shared expert.

    No row is sorted and none is dropped for capacity. Other than on CPUs, few rows read the experts
    that they chose and no others; more rows, and all rows on CPUs, run through every expert, and
    the weights select.

    Source: ``com.microsoft.MoE`` (swiglu, normalize_routing_weights = 1) and ``GatedAdd``.
    """

    def __init__(self, width: int, config: MoeConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        e, i = config.experts, config.hidden

        def random(*shape: int) -> jax.Array:
            noise = jax.random.normal(rngs.params(), shape, jnp.float32) * shape[-1] ** -0.5
            return noise.astype(dtype)

        self.router = Linear(width, e, dtype=dtype, rngs=rngs)
        self.gate_up = nnx.Param(random(e, 2 * i, width))  # [E, gate rows then up rows, D]
        self.down = nnx.Param(random(e, width, i))
        if config.shared_hidden:
            self.shared = Mlp(width, config.shared_hidden, dtype=dtype, rngs=rngs)
            self.shared_gate = Linear(width, 1, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        c = self.config
        rows = x.reshape(-1, x.shape[-1])
        probability = jax.nn.softmax(self.router(rows).astype(jnp.float32), axis=-1)
        best, chosen = jax.lax.top_k(probability, c.active)
        best = best / jnp.sum(best, axis=-1, keepdims=True)
        experts = (rows, best, chosen, self.gate_up[...], self.down[...])
        if rows.shape[0] * c.active < c.experts:
            y = jax.lax.platform_dependent(*experts, cpu=_all_experts, default=_chosen_experts)
        else:
            y = _all_experts(*experts)
        if c.shared_hidden:
            y = y + self.shared(rows) * jax.nn.sigmoid(self.shared_gate(rows))
        return y.reshape(x.shape)


def _all_experts(
    rows: jax.Array, share: jax.Array, chosen: jax.Array, gate_up: jax.Array, down: jax.Array
) -> jax.Array:
    """Run every expert over every row.

    Args:
      rows: [R, D].
      share: [R, k] float32, the weights of the experts of each row.
      chosen: [R, k] int32, indices of those experts.
      gate_up: [E, 2 I, D].
      down: [E, D, I].

    Returns:
      [R, D].
    """
    which = jax.nn.one_hot(chosen, gate_up.shape[0], dtype=jnp.float32)
    weight = jnp.sum(which * share[..., None], axis=1)  # [R, E]
    exact = precision(rows.dtype)
    inner = jnp.einsum("eid,td->eti", gate_up, rows, precision=exact)
    gate, up = jnp.split(inner, 2, axis=-1)
    active = jax.nn.silu(gate) * up * weight.T[..., None].astype(rows.dtype)
    return jnp.einsum("edi,eti->td", down, active, precision=exact)


def _chosen_experts(
    rows: jax.Array, share: jax.Array, chosen: jax.Array, gate_up: jax.Array, down: jax.Array
) -> jax.Array:
    """Compute the same from the chosen experts alone.

    Written as sums and not as products: XLA's GPU compiler reads a gathered matrix in place
    when a sum follows, and copies it for a product.
    """

    def product(matrices: jax.Array, vectors: jax.Array) -> jax.Array:  # [E, X, Y], [R k, Y]
        picked = jnp.take(matrices, chosen.reshape(-1), axis=0, mode="clip").astype(jnp.float32)
        summed = jnp.sum(picked * vectors[:, None].astype(jnp.float32), axis=-1)
        return summed.astype(rows.dtype)  # [R k, X]

    gate, up = jnp.split(product(gate_up, jnp.repeat(rows, chosen.shape[1], axis=0)), 2, axis=-1)
    active = jax.nn.silu(gate) * up * share.reshape(-1, 1).astype(rows.dtype)
    each = product(down, active).reshape(*chosen.shape, -1)  # [R, k, D]
    return jnp.sum(each.astype(jnp.float32), axis=1).astype(rows.dtype)


def feed_forward(
    width: int, config: MlpConfig | MoeConfig, *, dtype: DTypeLike, rngs: nnx.Rngs
) -> Mlp | Moe:
    """Return the module that ``config`` describes."""
    if isinstance(config, MoeConfig):
        return Moe(width, config, dtype=dtype, rngs=rngs)
    return Mlp(width, config.hidden, dtype=dtype, rngs=rngs)
