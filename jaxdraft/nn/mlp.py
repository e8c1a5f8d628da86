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
from jaxdraft.nn.linear import Linear, matrix, multiply, precision


class Mlp(nnx.Module):
    """``down(silu(gate(x)) * up(x))``, gate and up in one product."""

    implementation = XLA

    def __init__(self, width: int, hidden: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.gate_up = Linear(width, 2 * hidden, dtype=dtype, rngs=rngs)
        self.down = Linear(hidden, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        if self.implementation == PALLAS and fused.serves(x):
            form, weights = matrix(self.gate_up)
            gated = dataclasses.replace(form, gated=True)
            return self.down(fused.product(gated, x, weights, xla=multiply))
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Moe(nnx.Module):
    """Softmax over E experts, the best k kept and renormalised, plus a gated shared expert.

    Source: ``com.microsoft.MoE`` (swiglu, normalize_routing_weights = 1) and ``GatedAdd``. Every
    expert runs over every row and the weights select: with few rows that costs less than sorting
    them, and no token is ever dropped for capacity.
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
        weight = jnp.sum(
            jax.nn.one_hot(chosen, c.experts, dtype=jnp.float32) * best[..., None], axis=1
        )  # [rows, E]
        exact = precision(rows.dtype)
        inner = jnp.einsum("eid,td->eti", self.gate_up[...], rows, precision=exact)
        gate, up = jnp.split(inner, 2, axis=-1)
        active = jax.nn.silu(gate) * up * weight.T[..., None].astype(rows.dtype)
        y = jnp.einsum("edi,eti->td", self.down[...], active, precision=exact)
        if c.shared_hidden:
            y = y + self.shared(rows) * jax.nn.sigmoid(self.shared_gate(rows))
        return y.reshape(x.shape)


def feed_forward(
    width: int, config: MlpConfig | MoeConfig, *, dtype: DTypeLike, rngs: nnx.Rngs
) -> Mlp | Moe:
    """The module that ``config`` describes."""
    if isinstance(config, MoeConfig):
        return Moe(width, config, dtype=dtype, rngs=rngs)
    return Mlp(width, config.hidden, dtype=dtype, rngs=rngs)
