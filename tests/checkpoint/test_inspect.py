"""Reports and plans of checkpoints: what loading gives, without a number being read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import jaxdraft
from convert import ArtifactError, inspect_folder
from convert.checkpoint.load import load_checkpoint
from convert.tensors import DataFiles
from jaxdraft import Model, plan
from jaxdraft.checkpoint import save
from jaxdraft.cli import app
from tests.checkpoint.helpers import edit_json, edit_tensors
from tests.paths import FIRST_FAMILY

KINDS = ["dflash2", "dspark", "mtp", "none"]


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers lie in maps of the files. There are none."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(DataFiles, "_map", refuse)


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_agrees_with_what_is_loaded(kind: str, saved: Path) -> None:
    report = inspect_folder(saved, kind)
    loaded = load_checkpoint(saved, drafter=kind)
    assert report.loads and report.target is not None
    assert report.target.config == loaded.target_config
    assert report.eos_token_ids == loaded.eos_token_ids == (2, 7)
    parts = {"target": report.target}
    if kind == "none":
        assert report.drafter is None and loaded.drafter is None
    else:
        assert report.drafter is not None and report.drafter.kind == kind == loaded.drafter_kind
        assert report.drafter.config == loaded.drafter_config
        parts["drafter"] = report.drafter
    for name, part in parts.items():
        assert part.stored_bytes == loaded.stored_bytes[name] > 0
        assert part.weight_bytes == loaded.weight_bytes[name] > part.stored_bytes  # rotary tables
        assert part.dtype == "float32" and sum(part.tensors.values()) >= part.stored_bytes
    others = ", ".join(k for k in KINDS[:3] if k != kind)
    assert f"drafters that were not inspected: {others}" in report.notes
    facts = json.loads(json.dumps(report.summary()))
    assert facts["files"]["target/model.safetensors"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_plans_like_the_model_in_it(kind: str, saved: Path) -> None:
    options: dict[str, Any] = dict(memory="3MB", max_batch=2, context=128, page_size=16)
    model = jaxdraft.load(saved, drafter=kind)
    assert plan(saved, drafter=kind, **options).facts() == plan(model, **options).facts()


def test_plans_cost_what_the_stored_types_do(family: dict[str, Model], tmp_path: Path) -> None:
    """And nothing is said of pages and rows, so they are those of a model without an artifact."""
    model = family["dflash2"]
    save(model, tmp_path / "out", dtype="bfloat16")
    narrow, wide = plan(tmp_path / "out", pages=4), plan(model, pages=4)
    assert narrow.target_page_bytes * 2 == wide.target_page_bytes
    assert narrow.facts() == plan(jaxdraft.load(tmp_path / "out"), pages=4).facts()
    assert (narrow.max_batch, narrow.page_size) == (8, 256)


@pytest.mark.usefixtures("unread")
def test_no_number_is_read(saved: Path) -> None:
    for kind in KINDS:
        assert inspect_folder(saved, kind).loads
        plan(saved, drafter=kind, memory="3MB", page_size=16)
    with pytest.raises(AssertionError, match="a weight was read"):
        jaxdraft.load(saved)


def test_copies_are_compared_by_loading(copy: Path) -> None:
    """Of the target's matrices, which some drafters bring: equal shapes are all a header tells."""
    vocab, width = load_file(copy / "target" / "model.safetensors")["lm_head.weight"].shape

    def add(rows: int) -> Any:
        return lambda tensors: tensors.update(
            {"lm_head.weight": np.zeros((rows, width), np.float32)}
        )

    weights = copy / "dspark" / "model.safetensors"
    edit_tensors(weights, add(vocab))
    assert inspect_folder(copy, "dspark").loads
    with pytest.raises(ArtifactError, match="other numbers"):
        jaxdraft.load(copy, drafter="dspark")
    edit_tensors(weights, add(vocab + 1))
    assert not inspect_folder(copy, "dspark").loads


