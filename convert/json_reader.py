"""JSON files that other programs wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from convert.errors import ArtifactError
from convert.paths import locate

_MAX_JSON_BYTES = 1 << 26


def read_json(folder: Path, name: str) -> Mapping[str, object]:
    """The object in a JSON file of ``folder``.

    Raises:
      ArtifactError: there is no such file, or it holds something else.
    """
    path = locate(folder, name, folder.name, name)
    size = path.stat().st_size
    if size > _MAX_JSON_BYTES:
        raise ArtifactError(name, "size", f"{size} bytes", f"at most {_MAX_JSON_BYTES}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(name, "content", str(error)[:120], "JSON") from error
    if not isinstance(value, dict):
        raise ArtifactError(name, "content", type(value).__name__, "an object")
    return value


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands there twice")
    return result
