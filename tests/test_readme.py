"""Every code block of the README runs, in order, and its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jaxdraft.cli import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def run_install(arguments: list[str]) -> None:
    """Check a ``pip install`` of this project: the folder is the repository, the extras exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert arguments[:2] == ["install", "-e"] and len(arguments) == 3
    match = re.fullmatch(r"\.(?:\[([\w,]+)\])?", arguments[2])
    assert match is not None, arguments
    assert set((match[1] or "").split(",")) - {""} <= project["optional-dependencies"].keys()


def run_shell(block: str) -> list[str]:
    """Run every command of a block, with fewer repeats, and return what each prints."""
    printed = []
    for line in block.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        if program == "pip":
            run_install(arguments)
            continue
        assert program == "jaxdraft", line
        if arguments[0] in ("demo", "bench"):
            arguments += ["--repeats", "1"]
        if arguments[0] == "demo":
            arguments += ["--family", "--max-new-tokens", "8"]  # SmolLM2 may be installed
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, f"{line}\n{result.output}"
        printed.append(result.stdout)
    return printed


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all blocks, one after the other, in an empty folder; each may use the names before it.

    Returns:
      The text of each block with what it printed or, for shell blocks, a list of that.
    """
    import contextlib
    import io

    found: dict[str, Any] = {}
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("readme"))
        patch.setenv("JAX_COMPILATION_CACHE_DIR", "unused: conftest has chosen one")
        for language, block in BLOCKS:
            if language == "sh":
                found[block] = run_shell(block)
                continue
            assert language == "python", f"no rule for a block of {language!r}"
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block, "README.md", "exec"), names)
            found[block] = out.getvalue()
    return found


def test_every_block_runs(printed: dict[str, Any]) -> None:
    assert len(printed) == len(BLOCKS) >= 6


def test_the_quickstart_is_short_and_prints_its_counters(printed: dict[str, Any]) -> None:
    first = next(block for language, block in BLOCKS if language == "python")
    assert len(first.strip().splitlines()) <= 10
    assert "tokens in" in printed[first]


def test_the_shell_examples_print_what_their_comments_promise(printed: dict[str, Any]) -> None:
    install, shell = (printed[block] for language, block in BLOCKS if language == "sh")
    assert "equal to plain decoding" in install[0]
    inspected, planned, generated, measured, saved = shell
    assert "no problems found" in inspected and "pages" in inspected
    assert "int4" in planned and "24GB" in planned
    assert "tokens/s" in generated and "by position" in generated
    assert re.search(r"ngram .*x", measured)
    assert "target" in saved and Path(saved.split()[1]).parts[0] == "copy"


def test_every_drafter_setting_that_the_text_names_exists() -> None:
    import jaxdraft

    model = jaxdraft.load(jaxdraft.EMBEDDED)
    named = set(re.findall(r"drafter=\"(\w+)\"", README))
    assert named >= {"auto", "none", "ngram", "smollm2"}
    for name in named:
        if name == "smollm2":  # its target is not here; tests/draft reads it beside shapes alone
            assert jaxdraft.SMOLLM2_DRAFTER.name == name
        elif name in ("auto", "none", "ngram"):
            model.choose(name)
        else:
            jaxdraft.load(jaxdraft.EMBEDDED, drafter=name)
