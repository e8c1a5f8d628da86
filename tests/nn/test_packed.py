"""Quantized matrices kept packed: the same numbers, the same tokens, fewer bytes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdraft
from jaxdraft.nn import packed as packed_
from jaxdraft.nn.linear import matmul
from jaxdraft.nn.packed import Packed, PackedLinear
from tests.convert.test_dequantize import case, pack, plain
from tests.paths import artifact, artifact_names
from tests.test_generate import compilations
from tests.test_goldens import WITHIN, assert_greedy

QUANTIZED = [name for name in artifact_names() if "int4" in name or "int8" in name]
RUN = ["qwen35_int8_cpu", "qwen35_paged_int4_dflash2"]
"""Those that also run; the matrices of all are compared bit for bit."""

SHAPES = [(64, 32), (40, 32), (80, 32), (96, 16), (72, 64), (512, 256)]


def layer(bits: int, width: int, block: int, rows: int = 6, dtype: str = "float32") -> PackedLinear:
    """A packed layer of random numbers."""
    values, scales, _ = case(bits, width, block, rows)
    return PackedLinear(
        jnp.asarray(pack(values, bits)),
        jnp.asarray(scales),
        bits=bits,
        block=block,
        inputs=width,
        dtype=dtype,
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("width", "block"), SHAPES)
@pytest.mark.parametrize("outputs", [6, 5])
def test_numbers_equal_plain_loops(bits: int, width: int, block: int, outputs: int) -> None:
    values, scales, zeros = case(bits, width, block, outputs)
    expected = plain(values, scales, np.full(zeros.shape, 1 << (bits - 1)), width)
    packed = layer(bits, width, block, outputs)
    np.testing.assert_array_equal(packed.dequantized(), expected)
    x = np.random.default_rng(1).standard_normal((2, 3, width), dtype=np.float32)
    found = np.asarray(packed(jnp.asarray(x)))
    exact = x.astype(np.float64) @ expected.T.astype(np.float64)
    assert found.shape == exact.shape
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5 * np.abs(exact).max())
    dense = matmul(jnp.asarray(x), jnp.asarray(expected))
    np.testing.assert_allclose(found, dense, rtol=0, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rounds_once(dtype: str) -> None:
    """The matrix is the float32 one rounded, and what comes out has the dtype of the layer."""
    packed = layer(4, 64, 32, dtype=dtype)
    wide = layer(4, 64, 32).dequantized()
    assert packed.dequantized().dtype == dtype
    np.testing.assert_array_equal(packed.dequantized(), wide.astype(dtype))
    assert packed(jnp.ones((1, 64), jnp.float32)).dtype == dtype


def test_garbage_beyond_the_width_is_ignored() -> None:
    values, scales, _ = case(4, 40, 32)
    other = values.copy()
    other[:, -1, 8:] = 15 - other[:, -1, 8:]  # 40 values: eight of the second block count
    made = [
        PackedLinear(
            jnp.asarray(pack(v, 4)),
            jnp.asarray(scales),
            bits=4,
            block=32,
            inputs=40,
            dtype="float32",
        )
        for v in (values, other)
    ]
    x = jnp.linspace(-1, 1, 40).reshape(1, 40)
    np.testing.assert_array_equal(made[0](x), made[1](x))
    np.testing.assert_array_equal(made[0].dequantized(), made[1].dequantized())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"bits": 3}, "3 bits"),
        ({"inputs": 65}, "expected"),
        ({"block": 16}, "expected"),
        ({"bits": 8}, "expected"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, int], match: str) -> None:
    values, scales, _ = case(4, 64, 32)
    sizes: dict[str, Any] = {"bits": 4, "block": 32, "inputs": 64} | changes
    with pytest.raises(ValueError, match=match):
        PackedLinear(jnp.asarray(pack(values, 4)), jnp.asarray(scales), **sizes, dtype="float32")


def test_gradients_flow_to_the_rows_and_not_to_the_weights() -> None:
    packed = layer(4, 64, 32)
    x = jnp.ones((2, 64))
    found = jax.grad(lambda x: jnp.sum(packed(x)))(x)
    expected = jnp.broadcast_to(jnp.sum(packed.dequantized(), axis=0), x.shape)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert not jax.tree.leaves(nnx.state(packed, nnx.Param))


@functools.lru_cache(maxsize=4)
def both(name: str) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """Packed, dequantized, and the reference arrays."""
    with np.load(artifact(name) / "golden.npz") as stored:
        golden = {k: stored[k] for k in stored.files}
    packed = jaxdraft.load(artifact(name), dtype="float32", packed=True)
    return packed, jaxdraft.load(artifact(name), dtype="float32"), golden


def nbytes(model: jaxdraft.Model) -> int:
    """Bytes of all arrays, each once."""
    return sum({id(leaf): leaf.nbytes for leaf in jax.tree.leaves(model)}.values())


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_matrix_dequantizes_to_that_of_the_other_model(name: str) -> None:
    packed, dense, _ = both(name)
    pairs = [(packed.target.decoder, dense.target.decoder)]
    if packed.info.drafter == "dflash2":
        pairs.append((packed.drafter.backbone, dense.drafter.backbone))
    for ours, theirs in pairs:
        found = 0
        modules: dict[Any, Any] = dict(nnx.iter_modules(theirs()))
        for path, module in nnx.iter_modules(ours()):
            if isinstance(module, PackedLinear):
                found += 1
                np.testing.assert_array_equal(module.dequantized(), modules[path].weight[...])
        assert found > 0
        assert jax.tree.leaves(nnx.state(ours(), Packed))


@pytest.mark.parametrize("name", RUN)
def test_logits_and_tokens_equal_the_goldens(name: str) -> None:
    packed, _, golden = both(name)
    prompts = [golden[f"prompt{i}/ids"].tolist() for i in range(4)]
    found = np.asarray(jaxdraft.score(packed, prompts).logits)
    for i, prompt in enumerate(prompts):
        start = int(golden.get(f"prompt{i}/logits_from", 0))
        rows = found[i, start : len(prompt)]
        np.testing.assert_allclose(rows, golden[f"prompt{i}/logits"], atol=WITHIN, rtol=0)
    out = jaxdraft.generate(packed, prompts, max_new_tokens=40, stop_ids=())
    for i, ids in enumerate(out.ids()):
        assert_greedy(ids, golden, i)
    if packed.info.drafter != "none":
        assert int(out.stats.accepted.sum()) > 0


@pytest.mark.parametrize("name", QUANTIZED)
def test_bytes_shrink_and_shared_arrays_stay_shared(name: str) -> None:
    packed, dense, _ = both(name)
    assert nbytes(packed) < nbytes(dense)
    before = after = 0
    modules: dict[Any, Any] = dict(nnx.iter_modules(dense.target.decoder()))
    for path, module in nnx.iter_modules(packed.target.decoder()):
        if isinstance(module, PackedLinear):
            after += module.weight_q[...].nbytes + module.scales[...].nbytes
            before += modules[path].weight[...].nbytes
            # Of float32: a value takes bits / 32, and a scale of 4 bytes a block at most 1 / 32.
            assert after / before <= module.bits / 32 + 1 / module.block + 1e-9
    assert nbytes(dense) - nbytes(packed) >= before - after > 0
    if packed.info.drafter == "dflash2":
        params = packed.target.decoder.params
        head = "embed" if packed.target.config.tied else "head"
        assert packed.drafter.head is params[head]["weight"]
        assert packed.drafter.embedding is params["embed"]["weight"]


def test_an_artifact_without_quantized_matrices_stays_as_it_is() -> None:
    name = artifact("qwen3_fp32_cpu")
    packed, dense = jaxdraft.load(name, packed=True), jaxdraft.load(name)
    assert jax.tree.structure(packed.target) == jax.tree.structure(dense.target)


def test_a_second_call_does_not_compile() -> None:
    packed, _, golden = both("qwen35_paged_int4_dflash2")
    prompts = [golden[f"prompt{i}/ids"].tolist() for i in range(2)]
    call = functools.partial(jaxdraft.generate, packed, prompts, max_new_tokens=8, stop_ids=())
    call()
    assert compilations(call) == []


@pytest.mark.parametrize(("bits", "block", "rows"), [(2, 32, 1), (4, 64, 3), (8, 24, 8)])
def test_sums_of_a_few_rows_equal_the_product(bits: int, block: int, rows: int) -> None:
    """The form for GPUs, run on a CPU."""
    rng = np.random.default_rng(bits)
    blocks, inputs, outputs = 3, 3 * block - 5, 11
    packed = rng.integers(0, 256, (outputs, blocks, block * bits // 8), np.uint8)
    scales = rng.standard_normal((outputs, blocks)).astype(np.float32)
    layer = PackedLinear(
        jnp.asarray(packed), jnp.asarray(scales), bits=bits, block=block, inputs=inputs,
        dtype=jnp.float32,
    )  # fmt: skip
    x = jnp.asarray(rng.standard_normal((rows, inputs)), jnp.float32)
    table = layer.table
    found = packed_._product_by_sums(table.form, None, table.arrays, table._rows(x))
    np.testing.assert_allclose(found.T, layer(x), rtol=1e-5, atol=1e-4)
    assert found.dtype == jnp.float32
    wide = packed_._product_apart(table.form, jnp.float16, table.arrays, table._rows(x))
    np.testing.assert_allclose(wide.T, layer(x), rtol=1e-2, atol=1e-2)
