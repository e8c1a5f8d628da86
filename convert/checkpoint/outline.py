"""Targets without weight files: ``config.json``, and perhaps an index.

Names, shapes and types of all tensors follow from it, so that a report shows the size of the full
model before its weights are downloaded. An index, if there is one, must list these names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from convert.checkpoint.config import TargetFacts
from convert.checkpoint.tensors import Tensors
from convert.errors import Problems
from convert.json_reader import read_json
from convert.paths import CONFIG
from convert.tensors import BFLOAT16, FLOATS, DataFiles, Tensor
from convert.unused import Remarks, unused_tensor
from jaxdraft.checkpoint.files import INDEX
from jaxdraft.checkpoint.layout import MTP, Entry, mtp_layout

_NAMED = 5
"""Number of names that a message lists."""


def is_outline(home: Path) -> bool:
    """Return whether a folder describes a target and holds no file of weights."""
    if not (home / CONFIG).is_file():
        return False
    return not any(path.suffix in (".safetensors", ".gguf", ".bin") for path in home.iterdir())


def stored_names(home: Path) -> frozenset[str] | None:
    """Return the names of the tensors that the index lists; None without an index.

    Raises:
      ArtifactError: it lists none.
    """
    if not (home / INDEX).is_file():
        return None
    listed = read_json(home, INDEX).get("weight_map")
    return frozenset(listed) if isinstance(listed, dict) else frozenset()


def described_tensors(
    facts: TargetFacts,
    layout: Sequence[Entry],
    names: frozenset[str] | None,
    files: DataFiles,
    aside: tuple[str, ...],
    problems: Problems,
    remarks: Remarks,
) -> Tensors:
    """Return the tensors that a target consists of, without numbers.

    Args:
      facts: the content of ``config.json``.
      layout: layout of the target.
      names: names of the stored tensors, if they are known.
      files: files of the folder.
      aside: prefixes of the names of tensors that are not part of the target.
      problems: destination of names that do not fit.
      remarks: destination of notes for the reader of the report.
    """
    remarks.note(CONFIG, "no weights lie beside it: the report follows from the settings alone")
    expected = {part.name for entry in layout for part in entry.tensors}
    if facts.quantized is not None:
        words = "matrices are quantized; counts and bytes are those of the numbers that they encode"
        remarks.note(CONFIG, words)
    elif names is not None:
        others = {n for n in names - expected if not n.startswith(aside)}
        others = {n for n in others if unused_tensor(n, ()) is None}
        for found, wanted, lost in (
            ("nothing", "an entry", expected - names),
            ("an entry", "nothing", others),
        ):
            for name in sorted(lost)[:_NAMED]:
                problems.report(INDEX, f"weight_map, {name}", found, wanted)
            if len(lost) > _NAMED:
                problems.report(INDEX, "weight_map", f"{len(lost) - _NAMED} more", "none")
    types = {dtype.name: number for number, dtype in FLOATS.items()}
    data_type = types.get(facts.dtype or "", BFLOAT16)
    entries = list(layout)
    if facts.mtp is not None and (names is None or any(n.startswith(MTP) for n in names)):
        entries += mtp_layout(facts.mtp)
    return {
        part.name: Tensor(part.name, data_type, part.shape, CONFIG, None, None, files)
        for entry in entries
        for part in entry.tensors
    }
