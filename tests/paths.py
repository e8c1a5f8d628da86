"""Where the test data lives, found from this file and never from the working directory."""

from __future__ import annotations

from pathlib import Path

from tests.golden.twins import restore

TESTS = Path(__file__).resolve().parent
# Exported models with reference outputs, one folder each; see golden/regenerate.py.
ARTIFACTS = TESTS / "golden"


restore(ARTIFACTS)


def artifact(name: str) -> Path:
    """Returns the folder of the exported model `name`, or raises FileNotFoundError."""
    folder = ARTIFACTS / name
    if not (folder / "genai_config.json").is_file():
        raise FileNotFoundError(f"no exported model {name!r} under {ARTIFACTS}")
    return folder


def artifact_names(*, broken: bool = False) -> list[str]:
    """Returns the sorted names of all artifacts that load (or, with `broken`, that do not)."""
    names = [p.parent.name for p in ARTIFACTS.glob("*/genai_config.json")]
    return sorted(n for n in names if n.startswith("broken_") == broken)