def test_a_folder_of_the_target_alone(saved: Path) -> None:
    """Files are named from there, drafters found beside it."""
    report = inspect_folder(saved / "target")
    assert report.target is not None and report.target.file == "model.safetensors"
    assert report.drafter is not None and report.drafter.file == "dflash2/model.safetensors"
    assert inspect_folder(saved).target.file == "target/model.safetensors"  # type: ignore[union-attr]
    assert inspect_folder(saved / "target", saved / "dspark").drafter.kind == "dspark"  # type: ignore[union-attr]


def test_shards_are_named_by_their_index(family: dict[str, Model], tmp_path: Path) -> None:
    save(family["mtp"], tmp_path / "out", max_shard_bytes=10_000)
    report = inspect_folder(tmp_path / "out")
    loaded = load_checkpoint(tmp_path / "out")
    assert report.loads and report.target is not None and report.drafter is not None
    assert report.target.file == "target/model.safetensors.index.json"
    assert report.target.stored_bytes == loaded.stored_bytes["target"]
    assert report.drafter.kind == "mtp"


def test_tensors_without_a_use_are_noted(original: Path) -> None:
    """The vision tower; nothing else is left over."""
    (note,) = (n for n in inspect_folder(original).notes if "model.visual." in n)
    assert "21 tensors model.visual.* are not read: for images" in note


def test_what_loading_refuses_is_reported(copy: Path) -> None:
    """The target is described though its drafter is wrong, and nothing is without a target."""
    edit_json(copy / "dspark" / "config.json", lambda c: c.update(surprise=1, hidden_size=31))
    report = inspect_folder(copy, "dspark")
    with pytest.raises(ArtifactError) as caught:
        jaxdraft.load(copy, drafter="dspark")
    assert [str(p) for p in report.problems] == [str(p) for p in caught.value.problems]
    assert len(report.problems) == 2 and report.target is not None and report.drafter is None
    assert inspect_folder(copy).loads  # the other drafter is as it should be
    with pytest.raises(
        ValueError, match="cannot be loaded, so nothing can be planned: dspark/config.json"
    ):
        plan(copy, drafter="dspark", memory="1GiB")
    (copy / "target" / "model.safetensors").write_bytes(b"nothing")
    report = inspect_folder(copy)
    assert report.target is None and report.drafter is None and report.context_length is None
    (problem,) = report.problems
    assert problem.file == "target/model.safetensors" and json.dumps(report.summary())


def test_drafters_that_are_not_there(saved: Path) -> None:
    with pytest.raises(ValueError, match="no such drafter.*expected dflash2, dspark, mtp, none"):
        inspect_folder(saved, "eagle")
    with pytest.raises(ValueError, match="only a checkpoint offers a choice"):
        plan(FIRST_FAMILY, drafter="dspark", memory="1GiB")
    with pytest.raises(ValueError, match="a loaded model has its drafter"):
        plan(jaxdraft.load(saved), drafter="dspark", memory="1GiB")
    with pytest.raises(FileNotFoundError):
        inspect_folder(saved / "nowhere", "dspark")


def test_the_command(saved: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["inspect", str(saved), *arguments], env={"COLUMNS": "160"})

    shown = run("--memory", "4MiB", "--drafter", "dspark")
    assert shown.exit_code == 0, shown.output
    for text in ("dspark/model.safetensors", "drafter spill", "no problems found", "dflash2, mtp"):
        assert text in shown.output
    options = ["--memory", "4MiB", "--max-batch", "2", "--context", "64", "--page-size", "16"]
    facts = json.loads(run("--json", *options).output)
    expected = plan(saved, memory="4MiB", max_batch=2, context=64, page_size=16)
    assert facts["plan"] == expected.facts() and facts["drafter"]["kind"] == "dflash2"
    refused = run("--drafter", "eagle")
    assert refused.exit_code == 2 and "no such drafter" in " ".join(refused.output.split())


def test_the_command_fails_with_the_checkpoint(copy: Path) -> None:
    edit_json(copy / "dflash2" / "config.json", lambda c: c.update(surprise=1))
    shown = CliRunner().invoke(app, ["inspect", str(copy)])
    assert shown.exit_code == 1
    said = " ".join(shown.output.split())
    assert "problem: dflash2/config.json: surprise: found an unknown key" in said
