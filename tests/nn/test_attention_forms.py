"""The form of attention that runs on GPUs, run on a CPU: one pass, of one of a few lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdraft
from jaxdraft import testing
from jaxdraft.nn import attention as module
from jaxdraft.nn.attention import attend, reaches
from jaxdraft.state import paged
from jaxdraft.state.paged import CHUNK, Chunk
from tests.nn.test_attention_gradients import (
    DIM,
    HEADS,
    KV,
    LENGTHS,
    SOURCES,
    STEPS,
    attention,
    dense,
    normal,
    plain,
)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Programs take what is meant for other devices than CPUs."""

    def default(*args: Any, cpu: Any, default: Any) -> Any:
        del cpu
        return default(*args)

    jax.clear_caches()
    monkeypatch.setattr(jax.lax, "platform_dependent", default)
    yield monkeypatch
    jax.clear_caches()


def inputs(causal: bool) -> tuple[Any, ...]:
    size = max(LENGTHS)
    block_keys = None if causal else (normal(4, 2, STEPS, KV, DIM), normal(5, 2, STEPS, KV, DIM))
    q, keys = normal(1, 2, STEPS, HEADS, DIM), normal(2, 2, size, KV, DIM)
    return q, keys, normal(3, 2, size, KV, DIM), block_keys


def attended(make: Any, config: Any, causal: bool, args: tuple[Any, ...]) -> jax.Array:
    q, keys, values, block_keys = args
    first = jnp.asarray(LENGTHS, jnp.int32) - (STEPS if causal else 0)
    positions = first[:, None] + jnp.arange(STEPS, dtype=jnp.int32)[None]
    own = None
    if block_keys is not None:
        own = Chunk(*(jnp.swapaxes(x, 1, 2)[:, None] for x in block_keys), positions[:, None])
    source, _ = make(keys, values, config)
    run = jax.jit(lambda q: attend(q, positions, source, config, causal=causal, block_keys=own))
    return run(q)


@pytest.mark.parametrize("chunks", [1, 3, 1000])
@pytest.mark.parametrize("name", list(SOURCES))
def test_the_form_for_gpus_has_the_values_of_float64(
    name: str, chunks: int, elsewhere: pytest.MonkeyPatch
) -> None:
    """In every layout, with NaN in scratch; at once, and where scores are many, in passes."""
    make, config, causal = SOURCES[name]
    elsewhere.setattr(module, "_SCORES", chunks * 4 * 2 * HEADS * STEPS * CHUNK)
    args = inputs(causal)
    found = attended(make, config, causal, args)
    np.testing.assert_allclose(found, plain(*args, config, causal), atol=3e-6, rtol=1e-5)


def roomy(rows: jax.Array, values: jax.Array, config: Any) -> tuple[Any, Any]:
    """A state with room for much more than it holds, all of it NaN."""
    source, _ = dense(rows, values, config)
    keys, values, length = source.data
    room = [(0, 0), (0, 0), (0, 40 * CHUNK), (0, 0)]
    keys, values = (jnp.pad(x, room, constant_values=jnp.nan) for x in (keys, values))
    return paged._dense_source(keys, values, length), None


@pytest.mark.parametrize("causal", [True, False])
def test_a_short_text_in_a_long_state(causal: bool, elsewhere: pytest.MonkeyPatch) -> None:
    del elsewhere
    args = inputs(causal)
    source, _ = roomy(*args[1:3], attention())
    assert reaches(source.chunks, source.whole is not None)[0] < source.chunks // 2
    found = attended(roomy, attention(), causal, args)
    np.testing.assert_allclose(found, plain(*args, attention(), causal), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("whole", [True, False])
def test_reaches(whole: bool) -> None:
    """They ascend, end with everything, and hold little more than what is in use."""
    for chunks in range(1, 1200):
        found = reaches(chunks, whole)
        assert found == sorted(set(found)) and found[-1] == chunks
        for used in range(5, chunks + 1):
            reach = next(length for length in found if length >= used)
            assert reach <= 1.5 * used or (whole and reach == chunks <= 5 * used)
    assert reaches(73, whole=True) == [5, 7, 9, 13, 17, 73]


@pytest.mark.parametrize("kind", ["dflash2", "dspark", "mtp"])
def test_generation_is_the_same_in_both_forms(
    kind: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Greedy tokens, of rows of two lengths, with layers that have a window."""
    del monkeypatch
    changes = dict(
        layers=("sliding", "attention"),
        taps=(0, 1),
        sliding=attention(heads=4, head_dim=16, scale=0.25, window=20),
    )
    model = testing.tiny_model(kind, **changes)
    prompts = [[1, 2, 3, 4, 5], list(range(30))]
    expected = jaxdraft.generate(model, prompts, max_new_tokens=12).ids()
    request.getfixturevalue("elsewhere")
    assert jaxdraft.generate(model, prompts, max_new_tokens=12).ids() == expected
