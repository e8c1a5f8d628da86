"""Targets in published layouts: the logits and tokens that other programs compute."""

from __future__ import annotations

import pytest

from tests.hub import helpers

DECODED = ("gemma3_text_new", "gpt_oss_bf16", "llama_w4a16_asym", "mistral_v01")
"""Folders whose tokens are generated, too: windows, experts, packed matrices."""


@pytest.mark.parametrize("name", helpers.folders("logits"))
def test_logits(name: str) -> None:
    model, arrays = helpers.load(name, drafter="none"), helpers.golden(name)
    helpers.assert_logits(model, arrays, helpers.prompts(arrays)[-1])


@pytest.mark.parametrize("name", DECODED)
def test_tokens(name: str) -> None:
    model, arrays = helpers.load(name, drafter="none"), helpers.golden(name)
    helpers.assert_tokens(model, arrays, helpers.prompts(arrays)[-1])
