"""The table of architectures: in the documentation, and against the configurations read by it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from convert.checkpoint.config import read_target
from convert.errors import ArtifactError, Problems
from jaxdraft.checkpoint.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    """The script that writes the page."""
    spec = importlib.util.spec_from_file_location("docs_models", ROOT / "docs" / "models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_table_of_today(docs: ModuleType) -> None:
    text = docs.PAGE.read_text(encoding="utf-8")
    assert docs.page(text) == text, "run python docs/models.py"
    assert all(f"`{name}`" in text for name in FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_that_says_nothing_has_the_defaults(name: str) -> None:
    """``model_type`` alone is a configuration: every other key has the default of its class."""
    family = FAMILIES[name]
    body = {"model_type": name}
    whole = {**body, "text_config": {}} if family.composite else body
    problems = Problems()
    config = read_target(whole, head_stored=False, problems=problems).config
    assert not problems
    assert config.architecture == name and config.norms == family.sides
    assert config.width == family.defaults["hidden_size"]
    assert len(config.layers) == family.defaults["num_hidden_layers"]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llama", {"attention_bias": 1}, "attention_bias: found 1, expected true or false"),
        ("llama", {"mlp_bias": 1}, "mlp_bias: found 1, expected true or false"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob: found 1, expected true or false"),
        (
            "llama",
            {
                "quantization_config": {
                    "quant_method": "gptq",
                    "bits": 4,
                    "group_size": 128,
                    "desc_act": 1,
                }
            },
            "desc_act: found 1, expected true or false",
        ),
    ],
)
def test_a_number_is_not_a_boolean(name: str, settings: dict[str, Any], message: str) -> None:
    """Otherwise 1 would pass as true, and then have the effect of false."""
    with pytest.raises(ArtifactError) as raised:
        read_target({"model_type": name, **settings}, head_stored=False, problems=Problems())
    assert message in str(raised.value)
