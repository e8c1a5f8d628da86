"""Reports: what an artifact is, without loading it, and never an exception for a bad one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convert import inspect_artifact, load_artifact
from tests.convert.helpers import copied, edit_config
from tests.paths import artifact, artifact_names


@pytest.mark.parametrize("name", artifact_names())
def test_a_report_agrees_with_what_is_loaded(name: str) -> None:
    report = inspect_artifact(artifact(name))
    loaded = load_artifact(artifact(name))
    assert report.loads and report.problems == ()
    assert report.target.config == loaded.target_config
    assert report.target.stored_bytes == loaded.stored_bytes["target"]
    assert report.target.weight_bytes == loaded.weight_bytes["target"]
    assert (report.drafter is not None) == (loaded.drafter is not None)
    if report.drafter is not None:
        assert report.drafter.config == loaded.drafter_config
        assert report.drafter.kind == loaded.drafter_kind
        assert report.drafter.weight_bytes == loaded.weight_bytes["drafter"]
    facts = json.loads(json.dumps(report.summary()))
    assert facts["target"]["layers"] and facts["problems"] == []
    assert facts["files"]["model.onnx.data"] > 0


@pytest.mark.parametrize("name", artifact_names(broken=True))
def test_a_broken_export_is_reported(name: str) -> None:
    report = inspect_artifact(artifact(name))
    assert not report.loads and len(report.problems) == 1
    assert json.dumps(report.summary())


def test_problems_of_all_parts_are_reported(tmp_path: Path) -> None:
    folder = copied("qwen35_paged_fp16_dflash2", tmp_path)
    edit_config(folder, lambda c: c["model"]["dflash2"].update(surprise=1))
    (folder / "dflash2.onnx.data").unlink()
    (folder / "model.onnx").write_bytes(b"nothing")
    report = inspect_artifact(folder)
    assert [p.file for p in report.problems] == ["genai_config.json", "model.onnx", "dflash2.onnx"]
    assert report.target is None and report.drafter is None
    assert json.dumps(report.summary())


def test_an_empty_folder_and_none(tmp_path: Path) -> None:
    report = inspect_artifact(tmp_path)
    assert len(report.problems) == 1 and report.target is None
    assert json.dumps(report.summary())
    with pytest.raises(FileNotFoundError):
        inspect_artifact(tmp_path / "nowhere")


def test_notes(tmp_path: Path) -> None:
    folder = copied("qwen35_paged_fp16_dflash2", tmp_path)

    def change(config: dict) -> None:
        config["model"]["context_length"] = 2048
        config["model"]["decoder"]["surprise"] = 1
        del config["model"]["dflash2"]

    report = inspect_artifact(edit_config(folder, change))
    assert report.loads
    text = "\n".join(report.notes)
    assert "model.decoder.surprise is 1: an unknown setting" in text
    assert "cover 640 positions" in text and "artifact has none" in text


def test_a_window_that_the_export_lost_is_noted(tmp_path: Path) -> None:
    """The builder knows windows by layer types: a model without any is exported without its window,
    and the configuration still names it.
    """

    def change(config: dict) -> None:
        config["model"]["decoder"]["sliding_window"] = {
            "window_size": 4096,
            "slide_key_value_cache": False,
            "slide_inputs": False,
            "layers": [],
            "cache_slack": 0,
        }

    report = inspect_artifact(edit_config(copied("qwen3_fp32_cpu", tmp_path), change))
    assert report.loads
    assert "names a window of 4096 that no layer" in "\n".join(report.notes)
