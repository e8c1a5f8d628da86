"""Decide whether a drafter is a small language model."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open

from convert.json_reader import read_json
from convert.paths import CONFIG, GENAI_CONFIG, is_checkpoint, is_gguf
from jaxdraft.checkpoint.files import INDEX, SINGLE
from jaxdraft.checkpoint.layout import MTP, TARGET
from jaxdraft.config import DRAFT_MODEL
from jaxdraft.data import SHIPPED
from jaxdraft.kinds import KINDS


def draft_model_folder(home: Path, drafter: str | Path | None) -> Path | None:
    """Return the path of the language model that a drafter names; None: it is another drafter.

    Args:
      home: path of the target.
      drafter: as in :func:`jaxdraft.load`; None names no language model.

    Raises:
      ValueError: ``drafter`` is "draft_model", and the target's folder has none.
    """
    if drafter is None or drafter in (*KINDS, *SHIPPED, "none"):
        return None
    if drafter == DRAFT_MODEL:
        found = beside(home)
        if found is None:
            raise ValueError(f"drafter is {drafter!r}: there is no such folder at {home}")
        return found
    path = Path(drafter)
    if is_gguf(path) or (path / GENAI_CONFIG).is_file():
        return path
    if not is_checkpoint(path):
        return None
    return path if not (path / CONFIG).is_file() or _is_language_model(_names(path)) else None


def beside(home: Path) -> Path | None:
    """Return the draft model in the folder of a target, if there is one."""
    bases = [home, home / TARGET, *([home.parent] if home.resolve().name == TARGET else [])]
    return next((b / DRAFT_MODEL for b in bases if is_checkpoint(b / DRAFT_MODEL)), None)


def _is_language_model(names: Collection[str]) -> bool:
    """Return whether tensors are those of a language model, not of a head beside one.

    A head reads rows of its target through ``fc``, and its layers are not inside a model.
    """
    inside = any(".layers." in name for name in names if not name.startswith(MTP))
    return inside and not any(name.startswith("fc.") for name in names)


def _names(folder: Path) -> Collection[str]:
    """Return the names of the stored tensors; none if they cannot be read: loading reports that."""
    try:
        if (folder / INDEX).is_file():
            return list(read_json(folder, INDEX).get("weight_map") or ())
        with safe_open(folder / SINGLE, framework="numpy") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError, ValueError):
        return ()
