"""What is wrong with a checkpoint is said: the file, the place, what was found and expected."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxdraft
from convert import ArtifactError
from convert.checkpoint.block_config import read_block
from convert.checkpoint.config import read_target
from convert.errors import Problems
from jaxdraft import Model
from jaxdraft.checkpoint import save
from jaxdraft.checkpoint.layout import block_layout, target_layout
from jaxdraft.testing import tiny_drafter, tiny_target
from tests.checkpoint.helpers import edit_json, edit_tensors
from tests.paths import FIRST_FAMILY

Json = dict[str, Any]
Tensors = dict[str, np.ndarray]

NORM = "model.language_model.norm.weight"


def refused(folder: Path, **options: Any) -> str:
    """What loading says, all on one line."""
    with pytest.raises(ArtifactError) as caught:
        jaxdraft.load(folder, **options)
    assert isinstance(caught.value, ValueError)
    for problem in caught.value.problems:
        assert problem.file and problem.where and problem.found and problem.expected
    return str(caught.value)


def put(*path: str | int, value: Any) -> Callable[[Json], None]:
    """Sets a key of nested objects."""

    def change(body: Any) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = value

    return change


def drop(*path: str) -> Callable[[Json], None]:
    """Removes a key of nested objects."""

    def change(body: Any) -> None:
        for key in path[:-1]:
            body = body[key]
        del body[path[-1]]

    return change


TEXT, ROPE = "text_config", ("text_config", "rope_parameters")

TARGET: list[tuple[Callable[[Json], None], str]] = [
    (put("model_type", value="gpt2"), 'model_type: found "gpt2", expected one of qwen3_5, '),
    (put("model_type", value=5), "model_type: found 5, expected one of"),
    (drop("text_config"), "text_config: found nothing, expected an object"),
    (put(TEXT, "hidden_size", value="32"), 'text_config.hidden_size: found "32", expected an int'),
    (put(TEXT, "num_hidden_layers", value=True), "num_hidden_layers: found true, expected an int"),
    (put(TEXT, "layer_types", value=["full_attention"]), "layer_types: found"),
    (put(TEXT, "layer_types", value=["sliding_attention"] * 4), "layer_types: found"),
    (put(TEXT, "layer_types", value=["linear_attention"] * 4), "at least one full_attention"),
    (put(TEXT, "num_key_value_heads", value=3), "a divisor of the 4 query heads"),
    (put(TEXT, "attention_bias", value=True), "attention_bias: found true, expected false"),
    (put(TEXT, "hidden_act", value="gelu"), 'hidden_act: found "gelu", expected "silu"'),
    (put(TEXT, "attn_output_gate", value=False), "attn_output_gate: found false, expected true"),
    (put(TEXT, "rms_norm_eps", value=-1.0), "rms_norm_eps: found -1.0, expected a positive"),
    (put(*ROPE, "rope_type", value="dynamic"), 'rope_parameters.rope_type: found "dynamic"'),
    (put(*ROPE, "rope_theta", value=0), "rope_theta: found 0, expected a positive number"),
    (put(TEXT, "rope_scaling", value={"factor": 2.0}), "rope_scaling: found"),
    (put(*ROPE, "factor", value=2.0), "rope_parameters.factor: found an unknown key"),
    (put(*ROPE, "partial_rotary_factor", value=0.1), "partial_rotary_factor: found"),
    (put("quantization_config", value={"quant_method": "fp8"}), "weight_block_size: found nothing"),
    (put("tie_word_embeddings", value=True), "tie_word_embeddings: found false, expected true or"),
    (put("dtype", value="float8"), 'dtype: found "float8", expected one of float32'),
    (put(TEXT, "eos_token_id", value="2"), 'eos_token_id: found "2", expected a token id in 0..4'),
    (put(TEXT, "eos_token_id", value=[2, True]), "eos_token_id: found [2, true], expected a tok"),
    (put(TEXT, "vocab_size", value=64), "embed_tokens.weight: found shape [48, 32], expected"),
    (
        put(TEXT, "head_dim", value=8),
        "q_proj.weight: found shape [128, 32], expected shape [64, 3",
    ),
    (put(TEXT, "num_hidden_layers", value=3), "layer_types: found"),
    (put(TEXT, "use_sliding_window", value=True), "use_sliding_window: found true, expected false"),
    (put(TEXT, "linear_num_value_heads", value=3), "a multiple of the 2 key heads"),
]


@pytest.mark.parametrize(("change", "message"), TARGET)
def test_settings_of_the_target(change: Callable[[Json], None], message: str, copy: Path) -> None:
    edit_json(copy / "target" / "config.json", change)
    (copy / "target" / "generation_config.json").unlink()  # it would speak for eos_token_id
    said = refused(copy)
    assert message in said and "target/" in said


BLOCK = "dflash_config"


def half_windowed(body: Json) -> None:
    """No list of layers, and a number that stands for one."""
    del body["layer_types"]
    body["max_window_layers"] = 1


DRAFTERS: list[tuple[str, Callable[[Json], None], str]] = [
    ("dflash2", put(BLOCK, "selector_topk", value=8), "dflash_config.selector_topk: found an unkn"),
    ("dflash2", put("window", value=8), "config.json: window: found an unknown key"),
    ("dflash2", put("hidden_size", value=64), "hidden_size: found 64, expected 32, the target's"),
    ("dflash2", put("vocab_size", value=49), "vocab_size: found 49, expected 48, the target's"),
    (
        "dflash2",
        put(BLOCK, "target_layer_ids", value=[0, 3]),
        "expected layers in -1..2, each once",
    ),
    (
        "dflash2",
        put(BLOCK, "target_layer_ids", value=[2, 2]),
        "expected layers in -1..2, each once",
    ),
    ("dflash2", put(BLOCK, "target_layer_ids", value=[1]), "fc.weight: found shape [32, 64], exp"),
    ("dflash2", put(BLOCK, "mask_token_id", value=48), "mask_token_id: found 48, expected an int"),
    ("dflash2", drop(BLOCK, "mask_token_id"), "mask_token_id: found nothing, expected an integer"),
    ("dflash2", put("is_causal", value=5), "is_causal: found 5, expected true or false"),
    ("dflash2", put("layer_types", value=["full"] * 2), "since use_sliding_window is Tr"),
    ("dflash2", drop("use_sliding_window"), "since use_sliding_window is False"),
    ("dflash2", put("block_size", value=5), "block_size: found 5, expected 4, of dflash_config"),
    ("dflash2", put(BLOCK, value=[]), "dflash_config: found [], expected an object"),
    ("dflash2", half_windowed, "max_window_layers: found 1, expected 0 or 2"),
    ("dflash2", put("sliding_window", value=0), "sliding_window: found 0, expected an integer"),
    ("dflash2", put("rope_parameters", "rope_type", value="yarn"), 'rope_type: found "yarn"'),
    ("dflash2", put(BLOCK, "conv_kernel_size", value=3), "base_kernel: found shape [2, 2, 32]"),
    ("dflash2", put(BLOCK, "conv_group_size", value=5), "conv_group_size: found 5, expected a div"),
    ("dflash2", put(BLOCK, "selector_rank", value=9), "predecessor_codebook: found shape [48, 8]"),
    ("dspark", put("num_hidden_layers", value=1), "tensor layers.1.mlp.down_proj.weight: found"),
    ("dspark", put("markov_rank", value=0), "markov_rank: found 0, expected an integer in 1.."),
    ("dspark", put("block_size", value=0), "block_size: found 0, expected an integer in 1..4096"),
    ("dspark", put("markov_head_type", value="lstm"), 'found "lstm", expected "vanilla" or "ga'),
    ("dspark", put(BLOCK, "conv_kernel_size", value=2), "conv_kernel_size: found an unknown key"),
    ("dspark", put("draft_vocab_size", value=32), "tensor d2t: found nothing, expected shape [32]"),
    (
        "dspark",
        put("draft_vocab_size", value=2),
        "draft_vocab_size: found 2, expected an integer in",
    ),
    ("dflash2", put("quantization_config", value=[]), "quantization_config: found [], expected an"),
    ("dspark", put("use_sliding_window", value=True), "sliding_window: found nothing"),
]


@pytest.mark.parametrize(("kind", "change", "message"), DRAFTERS)
def test_settings_of_a_drafter(
    kind: str, change: Callable[[Json], None], message: str, copy: Path
) -> None:
    edit_json(copy / kind / "config.json", change)
    said = refused(copy, drafter=kind)
    assert message in said and f"{kind}/" in said


def missing(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: void(tensors.pop(name))


def void(_: object) -> None:
    pass


def replaced(name: str, array: np.ndarray) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: array})


WEIGHTS: list[tuple[str, Callable[[Tensors], None], str]] = [
    ("target", missing(NORM), f"target/model.safetensors: tensor {NORM}: found nothing, expected "),
    ("target", replaced(NORM, np.zeros((32, 1), np.float32)), "found shape [32, 1], expected shap"),
    ("target", replaced(NORM, np.zeros(32, np.int8)), f"tensor {NORM}: found INT8, expected FLOAT"),
    (
        "target",
        replaced(NORM, np.zeros(32, np.float64)),
        "found DOUBLE, expected FLOAT or",
    ),
    ("target", replaced("spare", np.zeros(3, np.float32)), "tensor spare: found shape [3], exp"),
    (
        "target",
        missing("lm_head.weight"),
        "tensor lm_head.weight: found nothing, expected shape [48, 32], since "
        "tie_word_embeddings is not true",
    ),
    ("dflash2", missing("fc.weight"), "dflash2/model.safetensors: tensor fc.weight: found nothing"),
    ("dflash2", replaced("embed_tokens.weight", np.zeros((48, 32), np.float32)), "other numbers"),
    (
        "dflash2",
        replaced("lm_head.weight", np.zeros((48, 16), np.float32)),
        "those of the target's",
    ),
    ("dflash2", replaced("confidence_head.bias", np.zeros(1, np.float32)), "no such tensor"),
]


@pytest.mark.parametrize(("part", "change", "message"), WEIGHTS)
def test_tensors(part: str, change: Callable[[Tensors], None], message: str, copy: Path) -> None:
    edit_tensors(copy / part / "model.safetensors", change)
    assert message in refused(copy)


HEAD: list[tuple[Callable[[Json], None], str]] = [
    (put(TEXT, "mtp_num_hidden_layers", value=2), "mtp_num_hidden_layers: found 2"),
    (put(TEXT, "mtp_use_dedicated_embeddings", value=True), "mtp_use_dedicated_embeddings: found"),
]


@pytest.mark.parametrize(("change", "message"), HEAD)
def test_settings_of_a_head(change: Callable[[Json], None], message: str, copy: Path) -> None:
    """They matter to the head alone."""
    edit_json(copy / "target" / "config.json", change)
    assert message in refused(copy, drafter="mtp")
    assert jaxdraft.load(copy).info.drafter == "dflash2"
    assert jaxdraft.load(copy, drafter="none").info.drafter == "none"


def test_half_a_head(copy: Path) -> None:
    edit_tensors(copy / "target" / "model.safetensors", missing("mtp.norm.weight"))
    assert "tensor mtp.norm.weight: found nothing" in refused(copy, drafter="mtp")
    assert jaxdraft.load(copy, drafter="none").info.drafter == "none"
    shutil.rmtree(copy / "dflash2")
    shutil.rmtree(copy / "dspark")
    assert "tensor mtp.norm.weight: found nothing" in refused(copy)


def test_every_problem_is_named_at_once(copy: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors[NORM]
        tensors["spare"] = np.zeros(3, np.float32)

    edit_tensors(copy / "target" / "model.safetensors", change)
    edit_json(copy / "target" / "config.json", put(TEXT, "attention_bias", value=True))
    said = refused(copy)
    for word in ("attention_bias", f"tensor {NORM}", "tensor spare"):
        assert word in said


def test_another_architecture_is_told_in_few_lines(copy: Path) -> None:
    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"transformer.{name}"] = tensors.pop(name)

    edit_tensors(copy / "target" / "model.safetensors", rename)
    said = refused(copy)
    assert len(said.splitlines()) == 21 and "more problems" in said


VALUES = (None, -1, 0, 3, 10**9, 1.5, "x", [], [1], {}, {"rope_type": "yarn"}, True, float("inf"))


def leaves(body: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything in nested objects and lists, they themselves included."""
    items = body.items() if isinstance(body, dict) else enumerate(body)
    found = []
    for key, value in items:
        found.append((*path, key))
        if isinstance(value, (dict, list)):
            found += leaves(value, (*path, key))
    return found


