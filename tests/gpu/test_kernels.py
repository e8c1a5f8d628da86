"""Pallas kernels compile for every card but a T4, at the shapes of the 27B geometry and others."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import gpu_compile
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from speed_table import target_27b

from jaxdraft.config import AttentionConfig
from jaxdraft.kernels import delta_net, linear
from jaxdraft.kernels.form import Form
from jaxdraft.nn.attention import attend
from jaxdraft.nn.delta_net import DeltaNet, _window_of_rates
from jaxdraft.nn.packed import multiply
from jaxdraft.state import paged, ring
from jaxdraft.state.paged import Chunk, PagedPool
from jaxdraft.state.recurrent import Recurrent
from jaxdraft.state.ring import Ring

pytestmark = pytest.mark.gpu

WITH_KERNELS = [name for name in gpu_compile.CARDS if name != "t4"]
TARGET = AttentionConfig(heads=24, kv_heads=4, head_dim=256, rotary_dim=64, scale=1 / 16)
DRAFTER = AttentionConfig(
    heads=32, kv_heads=8, head_dim=128, rotary_dim=128, scale=128**-0.5, window=4096
)
SMALL = AttentionConfig(
    heads=9, kv_heads=3, head_dim=80, rotary_dim=64, scale=0.1, softcap=30.0, window=500
)


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    if why := gpu_compile.unavailable():
        pytest.fail(why)


def attention(
    config: AttentionConfig, steps: int, dtype: Any, cache: str
) -> tuple[Any, tuple[Any, ...]]:
    """A jitted call of :func:`attend` with kernels and its arguments, shapes alone."""
    shape = config.kv_shape(1, dtype)
    make = {
        "dense": lambda: PagedPool.one_page_per_row(shape, batch=1, capacity=9344),
        "paged": lambda: PagedPool.zeros(shape, batch=8, pages=600, page_size=16, columns=64),
        "sliding": lambda: Ring.zeros(shape, batch=2, window=500, rows=16, page_size=128),
        "block": lambda: Ring.zeros(shape, batch=1, window=4096, block=8, page_size=128),
    }[cache]
    state = jax.eval_shape(make)
    batch = state.length.shape[0]
    rows = jax.ShapeDtypeStruct((batch, steps, config.heads, config.head_dim), dtype)
    positions = jax.ShapeDtypeStruct((batch, steps), jnp.int32)
    block = jax.ShapeDtypeStruct((batch, 1, config.kv_heads, steps, config.head_dim), dtype)

    @jax.jit
    def run(q: jax.Array, positions: jax.Array, state: Any, block: jax.Array) -> jax.Array:
        count = jnp.full_like(state.length, steps)
        block_keys = None
        if isinstance(state, PagedPool):
            source = paged.source(state, 0, state.length + count)
        elif state.rows:
            source = ring.reachable(state, 0, count)
        else:
            source = ring.source(state, 0)
            block_keys = Chunk(block, block, positions[:, None])
        causal = block_keys is None
        return attend(
            q,
            positions,
            source,
            config,
            causal=causal,
            block_keys=block_keys,
            implementation="pallas",
        )

    return run, (rows, positions, state, block)


@pytest.mark.parametrize("card", WITH_KERNELS)
@pytest.mark.parametrize(
    ("config", "steps", "dtype", "cache"),
    [
        (TARGET, 1, jnp.bfloat16, "dense"),
        (TARGET, 8, jnp.bfloat16, "dense"),
        (TARGET, 16, jnp.float16, "dense"),
        (TARGET, 16, jnp.float32, "dense"),
        (DRAFTER, 8, jnp.bfloat16, "block"),
        (dataclasses.replace(SMALL, window=-1), 4, jnp.float16, "paged"),
        (SMALL, 4, jnp.bfloat16, "sliding"),
    ],
)
def test_attention_is_two_launches(
    card: str, config: AttentionConfig, steps: int, dtype: Any, cache: str
) -> None:
    """One for the shares of the keys, one to join them; no key or value is copied."""
    run, arguments = attention(config, steps, dtype, cache)
    compiled = gpu_compile.compile_for(gpu_compile.CARDS[card], run, arguments)
    assert compiled.hlo.count('custom_call_target="__gpu$xla.gpu.triton"') == 2
    assert "while" not in compiled.thunks.lower()
    sums = arguments[0].size // config.head_dim * (config.head_dim + 2) * 4
    assert compiled.temporary <= 32 * sums + 4096


def test_vmap_adds_no_launch() -> None:
    run, arguments = attention(TARGET, 8, jnp.bfloat16, "dense")
    many = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), arguments)
    compiled = gpu_compile.compile_for(gpu_compile.CARDS["h200"], jax.jit(jax.vmap(run)), many)
    assert compiled.hlo.count('custom_call_target="__gpu$xla.gpu.triton"') == 2
    assert "while" not in compiled.thunks.lower()


def test_a_t4_is_refused_by_the_compiler() -> None:
    run, arguments = attention(SMALL, 4, jnp.float16, "sliding")
    with pytest.raises(jax.errors.JaxRuntimeError, match="Ampere"):
        gpu_compile.compile_for(gpu_compile.CARDS["t4"], run, arguments)


@pytest.mark.parametrize("card", WITH_KERNELS)
@pytest.mark.parametrize(
    ("steps", "batch", "dtype"), [(1, 1, jnp.bfloat16), (8, 1, jnp.float32), (16, 8, jnp.float16)]
)
def test_a_delta_net_window_is_one_launch(card: str, steps: int, batch: int, dtype: Any) -> None:
    """Products for rates and decays, and a copy of the rows that the capsule keeps, included."""
    config = target_27b().delta_net
    assert config is not None
    weights = jax.eval_shape(lambda: DeltaNet(64, config, dtype=dtype, rngs=nnx.Rngs(0)).weights)
    state = jax.eval_shape(
        lambda: Recurrent.zeros(
            batch,
            value_heads=config.value_heads,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            conv_width=config.conv_width,
            channels=config.channels,
            dtype=dtype,
        )
    )
    mixed = jax.ShapeDtypeStruct((batch, steps, config.channels + config.value_rows), dtype)
    x = jax.ShapeDtypeStruct((batch, steps, 5120), dtype)
    ba = jax.ShapeDtypeStruct((2 * config.value_heads, 5120), dtype)
    run = jax.jit(functools.partial(delta_net.window, config, xla=_window_of_rates))
    arguments = (weights, mixed, (x, ba), state.conv, state.state)
    compiled = gpu_compile.compile_for(gpu_compile.CARDS[card], run, arguments)
    kinds = re.findall(r"\d+: (k\w+)", compiled.thunks)
    assert kinds == ["kCustomKernel"]


@pytest.mark.parametrize("card", WITH_KERNELS)
@pytest.mark.parametrize(
    ("form", "rows"),
    [
        (Form(5120, 17408, jnp.bfloat16, bits=4, block=32), 8),
        (Form(5120, 17408, jnp.float16, bits=2, block=128), 1),
        (Form(17408, 5120, jnp.float32, bits=8, block=64), 64),
        (Form(5120, 34816, jnp.bfloat16, gated=True), 8),
        (Form(5120, 34816, jnp.bfloat16, bits=4, block=32, gated=True), 16),
        (Form(1536, 100, jnp.float32, gated=True), 64),
        (Form(5120, 17408, jnp.bfloat16, bits=8, block=128, values="e4m3", rows=128), 8),
    ],
)
def test_a_thin_product_is_one_launch_that_reads_packed_bytes(
    card: str, form: Form, rows: int
) -> None:
    """No matrix of floats is written: what the launch reads is what is stored."""
    arrays = (jax.ShapeDtypeStruct((form.outputs, form.inputs), form.dtype),)
    if form.bits:
        blocks = form.inputs // form.block
        packed = (form.outputs, blocks, form.block * form.bits // 8)
        arrays = (
            jax.ShapeDtypeStruct(packed, jnp.uint8),
            jax.ShapeDtypeStruct((form.outputs // form.rows, blocks), jnp.float16),
        )
    run = jax.jit(lambda x, weights: linear.product(form, x, weights, xla=multiply))
    x = jax.ShapeDtypeStruct((1, rows, form.inputs), form.dtype)
    compiled = gpu_compile.compile_for(gpu_compile.CARDS[card], run, (x, arrays))
    assert re.findall(r"\d+: (k\w+)", compiled.thunks) == ["kCustomKernel"]
    assert compiled.temporary < 4096
