"""What needs two devices; ``tests/test_transforms.py`` runs it with two forced ones.

A model that is replicated, prompts that are split, and a model that lives on the second device:
the tokens are those of one device, in ``generate``, ``stream``, ``score`` and the engine.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxdraft
from jaxdraft import Sampling
from jaxdraft.testing import tiny_model
from tests.examples import LONG

IDS = np.asarray([[1, 2, 3, 4], [5, 6, 7, 8]], np.int32)
WARM = Sampling(top_k=5, top_p=0.9)


def engine_tokens(model: Any) -> list[list[int]]:
    engine = jaxdraft.Engine(model, max_batch=2, page_size=16, context=64)
    asked = [
        engine.submit(row, max_new_tokens=4, sampling=how, key=2, logprobs=2)
        for row, how in zip(IDS.tolist(), (None, WARM), strict=True)
    ]
    return [request.result() for request in asked]


def everything(model: Any, ids: Any) -> list[Any]:
    """Tokens by every way there is."""
    greedy = jaxdraft.generate(model, ids, max_new_tokens=4, logprobs=2)
    warm = jaxdraft.generate(model, ids, max_new_tokens=4, sampling=WARM, key=3)
    events = jaxdraft.stream(model, ids, max_new_tokens=4, sampling=WARM, key=3, logprobs=2)
    streamed = [event.tokens for event in events]
    return [greedy.ids(), warm.ids(), streamed, engine_tokens(model)]


def check(kind: str, mesh: Mesh) -> None:
    """Compare every way to place a model and its prompts with one device."""
    whole, split = (NamedSharding(mesh, PartitionSpec(*names)) for names in ((), ("x",)))
    second = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    model = tiny_model(kind)
    expected = everything(model, IDS)
    replicated = jax.device_put(model, whole)
    assert everything(replicated, IDS) == expected, f"{kind}: replicated"
    rows = jax.device_put(jnp.asarray(IDS), split)
    moved = jax.device_put(model, second)
    found = jaxdraft.generate(moved, IDS, max_new_tokens=4, logprobs=2).ids()
    assert [found, engine_tokens(moved)] == expected[::3], f"{kind}: on the second device"

    def run(m: Any, p: jax.Array) -> jax.Array:
        return jaxdraft.generate(m, p, max_new_tokens=4, logprobs=2).tokens

    found = jax.jit(run)(replicated, rows)
    assert found.tolist() == expected[0], f"{kind}: split prompts"
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("x")),
        out_specs=PartitionSpec("x"), check_vma=False,
    )  # fmt: skip
    assert jax.jit(mapped)(replicated, rows).tolist() == expected[0], f"{kind}: shard_map"
    print(kind, "equal")
    if not LONG:
        return
    scored = jaxdraft.score(replicated, rows).logits
    np.testing.assert_allclose(scored, jaxdraft.score(model, IDS).logits, rtol=1e-4, atol=1e-4)
    keys = jax.device_put(jax.random.split(jax.random.key(0), 2), split)

    def draw(m: Any, key: jax.Array) -> jax.Array:
        return jaxdraft.generate(m, IDS, max_new_tokens=4, sampling=WARM, key=key).tokens

    drawn = jax.jit(jax.vmap(draw, in_axes=(None, 0)))(replicated, keys)
    for key, one in zip(jax.random.split(jax.random.key(0), 2), drawn, strict=True):
        assert draw(model, key).tolist() == one.tolist(), f"{kind}: split keys"


def check_drafts(kind: str, mesh: Mesh) -> None:
    """Compare sampled drafts of a replicated model with one device."""
    model = tiny_model(kind)

    def draw(m: Any) -> list[list[int]]:
        return jaxdraft.generate(m, IDS, max_new_tokens=4, sampling=WARM, key=3).ids()

    assert draw(jax.device_put(model, NamedSharding(mesh, PartitionSpec()))) == draw(model), kind
    print(kind, "equal")


def main() -> None:
    """Compare two devices with one, and print the drafters that agree."""
    assert len(jax.devices()) == 2, jax.devices()
    mesh = Mesh(np.asarray(jax.devices()), ("x",))
    check("dflash2", mesh)  # the drafter with the most top-k
    for kind in ("mtp", "dspark") if LONG else ():
        check_drafts(kind, mesh)
    print("all equal")


if __name__ == "__main__":
    main()
