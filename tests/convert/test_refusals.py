"""Graphs with one thing changed: nothing is passed over, and the message names the place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from convert import ArtifactError, load_artifact
from tests.convert.helpers import (
    Config,
    copied,
    edit_config,
    edit_graph,
    node_of,
    set_attribute,
    set_external,
    tensor_of,
)
from tests.paths import artifact, artifact_names

Graph = onnx.GraphProto
Change = Callable[[Graph], object]

DENSE = "qwen35_fp32_cpu"
PAGED = "qwen35_paged_fp16_dflash2"
QWEN3 = "qwen3_fp32_cpu"
QWEN3_PAGED = "qwen3_paged_fp16"
MOE = "qwen35_moe_fp32_cpu"
QMOE = "qwen35_moe_int4_cpu"
INT4 = "qwen35_int4_cpu"
GATHER = "qwen35_int4_cpu_gather"
TIED = "qwen35_tied_int4_cpu"
DSPARK = "qwen35_paged_fp16_dspark"
FUSED = "qwen35_paged_fp16_dflash2_fused"
MTP = "qwen35_fp32_cpu_mtp"
SLIDING = "sliding_qwen3_fp32_cpu"
SLIDING_PAGED = "sliding_qwen3_paged_fp16"


def refused(folder: Path, match: str | None) -> ArtifactError:
    """Loading fails with a message that matches."""
    with pytest.raises(ArtifactError, match=match) as caught:
        load_artifact(folder)
    return caught.value


def changed(tmp_path: Path, name: str, change: Change, file: str = "model.onnx") -> Path:
    """A copy of an artifact with one graph changed."""
    return edit_graph(copied(name, tmp_path), change, file)


def test_an_export_that_reads_an_undefined_tensor() -> None:
    error = refused(artifact("broken_qwen35_fp32_cuda"), "'past_key_values.0.key': .*undefined")
    assert error.file == "model.onnx"


def test_an_export_with_more_inputs_than_the_operator_has() -> None:
    refused(
        artifact("broken_qwen3_paged_fp16_int8kv"), "PagedAttention.*found 19 inputs.*expected 17"
    )


# Attributes.


def attribute(op: str, name: str, value: Any, index: int = 0) -> Change:
    """Set an attribute of the ``index``-th node of an operator."""
    return lambda graph: set_attribute(node_of(graph, op, index), name, value)


ATTRIBUTES = [
    (QWEN3, "GroupQueryAttention", "rotary_interleaved", 1),
    (QWEN3, "GroupQueryAttention", "smooth_softmax", 1),
    (QWEN3, "GroupQueryAttention", "softcap", -1.0),
    (QWEN3, "GroupQueryAttention", "softcap", float("nan")),
    (QWEN3, "GroupQueryAttention", "scale", -0.5),
    (QWEN3, "GroupQueryAttention", "local_window_size", 0),
    (QWEN3, "GroupQueryAttention", "do_rotary", 0),
    (QWEN3, "GroupQueryAttention", "do_rotary", 2),
    (QWEN3, "GroupQueryAttention", "k_quant_type", "PER_TENSOR"),
    (QWEN3, "GroupQueryAttention", "surprise", 1),
    (SLIDING, "GroupQueryAttention", "sliding_window_cache", 2),
    (SLIDING, "GroupQueryAttention", "local_window_size", -1),  # everything, of a bounded cache
    (DENSE, "GroupQueryAttention", "do_rotary", 1),
    (QWEN3_PAGED, "PagedAttention", "is_causal", 0),
    (QWEN3_PAGED, "PagedAttention", "rotary_interleaved", 1),
    (QWEN3_PAGED, "PagedAttention", "v_quant_type", "PER_TOKEN"),
    (DENSE, "MRotaryEmbedding", "interleaved", 1),
    (DENSE, "MRotaryEmbedding", "rotary_embedding_dim", 8),
    (DENSE, "MRotaryEmbedding", "mrope_section", [4, 2, 1]),
    (DENSE, "MRotaryEmbedding", "is_packed_batching", 1),
    (DENSE, "MRotaryEmbedding", "num_heads", 2),
    (DENSE, "SimplifiedLayerNormalization", "axis", 1),
    (DENSE, "SimplifiedLayerNormalization", "stash_type", 0),
    (DENSE, "SimplifiedLayerNormalization", "epsilon", -1.0),
    (DENSE, "CausalConvWithState", "activation", "none"),
    (DENSE, "CausalConvWithState", "state_window", 4),
    (DENSE, "LinearAttention", "update_rule", "delta"),
    (DENSE, "LinearAttention", "scale", 0.5),
    (DENSE, "LinearAttention", "state_window", 4),
    (DENSE, "LinearAttention", "q_num_heads", 3),
    (DENSE, "LpNormalization", "p", 1),
    (DENSE, "Transpose", "perm", [2, 1, 0]),
    (DENSE, "Split", "axis", 1),
    (PAGED, "GatedDeltaNet", "qk_l2_norm", 0),
    (PAGED, "GatedDeltaNet", "gate_activation", "mamba"),
    (PAGED, "GatedDeltaNet", "beta_activation", "none"),
    (PAGED, "GatedDeltaNet", "scale", 1.0),
    (PAGED, "GatedDeltaNet", "state_update_capacity", 4),
    (PAGED, "Concat", "axis", 0),
    (MOE, "MoE", "normalize_routing_weights", 0),
    (MOE, "MoE", "activation_type", "gelu"),
    (MOE, "MoE", "activation_alpha", 1.702),
    (MOE, "MoE", "swiglu_fusion", 0),
    (MOE, "MoE", "use_sparse_mixer", 1),
    (MOE, "MoE", "k", 5),
    (QMOE, "QMoE", "expert_weight_bits", 2),
    (QMOE, "QMoE", "block_size", 16),
    (INT4, "MatMulNBits", "bits", 8),
    (INT4, "MatMulNBits", "K", 128),
    (INT4, "MatMulNBits", "weight_prepacked", 1),
    (GATHER, "GatherBlockQuantized", "gather_axis", 1),
    (GATHER, "GatherBlockQuantized", "quantize_axis", 0),
    (GATHER, "GatherBlockQuantized", "block_size", 16),
    (TIED, "GatherBlockQuantized", "bits", 8),
]


@pytest.mark.parametrize(("name", "op", "key", "value"), ATTRIBUTES)
def test_attributes_that_are_not_implemented(
    tmp_path: Path, name: str, op: str, key: str, value: Any
) -> None:
    match = rf"^model\.onnx: .*\({op}\)|shape|recurrent_capsule"
    refused(changed(tmp_path, name, attribute(op, key, value)), match)


def test_a_required_attribute_that_is_missing(tmp_path: Path) -> None:
    def drop(graph: Graph) -> None:
        node = node_of(graph, "GroupQueryAttention")
        kept = [a for a in node.attribute if a.name != "num_heads"]
        del node.attribute[:]
        node.attribute.extend(kept)

    refused(changed(tmp_path, QWEN3, drop), r"attribute num_heads: found none")


def test_an_attribute_of_another_type(tmp_path: Path) -> None:
    refused(
        changed(tmp_path, QWEN3, attribute("GroupQueryAttention", "num_heads", 4.0)),
        "attribute num_heads: found 4.0",
    )


# Operators and edges.


def test_an_operator_that_is_not_implemented(tmp_path: Path) -> None:
    def change(graph: Graph) -> None:
        node_of(graph, "Sigmoid").op_type = "HardSigmoid"

    refused(
        changed(tmp_path, DENSE, change),
        r"act_fn/Sigmoid \(HardSigmoid\): .*HardSigmoid, an operator that is not implemented",
    )


def test_an_operator_of_another_domain(tmp_path: Path) -> None:
    def change(graph: Graph) -> None:
        node_of(graph, "Sigmoid").domain = "com.microsoft"

    refused(changed(tmp_path, DENSE, change), "com.microsoft::Sigmoid")


def test_a_node_outside_the_pattern(tmp_path: Path) -> None:
    def change(graph: Graph) -> None:
        graph.node.append(helper.make_node("Erf", ["logits"], ["stray"], name="stray"))

    refused(changed(tmp_path, DENSE, change), r"node stray \(Erf\): .*not implemented")


def test_a_constant_that_nothing_uses(tmp_path: Path) -> None:
    def change(graph: Graph) -> None:
        value = numpy_helper.from_array(np.zeros(1, np.int64))
        graph.node.append(helper.make_node("Constant", [], ["c"], name="stray", value=value))

    refused(changed(tmp_path, DENSE, change), "node stray")


def test_a_bias(tmp_path: Path) -> None:
    def change(graph: Graph) -> None:
        node = next(n for n in graph.node if n.name.endswith("layers.3/attn/o_proj/MatMul"))
        out = node.output[0]
        node.output[0] = "before"
        bias = numpy_helper.from_array(np.ones(64, np.float32), "bias")
        graph.initializer.append(bias)
        at = list(graph.node).index(node)
        graph.node.insert(at + 1, helper.make_node("Add", ["before", "bias"], [out], name="bias"))

    refused(changed(tmp_path, DENSE, change), r"node bias \(Add\): found ai.onnx::Add")


def rewired(name: str, index: int, value: str) -> Change:
    """Input ``index`` of the node whose name ends with ``name`` becomes ``value``."""

    def change(graph: Graph) -> None:
        node = next(n for n in graph.node if n.name.endswith(name))
        while len(node.input) <= index:
            node.input.append("")
        node.input[index] = value

    return change


EMBEDDED = "/model/embed_tokens/Gather/output_0"
ENTERING_1 = "/model/layers.1/input_layernorm/output_3"
HEAD_NORM = "model.layers.0.attn.q_norm.layernorm.weight"
DRAFTER_NORMED = "/dflash2/layers.0/input_layernorm/output_0"

EDGES = [
    # The value that enters is not the one of the pattern.
    (DENSE, "layers.1/mlp/up_proj/MatMul", 0, "/model/layers.1/input_layernorm/output_0"),
    (DENSE, "layers.1/linear_attn/z_proj/MatMul", 0, "/model/layers.0/input_layernorm/output_0"),
    (DENSE, "layers.1/linear_attn/a_proj/MatMul", 0, "/model/layers.0/input_layernorm/output_0"),
    (DENSE, "layers.1/post_attention_layernorm/SkipLayerNorm", 0, EMBEDDED),
    (DENSE, "layers.2/input_layernorm/SkipLayerNorm", 0, ENTERING_1),
    (DENSE, "layers.0/linear_attn/CausalConvWithState", 3, "past.1.conv"),
    (DENSE, "layers.0/linear_attn/LinearAttention", 3, "past.1.recurrent"),
    (DENSE, "layers.3/attn/GroupQueryAttention", 4, "past_key_values.3.key"),
    (DENSE, "layers.3/attn/k_rotary/MRotaryEmbedding", 3, "cos_cache"),
    (DENSE, "layers.0/mlp/act_fn/Mul", 1, "/model/layers.0/mlp/gate_proj/MatMul/output_0"),
    (PAGED, "layers.1/linear_attn/GatedDeltaNet", 3, "past_sequence_lengths"),
    (PAGED, "layers.3/attn/PagedAttention", 6, "cumulative_sequence_lengths"),
    (PAGED, "aux_hidden_states/Concat", 0, "/model/layers.1/post_attention_layernorm/output_3"),
    (PAGED, "aux_hidden_states/Concat", 0, EMBEDDED),
    # Inputs that the schema has and this package does not implement.
    (QWEN3, "layers.0/attn/GroupQueryAttention", 9, "input_ids"),
    (QWEN3, "layers.0/attn/GroupQueryAttention", 10, "model.embed_tokens.weight"),
    (QWEN3, "layers.0/attn/GroupQueryAttention", 11, "model.embed_tokens.weight"),
    (QWEN3, "layers.0/attn/GroupQueryAttention", 12, "model.embed_tokens.weight"),
    (QWEN3_PAGED, "layers.0/attn/PagedAttention", 10, "block_table"),
    (QWEN3_PAGED, "layers.0/attn/PagedAttention", 11, "model.embed_tokens.weight"),
    (QWEN3_PAGED, "layers.0/attn/PagedAttention", 14, "model.embed_tokens.weight"),
    (QWEN3_PAGED, "layers.0/attn/PagedAttention", 12, HEAD_NORM),
    (INT4, "layers.0/mlp/up_proj/MatMul_Q4", 4, "model.layers.0.input_layernorm.weight"),
    (INT4, "layers.0/mlp/up_proj/MatMul_Q4", 5, "model.layers.0.input_layernorm.weight"),
    (MOE, "layers.0/moe/MoE", 6, "model.layers.0.input_layernorm.weight"),
    (MOE, "layers.0/moe/MoE", 1, "/model/layers.1/moe/router/Reshape/output_0"),
    (DENSE, "layers.1/input_layernorm/SkipLayerNorm", 3, "model.layers.0.input_layernorm.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "node", "index", "value"), EDGES)
def test_edges_outside_the_pattern(
    tmp_path: Path, name: str, node: str, index: int, value: str
) -> None:
    refused(changed(tmp_path, name, rewired(node, index, value)), r"^model\.onnx: ")


DRAFTER_EDGES = [
    (PAGED, "dflash2", "layers.0/attn/out_gather", 1, "qkv_row_map"),
    (PAGED, "dflash2", "layers.0/attn/q_gather", 1, "qkv_row_map"),
    (PAGED, "dflash2", "layers.1/ctx_k/MatMul", 1, "dflash2.layers.0.self_attn.k_proj.weight"),
    (PAGED, "dflash2", "layers.0/attn/k_proj/MatMul", 0, "/dflash2/hidden_norm/output_0"),
    (PAGED, "dflash2", "conv_mask/Shape", 0, "/dflash2/embed_tokens/Gather/output_0"),
    (PAGED, "dflash2", "attention_conv/finish/term1/Mask", 1, "/dflash2/conv_mask/Cast/output_0"),
    (PAGED, "dflash2", "selector/prev", 0, "/dflash2/topk/cand/output_0"),
    (PAGED, "dflash2", "selector/succ_gather", 1, "/dflash2/selector/prev/output_0"),
    (PAGED, "dflash2", "selector/hidden_projection/MatMul", 0, "/dflash2/norm/output_0"),
    (PAGED, "dflash2", "select/Slice", 1, "dflash2.const.7"),
    (PAGED, "dflash2", "conv_mask/Mod", 1, "dflash2.const.1"),
    (FUSED, "dflash2", "layers.0/attn/qkv_rows/Concat", 1, DRAFTER_NORMED),
    (DSPARK, "dspark", "markov/pred_gather", 0, "dspark.markov_w2"),
    (DSPARK, "dspark", "topk/Cast", 0, "/lm_head/Cast/output_0"),
    (MTP, "mtp", "mtp/fc/Concat", 0, "/model/mtp/pre_fc_norm_hidden/output_0"),
    (MTP, "mtp", "hidden_states_out/Identity", 0, "/model/mtp/fc/MatMul/output_0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "node", "index", "value"), DRAFTER_EDGES)
def test_edges_of_drafters(
    tmp_path: Path, name: str, kind: str, node: str, index: int, value: str
) -> None:
    folder = changed(tmp_path, name, rewired(node, index, value), f"{kind}.onnx")
    refused(folder, rf"^{kind}\.onnx: ")


@pytest.mark.parametrize(
    ("name", "kind", "op", "key", "value"),
    [
        (PAGED, "dflash2", "PagedAttention", "is_causal", 1),
        (PAGED, "dflash2", "PagedAttention", "rotary_interleaved", 1),
        (PAGED, "dflash2", "PagedAttention", "surprise", 1),
        (PAGED, "dflash2", "TopK", "largest", 0),
        (PAGED, "dflash2", "TopK", "sorted", 0),
        (PAGED, "dflash2", "Split", "num_outputs", 3),
        (PAGED, "dflash2", "Transpose", "perm", [0, 1, 2, 3]),
        (DSPARK, "dspark", "PagedAttention", "is_causal", 1),
        (MTP, "mtp", "GroupQueryAttention", "do_rotary", 1),
    ],
)
def test_attributes_of_drafters(
    tmp_path: Path, name: str, kind: str, op: str, key: str, value: Any
) -> None:
    refused(
        changed(tmp_path, name, attribute(op, key, value), f"{kind}.onnx"), rf"^{kind}\.onnx: .*"
    )


def test_a_convolution_of_three_taps(tmp_path: Path) -> None:
    """The exporter accepts three taps and masks them wrongly: the export is refused."""

    def change(graph: Graph) -> None:
        node = next(n for n in graph.node if n.name.endswith("attention_conv/prepare/sum1/Add"))
        out, term = node.output[0], node.input[1]
        node.output[0] = "two"
        third = helper.make_node("Add", ["two", term], [out], name="sum2")
        graph.node.insert(list(graph.node).index(node) + 1, third)

    error = refused(changed(tmp_path, PAGED, change, "dflash2.onnx"), "3 taps")
    assert "another block" in error.expected and error.file == "dflash2.onnx"


# Windows.


@pytest.mark.parametrize("name", [SLIDING, SLIDING_PAGED])
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("layers", [0], r"found layers \[0\], expected layers \[0, 2\]"),
        ("layers", [0, 1, 2], r"expected layers \[0, 2\]"),
        ("layers", [], r"expected layers \[0, 2\]"),
        ("window_size", 13, r"window_size: found 13, expected 12"),
        (None, None, r"sliding_window: found nothing, expected layers \[0, 2\]"),
    ],
)
def test_windows_that_the_configuration_and_the_graph_describe_differently(
    tmp_path: Path, name: str, key: str | None, value: Any, message: str
) -> None:
    def change(config: Config) -> None:
        decoder = config["model"]["decoder"]
        if key is None:
            del decoder["sliding_window"]
        else:
            decoder["sliding_window"][key] = value

    refused(edit_config(copied(name, tmp_path), change), message)


@pytest.mark.parametrize(
    ("node", "table", "message"),
    [
        # A layer that sees everything would find the pages of the ring overwritten.
        ("layers.1/attn/PagedAttention", "block_table_windowed", "local_window_size.*bounded"),
        # The runtime gives the layer a ring, and the graph would look for all pages in it.
        ("layers.0/attn/PagedAttention", "block_table", r"layers \[0, 2\], expected layers \[2\]"),
    ],
)
def test_a_layer_with_the_page_table_of_the_other_kind(
    tmp_path: Path, node: str, table: str, message: str
) -> None:
    refused(changed(tmp_path, SLIDING_PAGED, rewired(node, 7, table)), message)


def test_a_bounded_cache_of_one_layer_that_the_configuration_does_not_know(tmp_path: Path) -> None:
    change = attribute("GroupQueryAttention", "sliding_window_cache", 0)
    refused(changed(tmp_path, SLIDING, change), r"layers \[0, 2\], expected layers \[2\]")


# Initializers.


def test_a_missing_initializer(tmp_path: Path) -> None:
    def change(graph: Graph) -> None:
        graph.initializer.remove(tensor_of(graph, "model.layers.1.mlp.up_proj.MatMul.weight"))

    refused(
        changed(tmp_path, DENSE, change),
        r"layers\.1/mlp/up_proj.*'model.layers.1.mlp.up_proj.MatMul.weight': found an undefined",
    )


def test_an_extra_initializer(tmp_path: Path) -> None:
    def change(graph: Graph) -> None:
        graph.initializer.append(numpy_helper.from_array(np.zeros(3, np.float32), "extra.weight"))

    refused(
        changed(tmp_path, DENSE, change), r"initializer 'extra\.weight': found one that nothing"
    )


def test_every_misshapen_initializer_is_named(tmp_path: Path) -> None:
    """One dimension of one tensor is halved, and its bytes with it; for every tensor in turn."""
    for name in (DENSE, MOE, INT4, GATHER, QWEN3_PAGED):
        original = onnx.load(str(artifact(name) / "model.onnx"), load_external_data=False)
        folder = copied(name, tmp_path)
        for tensor in original.graph.initializer:
            if "layers.1." in tensor.name or "layers.2." in tensor.name or "dt_bias" in tensor.name:
                continue

            def halve(graph: Graph, name: str = tensor.name) -> None:
                found = tensor_of(graph, name)
                axis = max(range(len(found.dims)), key=lambda i: found.dims[i])
                if found.dims[axis] < 2:
                    axis = 0
                found.dims[axis] //= 2
                sizes = {e.key: e.value for e in found.external_data}
                set_external(found, "length", str(int(sizes["length"]) // 2))

            (folder / "model.onnx").write_bytes(original.SerializeToString())
            edit_graph(folder, halve)
            with pytest.raises(ArtifactError) as caught:
                load_artifact(folder)
            related = tensor.name.removesuffix("_scales").removesuffix("_Q4")
            message = str(caught.value)
            assert related in message or "shape" in message or "found" in message
            assert caught.value.file == "model.onnx"


def test_a_misshapen_initializer(tmp_path: Path) -> None:
    def change(graph: Graph) -> None:
        tensor = tensor_of(graph, "model.layers.1.mlp.up_proj.MatMul.weight")
        tensor.dims[:] = [32, 128]

    refused(
        changed(tmp_path, DENSE, change),
        r"initializer model\.layers\.1\.mlp\.up_proj.*found shape \[32, 128\], expected \[64, 64\]",
    )


def test_an_initializer_of_another_type(tmp_path: Path) -> None:
    def change(graph: Graph) -> None:
        tensor = tensor_of(graph, "model.layers.1.mlp.up_proj.MatMul.weight")
        tensor.data_type = TensorProto.FLOAT16
        set_external(tensor, "length", str(64 * 64 * 2))

    refused(changed(tmp_path, DENSE, change), "up_proj.*found FLOAT16, expected FLOAT")


def test_expert_biases_that_are_not_zero(tmp_path: Path) -> None:
    def change(graph: Graph) -> None:
        tensor = tensor_of(graph, "model.layers.0.moe.experts.down_proj.bias")
        values = np.zeros(tuple(tensor.dims), np.float32)
        values[1, 2] = 1e-3
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))

    refused(changed(tmp_path, MOE, change), "fc2_bias: found numbers that are not zero")


@pytest.mark.parametrize(
    ("section", "count"), [("decoder", 5), ("decoder", 3), ("dflash2", 1), ("dflash2", 3)]
)
def test_another_number_of_layers_than_configured(tmp_path: Path, section: str, count: int) -> None:
    def change(config: Config) -> None:
        config["model"][section]["num_hidden_layers"] = count
        if section == "decoder":
            del config["model"]["dflash2"]

    folder = edit_config(copied(PAGED, tmp_path), change)
    refused(folder, rf"model\.{section}\.num_hidden_layers: found {count}")


def test_the_first_norm_adds_nothing(tmp_path: Path) -> None:
    def change(graph: Graph) -> None:
        node = node_of(graph, "SimplifiedLayerNormalization")
        embedded = node.input[0]
        node.op_type, node.domain = "SkipSimplifiedLayerNormalization", "com.microsoft"
        node.input[:] = [embedded, embedded, node.input[1]]
        node.output[:] = [node.output[0], "", "", "doubled"]
        set_attribute(node, "epsilon", 1e-6)
        kept = [a for a in node.attribute if a.name == "epsilon"]
        del node.attribute[:]
        node.attribute.extend(kept)
        after = next(n for n in graph.node if "layers.0/post_attention" in n.name)
        after.input[0] = "doubled"

    refused(changed(tmp_path, DENSE, change), "input_layernorm.weight: found a norm of a sum")


# Inputs, outputs and files.


def test_inputs_and_outputs_that_nothing_explains(tmp_path: Path) -> None:
    def more(graph: Graph) -> None:
        graph.input.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, ["rows"]))

    refused(changed(tmp_path, DENSE, more), "input 'more': found one that nothing uses")

    def inner(graph: Graph) -> None:
        name = "/model/layers.1/mlp/Mul/output_0"
        graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))

    folder = edit_graph(copied(QWEN3, tmp_path), inner)
    refused(folder, "output '/model/layers.1/mlp/Mul/output_0': found one that nothing uses")


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [("input_ids", 0, 6), ("past_key_values.3.key", 1, 4), ("past.0.conv", 2, 4), ("logits", 2, 8)],
)
def test_declared_shapes(tmp_path: Path, name: str, index: int, value: int) -> None:
    def change(graph: Graph) -> None:
        found = next(v for v in [*graph.input, *graph.output] if v.name == name)
        found.type.tensor_type.shape.dim[index].dim_value = value

    refused(changed(tmp_path, DENSE, change), f"{re.escape(name)}'")


def test_declared_types(tmp_path: Path) -> None:
    def change(graph: Graph) -> None:
        found = next(v for v in graph.input if v.name == "past_key_values.3.key")
        found.type.tensor_type.elem_type = TensorProto.FLOAT16

    refused(changed(tmp_path, DENSE, change), "past_key_values.3.key': found FLOAT16")


@pytest.mark.parametrize("file", ["model.onnx", "model.onnx.data", "dflash2.onnx"])
def test_missing_files(tmp_path: Path, file: str) -> None:
    folder = copied(PAGED, tmp_path)
    (folder / file).unlink()
    refused(folder, f"'{re.escape(file)}', which does not exist")


@pytest.mark.parametrize(
    ("name", "file"),
    [(PAGED, "model.onnx.data"), (PAGED, "dflash2.onnx.data"), (MTP, "mtp.onnx.data")],
)
def test_data_truncated_by_one_byte(tmp_path: Path, name: str, file: str) -> None:
    folder = copied(name, tmp_path)
    size = (folder / file).stat().st_size
    with open(folder / file, "r+b") as data:
        data.truncate(size - 1)
    error = refused(folder, rf"initializer .*of {re.escape(file)}, which has {size - 1}")
    assert error.file.endswith(".onnx")


def test_an_offset_past_the_end(tmp_path: Path) -> None:
    def change(graph: Graph) -> None:
        set_external(tensor_of(graph, "lm_head.MatMul.weight"), "offset", str(2**40))

    refused(changed(tmp_path, DENSE, change), r"initializer lm_head\.MatMul\.weight.*which has")


@pytest.mark.parametrize("location", ["../model.onnx.data", "/etc/passwd", "a\\b", "", "C:x"])
def test_data_outside_the_folder(tmp_path: Path, location: str) -> None:
    def change(graph: Graph) -> None:
        set_external(tensor_of(graph, "lm_head.MatMul.weight"), "location", location)

    refused(changed(tmp_path, DENSE, change), "lm_head.MatMul.weight, location")


def test_a_drafter_in_another_folder_cannot_find_the_target(tmp_path: Path) -> None:
    folder = copied(PAGED, tmp_path)
    (folder / "model.onnx.data").rename(folder / "moved.data")
    edit_graph(
        folder,
        lambda graph: [
            set_external(tensor, "location", "moved.data") for tensor in graph.initializer
        ],
    )
    refused(folder, r"dflash2\.onnx: .*'model\.onnx\.data', which does not exist")


@pytest.mark.parametrize("file", ["model.onnx", "dflash2.onnx"])
def test_graphs_cut_short(tmp_path: Path, file: str) -> None:
    folder = copied(PAGED, tmp_path)
    whole = (folder / file).read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        (folder / file).write_bytes(whole[:length])
        assert refused(folder, None).problems[0].file == file


def test_nothing_is_allocated_for_an_artifact_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every check comes before the first array, whichever part it is about."""
    monkeypatch.setattr("convert.build._Arena.empty", lambda *a: pytest.fail("allocated"))
    folder = copied(PAGED, tmp_path)
    edit_graph(folder, attribute("PagedAttention", "is_causal", 1, index=1), "dflash2.onnx")
    refused(folder, "is_causal|causal")


def test_the_golden_artifacts_are_not_refused() -> None:
    """The mutations above start from artifacts that load."""
    used = {DENSE, PAGED, QWEN3, QWEN3_PAGED, MOE, QMOE, INT4, GATHER, TIED, DSPARK, FUSED, MTP}
    assert used <= set(artifact_names())
