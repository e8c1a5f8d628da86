"""Experts: those that rows chose alone, as GPUs run them, against all of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdraft.config import MoeConfig
from jaxdraft.nn import mlp


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_chosen_experts_give_what_all_experts_give(rows: int) -> None:
    rng = np.random.default_rng(rows)
    gate_up = jnp.asarray(rng.standard_normal((6, 10, 7)), jnp.float32)
    down = jnp.asarray(rng.standard_normal((6, 7, 5)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((rows, 7)), jnp.float32)
    chosen = jnp.asarray([rng.permutation(6)[:2] for _ in range(rows)], jnp.int32)
    share = jnp.asarray(rng.random((rows, 2)), jnp.float32)
    expected = mlp._all_experts(x, share, chosen, gate_up, down)
    # Experts that nobody chose may hold anything.
    others = [e for e in range(6) if e not in np.asarray(chosen)]
    gate_up = gate_up.at[jnp.asarray(others, jnp.int32)].set(jnp.nan)
    found = jax.jit(mlp._chosen_experts)(x, share, chosen, gate_up, down)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_module_with_many_experts_gives_what_they_all_give() -> None:
    config = MoeConfig(experts=8, active=2, hidden=5, shared_hidden=0)
    moe = mlp.Moe(7, config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 7)), jnp.float32)
    rows = x.reshape(6, 7)
    probability = jax.nn.softmax(moe.router(rows), axis=-1)
    best, chosen = jax.lax.top_k(probability, 2)
    best = best / jnp.sum(best, axis=-1, keepdims=True)
    for part in (x[:1, :3], x):  # with 6 < 8 experts, and with 12
        found = moe(part).reshape(-1, 7)
        size = found.shape[0]
        arrays = (rows[:size], best[:size], chosen[:size], moe.gate_up[...], moe.down[...])
        np.testing.assert_allclose(found, mlp._chosen_experts(*arrays), rtol=1e-4, atol=1e-5)
