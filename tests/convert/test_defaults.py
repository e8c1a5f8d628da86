"""Attributes that are absent, or hold the value that stands for "derive it", mean the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from convert import ArtifactError, Loaded, load_artifact
from tests.convert.helpers import copied, edit_graph, node_of, set_attribute

DENSE = "qwen35_fp32_cpu"
PAGED = "qwen35_paged_fp16_dflash2"
GATHER = "qwen35_int4_cpu_gather"
MOE = "qwen35_moe_int4_cpu"

Change = Callable[[onnx.GraphProto], object]


def without(op: str, *names: str) -> Change:
    """Removes attributes of every node of an operator."""

    def change(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if node.op_type == op:
                kept = [a for a in node.attribute if a.name not in names]
                assert len(kept) < len(node.attribute)
                del node.attribute[:]
                node.attribute.extend(kept)

    return change


def given(op: str, **values: object) -> Change:
    """Sets attributes of every node of an operator."""

    def change(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if node.op_type == op:
                for name, value in values.items():
                    set_attribute(node, name, value)

    return change


def assert_equal(found: Loaded, expected: Loaded) -> None:
    assert found.target_config == expected.target_config
    ours, theirs = jax.tree.leaves(found.target.params), jax.tree.leaves(expected.target.params)
    for a, b in zip(ours, theirs, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (DENSE, without("MRotaryEmbedding", "interleaved", "is_packed_batching")),
        (DENSE, given("MRotaryEmbedding", scale=1.0)),
        (DENSE, given("GroupQueryAttention", scale=0.0, causal=1, smooth_softmax=-1)),
        (DENSE, without("LinearAttention", "update_rule", "state_window")),
        (DENSE, given("GatedRMSNorm", activation="swish")),
        (DENSE, given("CausalConvWithState", activation="swish", dilation=1)),
        (PAGED, given("GatedDeltaNet", gate_activation="softplus")),
        (PAGED, without("GatedDeltaNet", "scale", "chunk_size", "update_rule")),
        (PAGED, given("PagedAttention", scale=0.0)),
        (GATHER, without("GatherBlockQuantized", "gather_axis", "quantize_axis")),
        (GATHER, given("GatherBlockQuantized", gather_axis=-2, quantize_axis=-1)),
        (MOE, given("QMoE", weights_prepacked=-1)),
        (MOE, given("QMoE", weights_prepacked=0)),
    ],
)
def test_defaults(name: str, change: Change, tmp_path: Path) -> None:
    folder = copied(name, tmp_path)
    expected = load_artifact(folder)
    assert_equal(load_artifact(edit_graph(folder, change)), expected)


def whole_head(graph: onnx.GraphProto) -> None:
    """Rotary tables as wide as half a head, and attributes that say so."""
    for name in ("cos_cache", "sin_cache"):
        tensor = next(t for t in graph.initializer if t.name == name)
        rows = tensor.dims[0]
        angles = np.outer(np.arange(rows), 100.0 ** (-np.arange(HEAD // 2) / (HEAD // 2)))
        table = np.cos(angles) if name == "cos_cache" else np.sin(angles)
        tensor.CopyFrom(numpy_helper.from_array(table.astype(np.float32), name))
    given("MRotaryEmbedding", rotary_embedding_dim=HEAD, mrope_section=[HEAD // 2, 0, 0])(graph)


HEAD = 32


def test_no_channels_stand_for_the_whole_head(tmp_path: Path) -> None:
    folder = edit_graph(copied(DENSE, tmp_path), whole_head)
    expected = load_artifact(folder)
    assert expected.target_config.attention is not None
    assert expected.target_config.attention.rotary_dim == HEAD
    assert expected.target_config.attention.head_dim == HEAD
    edit_graph(folder, given("MRotaryEmbedding", rotary_embedding_dim=0))
    assert_equal(load_artifact(folder), expected)
    edit_graph(folder, given("MRotaryEmbedding", num_heads=0))
    assert_equal(load_artifact(folder), expected)
    edit_graph(folder, without("MRotaryEmbedding", "rotary_embedding_dim", "num_heads"))
    assert_equal(load_artifact(folder), expected)


def test_no_channels_and_narrower_tables(tmp_path: Path) -> None:
    folder = copied(DENSE, tmp_path)
    edit_graph(folder, given("MRotaryEmbedding", rotary_embedding_dim=0))
    with pytest.raises(ArtifactError, match="32 channels rotated, expected .* 16 channels as in"):
        load_artifact(folder)


def plain_rotation(graph: onnx.GraphProto) -> None:
    """One row of positions, as models that read text alone have it."""
    for node in graph.node:
        if node.op_type == "MRotaryEmbedding":
            node.op_type = "RotaryEmbedding"
            kept = [a for a in node.attribute if not a.name.startswith("mrope")]
            del node.attribute[:]
            node.attribute.extend(kept)
    positions = next(v for v in graph.input if v.name == "position_ids")
    del positions.type.tensor_type.shape.dim[0]


def test_rotation_by_one_row_of_positions(tmp_path: Path) -> None:
    folder = copied(DENSE, tmp_path)
    expected = load_artifact(folder)
    assert_equal(load_artifact(edit_graph(folder, plain_rotation)), expected)
    edit_graph(folder, given("RotaryEmbedding", scale=2.0))
    with pytest.raises(ArtifactError, match="attribute scale: found 2.0"):
        load_artifact(folder)


def test_rotation_of_the_whole_head_by_one_row_of_positions(tmp_path: Path) -> None:
    folder = edit_graph(copied(DENSE, tmp_path), whole_head)
    expected = load_artifact(folder)
    edit_graph(folder, plain_rotation)
    edit_graph(folder, given("RotaryEmbedding", rotary_embedding_dim=0, num_heads=0))
    assert_equal(load_artifact(folder), expected)


def unscaled(graph: onnx.GraphProto) -> None:
    """The operator scales queries, and no product before it."""
    for node in graph.node:
        if node.op_type == "LinearAttention":
            scaled = next(n for n in graph.node if node.input[0] in n.output)
            assert scaled.op_type == "Mul"
            node.input[0] = scaled.input[0]
            graph.node.remove(scaled)
            if not any(scaled.input[1] in n.input for n in graph.node):
                graph.node.remove(next(n for n in graph.node if scaled.input[1] in n.output))
            for attribute in node.attribute:
                if attribute.name == "scale":
                    attribute.CopyFrom(helper.make_attribute("scale", 0.0))


def test_a_scale_that_the_operator_derives(tmp_path: Path) -> None:
    folder = copied(DENSE, tmp_path)
    expected = load_artifact(folder)
    edit_graph(folder, unscaled)
    assert_equal(load_artifact(folder), expected)
    edit_graph(folder, without("LinearAttention", "scale"))
    assert_equal(load_artifact(folder), expected)


def test_a_scale_that_is_applied_twice(tmp_path: Path) -> None:
    folder = edit_graph(copied(DENSE, tmp_path), given("LinearAttention", scale=0.0))
    with pytest.raises(ArtifactError, match="scale: found"):
        load_artifact(folder)


@pytest.mark.parametrize(
    ("op", "eps"), [("SkipSimplifiedLayerNormalization", 1e-12), ("GatedRMSNorm", 1e-5)]
)
def test_epsilons(op: str, eps: float, tmp_path: Path) -> None:
    """The operators' own defaults; norms of one model have one epsilon, so all must be given."""
    folder = copied(DENSE, tmp_path)
    node = node_of(onnx.load(folder / "model.onnx", load_external_data=False).graph, op)
    assert any(a.name == "epsilon" for a in node.attribute)
    for other in ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"):
        if op != "GatedRMSNorm":
            edit_graph(folder, given(other, epsilon=eps))
    edit_graph(folder, given(op, epsilon=eps))
    expected = load_artifact(folder)
    assert_equal(load_artifact(edit_graph(folder, without(op, "epsilon"))), expected)
