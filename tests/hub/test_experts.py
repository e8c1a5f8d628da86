"""Experts in published layouts: kept packed, stacked on load, and settings that are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxdraft
from convert import ArtifactError
from jaxdraft.checkpoint import save
from jaxdraft.checkpoint.config import quantization_json
from jaxdraft.checkpoint.forms import from_int8, to_int8
from jaxdraft.nn.experts import PackedExperts
from tests.checkpoint.helpers import edit_json, edit_tensors
from tests.hub import helpers

MXFP4, MIXED, BF16 = "gpt_oss_mxfp4", "qwen3_moe_mixed", "gpt_oss_bf16"

Json = dict[str, Any]


def expert_bytes(model: Any) -> tuple[int, int]:
    """Bytes of the matrices of all experts, and numbers in them."""
    total = numbers = 0
    for layer in model.target.decoder().layers:
        for part in (layer.mlp.gate_up, layer.mlp.down):
            packed = isinstance(part, PackedExperts)
            total += sum(leaf.nbytes for leaf in jax.tree.leaves(part.table if packed else part))
            numbers += part.form.outputs * part.form.inputs * 4 if packed else part[...].size
    return total, numbers


def test_experts_in_mxfp4_stay_packed_unless_floats_are_asked_for() -> None:
    """Four bits and a scale of eight per 32 numbers; the floats are bit for bit the same."""
    arrays = helpers.golden(MXFP4)
    packed = helpers.load(MXFP4, drafter="none")
    floats = helpers.load(MXFP4, drafter="none", packed=False)
    size, numbers = expert_bytes(packed)
    assert size == numbers * (4 + 8 / 32) / 8 and expert_bytes(floats) == (4 * numbers, numbers)
    helpers.assert_logits(floats, arrays, "prompt2")
    both = (model.target.decoder().layers for model in (packed, floats))  # type: ignore[attr-defined]
    for ours, theirs in zip(*both, strict=True):
        for part in ("gate_up", "down"):
            table = getattr(ours.mlp, part).table
            wide = jax.vmap(type(table).dequantized)(table)
            np.testing.assert_array_equal(wide, getattr(theirs.mlp, part)[...])
    assert jaxdraft.inspect(helpers.DATA / MXFP4).target.weight_bytes == _bytes_of(  # type: ignore[union-attr]
        jaxdraft.load(helpers.DATA / MXFP4, drafter="none")
    )


def test_a_configuration_alone_gives_the_bytes_of_packed_experts(tmp_path: Path) -> None:
    shutil.copyfile(helpers.DATA / MXFP4 / "config.json", tmp_path / "config.json")
    found, whole = (jaxdraft.inspect(each).target for each in (tmp_path, helpers.DATA / MXFP4))
    assert found is not None and whole is not None
    assert (found.weight_bytes, found.stored_bytes) == (whole.weight_bytes, whole.stored_bytes)
    assert found.counts == whole.counts and found.tensors == whole.tensors


def _bytes_of(model: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model.target.decoder.params))


@pytest.mark.parametrize("name", [MXFP4, MIXED, BF16])
def test_experts_are_saved_byte_for_byte(name: str, tmp_path: Path) -> None:
    model = jaxdraft.load(helpers.DATA / name, drafter="none")
    save(model, tmp_path / "out")
    ours, theirs = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "out" / "target", helpers.DATA / name)
    )
    assert ours.keys() == theirs.keys()
    for key, array in ours.items():
        assert array.shape == theirs[key].shape and array.tobytes() == theirs[key].tobytes(), key


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    """Copies of folders to spoil."""
    return lambda name: Path(shutil.copytree(helpers.DATA / name, tmp_path / name))


def test_separate_experts_that_are_quantized_stay_packed(copy: Callable[[str], Path]) -> None:
    """Every matrix of an expert is a quantized tensor of its own: one packed stack in memory."""
    folder = copy(MIXED)
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if ".experts." in key]:
        values, scales = to_int8(tensors[key].astype(np.float32), np.dtype(np.float32))
        tensors |= {key: values, f"{key}_scale": scales}
    save_file(tensors, folder / "model.safetensors")
    edit_json(folder / "config.json", lambda c: c.update(quantization_config=quantization_json(8)))
    packed = jaxdraft.load(folder, dtype="float32", drafter="none", packed=True)
    wide = jaxdraft.load(folder, dtype="float32", drafter="none")
    mlp = packed.target.decoder().layers[0].mlp  # type: ignore[attr-defined]
    assert isinstance(mlp.gate_up, PackedExperts) and mlp.gate_up.weight_q[...].shape[0] == 4
    key = "model.layers.0.mlp.experts.3.up_proj.weight"
    third = np.asarray(wide.target.decoder().layers[0].mlp.gate_up[...])[3, 28:]  # type: ignore[attr-defined]
    np.testing.assert_array_equal(third, from_int8(tensors[key], tensors[f"{key}_scale"]))
    ids = np.arange(9)
    found, expected = (helpers.logits_of(model, ids) for model in (packed, wide))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def settings(**values: Any) -> Callable[[Json], None]:
    return lambda body: body.update(values)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        (MIXED, settings(mlp_only_layers=[3]), r"mlp_only_layers: found \[3\], expected .* 0\.\.2"),
        (MIXED, settings(mlp_only_layers=[0, 1, 2]), "at least one layer with experts"),
        (MIXED, settings(num_experts_per_tok=5), "num_experts_per_tok: found 5, expected .* 1..4"),
        (MIXED, settings(norm_topk_prob="yes"), "norm_topk_prob: found .yes., expected true or f"),
        (MIXED, settings(use_sliding_window=True), "use_sliding_window: found true"),
        (BF16, settings(swiglu_alpha=1.0), "swiglu_alpha: found 1.0, expected 1.702"),
        (BF16, settings(experts_per_token=3), "experts_per_token: found 3, expected 2"),
        (BF16, settings(num_local_experts=3), r"router.weight: found shape \[4, 64\], expected"),
        (MXFP4, settings(intermediate_size=48), r"down_proj_blocks: found .*groups of 32 that ma"),
        (MXFP4, lambda body: body.pop("quantization_config"), "gate_up_proj: found nothing"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    name: str, change: Callable[[Json], Any], match: str, copy: Callable[[str], Path]
) -> None:
    folder = copy(name)
    edit_json(folder / "config.json", change)
    with pytest.raises(ArtifactError, match=match):
        jaxdraft.load(folder, drafter="none")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (MIXED, "model.layers.2.mlp.experts.3.up_proj.weight"),
        (BF16, "model.layers.1.self_attn.sinks"),
        (BF16, "model.layers.0.mlp.experts.down_proj_bias"),
        (MXFP4, "model.layers.0.mlp.experts.down_proj_scales"),
    ],
)
def test_tensors_that_are_missing_are_named(
    name: str, tensor: str, copy: Callable[[str], Path]
) -> None:
    folder = copy(name)
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors.pop(tensor))
    with pytest.raises(ArtifactError, match=f"tensor {tensor}: found nothing"):
        jaxdraft.load(folder, drafter="none")


def test_layers_without_experts_follow_from_the_list_and_the_step(
    copy: Callable[[str], Path],
) -> None:
    folder = copy(MIXED)
    config = jaxdraft.load(folder, drafter="none").target.config  # type: ignore[attr-defined]
    assert config.dense_layers == (1,) and config.feed_forward(1).hidden == 96
    edit_json(folder / "config.json", settings(mlp_only_layers=None, decoder_sparse_step=2))
    problems = str(jaxdraft.inspect(folder).problems)  # layers 0 and 2 are dense, as described
    for layer in (0, 2):
        assert f"model.layers.{layer}.mlp.gate_proj.weight', 'nothing'" in problems
    assert "model.layers.1.mlp.experts.0.gate_proj.weight', 'nothing'" in problems
