"""LoRA adapters in PEFT's layout, against a merge in plain numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import jaxdraft
from convert import ArtifactError
from jaxdraft.nn.packed import PackedLinear
from tests.convert.test_gguf import LAYOUTS, checkpoint, numbers, write

Tensors = dict[str, np.ndarray]

RANK, ALPHA = 4, 6
SETTINGS = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": ALPHA,
    "target_modules": ["q_proj", "down_proj", "embed_tokens"],
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "lora_dropout": 0.1,
    "init_lora_weights": True,
    "rank_pattern": {},
    "alpha_pattern": {},
}

QUERY = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
EMBED = "model.embed_tokens.weight"


def factors(base: Tensors, names: tuple[str, ...] = (QUERY, DOWN)) -> Tensors:
    """The tensors of an adapter."""
    rng = np.random.default_rng(3)
    found: Tensors = {}
    for name in names:
        rows, columns = base[name].shape
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"
        if name == EMBED:
            a, b, rows, columns = (
                f"{stem}.lora_embedding_A",
                f"{stem}.lora_embedding_B",
                columns,
                rows,
            )
        found[a] = rng.normal(size=(RANK, columns)).astype(np.float32)
        found[b] = rng.normal(size=(rows, RANK)).astype(np.float32)
    return found


def adapter(folder: Path, tensors: Tensors, **settings: Any) -> Path:
    """Write an adapter."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS | settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(base: Tensors, tensors: Tensors, scale: float) -> Tensors:
    """The base with ``scale * B @ A`` added, by numpy."""
    found = dict(base)
    for name, values in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in tensors:
            a, b = tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"]
            found[name] = values + scale * (b @ a)
        if f"{stem}.lora_embedding_A" in tensors:
            a, b = tensors[f"{stem}.lora_embedding_A"], tensors[f"{stem}.lora_embedding_B"]
            found[name] = values + scale * (b @ a).T
    return found


def assert_close(found: jaxdraft.Model, expected: jaxdraft.Model) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5),
        found.target,
        expected.target,
    )


@pytest.fixture
def base(tmp_path: Path) -> Tensors:
    """A model with a head of its own, in a folder ``base``."""
    found = numbers(*LAYOUTS["llama"])
    checkpoint(tmp_path / "base", "llama", found)
    return found


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, ALPHA / RANK),
        ({"use_rslora": True}, ALPHA / RANK**0.5),
        ({"alpha_pattern": {"self_attn.q_proj": 2, "down_proj": 2, "embed_tokens": 2}}, 0.5),
        ({"r": 8, "rank_pattern": {".*_proj": RANK, "embed_tokens": RANK}}, ALPHA / RANK),
        ({"alpha_pattern": {"^layers.0.self_attn.q_proj": 2, "^model.*": 8}}, 2.0),
    ],
)
def test_merging_equals_numpy(
    settings: dict[str, Any], scale: float, base: Tensors, tmp_path: Path
) -> None:
    """A part of a fused matrix, one that is whole, and an embedding."""
    tensors = factors(base, (QUERY, DOWN, EMBED))
    wide = checkpoint(tmp_path / "wide", "llama", merged(base, tensors, scale))
    folder = adapter(tmp_path / "lora", tensors, **settings)
    found = jaxdraft.load(tmp_path / "base", adapter=folder)
    assert_close(found, jaxdraft.load(wide))


def test_modules_that_are_stored_whole(base: Tensors, tmp_path: Path) -> None:
    head = np.ones_like(base["lm_head.weight"])
    tensors = {**factors(base), "base_model.model.lm_head.weight": head}
    folder = adapter(tmp_path / "lora", tensors, modules_to_save=["lm_head"])
    expected = merged(base, tensors, ALPHA / RANK) | {"lm_head.weight": head}
    found = jaxdraft.load(tmp_path / "base", adapter=folder)
    assert_close(found, jaxdraft.load(checkpoint(tmp_path / "wide", "llama", expected)))


def test_a_stored_base_takes_the_place_of_the_matrix_that_is_adapted(
    base: Tensors, tmp_path: Path
) -> None:
    """PEFT stores an adapted embedding beside its change."""
    tensors = factors(base, (QUERY, EMBED))
    other = base | {EMBED: 2 * base[EMBED]}
    stored = tensors | {f"base_model.model.{EMBED[:-7]}.base_layer.weight": other[EMBED]}
    found = jaxdraft.load(tmp_path / "base", adapter=adapter(tmp_path / "lora", stored))
    expected = merged(other, tensors, ALPHA / RANK)
    assert_close(found, jaxdraft.load(checkpoint(tmp_path / "wide", "llama", expected)))


