"""Models of which only the description is there: what would be loaded, without a weight."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import jaxdraft
from convert import ArtifactError
from jaxdraft.checkpoint import save
from jaxdraft.cli import app
from tests.paths import FIRST_FAMILY

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a target in shards, with their index."""
    folder = tmp_path_factory.mktemp("whole") / "family"
    save(jaxdraft.load(FIRST_FAMILY, drafter="none"), folder, max_shard_bytes=1 << 20)
    return folder / "target"


def outline(whole: Path, folder: Path, *names: str) -> Path:
    """Make a folder with some of the files of a target."""
    folder.mkdir()
    for name in ("config.json", *names):
        shutil.copy(whole / name, folder)
    return folder


@pytest.mark.parametrize("names", [(), (INDEX,)])
def test_a_description_says_what_the_whole_model_would(
    names: tuple[str, ...], whole: Path, tmp_path: Path
) -> None:
    folder = outline(whole, tmp_path / "outline", *names)
    found, full = jaxdraft.inspect(folder), jaxdraft.inspect(whole)
    assert full.loads and not found.loads and not found.weights and not found.problems
    assert found.target is not None and full.target is not None
    assert found.target.config == full.target.config
    assert found.target.counts == full.target.counts
    assert found.target.weight_bytes == full.target.weight_bytes
    assert found.target.stored_bytes == full.target.stored_bytes
    assert found.context_length == full.context_length
    assert jaxdraft.plan(folder, pages=3).costs == jaxdraft.plan(whole, pages=3).costs
    assert jaxdraft.overview(folder) == jaxdraft.overview(whole)
    with pytest.raises(ArtifactError, match="model.*safetensors"):
        jaxdraft.load(folder)


def test_an_index_that_does_not_fit_is_a_problem(whole: Path, tmp_path: Path) -> None:
    folder = outline(whole, tmp_path / "outline", INDEX)
    body = json.loads((whole / INDEX).read_text())
    body["weight_map"]["model.other"] = body["weight_map"].pop("lm_head.weight")
    (folder / INDEX).write_text(json.dumps(body))
    missing, other = jaxdraft.inspect(folder).problems
    assert "lm_head.weight" in missing.where and "model.other" in other.where
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "a"}}))
    problems = jaxdraft.inspect(folder).problems
    assert problems[-1].file == INDEX and "more" in problems[-1].found
    with pytest.raises(ValueError, match="cannot be loaded"):
        jaxdraft.overview(folder)


def test_counts_and_bytes_by_hand(tmp_path: Path) -> None:
    """Of a Qwen3 with experts of its own size: every number is written out."""
    config = {
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    attention = (4 + 2 + 2) * 32 * 64 + 64 * 4 * 32
    matrices = 2 * (attention + 3 * 64 * 128)
    rows = 2 * ((4 + 2 + 2) * 32 + 64 + 2 * 128 + 64)
    total = 1000 * 64 + matrices + 2 * (2 * 64 + 2 * 32) + 64
    tables = 2 * 512 * 16 * 4  # cosines and sines of half the channels
    report = jaxdraft.inspect(tmp_path)
    assert report.target is not None and report.target.counts is not None
    counts = report.target.counts
    assert (counts.parameters, counts.active, counts.matrices) == (total, total, matrices)
    assert (counts.rows, counts.computed_bytes) == (rows, tables)
    wide, half, int8, int4 = jaxdraft.overview(tmp_path, memories=["2MB"]).fits
    assert [fit.form for fit in (wide, half, int8, int4)] == ["float32", "bfloat16", "int8", "int4"]
    assert wide.weights == 4 * total + tables and half.weights == 2 * total + tables
    rest = 2 * (total - matrices) + tables
    assert int8.weights == rest + matrices + 2 * rows
    assert int4.weights == rest + matrices // 2 + matrices // 64 * 2
    position = 2 * 2 * 2 * 32  # keys and values of two layers with two heads
    assert (wide.cache, half.cache) == (4000 * position, 2000 * position)
    assert {fit.row for fit in (wide, half, int8, int4)} == {0}
    left = [2_000_000 - fit.weights for fit in (half, int4)]
    assert [fit.rows["2MB"] for fit in (half, int4)] == [b // (512 * 2 * position) for b in left]
    assert half.tokens["2MB"] == 512
    small = jaxdraft.overview(tmp_path, memories=["600KB"]).fits
    assert small[0].tokens["600KB"] == small[0].rows["600KB"] == 0
    assert small[1].rows["600KB"] == 0 and small[1].tokens["600KB"] == 256  # one page


def test_a_language_model_that_drafts_is_counted(whole: Path, tmp_path: Path) -> None:
    small = outline(whole, tmp_path / "small", INDEX)
    alone, found = jaxdraft.overview(whole), jaxdraft.overview(whole, drafter=str(whole))
    assert found.drafter == "draft_model" and found.drafter_parameters == alone.parameters
    for fit, one in zip(found.fits, alone.fits, strict=True):
        assert fit.weights == 2 * one.weights and fit.cache == 2 * one.cache
    assert jaxdraft.overview(small, drafter=small) == found


def test_the_shell(whole: Path, tmp_path: Path) -> None:
    folder = outline(whole, tmp_path / "outline")
    runner = CliRunner()
    shown = runner.invoke(app, ["plan", str(folder)])
    assert shown.exit_code == 0, shown.output
    assert "bfloat16" in shown.output and "141GB" in shown.output
    facts = json.loads(runner.invoke(app, ["plan", str(folder), "--json"]).stdout)
    assert facts["parameters"] == jaxdraft.overview(folder).parameters
    shown = runner.invoke(app, ["plan", str(folder), "--memory", "64MiB", "--max-batch", "2"])
    assert shown.exit_code == 0 and "full rows" in shown.output, shown.output
    shown = runner.invoke(app, ["inspect", str(folder)])
    assert shown.exit_code == 0 and "the weights are not there" in shown.output
    shown = runner.invoke(app, ["plan", str(folder), "--context", "7"])
    assert shown.exit_code == 2 and "--memory" in shown.output
