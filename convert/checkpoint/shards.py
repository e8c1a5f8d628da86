"""The safetensors files of a checkpoint: names, shapes and places of its tensors.

The headers are read by the ``safetensors`` library, which checks them against the files; the
numbers stay on disk, mapped, until they are needed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from convert.errors import ArtifactError
from convert.json_reader import read_json
from convert.paths import locate
from convert.tensors import (
    BFLOAT16,
    BOOL,
    FLOAT,
    FLOAT16,
    INT8,
    INT32,
    INT64,
    UINT8,
    DataFiles,
    Place,
    Tensor,
    same_numbers,
)
from convert.unused import Remarks
from jaxdraft.checkpoint.files import INDEX, SINGLE

# The format's types, in ONNX's numbers. Parameters are made of some of them; see checkpoint.py.
_TYPES = {
    "F32": FLOAT,
    "F16": FLOAT16,
    "BF16": BFLOAT16,
    "F64": 11,
    "F8_E4M3": 17,
    "F8_E5M2": 19,
    "I8": INT8,
    "U8": UINT8,
    "I16": 5,
    "U16": 4,
    "I32": INT32,
    "U32": 12,
    "I64": INT64,
    "U64": 13,
    "BOOL": BOOL,
}

_BYTES = {
    name: 1 if name.startswith("F8") or name == "BOOL" else int(name.lstrip("BFIU")) // 8
    for name in _TYPES
}

PICKLE = "pytorch_model.bin"
"""Older format of weights, which is not read."""

Array = np.ndarray


def read_tensors(folder: Path, files: DataFiles, remarks: Remarks) -> dict[str, Tensor]:
    """Return every tensor of the checkpoint in ``folder``, by name.

    Args:
      folder: folder with ``model.safetensors``, or shards and their index.
      files: owner of the maps.
      remarks: destination of remarks, which do not prevent loading.

    Raises:
      ArtifactError: a file is missing, invalid or outside the folder; the index and the shards
        disagree; the type of a tensor is not supported.
    """
    single, index = (folder / name for name in (SINGLE, INDEX))
    if single.exists() and index.exists():
        raise ArtifactError(folder.name, SINGLE, f"and {INDEX} beside it", "one of the two")
    if not index.exists() and not single.exists() and (folder / PICKLE).is_file():
        raise ArtifactError(
            PICKLE,
            "format",
            "a pickle, which can run any code when it is read",
            f"{SINGLE}: in PyTorch, safetensors.torch.save_file(torch.load({PICKLE!r}, "
            f"weights_only=True), {SINGLE!r}) writes one",
        )
    if not index.exists():
        return _read_shard(locate(folder, SINGLE, folder.name, "weights"), SINGLE, files)
    weight_map = _weight_map(folder)
    shards: dict[str, dict[str, Tensor]] = {}
    for file in sorted(set(weight_map.values())):
        shards[file] = _read_shard(locate(folder, file, INDEX, "weight_map"), file, files)
    for name, file in sorted(weight_map.items()):
        if name not in shards[file]:
            raise ArtifactError(INDEX, f"weight_map, {name}", f"no such tensor in {file}", "one")
    for file, shard in shards.items():
        for name in sorted(shard.keys() - {n for n, f in weight_map.items() if f == file}):
            listed = weight_map.get(name)
            if listed is None:
                raise ArtifactError(file, f"tensor {name}", "a tensor", f"none, as in {INDEX}")
            if not same_numbers(shard[name], shards[listed][name]):
                expected = f"those of {listed}, which {INDEX} names"
                raise ArtifactError(file, f"tensor {name}", "other numbers", expected)
            remarks.note(file, f"tensor {name} is stored a second time; {listed} is read")
    return {name: shards[file][name] for name, file in weight_map.items()}


def _weight_map(folder: Path) -> dict[str, str]:
    value = read_json(folder, INDEX).get("weight_map")
    if not isinstance(value, dict) or not value:
        raise ArtifactError(INDEX, "weight_map", type(value).__name__, "an object with entries")
    for name, file in value.items():
        if not isinstance(file, str):
            raise ArtifactError(INDEX, f"weight_map, {name}", repr(file)[:80], "the name of a file")
    return value


def _cut_short(path: Path) -> str | None:
    """Return how a file is shorter than it states, as after a download that broke off."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            end = 8 + length
            if size < end:
                return f"{size} bytes, which end inside the header of {length} bytes"
            entries = json.loads(file.read(length))
        ends = [e["data_offsets"][1] for name, e in entries.items() if name != "__metadata__"]
        end += max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    return f"{size} bytes, of the {end} that its header describes" if size < end else None


def read_file(folder: Path, name: str, files: DataFiles) -> dict[str, Tensor]:
    """Return every tensor of one safetensors file of a folder, by name.

    Raises:
      ArtifactError: the file is missing, invalid or outside the folder.
    """
    return _read_shard(locate(folder, name, folder.name, "weights"), name, files)


def _read_shard(path: Path, file: str, files: DataFiles) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="numpy") as opened:
            # In the order in which they lie in the file, without gaps: the library has checked.
            facts = []
            for name in opened.offset_keys():
                part = opened.get_slice(name)
                facts.append((name, part.get_dtype(), tuple(part.get_shape())))
    except (SafetensorError, OSError, ValueError) as error:
        found = _cut_short(path) or str(error)[:200]
        raise ArtifactError(file, "header", found, "a safetensors file") from error
    with open(path, "rb") as opened:
        offset = 8 + int.from_bytes(opened.read(8), "little")
    tensors: dict[str, Tensor] = {}
    for name, dtype, shape in facts:
        if dtype not in _TYPES:
            raise ArtifactError(file, f"tensor {name}", dtype, f"one of {', '.join(_TYPES)}")
        length = math.prod(shape) * _BYTES[dtype]
        place = Place(path, file, offset, length)
        tensors[name] = Tensor(name, _TYPES[dtype], shape, file, place, None, files)
        offset += length
    if offset != files.size(path):
        raise ArtifactError(file, "size", f"{files.size(path)} bytes", f"{offset}")
    return tensors
