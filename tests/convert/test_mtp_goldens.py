"""Converted MTP heads reproduce their own graph: one call over a prompt, then a chain."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import load_artifact
from jaxdraft.nn.linear import matmul
from jaxdraft.state.paged import PagedPool
from tests.paths import artifact, artifact_names

HEADS = [name for name in artifact_names() if name.endswith("_mtp")]


@pytest.mark.parametrize("name", HEADS)
def test_first_call_and_chain(name: str) -> None:
    with np.load(artifact(name) / "golden.npz") as file:
        golden = {k.removeprefix("mtp/"): file[k] for k in file.files if k.startswith("mtp/")}
    loaded = load_artifact(artifact(name), dtype="float32")
    config = loaded.drafter_config
    table, head = (loaded.target.params[part]["weight"] for part in ("embed", "head"))

    @jax.jit
    def step(drafter, table, head, tokens, hidden, pool):
        count = jnp.full((1,), tokens.shape[1], jnp.int32)
        rows, pool = drafter()(jnp.take(table, tokens, axis=0), hidden, count, pool)
        return rows, matmul(rows, head), pool.replace(length=pool.length + count)

    pool = PagedPool.one_page_per_row(
        config.attention.kv_shape(1, jnp.float32), batch=1, capacity=64
    )
    tokens, hidden = jnp.asarray(golden["tokens"])[None], jnp.asarray(golden["hidden"])[None]
    rows, logits, pool = step(loaded.drafter, table, head, tokens, hidden, pool)
    np.testing.assert_allclose(rows[0], golden["hidden_out"], atol=5e-4)
    np.testing.assert_allclose(logits[0], golden["logits"], atol=5e-4)
    for link, token in enumerate(golden["chain_tokens"]):
        np.testing.assert_allclose(logits[0, -1], golden["chain_logits"][link], atol=5e-4)
        assert int(jnp.argmax(logits[0, -1])) == token
        tokens = jnp.full((1, 1), token, jnp.int32)
        rows, logits, pool = step(loaded.drafter, table, head, tokens, rows[:, -1:], pool)
