"""What target and drafter must agree on: every disagreement is found before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from convert import ArtifactError, inspect_artifact, load_artifact
from tests.convert.helpers import (
    Config,
    copied,
    edit_config,
    edit_graph,
    set_external,
    tensor_of,
)

DFLASH2 = "qwen35_paged_fp16_dflash2"
DSPARK = "qwen35_paged_fp16_dspark"
MTP = "qwen35_paged_fp16_mtp"
INT4 = "qwen35_paged_int4_gather_dflash2"

DRAFTERS = [(DFLASH2, "dflash2"), (DSPARK, "dspark"), (MTP, "mtp"), (INT4, "dflash2")]


def refused(folder: Path, match: str) -> ArtifactError:
    """Loading fails, and inspecting reports the same."""
    with pytest.raises(ArtifactError, match=match) as caught:
        load_artifact(folder)
    reported = inspect_artifact(folder).problems
    assert [str(p) for p in reported] == [
        str(p) if p is not caught.value else str(reported[0]) for p in caught.value.problems
    ]
    return caught.value


def declared(graph: onnx.GraphProto, name: str) -> onnx.ValueInfoProto:
    """The graph input or output of a name."""
    return next(v for v in [*graph.input, *graph.output] if v.name == name)


def dim(name: str, index: int, value: int | str) -> Callable[[onnx.GraphProto], None]:
    """Change one declared dimension."""

    def change(graph: onnx.GraphProto) -> None:
        entry = declared(graph, name).type.tensor_type.shape.dim[index]
        if isinstance(value, int):
            entry.dim_value = value
        else:
            entry.dim_param = value

    return change


def kind_of(name: str, data_type: int) -> Callable[[onnx.GraphProto], None]:
    """Change a declared type."""

    def change(graph: onnx.GraphProto) -> None:
        declared(graph, name).type.tensor_type.elem_type = data_type

    return change


@pytest.mark.parametrize(
    ("file", "change", "match"),
    [
        ("model.onnx", dim("aux_hidden_states", 1, 192), r"aux_hidden_states'.*192"),
        ("model.onnx", dim("aux_hidden_states", 1, "width"), "aux_hidden_states'.*'width'"),
        ("model.onnx", dim("aux_hidden_states", 0, 16), r"aux_hidden_states'.*\[16, 128\]"),
        ("model.onnx", kind_of("aux_hidden_states", TensorProto.FLOAT), "found FLOAT"),
        ("dflash2.onnx", dim("aux_hidden_states", 1, 192), r"aux_hidden_states'.*192"),
        ("dflash2.onnx", dim("aux_hidden_states", 0, 16), r"aux_hidden_states'.*\[16, 128\]"),
        ("dflash2.onnx", kind_of("aux_hidden_states", TensorProto.FLOAT), "as 'aux_hidden"),
        ("dflash2.onnx", dim("draft_candidate_ids", 2, 5), r"draft_candidate_ids'.*7, 5"),
        ("dflash2.onnx", dim("draft_candidate_ids", 1, 8), r"draft_candidate_ids'.*8, 4"),
        ("dflash2.onnx", kind_of("draft_candidate_ids", TensorProto.INT64), "found INT64"),
        ("dflash2.onnx", dim("draft_scores", 3, 5), r"draft_scores'.*4, 5"),
        ("dflash2.onnx", kind_of("draft_scores", TensorProto.FLOAT16), "found FLOAT16"),
        ("dflash2.onnx", dim("past_key_values.1.key", 2, 4), r"past_key_values.1.key'.*4, 32"),
        ("dflash2.onnx", dim("past_key_values.1.value", 3, 64), r"past_key_values.1.value'"),
        ("dflash2.onnx", dim("present.1.key", 1, 16), r"present.1.key'.*16"),
        ("dflash2.onnx", kind_of("present.0.value", TensorProto.FLOAT), "present.0.value'"),
        ("dflash2.onnx", kind_of("block_table", TensorProto.INT64), "block_table'"),
        ("dflash2.onnx", kind_of("input_ids", TensorProto.INT32), "input_ids'"),
        ("dflash2.onnx", dim("block_row_index", 0, 8), "block_row_index'"),
    ],
)
def test_declared_inputs_and_outputs(
    tmp_path: Path, file: str, change: Callable[[onnx.GraphProto], None], match: str
) -> None:
    refused(edit_graph(copied(DFLASH2, tmp_path), change, file), match)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("aux_hidden_state_layers", [1, 2], r"found \[1, 2\], expected \[1, 3\]"),
        ("aux_hidden_state_layers", [3, 1], r"found \[3, 1\], expected \[1, 3\]"),
        ("aux_hidden_state_layers", [1], r"found \[1\], expected \[1, 3\]"),
        ("sliding_window", 64, "sliding_window: found 64, expected -1"),
        ("head_size", 16, "head_size: found 16, expected 32"),
        ("num_key_value_heads", 4, "num_key_value_heads: found 4, expected 2"),
        ("selector_top_k", 5, "draft_scores'"),
        ("mask_token_id", 383, None),
    ],
)
def test_the_section_against_the_graphs(
    tmp_path: Path, key: str, value: Any, match: str | None
) -> None:
    folder = edit_config(
        copied(DFLASH2, tmp_path), lambda c: c["model"]["dflash2"].update({key: value})
    )
    if match is None:
        assert load_artifact(folder).drafter_config.mask_token == value
    else:
        refused(folder, match)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("head_size", 16),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 1),
        ("hidden_size", 32),
    ],
)
def test_the_decoder_section_against_its_graph(tmp_path: Path, key: str, value: int) -> None:
    folder = edit_config(
        copied(DFLASH2, tmp_path), lambda c: c["model"]["decoder"].update({key: value})
    )
    with pytest.raises(ArtifactError):
        load_artifact(folder)


def test_another_block_than_the_graph(tmp_path: Path) -> None:
    def change(config: Config) -> None:
        config["model"]["dflash2"].update(block_size=7, num_draft_tokens=6)

    refused(edit_config(copied(DFLASH2, tmp_path), change), "draft_scores'.*7, 4, 4.*6, 4, 4")


def test_a_vocabulary_of_another_size(tmp_path: Path) -> None:
    folder = edit_config(copied(DFLASH2, tmp_path), lambda c: c["model"].update(vocab_size=383))
    refused(folder, r"initializer lm_head\.MatMul\.weight: found shape \[64, 384\]")


def test_pages_of_another_size(tmp_path: Path) -> None:
    def change(config: Config) -> None:
        config["engine"]["dynamic_batching"]["block_size"] = 16

    refused(edit_config(copied(DFLASH2, tmp_path), change), "block_size: found 16, expected 256")


def test_layers_of_the_state_groups(tmp_path: Path) -> None:
    def change(config: Config) -> None:
        config["model"]["decoder"]["state_groups"][0]["layer_ids"] = [2]

    refused(edit_config(copied(DFLASH2, tmp_path), change), "paged_kv.layer_ids")


# Shared tensors.


def own_copy(graph: onnx.GraphProto, name: str, shape: list[int]) -> None:
    """Give the drafter numbers of its own under the shared name."""
    values = np.zeros(shape, np.float16)
    tensor_of(graph, name).CopyFrom(numpy_helper.from_array(values, name))


@pytest.mark.parametrize(("name", "kind"), DRAFTERS)
def test_shared_tensors_are_the_targets(tmp_path: Path, name: str, kind: str) -> None:
    """Another offset, a copy of its own, or a missing entry in either list."""
    folder = copied(name, tmp_path)
    graph = onnx.load(str(folder / f"{kind}.onnx"), load_external_data=False).graph
    shared = [t for t in graph.initializer if t.external_data[0].value == "model.onnx.data"]
    assert len(shared) == (4 if name == INT4 else 2)
    for tensor in shared:
        offset = next(int(e.value) for e in tensor.external_data if e.key == "offset")
        for moved in (offset + 128, max(offset - 128, 0)):
            if moved == offset:
                continue
            target = copied(name, _fresh(tmp_path))
            edit_graph(
                target,
                lambda g, t=tensor.name, m=moved: set_external(tensor_of(g, t), "offset", str(m)),
                f"{kind}.onnx",
            )
            with pytest.raises(ArtifactError, match=f"{tensor.name}"):
                load_artifact(target)


def _fresh(folder: Path) -> Path:
    """A folder that does not exist yet."""
    made = folder / str(len(list(folder.iterdir())))
    made.mkdir()
    return made


def test_a_drafter_with_a_head_of_its_own(tmp_path: Path) -> None:
    folder = edit_graph(
        copied(DFLASH2, tmp_path),
        lambda graph: own_copy(graph, "lm_head.MatMul.weight", [64, 384]),
        "dflash2.onnx",
    )
    error = refused(folder, "lm_head.MatMul.weight .the head.: found .*in the graph")
    assert "[64, 384]" in error.found and "the target's" in error.expected


def test_a_head_of_another_vocabulary(tmp_path: Path) -> None:
    folder = edit_graph(
        copied(DFLASH2, tmp_path),
        lambda graph: own_copy(graph, "lm_head.MatMul.weight", [64, 520]),
        "dflash2.onnx",
    )
    refused(folder, r"lm_head\.MatMul\.weight: found shape \[64, 520\], expected \[64, 384\]")


@pytest.mark.parametrize("section", ["decoder", "dflash2"])
@pytest.mark.parametrize("entry", [0, 1])
def test_a_shared_tensor_that_is_not_listed(tmp_path: Path, section: str, entry: int) -> None:
    folder = edit_config(
        copied(DFLASH2, tmp_path), lambda c: c["model"][section]["shared_initializers"].pop(entry)
    )
    name = ("model.embed_tokens.weight", "lm_head.MatMul.weight")[entry]
    refused(folder, rf"model\.{section}\.shared_initializers, {name}: found no such entry")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("offset", "64"),
        ("length", "1"),
        ("data_type", 1),
        ("shape", [64, 520]),
        ("data_file", "dflash2.onnx.data"),
        ("name", "other"),
    ],
)
def test_an_entry_that_says_something_else(tmp_path: Path, key: str, value: Any) -> None:
    folder = edit_config(
        copied(DFLASH2, tmp_path),
        lambda c: c["model"]["dflash2"]["shared_initializers"][1].update({key: value}),
    )
    refused(folder, r"model\.dflash2\.shared_initializers, lm_head\.MatMul\.weight")


def test_all_disagreements_are_reported_together(tmp_path: Path) -> None:
    def change(config: Config) -> None:
        drafter = config["model"]["dflash2"]
        drafter.update(aux_hidden_state_layers=[3, 1], sliding_window=64)
        drafter["shared_initializers"].pop()
        config["engine"]["dynamic_batching"]["block_size"] = 16

    folder = edit_config(copied(DFLASH2, tmp_path), change)
    edit_graph(folder, kind_of("aux_hidden_states", TensorProto.FLOAT), "dflash2.onnx")
    error = refused(folder, "sliding_window")
    found = "\n".join(p.where for p in error.problems)
    for where in (
        "sliding_window",
        "block_size",
        "aux_hidden_state_layers",
        "lm_head",
        "input 'aux",
    ):
        assert where in found
    assert len(error.problems) == 5
    assert str(error).count("\n") == 4
