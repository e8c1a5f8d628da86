"""Experts: each form of the product against a plain sum in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdraft.config import MoeConfig
from jaxdraft.kernels.form import Form
from jaxdraft.nn import experts, mlp
from jaxdraft.nn.experts import Experts, PackedExperts
from jaxdraft.nn.packed import PackedMatrix

E, K, D, I = 6, 2, 7, 5  # noqa: E741, the letters of the module
CONFIGS = [
    MoeConfig(experts=E, active=K, hidden=I, shared_hidden=0),
    MoeConfig(experts=E, active=K, hidden=I, shared_hidden=0, limit=1.5),
]
FORMS = [experts.all_experts, experts.chosen_experts, experts.experts_in_turn]


def problem(rows: int, biases: bool) -> tuple[jax.Array, jax.Array, jax.Array, Experts]:
    """Rows, their weights and experts, and the experts."""
    rng = np.random.default_rng(rows)
    chosen = jnp.asarray([rng.permutation(E)[:K] for _ in range(rows)], jnp.int32)

    def random(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    weights = Experts(random(E, 2 * I, D), random(E, D, I))
    if biases:
        weights = weights._replace(gate_up_bias=random(E, 2 * I), down_bias=random(E, D))
    return random(rows, D), jnp.asarray(rng.random((rows, K)), jnp.float32), chosen, weights


def reference(config: MoeConfig, x: jax.Array, share: jax.Array, chosen: jax.Array, e: Experts):
    """The sum row by row, in float64 numpy."""
    wide = [None if part is None else np.asarray(part, np.float64) for part in e]
    out = np.zeros(x.shape)
    for row, (experts_of, weights) in enumerate(zip(np.asarray(chosen), share, strict=True)):
        for index, weight in zip(experts_of, weights, strict=True):
            inner = wide[0][index] @ np.asarray(x[row], np.float64)
            inner = inner if wide[2] is None else inner + wide[2][index]
            gate, up = inner[:I], inner[I:]
            if config.limit:
                gate, up = np.minimum(gate, config.limit), np.clip(up, -config.limit, config.limit)
                active = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            else:
                active = gate / (1 + np.exp(-gate)) * up
            y = wide[1][index] @ active
            out[row] += float(weight) * (y if wide[3] is None else y + wide[3][index])
    return out


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows", [1, 3, 40])  # 40 rows: several tiles per expert
def test_every_form_gives_the_plain_sum(config: MoeConfig, rows: int) -> None:
    for biases in (False, True):
        arrays = problem(rows, biases)
        expected = reference(config, *arrays)
        for form in FORMS:
            found = jax.jit(functools.partial(form, config))(*arrays)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=str(form))


@pytest.mark.parametrize("form", [experts.chosen_experts, experts.experts_in_turn])
def test_experts_that_no_row_chose_are_not_read(form) -> None:
    x, share, chosen, weights = problem(2, True)
    expected = reference(CONFIGS[0], x, share, chosen, weights)
    others = jnp.asarray([e for e in range(E) if e not in np.asarray(chosen)], jnp.int32)
    spoiled = jax.tree.map(lambda part: part.at[others].set(jnp.nan), weights)
    found = jax.jit(functools.partial(form, CONFIGS[0]))(x, share, chosen, spoiled)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_no_row_reads_or_spoils_another() -> None:
    """A row that is not a number is padding, which shares experts and tiles with others."""
    x, share, chosen, weights = problem(5, False)
    chosen = chosen.at[1].set(chosen[0])
    expected = reference(CONFIGS[0], x, share, chosen, weights)
    found = np.asarray(
        experts.experts_in_turn(CONFIGS[0], x.at[1].set(jnp.nan), share, chosen, weights)
    )
    assert np.isnan(found[1]).all()
    kept = [0, 2, 3, 4]
    np.testing.assert_allclose(found[kept], expected[kept], rtol=1e-5, atol=1e-5)


def test_one_row_widens_its_own_experts_alone() -> None:
    """On CPUs no buffer of the program holds all experts in float32."""
    count, width, hidden = 32, 64, 32
    config = MoeConfig(experts=count, active=2, hidden=hidden, shared_hidden=0)
    dtype = jnp.bfloat16
    shapes = [(1, width), (count, 2 * hidden, width), (count, width, hidden)]
    x, gate_up, down = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    share, chosen = (jax.ShapeDtypeStruct((1, 2), each) for each in (jnp.float32, jnp.int32))
    run = jax.jit(functools.partial(experts.run_experts, config))
    lowered = run.lower(x, share, chosen, Experts(gate_up, down))
    compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": 3})
    one = 4 * 3 * width * hidden  # bytes of one expert in float32
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * one


E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""Sizes of the numbers of MXFP4."""


