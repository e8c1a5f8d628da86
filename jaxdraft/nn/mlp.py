"""Feed-forward parts: a gated MLP, and routed experts beside a shared one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdraft.config import Activation, MlpConfig, MoeConfig
from jaxdraft.kernels import PALLAS, XLA
from jaxdraft.nn.experts import Experts, PackedExperts, run_experts
from jaxdraft.nn.fused import split
from jaxdraft.nn.linear import Linear, along_last, matrix
from jaxdraft.nn.packed import multiply

ACTIVATIONS: Mapping[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class Mlp(nnx.Module):
    """``down(activation(gate(x)) * up(x))``, gate and up in one product."""

    implementation = XLA
    shards = 1
    """Number of devices that the hidden width is divided over; see :mod:`jaxdraft.nn.fused`."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        activation: Activation = "silu",
        bias: bool = False,
    ):
        self.activation = activation
        self.gate_up = Linear(width, 2 * hidden, dtype=dtype, rngs=rngs)
        self.down = Linear(hidden, width, dtype=dtype, rngs=rngs)
        self.bias = bias
        if bias:  # beside the matrices: every form of matrix can have one
            self.gate_up_bias = nnx.Param(jnp.zeros((2 * hidden,), dtype))
            self.down_bias = nnx.Param(jnp.zeros((width,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        plain = self.activation == "silu" and not self.bias  # the kernel implements nothing else
        if self.implementation == PALLAS and plain:
            from jaxdraft.kernels import linear as fused  # Pallas is slow to import

            found = matrix(self.gate_up) if fused.serves(x) else None
            if found is not None and found[0].served:
                form, weights = found
                gated = dataclasses.replace(form, gated=True)
                return self.down(fused.product(gated, x, weights, xla=multiply))
        both = self.gate_up(x)
        if self.bias:
            both = both + along_last(self.gate_up_bias[...], both)
        gate, up = split(both, (both.shape[-1] // 2,) * 2, self.shards)
        y = self.down(ACTIVATIONS[self.activation](gate) * up)
        return y + along_last(self.down_bias[...], y) if self.bias else y


class Moe(nnx.Module):
    """Softmax over E experts, of which each row runs the best k, perhaps beside a shared expert.

    No row is dropped for capacity. On CPUs a loop reads every expert that some row chose, once, and
    multiplies the rows that chose it. Elsewhere few rows read the experts that they chose and no
    others; more rows run through every expert, and the weights select.

    Source: ``com.microsoft.MoE`` (swiglu) and ``GatedAdd``; transformers' ``qwen3_moe`` and
    ``gpt_oss``.
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
        if config.router_bias:
            self.router_bias = nnx.Param(jnp.zeros((e,), dtype))
        if config.bias:
            self.gate_up_bias = nnx.Param(jnp.zeros((e, 2 * i), dtype))
            self.down_bias = nnx.Param(jnp.zeros((e, width), dtype))
        if config.shared_hidden:
            self.shared = Mlp(width, config.shared_hidden, dtype=dtype, rngs=rngs)
            self.shared_gate = Linear(width, 1, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        c = self.config
        rows = x.reshape(-1, x.shape[-1])
        share, chosen = self.route(rows)
        y = run_experts(c, rows, share, chosen, self.experts)
        if c.shared_hidden:
            y = y + self.shared(rows) * jax.nn.sigmoid(self.shared_gate(rows))
        return y.reshape(x.shape)

    @property
    def experts(self) -> Experts:
        """The weights of the experts, dense or packed."""
        gate_up, down = (
            part.table if isinstance(part, PackedExperts) else part[...]
            for part in (self.gate_up, self.down)
        )
        if not self.config.bias:
            return Experts(gate_up, down)
        return Experts(gate_up, down, self.gate_up_bias[...], self.down_bias[...])

    def route(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the weights [R, k] float32 and the indices [R, k] of the experts of each row.

        Renormalized weights are a softmax over the chosen experts alone, which is the same.
        """
        scores = self.router(rows)
        if self.config.router_bias:
            scores = scores + along_last(self.router_bias[...], scores)
        probability = jax.nn.softmax(scores.astype(jnp.float32), axis=-1)
        best, chosen = jax.lax.top_k(probability, self.config.active)
        if self.config.renormalized:
            best = best / jnp.sum(best, axis=-1, keepdims=True)
        return best, chosen


def feed_forward(
    width: int, config: MlpConfig | MoeConfig, *, dtype: DTypeLike, rngs: nnx.Rngs
) -> Mlp | Moe:
    """Return the module that ``config`` describes."""
    if isinstance(config, MoeConfig):
        return Moe(width, config, dtype=dtype, rngs=rngs)
    return Mlp(
        width,
        config.hidden,
        dtype=dtype,
        rngs=rngs,
        activation=config.activation,
        bias=config.bias,
    )
