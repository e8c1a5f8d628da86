"""Compute the numbers of the quantized targets in ``data`` again: dequantized here, then transformers.

    python tests/hub/regenerate_quantized.py [--write] [FOLDER ...]

The matrices are dequantized by the formulas below, apart from the code under test, and written as a
checkpoint in float32, which ``regenerate.py`` computes with. Needs the ``full`` extra.

| layout | value |
|---|---|
| AWQ | ``(q - z) * scale``; nibbles of a word, low first, are columns 0 2 4 6 1 3 5 7 of its eight |
| GPTQ | ``(q - (z + 1)) * scale[g_idx]``; values packed along the inputs |
| pack-quantized | ``(q - z) * scale``; values packed along the inputs, zero points along the outputs |
| fp8 | ``q * scale_inv[row // 128, column // 128]`` |
| MXFP4 | ``E2M1[q] * 2 ** (scale - 127)``, of experts; the result is transposed |
"""  # noqa: E501 - a table

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import regenerate
import torch
from safetensors.torch import load_file, save_file

FOLDERS = (
    "gpt_oss_mxfp4",
    "llama_w4a16_asym",
    "qwen25_awq",
    "qwen25_gptq_act_order",
    "qwen3_fp8_ragged",
)

Array = np.ndarray


def nibbles(words: Array) -> Array:
    """Return the eight halves of bytes of each int32, low first, along a new last axis."""
    return words.astype(np.int64)[..., None] >> np.arange(0, 32, 4) & 15


def awq(part: dict[str, Array], group: int) -> Array:
    """Return a matrix [out, in]."""

    def columns(words: Array) -> Array:
        wide = np.empty((len(words), words.shape[1] * 8), np.int64)
        for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            wide[:, column::8] = nibbles(words)[..., place]
        return wide

    values, zeros = columns(part["qweight"]), columns(part["qzeros"])
    rows = np.arange(len(values)) // group
    return ((values - zeros[rows]) * part["scales"].astype(np.float32)[rows]).T


def gptq(part: dict[str, Array], group: int) -> Array:
    """Return a matrix [out, in]."""
    words = part["qweight"]
    values = nibbles(words).transpose(0, 2, 1).reshape(len(words) * 8, -1)
    zeros = nibbles(part["qzeros"]).reshape(len(part["qzeros"]), -1) + 1
    groups = part["g_idx"]
    return ((values - zeros[groups]) * part["scales"].astype(np.float32)[groups]).T


def packed(part: dict[str, Array], group: int) -> Array:
    """Return a matrix [out, in]."""
    words, zero_words = part["weight_packed"], part["weight_zero_point"]
    rows, columns = part["weight_shape"]
    values = nibbles(words).reshape(rows, -1)[:, :columns]
    zeros = nibbles(zero_words).transpose(0, 2, 1).reshape(-1, zero_words.shape[1])[:rows]
    scale = part["weight_scale"].astype(np.float32)
    return (values - np.repeat(zeros, group, axis=1)) * np.repeat(scale, group, axis=1)


def fp8(part: dict[str, Array], group: int) -> Array:
    """Return a matrix [out, in]."""
    rows, columns = (np.arange(size) // group for size in part["weight"].shape)
    return part["weight"] * part["weight_scale_inv"][rows][:, columns]


E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Sizes of the numbers of four bits, whose highest is the sign."""


def mxfp4(blocks: Array, scales: Array) -> Array:
    """Return the matrices of experts, [E, in, out]."""
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1)  # the low half first
    values = np.concatenate([E2M1, -E2M1])[halves]  # [E, out, in / 32, 16, 2]
    grouped = (
        values.reshape(*scales.shape, 32) * np.exp2(scales.astype(np.float32) - 127)[..., None]
    )
    return grouped.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


def dequantized_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a target with experts in MXFP4, in float32."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix("_blocks")
        if stem != name:
            wide = mxfp4(tensor.numpy(), tensors[f"{stem}_scales"].numpy())
            found[stem] = torch.tensor(wide).contiguous()
        elif not name.endswith("_proj_scales"):
            found[name] = tensor.float()
    return found


def dequantized(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the settings and the tensors of a folder without quantization, in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings = config.pop("quantization_config")
    if settings["quant_method"] == "mxfp4":
        return config, dequantized_experts(load_file(folder / "model.safetensors"))
    formula = {"awq": awq, "gptq": gptq, "fp8": fp8}.get(settings["quant_method"], packed)
    group = settings.get("group_size", 128)
    if "config_groups" in settings:
        group = settings["config_groups"]["group_0"]["weights"]["group_size"]
    parts: dict[str, dict[str, Array]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        wide = tensor.float() if tensor.is_floating_point() else tensor
        parts.setdefault(module, {})[kind] = wide.numpy()
    found: dict[str, torch.Tensor] = {}
    for module, part in parts.items():
        if len(part.keys() - {"weight", "bias"}):
            found[f"{module}.weight"] = torch.tensor(formula(part, group)).float()
        else:
            found[f"{module}.weight"] = torch.tensor(part["weight"])
        if np.any(part.get("bias", 0)):
            found[f"{module}.bias"] = torch.tensor(part["bias"])
    return config, {name: tensor.contiguous() for name, tensor in found.items()}


def main() -> None:
    """Compare, and write if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for name in options.folders:
        folder = regenerate.DATA / name
        before = dict(np.load(folder / "golden.npz"))
        with tempfile.TemporaryDirectory() as temporary:
            config, tensors = dequantized(folder)
            (Path(temporary) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            save_file(tensors, Path(temporary) / "model.safetensors", {"format": "pt"})
            after = regenerate.again(regenerate.reference(Path(temporary)), before)
        regenerate.compare(name, before, after, write=options.write)


if __name__ == "__main__":
    main()
