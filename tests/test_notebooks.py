"""Every notebook runs from its first cell to its last."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import jax
import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a reader runs it: optimized. Compiled programs are kept where those of the tests are.
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("JAXDRAFT_NOTEBOOK_SMALL", "1")  # a training run in its short form
    if jax.config.jax_compilation_cache_dir:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
        monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=300, kernel_name="python3").execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_shown_with_its_results(path: Path) -> None:
    """Every code cell was run, in order and without an error, and the file stays small."""
    book = nbformat.read(path, as_version=4)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output.output_type for cell in cells for output in cell.outputs}
    assert "error" not in kinds and "display_data" in kinds
    assert path.stat().st_size < 400_000


def first_cell(path: Path) -> str:
    """Return the cell that installs the package."""
    book = nbformat.read(path, as_version=4)
    return next(cell.source for cell in book.cells if cell.cell_type == "code")


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_first_cell_installs_from_a_clone_or_from_a_url(
    path: Path, gpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No index has the package. Where it is installed, nothing happens."""
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/nvidia-smi" if gpu else None)
    source = first_cell(path)
    exec(source, {})
    assert commands == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.chdir(path.parent)
    exec(source, {})
    monkeypatch.chdir(tmp_path)
    url = "https://example.org/jaxdraft.git"
    exec(source.replace('SOURCE = ""', f'SOURCE = "{url}"'), {})
    with pytest.raises(SystemExit, match="set SOURCE"):
        exec(source, {})
    clone, remote = (command[-1] for command in commands)
    found = re.fullmatch(r"(.*)\[([\w,]+)\]", clone)
    assert found is not None and Path(found[1]) == path.parents[1]
    extras = found[2].split(",")
    project = tomllib.loads((path.parents[1] / "pyproject.toml").read_text())["project"]
    assert set(extras) <= project["optional-dependencies"].keys()
    assert ("cuda12" in extras) == gpu and ("train" in extras) == ("train" in path.stem)
    assert remote == f"jaxdraft[{found[2]}] @ git+{url}"


def test_the_notebooks_take_the_type_of_the_device() -> None:
    for path in NOTEBOOKS:
        assert ("devices.native_dtype()" in path.read_text()) != ("train" in path.stem)
