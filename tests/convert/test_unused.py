"""Nothing in a file is ignored in silence: used, harmless by a written reason, or reported."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdraft
from convert import inspect_folder, load_artifact, unused
from jaxdraft import LoadWarning
from tests.convert.helpers import Config, copied, edit_config, edit_graph
from tests.examples import examples
from tests.paths import artifact

DFLASH2 = "qwen35_paged_fp16_dflash2"
MTP = "qwen35_fp32_cpu_mtp"

APART = {"session_options", "vision_config", "added_tokens_decoder", "weight_map"}
"""Objects that change nothing whatever is in them; see the tables in convert/unused.py."""


def objects_of(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths of all objects, but not into those that are apart."""
    if isinstance(value, dict):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if key not in APART and isinstance(inner, (dict, list)):
            yield from objects_of(inner, (*path, key))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An artifact of each kind of drafter, and a checkpoint, to be changed and repaired."""
    home = tmp_path_factory.mktemp("unused")
    made = {name: copied(name, home) for name in (DFLASH2, MTP)}
    for name, folder in made.items():
        shutil.copyfile(artifact(name) / "genai_config.json", folder / "genai_config.json")
    made["checkpoint"] = Path(shutil.copytree(jaxdraft.EMBEDDED, home / "family"))
    return made


FILES = [
    (DFLASH2, "genai_config.json", None),
    (MTP, "genai_config.json", None),
    ("checkpoint", "target/config.json", None),
    ("checkpoint", "target/generation_config.json", None),
    ("checkpoint", "target/tokenizer_config.json", None),
    ("checkpoint", "dflash2/config.json", "dflash2"),
    ("checkpoint", "dspark/config.json", "dspark"),
]


@pytest.mark.parametrize(("name", "file", "drafter"), FILES)
@settings(max_examples=examples(5))  # each reads a whole folder
@given(data=st.data())
def test_unknown_keys_are_always_named(
    name: str, file: str, drafter: str | None, folders: dict[str, Path], data: st.DataObject
) -> None:
    path = folders[name] / file
    original = path.read_text()
    body = json.loads(original)
    places = list(objects_of(body))
    place = places[data.draw(st.integers(0, len(places) - 1))]
    key = data.draw(st.from_regex(r"[a-z_]{1,8}_zz", fullmatch=True))
    value = data.draw(st.sampled_from([None, False, 0, -1, 1.5, "text", [], [1], {}, {"a": 1}]))
    parent = copy.deepcopy(body)
    inner = parent
    for step in place:
        inner = inner[step]
    inner[key] = value
    try:
        path.write_text(json.dumps(parent))
        report = inspect_folder(folders[name], drafter)
    finally:
        path.write_text(original)
    reported = "\n".join([*map(str, report.problems), *report.notes])
    assert key in reported, (place, key, value)


@pytest.mark.parametrize(("name", "file", "drafter"), FILES)
def test_every_key_is_used_or_has_a_reason(
    name: str, file: str, drafter: str | None, folders: dict[str, Path]
) -> None:
    """What the builder and this package write leaves nothing to report."""
    report = inspect_folder(folders[name], drafter)
    assert report.loads and "no effect" not in "\n".join(report.notes)


def test_every_reason_is_a_sentence() -> None:
    tables = [value for name, value in vars(unused).items() if name.endswith("_KEYS")]
    reasons = {r for table in tables if isinstance(table, dict) for r in table.values()}
    assert len(reasons) > 10 and all(len(reason.split()) > 3 for reason in reasons)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["search"].update(repetition_penalty=1.2), "search.repetition_penalty is 1.2"),
        (lambda c: c.update(surprise={}), "surprise is {}"),
        (lambda c: c["engine"].update(surprise=1), "engine.surprise is 1"),
        (lambda c: c["engine"]["dynamic_batching"].update(surprise=1), "batching.surprise is 1"),
    ],
)
def test_settings_that_an_artifact_does_not_get(change: Any, message: str, tmp_path: Path) -> None:
    folder = edit_config(copied(DFLASH2, tmp_path), change)
    assert message in "\n".join(inspect_folder(folder).notes)
    with pytest.warns(LoadWarning, match=message):
        jaxdraft.load(folder)


def test_sampling_that_an_artifact_recommends_is_noted(tmp_path: Path) -> None:
    change = lambda c: c["search"].update(do_sample=True, temperature=0.7)  # noqa: E731
    folder = edit_config(copied(DFLASH2, tmp_path), change)
    assert "search.do_sample is true (temperature 0.7)" in "\n".join(inspect_folder(folder).notes)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LoadWarning)
        jaxdraft.load(folder)


def test_files_of_an_artifact_that_are_not_read(tmp_path: Path) -> None:
    folder = copied(DFLASH2, tmp_path)
    (folder / "surprise.bin").write_bytes(b"")
    (folder / "README.md").write_text("")
    notes = "\n".join(inspect_folder(folder).notes)
    assert "surprise.bin is not read" in notes and "README" not in notes
    assert ".onnx" not in notes and ".data is" not in notes


# ----------------------------------------------------------------------- an artifact's drafter


def spoiled_section(config: Config) -> None:
    config["model"]["dflash2"] = {"filename": "../x", "surprise": 1}


def two_sections(config: Config) -> None:
    config["model"]["dspark"] = {}


def misplaced(config: Config) -> None:
    config["mask_token_id"] = 3


@pytest.mark.parametrize("change", [spoiled_section, two_sections, misplaced])
def test_a_drafter_that_is_not_wanted(change: Any, tmp_path: Path) -> None:
    folder = edit_config(copied(DFLASH2, tmp_path), change)
    assert not inspect_folder(folder).loads
    assert inspect_folder(folder, "none").loads
    assert load_artifact(folder, drafter="none").drafter_kind is None


def test_a_drafters_graph_that_is_not_wanted(tmp_path: Path) -> None:
    folder = copied(DFLASH2, tmp_path)
    edit_graph(folder, lambda graph: graph.node.pop(), "dflash2.onnx")
    assert not inspect_folder(folder).loads
    model = jaxdraft.load(folder, drafter="none")
    assert model.info.drafter == "none"
    (folder / "dflash2.onnx").unlink()
    jaxdraft.load(folder, drafter="none")


def test_the_drafter_that_an_artifact_has(tmp_path: Path) -> None:
    folder = copied(DFLASH2, tmp_path)
    assert load_artifact(folder, drafter="dflash2").drafter_kind == "dflash2"
    for other in ("dspark", "mtp", tmp_path):
        with pytest.raises(ValueError, match="only a checkpoint offers a choice"):
            jaxdraft.load(folder, drafter=other)
