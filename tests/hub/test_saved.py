"""Targets in published layouts: what a report says of them, and how they are saved again."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

import jaxdraft
from jaxdraft import Model
from jaxdraft.checkpoint import save
from jaxdraft.checkpoint.families import FAMILIES
from jaxdraft.nn.decoder import Decoder
from jaxdraft.target import DecoderTarget
from tests.hub import helpers

WORDS = {
    "gemma3_multimodal": "gemma3, window 10, scores times 0.218218, linear, gelu_tanh, for images",
    "gemma3_text_new": "gemma3_text, sliding 2, window 12, base 10,000, base 1,000,000, 8.0",
    "gpt_oss_bf16": "gpt_oss, biases of q, k, v, o, sinks, window 8, yarn, factor 32, clamped at 7",
    "gpt_oss_mxfp4": "gpt_oss, sinks, 2 of 4 experts of 96, router bias, biases, UINT8",
    "qwen3_moe_mixed": "qwen3_moe, 2 of 4 experts of 28, softmax over all, dense_layers [1]",
    "glm4": "glm4, 8 channels rotated in pairs, biases of q, k, v, before and after each part",
    "llama32_tied": "llama, llama3, factor 32, 128 positions before",
    "mistral_v01": "mistral, window 16",
    "olmo2": "olmo2, norms over all heads, after each part",
    "phi4_mini": "phi3, 12 channels rotated, longrope, factors for short texts, times 1.30931",
    "qwen25_tied": "qwen2, biases of q, k, v",
    "qwen3_yarn_new": "qwen3, yarn, factor 4, tables times 1.13863",
}
"""Words of a report, by folder."""


@pytest.mark.parametrize("name", WORDS)
def test_reports_name_architecture_and_properties(name: str) -> None:
    report = jaxdraft.inspect(helpers.DATA / name)
    assert report.loads
    facts = report.summary()
    assert facts["target"]["kind"] == WORDS[name].split(",")[0]
    text = str(facts["target"]).replace("':", "") + str(facts["notes"])
    for word in WORDS[name].split(", ")[1:]:
        assert word in text, (word, text)


def arrays(model: Model) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(model.target.decoder.params)  # type: ignore[attr-defined]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def stored(folder: Path) -> set[str]:
    """Names of the tensors that text needs, as the text model alone has them."""
    names = set[str]()
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, "numpy") as file:
            names |= {name.removeprefix("language_model.") for name in file.keys()}  # noqa: SIM118
    return {name for name in names if name.startswith(("model.", "lm_head."))}


@pytest.mark.filterwarnings("error")  # whatever is written is read, too
@pytest.mark.parametrize("name", WORDS)
def test_what_is_loaded_is_saved_in_its_own_layout(name: str, tmp_path: Path) -> None:
    model = helpers.load(name, drafter="none")
    saved = save(model, tmp_path / "out", dtype="float32")
    assert not saved.rounded
    assert stored(saved.folder / "target") == stored(helpers.DATA / name)
    again = jaxdraft.load(saved.folder, drafter="none")
    ours, theirs = model.target.config, again.target.config
    assert (ours, ours.rope, ours.sliding_rope) == (theirs, theirs.rope, theirs.sliding_rope)
    assert theirs.architecture == ours.architecture.removesuffix("_text") + "_text" * (
        "gemma3" in name
    )
    assert model.info.stop_ids == again.info.stop_ids
    before, after = arrays(model), arrays(again)
    assert before.keys() == after.keys()
    for path, array in before.items():
        assert array.tobytes() == after[path].tobytes(), path


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [n for n, family in FAMILIES.items() if not family.experts])
def test_every_property_of_an_architecture_is_written(name: str, tmp_path: Path) -> None:
    config = helpers.small_config(FAMILIES[name])
    target = DecoderTarget.of(Decoder(config, dtype="float32", rngs=nnx.Rngs(0)))
    saved = save(target, tmp_path / "out")
    again = jaxdraft.load(saved.folder).target.config
    assert again == config
    assert (again.rope, again.sliding_rope) == (config.rope, config.sliding_rope)
    assert FAMILIES[again.architecture].text_type in ("", FAMILIES[name].text_type)
