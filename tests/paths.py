"""Where the test data lives, found from this file and never from the working directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

TESTS = Path(__file__).resolve().parent
# Exported models with reference outputs, one folder each; see golden/regenerate.py.
ARTIFACTS = TESTS / "golden"


def _restore_twins() -> None:
    """Puts back the files that regenerate.py kept once for several folders.

    As copies: onnx refuses external data with several hard links.
    """
    twins = json.loads((ARTIFACTS / "twins.json").read_text())
    for name, entry in twins.items():
        if (ARTIFACTS / name).exists():
            continue
        source, changes = (entry, {}) if isinstance(entry, str) else (entry["of"], entry["bytes"])
        data = bytearray((ARTIFACTS / source).read_bytes())
        for offset, byte in changes.items():
            data[int(offset)] = int(byte, 16)
        # Under another name first: test processes start at the same time.
        aside = ARTIFACTS / f"{name}.{os.getpid()}"
        aside.write_bytes(data)
        aside.replace(ARTIFACTS / name)


_restore_twins()


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
