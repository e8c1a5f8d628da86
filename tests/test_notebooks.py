"""Every notebook runs from its first cell to its last."""

from __future__ import annotations

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
