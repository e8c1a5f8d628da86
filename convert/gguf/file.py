"""A GGUF file: its metadata, and where the bytes of its tensors lie.

Layout, all little-endian: the magic, a version, the numbers of tensors and of entries; entries
(name, type, value); tensors (name, axes from the fastest, type, offset); from the next multiple of
``general.alignment`` on, the bytes of the tensors. A string is its length and UTF-8 bytes. Source:
the specification in ggml's ``docs/gguf.md``.

The package ``gguf`` reads the same, and tests compare with it. It makes several arrays of each
token of a vocabulary, which takes seconds.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.errors import ArtifactError
from convert.gguf.formats import FLOAT_TYPES, FORMATS, NAMES, SIZES, GgufTensor
from convert.tensors import DataFiles, Place, Tensor

SUFFIX = ".gguf"

_MAGIC = b"GGUF"

_VERSIONS = (2, 3)

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
"""Types of metadata that are numbers, as ``struct`` spells them."""

_STRING, _ARRAY = 8, 9

_AXES = 4
"""Maximum number of axes of a tensor."""


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """The content of a GGUF file.

    Attributes:
      path: the file.
      metadata: settings by name, for example ``llama.block_count``. Numbers are int or float,
        lists of strings lists, and lists of numbers numpy arrays.
      tensors: tensors by their names in the file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def architecture(self) -> str:
        """The architecture, which begins the names of its settings."""
        return str(self.metadata.get("general.architecture", ""))


def read_gguf(path: str | Path, files: DataFiles | None = None) -> GgufFile:
    """Read the metadata of a GGUF file, and the places of its tensors.

    Args:
      path: the file.
      files: where maps are kept. Default: those of this call.

    Raises:
      ArtifactError: it is not a GGUF file, ends early, is of another version, or has tensors in a
        format that is not implemented.
      FileNotFoundError: there is no such file.
    """
    path = Path(path)
    files = DataFiles(path.parent) if files is None else files
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    with open(path, "rb") as file:
        if file.seek(0, 2) < 24:
            raise ArtifactError(path.name, "header", f"{file.tell()} bytes", "a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, data, files)


def _read(path: Path, data: mmap.mmap, files: DataFiles) -> GgufFile:
    cursor = _Cursor(path.name, data)
    magic = cursor.take(4)
    if magic != _MAGIC:
        raise ArtifactError(path.name, "magic", repr(magic), repr(_MAGIC))
    version = cursor.number("<I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        shown = "big-endian numbers" if swapped else f"{version}"
        raise ArtifactError(path.name, "version", shown, "2 or 3, little-endian")
    tensors, entries = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        name = cursor.string("metadata")
        if name in metadata:
            raise ArtifactError(path.name, f"metadata {name}", "two values", "one")
        metadata[name] = cursor.value(cursor.number("<I"), name)
    facts = [_tensor_facts(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ArtifactError(path.name, "general.alignment", repr(alignment), "a power of two")
    start = -(-cursor.at // alignment) * alignment
    found: dict[str, Tensor] = {}
    at = 0
    for name, shape, kind, offset in facts:
        if name in found:
            raise ArtifactError(path.name, f"tensor {name}", "two tensors", "one")
        if offset != at:  # the tensors follow each other; ggml reads no other file
            raise ArtifactError(path.name, f"tensor {name}", f"offset {offset}", f"{at}")
        found[name] = _tensor(path, name, shape, kind, start + offset, len(data), files)
        at += -(-found[name].nbytes // alignment) * alignment
    return GgufFile(path, metadata, found)


def _tensor_facts(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Read a tensor's name, shape, type, and offset."""
    name = cursor.string("tensors")
    axes = cursor.number("<I")
    if axes > _AXES:
        raise ArtifactError(cursor.file, f"tensor {name}", f"{axes} axes", f"at most {_AXES}")
    shape = tuple(cursor.number("<Q") for _ in range(axes))[::-1]
    return name, shape, cursor.number("<I"), cursor.number("<Q")


def _tensor(
    path: Path,
    name: str,
    shape: tuple[int, ...],
    kind: int,
    start: int,
    end: int,
    files: DataFiles,
) -> Tensor:
    where = f"tensor {name}"
    if kind not in SIZES:
        known = ", ".join(NAMES[each] for each in (*FLOAT_TYPES, *FORMATS))
        label = NAMES.get(kind, f"type {kind}")
        raise ArtifactError(path.name, where, label, f"one of {known}")
    values, size = SIZES[kind]
    count = math.prod(shape)
    if shape and shape[-1] % values:
        raise ArtifactError(path.name, where, f"rows of {shape[-1]}", f"a multiple of {values}")
    length = count // values * size
    if start + length > end:
        found = f"bytes up to {start + length}, in a file of {end}"
        raise ArtifactError(path.name, where, found, "a complete file")
    place = Place(path, path.name, start, length)
    if kind in FLOAT_TYPES:
        return Tensor(name, FLOAT_TYPES[kind], shape, path.name, place, None, files)
    if len(shape) != 2:
        raise ArtifactError(path.name, where, f"{NAMES[kind]} of shape {list(shape)}", "a matrix")
    return GgufTensor.of(name, shape, path.name, place, files, FORMATS[kind])


class _Cursor:
    """A place in the file that moves on with what is read."""

    def __init__(self, file: str, data: mmap.mmap):
        self.file, self.data, self.at = file, data, 0

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        if size > len(self.data) - self.at:
            found = f"{size} bytes at {self.at}, in a file of {len(self.data)}"
            raise ArtifactError(self.file, "header", found, "a complete file")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, form: str) -> Any:
        """Return the next number."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self, where: str) -> str:
        """Return the next string."""
        raw = self.take(self.number("<Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ArtifactError(self.file, where, repr(raw[:40]), "UTF-8") from error

    def value(self, kind: int, name: str) -> Any:
        """Return the next value of a type."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string(f"metadata {name}")
        if kind != _ARRAY:
            raise ArtifactError(self.file, f"metadata {name}", f"type {kind}", "a known type")
        inner, count = self.number("<I"), self.number("<Q")
        if inner == _STRING:
            return [self.string(f"metadata {name}") for _ in range(count)]
        if inner not in _SCALARS:
            found = f"a list of type {inner}"
            raise ArtifactError(self.file, f"metadata {name}", found, "numbers or strings")
        dtype = np.dtype(_SCALARS[inner])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)
