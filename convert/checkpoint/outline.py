"""Targets without weight files: ``config.json``, and perhaps an index.

Names, shapes and types of all tensors follow from it, so that a report shows the size of the full
model before its weights are downloaded. An index, if there is one, must list these names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from convert.checkpoint.config import TargetFacts
from convert.checkpoint.packings import expected
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
      ArtifactError: the index lists no names.
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
    types = {dtype.name: number for number, dtype in FLOATS.items()}
    data_type = types.get(facts.dtype or "", BFLOAT16)
    needed = set(_stored(layout, facts, data_type))
    if facts.quantized is not None and not _in_mxfp4(facts):
        words = "matrices are quantized; counts and bytes are those of the numbers that they encode"
        remarks.note(CONFIG, words)
    elif names is not None:
        others = {n for n in names - needed if not n.startswith(aside)}
        others = {n for n in others if unused_tensor(n, ()) is None}
        for found, wanted, lost in (
            ("nothing", "an entry", needed - names),
            ("an entry", "nothing", others),
        ):
            for name in sorted(lost)[:_NAMED]:
                problems.report(INDEX, f"weight_map, {name}", found, wanted)
            if len(lost) > _NAMED:
                problems.report(INDEX, "weight_map", f"{len(lost) - _NAMED} more", "none")
    entries = list(layout)
    if facts.mtp is not None and (names is None or any(n.startswith(MTP) for n in names)):
        entries += mtp_layout(facts.mtp)
    return {
        name: Tensor(name, stored, shape, CONFIG, None, None, files)
        for name, (stored, shape) in _stored(entries, facts, data_type).items()
    }


def _in_mxfp4(facts: TargetFacts) -> bool:
    """Return whether experts are in MXFP4; the layout determines their tensors."""
    quantized = facts.quantized
    return quantized is not None and all(each.layout == "mxfp4" for each in quantized.schemes)


def _stored(
    layout: Sequence[Entry], facts: TargetFacts, data_type: int
) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return type and shape of every stored tensor, by name."""
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    for part in (part for entry in layout for part in entry.tensors):
        found[part.name] = data_type, part.shape
        if len(part.shape) == 3 and facts.quantized is not None and _in_mxfp4(facts):
            wanted = expected(facts.quantized.schemes[0], part.name, part.shape)
            if all(each.shapes for each in wanted.values()):
                del found[part.name]
                found |= {n: (next(iter(e.types)), e.shapes[0]) for n, e in wanted.items()}
    return found
