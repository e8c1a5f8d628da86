"""Targets in published layouts: the logits and tokens that other programs compute."""

from __future__ import annotations

import pytest

from tests.hub import helpers


@pytest.mark.parametrize("name", helpers.folders("logits"))
def test_logits_and_tokens(name: str) -> None:
    model, arrays = helpers.load(name, drafter="none"), helpers.golden(name)
    for prompt in helpers.prompts(arrays):
        helpers.assert_logits(model, arrays, prompt)
    helpers.assert_tokens(model, arrays, helpers.prompts(arrays)[-1])
