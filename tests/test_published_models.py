"""Published models, of their settings alone: as many parameters as their repositories hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import jaxdraft

FILE = Path(__file__).resolve().parents[1] / "experiments" / "published_models.json"
MODELS: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))

LAYER = 4 * 1152**2 + 2 * 1152 * 4304 + (4 * 1152 + 4304 + 1152) + 4 * 1152
"""Parameters of a layer of the towers for pictures: attention, MLP, biases, two norms."""

TOWERS = {
    # 27 layers, pieces of 3 x 2 x 16 x 16, 2304 positions, and the merger of four pieces.
    "Qwen/Qwen3.5-27B": 27 * LAYER
    + (3 * 2 * 16 * 16 + 1 + 2304 + 2) * 1152
    + 4608 * (4608 + 1)
    + (4608 + 1) * 5120,
    # 27 layers, pieces of 3 x 14 x 14, 4096 positions, two norms, and the projection.
    "google/gemma-3-27b-it": 27 * LAYER + (3 * 14 * 14 + 1 + 4096 + 2) * 1152 + 1152 * 5376 + 1152,
}
"""Published parameters that are no part of the text model."""

EMBEDDING = {"openai/gpt-oss-20b": 201088 * 2880, "openai/gpt-oss-120b": 201088 * 2880}
"""Numbers that the published counts of active parameters leave out."""


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_published_ones(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(model["config"]))
    report = jaxdraft.inspect(tmp_path)
    assert not report.problems and report.target is not None and report.target.counts is not None
    counts = report.target.counts
    head = 0  # for multi-token prediction
    if report.drafter is not None and report.drafter.counts is not None:
        head = report.drafter.counts.parameters
    assert counts.parameters + head + TOWERS.get(name, 0) == model["published"]
    active = counts.active - EMBEDDING.get(name, 0)
    stated = model.get("published_active", counts.parameters)
    assert abs(active - stated) < 0.02 * stated
