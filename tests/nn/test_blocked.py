"""Matrices in blocks beside themselves: the same numbers, the same tokens, in short windows."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdraft
from jaxdraft import checkpoint
from jaxdraft.nn.linear import BlockedLinear, Blocks, Linear, matmul
from tests.paths import artifact
from tests.test_generate import compilations
from tests.test_goldens import WITHIN, assert_greedy

KINDS = [
    "patched_fp32_paged_dflash2",
    "qwen35_tied_fp32_cpu",
    "qwen3_fp32_cpu",
    "qwen35_moe_fp32_cpu",
]


@functools.cache
def both(name: str) -> tuple[Any, Any, Any]:
    """The model with blocks and without, and its goldens."""
    folder = artifact(name)
    return (
        jaxdraft.load(folder, blocked=True),
        jaxdraft.load(folder),
        dict(np.load(folder / "golden.npz")),
    )


def blocked_parts(model: Any) -> list[BlockedLinear]:
    """The matrices of the target that have blocks."""
    parts = nnx.iter_modules(model.target.decoder())
    return [part for _, part in parts if isinstance(part, BlockedLinear)]


def test_a_block_holds_64_outputs_column_by_column() -> None:
    weight = np.arange(128 * 3, dtype=np.float32).reshape(128, 3)
    blocks = np.asarray(BlockedLinear(jnp.asarray(weight)).blocks[...])
    assert blocks.shape == (2, 3, 64)
    for out in range(128):
        for k in range(3):
            assert blocks[out // 64, k, out % 64] == weight[out, k]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1,), (2,), (1, 5), (2, 3), (7,), (3, 4), (0,)])
def test_products_equal_those_of_the_plain_matrix(shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(len(shape))
    weight = jnp.asarray(rng.standard_normal((192, 40)), dtype)
    x = jnp.asarray(rng.standard_normal((*shape, 40)), jnp.float32)
    for out_dtype in (None, jnp.float32):
        found = BlockedLinear(weight)(x, out_dtype=out_dtype)
        expected = matmul(x, weight, out_dtype=out_dtype)
        assert found.shape == (*shape, 192)
        assert found.dtype == expected.dtype
        close = 1e-5 if dtype == "float32" else 0.06
        difference = np.abs(np.asarray(found, np.float32) - np.asarray(expected, np.float32))
        assert np.max(difference, initial=0) <= close


@pytest.mark.parametrize("rows", range(1, 9))
def test_few_rows_read_the_blocks_and_others_the_matrix(rows: int) -> None:
    linear = BlockedLinear(jnp.ones((64, 8), jnp.float32))
    linear.blocks.set_value(jnp.zeros_like(linear.blocks[...]))
    found = np.asarray(linear(jnp.ones((1, rows, 8), jnp.float32)))
    assert np.all(found == (0 if 2 <= rows <= 6 else 8))


@pytest.mark.parametrize("shape", [(63, 8), (0, 8), (64,), (2, 64, 8)])
def test_a_matrix_that_does_not_divide_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \[out, in\], out a multiple of 64"):
        BlockedLinear(jnp.zeros(shape, jnp.float32))


@pytest.mark.parametrize("name", KINDS)
def test_every_matrix_that_divides_has_blocks_of_its_numbers(name: str) -> None:
    blocked, plain, _ = both(name)
    theirs: dict[Any, Any] = dict(nnx.iter_modules(plain.target.decoder()))
    ours: dict[Any, Any] = dict(nnx.iter_modules(blocked.target.decoder()))
    for path, part in theirs.items():
        if isinstance(part, Linear):
            fits = part.weight[...].shape[0] % 64 == 0
            assert isinstance(ours[path], BlockedLinear) == fits, path
            np.testing.assert_array_equal(ours[path].weight[...], part.weight[...])
    found = blocked_parts(blocked)
    assert found
    for part in found:
        blocks = np.asarray(part.blocks[...])
        rows = np.swapaxes(blocks, 1, 2).reshape(part.weight[...].shape)
        np.testing.assert_array_equal(rows, part.weight[...])


@pytest.mark.parametrize("name", KINDS)
def test_logits_of_short_windows_equal_the_goldens(name: str) -> None:
    blocked, _, golden = both(name)
    prompt = golden["prompt0/ids"].tolist()
    start = int(golden.get("prompt0/logits_from", 0))
    target = blocked.target
    state = target.init(1, len(prompt))
    rows = []
    for first in range(0, len(prompt), 5):
        window = prompt[first : first + 5]
        count = jnp.asarray([len(window)], jnp.int32)
        out = _forward(target, jnp.asarray([window], jnp.int32), count, state)
        state = target.commit(out.state, count)
        rows.append(np.asarray(out.logits[0]))
    found = np.concatenate(rows)[start:]
    np.testing.assert_allclose(found, golden["prompt0/logits"], atol=WITHIN, rtol=0)


@jax.jit
def _forward(target: Any, tokens: jax.Array, count: jax.Array, state: Any) -> Any:
    return target.forward(tokens, count, state)


@pytest.mark.parametrize("drafts", [3, None])
def test_tokens_equal_the_goldens(drafts: int | None) -> None:
    blocked, plain, golden = both("patched_fp32_paged_dflash2")
    for i in range(2):
        prompt = golden[f"prompt{i}/ids"].tolist()
        call = functools.partial(
            jaxdraft.generate,
            prompts=[prompt],
            max_new_tokens=40,
            stop_ids=(),
            draft_tokens=drafts,
        )
        out = call(blocked)
        assert_greedy(out.ids()[0], golden, i)
        assert int(out.stats.rounds.sum()) == int(call(plain).stats.rounds.sum())


def test_the_embedded_model_says_the_same_and_accepts_the_same() -> None:
    call = functools.partial(
        jaxdraft.generate,
        prompts=["def read(path):\n", "import os\n"],
        max_new_tokens=32,
        draft_tokens=2,
    )
    blocked, plain = (
        call(jaxdraft.load(jaxdraft.EMBEDDED, drafter="dspark", blocked=choice))
        for choice in (True, False)
    )
    assert blocked.ids() == plain.ids()
    accepted = np.asarray(blocked.stats.accepted)
    np.testing.assert_array_equal(accepted, plain.stats.accepted)
    assert accepted.sum() > 0


def test_blocks_cost_as_much_as_the_matrices_and_drafters_keep_sharing() -> None:
    blocked, plain, _ = both("patched_fp32_paged_dflash2")

    def nbytes(model: Any) -> int:
        return sum({id(leaf): leaf.nbytes for leaf in jax.tree.leaves(model)}.values())

    extra = sum(part.blocks[...].nbytes for part in blocked_parts(blocked))
    assert nbytes(blocked) - nbytes(plain) == extra > 0
    params = blocked.target.decoder.params
    assert blocked.drafter.embedding is params["embed"]["weight"]
    assert jax.tree.leaves(nnx.state(blocked.target.decoder(), Blocks))


def test_a_second_call_does_not_compile() -> None:
    blocked, _, golden = both("patched_fp32_paged_dflash2")
    prompts = [golden["prompt0/ids"].tolist()]
    call = functools.partial(
        jaxdraft.generate, blocked, prompts, max_new_tokens=8, stop_ids=(), draft_tokens=3
    )
    call()
    assert compilations(call) == []


def test_blocks_of_packed_matrices_are_refused() -> None:
    with pytest.raises(ValueError, match="packed and blocked are True; expected one"):
        jaxdraft.load(artifact("qwen3_fp32_cpu"), packed=True, blocked=True)


def test_a_model_with_blocks_is_not_saved(tmp_path: Path) -> None:
    blocked, _, _ = both("qwen3_fp32_cpu")
    with pytest.raises(ValueError, match="load it without blocked=True"):
        checkpoint.save(blocked, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_tied_head_gets_blocks_and_the_embedding_stays_one_array() -> None:
    blocked, _, _ = both("qwen35_tied_fp32_cpu")
    params = blocked.target.decoder.params
    assert params["head"]["weight"] is params["embed"]["weight"]
    assert params["head"]["blocks"].shape == (6, 64, 64)