def test_packed_matrices_that_are_adapted_become_floats(tmp_path: Path) -> None:
    """A GGUF file; the others stay packed."""
    stored = write(tmp_path / "base.gguf", "llama", numbers(*LAYOUTS["llama"]))
    tensors = factors(stored)
    folder = adapter(tmp_path / "lora", tensors)
    found: Any = jaxdraft.load(tmp_path / "base.gguf", adapter=folder, packed=True)
    wide = checkpoint(tmp_path / "wide", "llama", merged(stored, tensors, ALPHA / RANK))
    expected: Any = jaxdraft.load(wide)
    theirs: Any = dict(nnx.iter_modules(expected.target.decoder()))
    packed = set()
    for path, module in nnx.iter_modules(found.target.decoder()):
        if isinstance(module, PackedLinear):
            packed.add(path[-1])
            np.testing.assert_allclose(module.dequantized(), theirs[path].weight[...], atol=1e-6)
    assert packed == {"o", "gate_up", "embed", "head"}
    layer = found.target.decoder.params["layers"][0]
    other = expected.target.decoder.params["layers"][0]
    for part, name in (("mixer", "qkv"), ("mlp", "down")):
        ours, plain = layer[part][name]["weight"], other[part][name]["weight"]
        np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-5)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora: found true, expected false"),
    "transposed": ({"fan_in_fan_out": True}, "fan_in_fan_out: found true, expected false"),
    "biases": ({"bias": "all"}, 'bias: found "all", expected "none"'),
    "kind": ({"peft_type": "LOHA"}, 'peft_type: found "LOHA", expected "LORA"'),
    "residual": ({"init_lora_weights": "pissa"}, "expected one for the base as it is"),
    "experts": ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters: found"),
    "flag": ({"use_rslora": 1}, "use_rslora: found 1, expected true or false"),
    "pattern": ({"alpha_pattern": {"q_proj(": 2}}, "expected a regular expression"),
    "fraction": ({"rank_pattern": {"q_proj": 4.5}}, "found 4.5, expected an integer"),
    "rank": ({"r": 8}, "found rank 4, expected 8, as in adapter_config.json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_are_refused(name: str, base: Tensors, tmp_path: Path) -> None:
    settings, message = REFUSED[name]
    folder = adapter(tmp_path / "lora", factors(base), **settings)
    with pytest.raises(ArtifactError) as raised:
        jaxdraft.load(tmp_path / "base", adapter=folder)
    assert message in str(raised.value)


def test_tensors_that_are_refused(base: Tensors, tmp_path: Path) -> None:
    whole = factors(base)
    names = [name for name in whole if "q_proj" in name]
    changes: list[tuple[Tensors, str]] = [
        ({n: v for n, v in whole.items() if n != names[0]}, "found ['B'] alone, expected both"),
        (whole | {names[0]: np.zeros((RANK, 3), np.float32)}, "expected [r, 64] and [64, r]"),
        (whole | {names[0].removesuffix(".weight"): whole[names[0]]}, "found a second tensor"),
        (whole | {n[len("base_model.model.") :]: v for n, v in whole.items()}, "a second tensor"),
        (
            whole | {"base_model.model.lm_head.base_layer.weight": base["lm_head.weight"]},
            "found no lora_A and lora_B, expected both",
        ),
        ({n.replace("q_proj", "z_proj"): v for n, v in whole.items()}, "a matrix of the target"),
        (whole | {"base_model.model.x": np.zeros(3, np.float32)}, "expected lora_A, lora_B, or"),
        ({n: v.astype(np.int8) for n, v in whole.items()}, "found INT8, expected FLOAT or"),
        ({"base_model.model.lm_head.weight": np.zeros((2, 2), np.float32)}, "expected shape [96"),
    ]
    for tensors, message in changes:
        folder = adapter(tmp_path / "lora", tensors)
        with pytest.raises(ArtifactError) as raised:
            jaxdraft.load(tmp_path / "base", adapter=folder)
        assert message in str(raised.value)


def test_folders_that_are_refused(base: Tensors, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "lora", factors(base))
    with pytest.raises(ArtifactError, match="found an adapter, expected its base"):
        jaxdraft.load(folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ArtifactError, match="which can hold programs, expected adapter_model.safe"):
        jaxdraft.load(tmp_path / "base", adapter=folder)
    with pytest.raises(ArtifactError, match="found no adapter_config.json, expected a folder"):
        jaxdraft.load(tmp_path / "base", adapter=tmp_path)