@pytest.mark.parametrize("part", ["target", "dflash2", "dspark"])
def test_no_setting_breaks_the_reading(part: str, saved: Path) -> None:
    """Every setting replaced by everything: it is read, or refused as :class:`ArtifactError`."""
    bodies = {p: json.loads((saved / p / "config.json").read_text()) for p in ("target", part)}
    whole = read_target(bodies["target"], head_stored=True, problems=Problems()).config
    read = refusals = 0
    for path in leaves(bodies[part]):
        for value in VALUES:
            body = json.loads(json.dumps(bodies[part]))
            put(*path, value=value)(body)
            problems = Problems()
            try:
                if part == "target":
                    facts = read_target(body, head_stored=True, problems=problems)
                    assert target_layout(facts.config, facts.family)
                else:
                    config = read_block(body, part, whole, problems).config
                    assert block_layout(config)
            except ArtifactError:
                refusals += 1
            else:
                read += 1
    assert read > 100 and refusals > 100


def test_the_drafter_is_of_one_kind(copy: Path) -> None:
    def strip(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith("candidate_selector.")]:
            del tensors[name]

    edit_tensors(copy / "dflash2" / "model.safetensors", strip)
    assert "found tensors of no drafter, expected candidate_selector.* of dflash2" in refused(copy)


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"\xff" * 64])
def test_files_that_are_no_safetensors(content: bytes, copy: Path) -> None:
    (copy / "target" / "model.safetensors").write_bytes(content)
    assert "target/model.safetensors: header: found" in refused(copy)


