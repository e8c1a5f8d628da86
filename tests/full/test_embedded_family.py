"""The prompts that come with the package, asked again.

``JAXDRAFT_BUILDER`` names an interpreter that has torch and transformers; default: this one.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from jaxdraft import EMBEDDED
from jaxdraft.demo import embedded_prompts

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
PYTHON = os.environ.get("JAXDRAFT_BUILDER", sys.executable)

pytestmark = pytest.mark.full


def test_transformers_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens and margins of the committed checkpoint."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    script = importlib.import_module("family_prompts")
    prompts = embedded_prompts()
    answer = script.reference(PYTHON, EMBEDDED / "target", [p["prompt_ids"] for p in prompts])
    for found, prompt in zip(answer["prompts"], prompts, strict=True):
        assert found["greedy"] == prompt["greedy"]
        assert found["min_margin"] == pytest.approx(prompt["min_margin"], abs=2e-4)
