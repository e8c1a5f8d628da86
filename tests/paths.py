"""Paths of the test data, relative to this file and never to the working directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.golden.twins import restore

TESTS = Path(__file__).resolve().parent
# Exported models with reference outputs, one folder each; see golden/regenerate.py.
ARTIFACTS = TESTS / "golden"
# A trained target with its DFlash2 drafter, exported in float32; see its MODEL_CARD.md.
FIRST_FAMILY = TESTS / "first_family"


def restore_files() -> None:
    """Put back the files that the repository keeps as recipes; `tests/conftest.py` calls it."""
    restore(ARTIFACTS)
    restore(FIRST_FAMILY)


def artifact(name: str) -> Path:
    """Return the folder of the exported model `name`.

    Raises:
      FileNotFoundError: there is no such folder.
    """
    folder = ARTIFACTS / name
    if not (folder / "genai_config.json").is_file():
        raise FileNotFoundError(f"no exported model {name!r} under {ARTIFACTS}")
    return folder


def artifact_names(*, broken: bool = False) -> list[str]:
    """Return the sorted names of all artifacts that load (or, with `broken`, that do not)."""
    names = [p.parent.name for p in ARTIFACTS.glob("*/genai_config.json")]
    return sorted(n for n in names if n.startswith("broken_") == broken)


def first_prompts() -> list[dict[str, Any]]:
    """Return the first family's held-out prompts, its answers and its accepted drafts."""
    return json.loads((FIRST_FAMILY / "prompts.json").read_text(encoding="utf-8"))["prompts"]