def test_truncated_files(copy: Path) -> None:
    path = copy / "dflash2" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "bytes, of the" in refused(copy) and "that its header describes" in refused(copy)
    path.write_bytes(path.read_bytes()[:50])
    assert "50 bytes, which end inside the header of" in refused(copy)


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1, "a": 2}', '{"a": NaN'])
def test_settings_that_are_no_object(content: str, copy: Path) -> None:
    (copy / "target" / "config.json").write_text(content)
    assert "target/config.json: content: found" in refused(copy)


def test_generation_settings(copy: Path) -> None:
    edit_json(copy / "target" / "generation_config.json", put("eos_token_id", value=[2, 1.5]))
    assert "generation_config.json: eos_token_id: found [2, 1.5]" in refused(copy)


# -------------------------------------------------------------------------------------- shards


@pytest.fixture
def sharded(saved: Path, tmp_path: Path) -> Path:
    model = jaxdraft.load(saved, drafter="none")
    save(model, tmp_path / "out", max_shard_bytes=30_000)
    return tmp_path / "out" / "target"


def test_an_index_that_is_wrong(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    whole = index.read_text()
    body = json.loads(whole)
    files = sorted(set(body["weight_map"].values()))
    first = next(n for n, f in body["weight_map"].items() if f == files[0])

    def says(change: Callable[[Json], None]) -> str:
        index.write_text(whole)
        edit_json(index, change)
        return refused(sharded)

    named = put("weight_map", "ghost", value=files[0])
    assert f"weight_map, ghost: found no such tensor in {files[0]}" in says(named)
    moved = put("weight_map", first, value=files[1])
    assert f"weight_map, {first}: found no such tensor in {files[1]}" in says(moved)
    assert f"tensor {first}: found a tensor, expected none" in says(drop("weight_map", first))
    assert "weight_map: found list, expected an object" in says(put("weight_map", value=[]))
    for bad in ("../target/model.safetensors", "/etc/passwd", "no.safetensors", "a\0b"):
        assert (
            "inside the artifact's folder" in (said := says(put("weight_map", first, value=bad)))
            or "does not exist" in said
        )
    assert "the name of a file" in says(put("weight_map", first, value=3))


def test_one_file_and_an_index(sharded: Path, saved: Path) -> None:
    shutil.copy(saved / "target" / "model.safetensors", sharded)
    assert "expected one of the two" in refused(sharded)


# -------------------------------------------------------------------------------------- places


def test_links_out_of_the_folder(copy: Path, tmp_path: Path) -> None:
    weights = copy / "target" / "model.safetensors"
    outside = tmp_path / "elsewhere.safetensors"
    weights.rename(outside)
    weights.symlink_to(outside)
    assert "a link to" in refused(copy)


def test_the_cache_of_a_hub_consists_of_links(saved: Path, tmp_path: Path) -> None:
    """``models--x/snapshots/revision/file`` links to ``models--x/blobs/hash``, and nowhere else."""
    snapshot = tmp_path / "models--x" / "snapshots" / "0123"
    blobs = tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(sorted((saved / "target").iterdir())):
        shutil.copy(path, blobs / str(i))
        (snapshot / path.name).symlink_to(os.path.relpath(blobs / str(i), snapshot))
    assert jaxdraft.load(snapshot).info.drafter == "mtp"
    weights = snapshot / "model.safetensors"
    weights.unlink()
    weights.symlink_to(saved / "target" / "model.safetensors")
    assert "a link to" in refused(snapshot)


def test_folders_that_hold_neither(tmp_path: Path) -> None:
    assert "genai_config.json" in refused(tmp_path)


def test_arguments(saved: Path) -> None:
    with pytest.raises(ValueError, match="only a checkpoint offers a choice"):
        jaxdraft.load(FIRST_FAMILY, drafter="dspark")
    for dtype in ("int8", "int3"):
        with pytest.raises(ValueError, match=f"dtype is '{dtype}'; expected one of float32, "):
            jaxdraft.load(saved, dtype=dtype)
    with pytest.raises(ValueError, match="expected dflash2, dspark, mtp, none, smollm2, or a f"):
        jaxdraft.load(saved, drafter="dflash3")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A drafter with a draft vocabulary and matrices in eight bits, to spoil."""
    target = tiny_target()
    model = Model.of(target, tiny_drafter(target, draft_vocab_size=20))
    return save(model, tmp_path / "small", int8=True).folder


GROUP = ("quantization_config", "config_groups", "group_0")
SMALL: list[tuple[Callable[[Json], None], str]] = [
    (
        put("quantization_config", "quant_method", value="hqq"),
        'quant_method: found "hqq", expected "compressed-tensors" or "fp8" or "awq" or "gptq"',
    ),
    (
        put("quantization_config", "format", value="nvfp4-pack-quantized"),
        'format: found "nvfp4-pack-quantized", expected "pack-quantized" or',
    ),
    (put(*GROUP, "weights", "num_bits", value=4), "weights.num_bits: found 4, expected 8"),
    (put(*GROUP, "weights", "symmetric", value=False), "weight_zero_point: found nothing, expec"),
    (put(*GROUP, "weights", "strategy", value="group"), "group_size: found nothing, expected an"),
    (put(*GROUP, "weights", "strategy", value="token"), 'strategy: found "token", expected "chan'),
    (drop(*GROUP, "weights"), "group_0.weights: found nothing, expected an object"),
    (drop("quantization_config"), "tensor fc.weight: found INT8, expected FLOAT or FLOAT16"),
    (drop("draft_vocab_size"), "predecessor_codebook: found shape [20, 8], expected shape [48, 8]"),
]


@pytest.mark.parametrize(("change", "message"), SMALL)
def test_settings_of_a_small_drafter(
    change: Callable[[Json], None], message: str, small: Path
) -> None:
    edit_json(small / "dflash2" / "config.json", change)
    assert message in refused(small)


def typed(name: str, dtype: type) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name].astype(dtype)})


def tokens(*ids: int) -> Callable[[Tensors], None]:
    """The draft vocabulary begins with other tokens."""

    def change(tensors: Tensors) -> None:
        tensors["d2t"][: len(ids)] = np.asarray(ids) - np.arange(len(ids))

    return change


SMALL_WEIGHTS: list[tuple[Callable[[Tensors], None], str]] = [
    (missing("fc.weight_scale"), "tensor fc.weight_scale: found nothing, expected shape [32, 1]"),
    (
        replaced("fc.weight_scale", np.zeros(7, np.float32)),
        "found shape [7], expected shape [32, 1]",
    ),
    (typed("fc.weight_scale", np.int64), "tensor fc.weight_scale: found INT64, expected FLOAT"),
    (typed("fc.weight", np.float32), "tensor fc.weight: found FLOAT, expected INT8"),
    (typed("norm.weight", np.int8), "tensor norm.weight: found INT8, expected FLOAT"),
    (typed("d2t", np.float32), "tensor d2t: found FLOAT, expected INT64"),
    (missing("d2t"), "tensor d2t: found nothing, expected shape [20]"),
    (
        tokens(0, 0),
        "tensor d2t: found draft id 1 for token 0, after token 0, expected tokens in 0..47, each",
    ),
    (tokens(-1), "found draft id 0 for token -1, expected"),
    (lambda tensors: tensors["d2t"].__setitem__(19, 48), "found draft id 19 for token 67, after"),
]


@pytest.mark.parametrize(("change", "message"), SMALL_WEIGHTS)
def test_tensors_of_a_small_drafter(
    change: Callable[[Tensors], None], message: str, small: Path
) -> None:
    edit_tensors(small / "dflash2" / "model.safetensors", change)
    assert message in refused(small)