def mxfp4(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[PackedExperts, np.ndarray]:
    """Random packed experts, and their numbers by a table."""
    blocks = -(-inputs // 32)
    raw = rng.integers(0, 256, (E, outputs, blocks, 16), np.uint8)
    powers = rng.integers(120, 130, (E, outputs, blocks), np.uint8)
    nibbles = np.stack([raw & 15, raw >> 4], axis=-1).reshape(E, outputs, blocks, 32)
    values = np.concatenate([E2M1, -E2M1])[nibbles] * np.exp2(powers[..., None] - 127.0)
    arrays = {"weight_q": jnp.asarray(raw), "scales": powers.view(jnp.float8_e8m0fnu)}
    form = Form(inputs, outputs, jnp.dtype(jnp.float32), 4, 32, values="e2m1")
    return PackedExperts(arrays, form), values.reshape(E, outputs, -1)[..., :inputs]


def test_packed_experts_are_those_of_their_numbers() -> None:
    rows = 40
    rng = np.random.default_rng(rows)
    gate_up, wide = mxfp4(rng, 2 * I, 40)  # the second block of a row is not full
    down, wide_down = mxfp4(rng, 40, I)
    _, share, chosen, _ = problem(rows, False)
    x = jnp.asarray(rng.standard_normal((rows, 40)), jnp.float32) * 0.1
    biases = (jnp.asarray(rng.standard_normal(n), jnp.float32) for n in ((E, 2 * I), (E, 40)))
    packed = Experts(gate_up.table, down.table, *biases)
    dense = packed._replace(
        gate_up=jnp.asarray(wide, jnp.float32), down=jnp.asarray(wide_down, jnp.float32)
    )
    np.testing.assert_array_equal(jax.vmap(PackedMatrix.dequantized)(packed.down), dense.down)
    arrays = x, share, chosen
    expected = reference(CONFIGS[1], *arrays, dense)
    for form in FORMS:
        found = jax.jit(functools.partial(form, CONFIGS[1]))(*arrays, packed)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4, err_msg=str(form))

    def total(x: jax.Array, weights: Experts) -> jax.Array:
        return jnp.sum(direction * experts.run_experts(CONFIGS[1], x, share, chosen, weights))

    direction = jnp.asarray(rng.standard_normal(x.shape), jnp.float32)
    found, slope = jax.grad(total)(x, packed), jax.grad(total)(x, dense)
    np.testing.assert_allclose(found, slope, rtol=1e-4, atol=1e-5 * np.abs(slope).max())


def test_packed_experts_that_do_not_fit_are_refused() -> None:
    form = Form(32, 4, jnp.dtype(jnp.float32), 4, 32, values="e2m1")
    scales = np.full((E, 4, 1), 127, np.uint8).view(jnp.float8_e8m0fnu)
    with pytest.raises(ValueError, match=r"arrays have the shapes .*\(4, 2, 16\).*expected"):
        PackedExperts({"weight_q": np.zeros((E, 4, 2, 16), np.uint8), "scales": scales}, form)
    with pytest.raises(ValueError, match="experts; expected one number"):
        PackedExperts({"weight_q": np.zeros((2, 4, 1, 16), np.uint8), "scales": scales}, form)


def test_gradients_are_those_of_all_experts() -> None:
    x, share, chosen, weights = problem(3, True)

    def loss(form, *arrays):
        return jnp.sum(jnp.sin(form(CONFIGS[1], arrays[0], arrays[1], chosen, arrays[2])))

    found = jax.grad(functools.partial(loss, experts.run_experts), (0, 1, 2))(x, share, weights)
    expected = jax.grad(functools.partial(loss, experts.all_experts), (0, 1, 2))(x, share, weights)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, expected)


@pytest.mark.parametrize("renormalized", [True, False])
def test_a_module_routes_by_the_best_of_a_softmax(renormalized: bool) -> None:
    config = MoeConfig(experts=8, active=2, hidden=5, shared_hidden=0, renormalized=renormalized)
    moe = mlp.Moe(7, config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 7)), jnp.float32)
    scores = np.asarray(x, np.float64).reshape(6, 7) @ np.asarray(moe.router.weight[...]).T
    probability = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    chosen = np.argsort(-probability, axis=-1)[:, :2]
    share = np.take_along_axis(probability, chosen, axis=-1)
    if renormalized:
        share = share / share.sum(axis=-1, keepdims=True)
    arrays = (jnp.asarray(share, jnp.float32), jnp.asarray(chosen, jnp.int32))
    weights = Experts(moe.gate_up[...], moe.down[...])
    found = moe(x).reshape(6, 7)
    expected = experts.all_experts(config, x.reshape(6, 7), *arrays, weights)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
