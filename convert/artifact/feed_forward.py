"""Feed-forward parts of a graph: dense, and routed experts."""

from __future__ import annotations

import dataclasses

import numpy as np

from convert.artifact.products import Io, linear, split_into
from convert.artifact.quantized import Blocks, Experts, Quantized
from convert.artifact.walk import Call, Walk
from convert.errors import ArtifactError
from convert.recipes import Dense, Recipe, Recipes
from convert.tensors import FLOAT, FLOATS, UINT8
from jaxdraft.config import MlpConfig, MoeConfig


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """A feed-forward part: its input value, shape and parameters."""

    source: str
    config: MlpConfig | MoeConfig
    recipes: Recipes


def feed_forward(walk: Walk, value: str, io: Io, width: int) -> FeedForward:
    """Match ``value = mlp(x)``, routed experts, or routed experts with a gated shared one.

    x --> MatMul router -> Reshape --> MoE, QMoE ---------> GatedAdd = value
      |                                                      |    |
       --> mlp (the shared expert) --------------------------     |
      |                                                           |
       --> MatMul -> Sigmoid ------------------------------------
    """
    op = walk.op(value)
    if op in ("MoE", "QMoE"):
        return _experts(walk, value, width)
    if op != "GatedAdd":
        return mlp(walk, value, width)
    call = walk.expect_op(value, "GatedAdd")
    routed = _experts(walk, call["x"], width)
    shared = mlp(walk, call["y"], width)
    gate = walk.expect_op(call["gate"], "Sigmoid")
    source, weight = linear(walk, gate["x"], width, 1)
    walk.expect_same(f"{call.node.label}, the shared expert", shared.source, routed.source)
    walk.expect_same(f"{call.node.label}, the gate", source, routed.source)
    assert isinstance(routed.config, MoeConfig) and isinstance(shared.config, MlpConfig)
    config = dataclasses.replace(routed.config, shared_hidden=shared.config.hidden)
    recipes = {
        **routed.recipes,
        **{("shared", *path): recipe for path, recipe in shared.recipes.items()},
        ("shared_gate", "weight"): Recipe.rows([weight]),
    }
    return FeedForward(routed.source, config, recipes)


def mlp(walk: Walk, value: str, width: int) -> FeedForward:
    """Match ``value = down(silu(gate(x)) * up(x))``.

        x --> MatMul gate --> Sigmoid --> Mul --> Mul -> MatMul down = value
          |               |               |       |
          |                ---------------        |
           --> MatMul up -------------------------

    One product for both is cut by a Split: gate, up.
    """
    product, down = linear(walk, value, None, width)
    hidden = down.shape[1]
    call = walk.expect_op(product, "Mul")
    silu = walk.expect_op(call["a"], "Mul")
    sigmoid = walk.expect_op(silu["b"], "Sigmoid")
    walk.expect_same(f"{sigmoid.node.label}, input", sigmoid["x"], silu["a"])
    gate, up = silu["a"], call["b"]
    if walk.op(gate) == "Split":
        split = split_into(walk, gate, [hidden, hidden], 0)
        walk.expect_same(f"{call.node.label}, up", split_into(walk, up, [hidden, hidden], 1), split)
        source, both = linear(walk, split, width, 2 * hidden)
        recipe = Recipe.rows([both])
    else:
        source, gate_weight = linear(walk, gate, width, hidden)
        other, up_weight = linear(walk, up, width, hidden)
        walk.expect_same(f"{call.node.label}, up", other, source)
        recipe = Recipe.rows([gate_weight, up_weight])
    recipes: Recipes = {
        ("gate_up", "weight"): recipe,
        ("down", "weight"): Recipe.rows([down]),
    }
    return FeedForward(source, MlpConfig(hidden=hidden), recipes)


def _experts(walk: Walk, value: str, width: int) -> FeedForward:
    """Match ``value = experts(x)``, each of them a fused SwiGLU: gate and up in turn.

    x --> MatMul router -> Reshape [-1, experts] --> MoE, QMoE = value
      |                                               |  <-- fc1 [E, 2 hidden, width], [zeros]
       -----------------------------------------------   <-- fc2 [E, width, hidden], [zeros]
    """
    call = walk.expect_op(value, "MoE", "QMoE")
    label, source = call.node.label, call["x"]
    reshape = walk.expect_op(call["router"], "Reshape")
    router_source, router = linear(walk, reshape["data"], width, None)
    experts = router.shape[0]
    walk.expect(reshape, "shape", [-1, experts])
    walk.expect_same(f"{label}, the router", router_source, source)
    if not 1 <= call.attributes["k"] <= experts:
        raise ArtifactError(walk.file, f"{label}, k", call.attributes["k"], f"1..{experts}")
    if call.node.op == "MoE":
        fc1 = Dense.of(
            walk.weight(call["fc1"], f"{label}, fc1", (experts, None, width)), transposed=False
        )
        hidden = fc1.shape[0] // experts // 2
        fc2 = Dense.of(
            walk.weight(call["fc2"], f"{label}, fc2", (experts, width, hidden)), transposed=False
        )
    else:
        fc1 = _quantized_experts(walk, call, "fc1", experts, None, width)
        hidden = fc1.shape[0] // experts // 2
        fc2 = _quantized_experts(walk, call, "fc2", experts, width, hidden)
    if fc1.shape[0] != experts * 2 * hidden:
        raise ArtifactError(walk.file, f"{label}, fc1", f"{fc1.shape[0]} rows", "an even number")
    for role, rows in (("fc1_bias", 2 * hidden), ("fc2_bias", width)):
        _zero_bias(walk, call[role], f"{label}, {role}", (experts, rows))
    config = MoeConfig(experts=experts, active=call.attributes["k"], hidden=hidden, shared_hidden=0)
    recipes: Recipes = {
        ("router", "weight"): Recipe.rows([router]),
        ("gate_up",): Recipe.of(Experts(fc1, experts, interleaved=True)),
        ("down",): Recipe.of(Experts(fc2, experts, interleaved=False)),
    }
    return FeedForward(source, config, recipes)


def _quantized_experts(
    walk: Walk, call: Call, role: str, experts: int, rows: int | None, width: int
) -> Quantized:
    label, bits = call.node.label, call.attributes["expert_weight_bits"]
    block = call.attributes["block_size"] or width
    if width * bits % 8 or width % block or block * bits % 8:
        raise ArtifactError(
            walk.file,
            f"{label}, {role}",
            f"{width} values per row in blocks of {block}",
            "whole blocks",
        )
    blocks = Blocks(bits, block, width, zero=1 << (bits - 1))
    packed = walk.tensor(
        call[role], f"{label}, {role}", shape=(experts, rows, width * bits // 8), dtypes=(UINT8,)
    )
    rows = packed.shape[1]
    stored = walk.graph.initializers.get(call[f"{role}_scales"])
    flat = stored is not None and len(stored.shape) == 2 and blocks.count == 1
    shape = (experts, rows) if flat else (experts, rows, blocks.count)
    dtypes = tuple(FLOATS) if walk.dtype is None else (walk.dtype, FLOAT)
    scales = walk.tensor(
        call[f"{role}_scales"], f"{label}, {role}_scales", shape=shape, dtypes=dtypes
    )
    return Quantized(packed, scales, None, blocks, experts * rows, 0, experts * rows)


def _zero_bias(walk: Walk, name: str, where: str, shape: tuple[int, int]) -> None:
    if name:
        bias = walk.weight(name, where, shape)
        if np.any(bias.read()):
            raise ArtifactError(walk.file, where, "numbers that are not zero", "zeros, or no bias")
        bias.release()
