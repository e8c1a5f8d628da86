"""An ONNX graph as data: nodes, attributes, and initializers that stay on disk until they are read.

The protobuf is read without its external data. Where a tensor's bytes lie is checked when the graph
is read (file inside the folder, offset and length inside the file, length equal to what dtype and
shape need), so that nothing can fail later, when memory has been allocated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, TensorProto

from convert.errors import ArtifactError
from convert.paths import contained

Array = np.ndarray

MICROSOFT = "com.microsoft"
_DOMAINS = {"": range(18, 27), MICROSOFT: range(1, 2)}
_MAX_GRAPH_BYTES = 1 << 30

FLOAT, UINT8, FLOAT16, BFLOAT16 = (
    TensorProto.FLOAT,
    TensorProto.UINT8,
    TensorProto.FLOAT16,
    TensorProto.BFLOAT16,
)
INT8, INT32, INT64 = TensorProto.INT8, TensorProto.INT32, TensorProto.INT64
INT4, UINT4 = TensorProto.INT4, TensorProto.UINT4
FLOATS: dict[int, np.dtype] = {
    FLOAT: np.dtype(np.float32),
    FLOAT16: np.dtype(np.float16),
    BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
"""ONNX float types that hold weights, and their numpy dtypes."""

_DTYPES: dict[int, np.dtype] = {
    **FLOATS,
    UINT8: np.dtype(np.uint8),
    INT32: np.dtype(np.int32),
    INT64: np.dtype(np.int64),
}
_STORED = {**_DTYPES, INT8: np.dtype(np.int8)}
"""What a tensor can be; int8 in checkpoints alone."""

_NIBBLES: dict[int, np.dtype] = {INT4: np.dtype(np.int8), UINT4: np.dtype(np.uint8)}


def type_name(data_type: int) -> str:
    """``1`` -> ``"FLOAT"``."""
    try:
        return TensorProto.DataType.Name(data_type)
    except ValueError:
        return f"type {data_type}"


def stored_bytes(data_type: int, shape: Iterable[int]) -> int:
    """Bytes of a stored tensor; two elements share a byte in INT4 and UINT4, the last may be alone.

    Example: five INT4 elements take three bytes.
    """
    elements = math.prod(shape)
    if data_type in _NIBBLES:
        return (elements + 1) // 2
    return elements * _STORED[data_type].itemsize


def unpack_nibbles(packed: Array, count: int, *, signed: bool) -> Array:
    """Elements of a packed 4-bit tensor, low nibble first, one a byte: [count].

    Example: ``0xF8`` is (-8, -1) signed and (8, 15) unsigned.
    """
    pair = np.stack([packed & 0x0F, packed >> 4], axis=-1).reshape(-1)[:count]
    if not signed:
        return pair
    return (pair.astype(np.int8) ^ 8) - np.int8(8)


class DataFiles:
    """The data files of one folder, each mapped once however many graphs point into it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    def size(self, path: Path) -> int:
        """Bytes in the file. No map is made."""
        return path.stat().st_size

    def view(self, path: Path, offset: int, length: int) -> Array:
        """Bytes [length] of the file, as a read-only view of the map."""
        if length == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(self._map(path), np.uint8, length, offset)

    def drop(self, path: Path, offset: int, length: int) -> None:
        """Let go of the resident pages of a range. They come back from disk if touched again."""
        held = self._maps.get(path)
        if held is None or not hasattr(held, "madvise") or not hasattr(mmap, "MADV_DONTNEED"):
            return
        # Only whole pages: the first and last may hold a neighbour's bytes, which costs at most a
        # page fault, never a value.
        page = mmap.PAGESIZE
        start = offset // page * page
        end = min(-(-(offset + length) // page) * page, len(held))
        if end > start:
            held.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Unmap what no view holds any more."""
        for held in self._maps.values():
            with contextlib.suppress(BufferError):  # a view lives on; the map goes with it
                held.close()
        self._maps.clear()

    def _map(self, path: Path) -> mmap.mmap:
        with self._lock:
            held = self._maps.get(path)
            if held is None:
                with open(path, "rb") as file:
                    held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                if hasattr(held, "madvise") and hasattr(mmap, "MADV_WILLNEED"):
                    held.madvise(mmap.MADV_WILLNEED)
                self._maps[path] = held
            return held


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor's bytes lie in a data file."""

    path: Path
    location: str  # as the graph spells it
    offset: int
    length: int


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A stored tensor. Reading it maps its bytes; nothing is copied that need not be."""

    name: str
    data_type: int
    shape: tuple[int, ...]
    file: str  # of the graph, for messages
    place: Place | None  # None: inline
    inline: Array | None  # decoded values, when inline
    files: DataFiles

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        if self.place is not None:
            return self.place.length
        return stored_bytes(self.data_type, self.shape)

    def read(self) -> Array:
        """The values in the tensor's own dtype and shape; 4-bit types one element a byte.

        A view of the map where bytes can be used as they are; read-only.
        """
        if self.inline is not None:
            return self.inline
        assert self.place is not None
        raw = self.files.view(self.place.path, self.place.offset, self.place.length)
        return _decode(raw, self.data_type, self.shape)

    @property
    def is_nibbles(self) -> bool:
        """Whether two elements share a byte."""
        return self.data_type in _NIBBLES

    def raw(self) -> Array:
        """The stored bytes of a 4-bit tensor in the graph's data file or in the graph."""
        if self.inline is not None:
            nibbles = self.inline.reshape(-1).astype(np.uint8) & 0x0F
            if nibbles.size % 2:
                nibbles = np.append(nibbles, np.uint8(0))
            return nibbles[0::2] | nibbles[1::2] << 4
        assert self.place is not None
        return self.files.view(self.place.path, self.place.offset, self.place.length)

    def release(self, start: int = 0, length: int | None = None) -> None:
        """Drop the resident pages of this tensor, or of a range of its bytes."""
        if self.place is not None:
            size = self.place.length - start if length is None else length
            self.files.drop(self.place.path, self.place.offset + start, size)


def _decode(raw: Array, data_type: int, shape: tuple[int, ...]) -> Array:
    if data_type in _NIBBLES:
        values = unpack_nibbles(raw, math.prod(shape), signed=data_type == INT4)
        return values.reshape(shape)
    return raw.view(_STORED[data_type]).reshape(shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One operator call. An absent optional input or output has the name ``""``."""

    index: int
    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"node {self.name or self.index} ({self.op})"


@dataclasses.dataclass(frozen=True)
class Value:
    """A graph input or output. A dynamic dimension is given by its name, an unnamed one by None."""

    name: str
    data_type: int
    shape: tuple[int | str | None, ...]


class Graph:
    """A graph that is well formed: every name is defined once, before it is used.

    Attributes:
      path: the file.
      file: its name, for messages.
      inputs, outputs: declared values by name.
      initializers: stored tensors by name.
      nodes: in stored order, which is a valid order.
      producers: value name -> (node, output index).
    """

    def __init__(self, path: Path, files: DataFiles):
        self.path = path
        self.file = path.name
        model = _load(path)
        _check_opsets(self.file, model)
        graph = model.graph
        self.inputs = self._values("input", graph.input)
        self.outputs = self._values("output", graph.output)
        self.initializers: dict[str, Tensor] = {}
        if graph.sparse_initializer:
            raise ArtifactError(self.file, "sparse_initializer", "a sparse tensor", "dense tensors")
        for proto in graph.initializer:
            if proto.name in self.initializers:
                raise ArtifactError(
                    self.file, f"initializer {proto.name}", "two of that name", "one"
                )
            self.initializers[proto.name] = _tensor(proto, self.file, files)
        self.nodes = [
            Node(
                index=i,
                op=node.op_type,
                domain=_domain(node.domain),
                name=node.name,
                inputs=tuple(node.input),
                outputs=tuple(node.output),
                attributes=_attributes(node, i, self.file, files),
            )
            for i, node in enumerate(graph.node)
        ]
        self.producers: dict[str, tuple[Node, int]] = {}
        self._check_names()

    def _values(self, kind: str, protos: Iterable[onnx.ValueInfoProto]) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for proto in protos:
            if proto.name in values or not proto.name:
                raise ArtifactError(
                    self.file,
                    f"{kind} {proto.name!r}",
                    "an empty or repeated name",
                    "one name each",
                )
            if not proto.type.HasField("tensor_type"):
                raise ArtifactError(self.file, f"{kind} {proto.name}", "no tensor", "a tensor")
            tensor = proto.type.tensor_type
            shape = tuple(
                d.dim_value if d.HasField("dim_value") else (d.dim_param or None)
                for d in tensor.shape.dim
            )
            values[proto.name] = Value(proto.name, tensor.elem_type, shape)
        return values

    def _check_names(self) -> None:
        defined = set(self.inputs) | set(self.initializers)
        clash = set(self.inputs) & set(self.initializers)
        if clash:
            raise ArtifactError(
                self.file,
                f"initializer {min(clash)}",
                "an input of the same name",
                "one of the two",
            )
        for node in self.nodes:
            for name in node.inputs:
                if name and name not in defined:
                    raise ArtifactError(
                        self.file,
                        f"{node.label}, input {name!r}",
                        "an undefined tensor",
                        "a graph input, an initializer or the output of an earlier node",
                    )
            for i, name in enumerate(node.outputs):
                if not name:
                    continue
                if name in defined:
                    raise ArtifactError(
                        self.file, f"{node.label}, output {name!r}", "a name in use", "a fresh name"
                    )
                defined.add(name)
                self.producers[name] = (node, i)
        for name in self.outputs:
            if name not in self.producers:
                raise ArtifactError(
                    self.file, f"output {name!r}", "no node that computes it", "a node's output"
                )


def _load(path: Path) -> onnx.ModelProto:
    try:
        size = path.stat().st_size
        if size > _MAX_GRAPH_BYTES:
            raise ArtifactError(
                path.name, "size", f"{size} bytes", "a graph whose weights are external data"
            )
        model = onnx.ModelProto.FromString(path.read_bytes())
    except OSError as error:
        raise ArtifactError(
            path.name, "file", error.strerror or error, "a readable file"
        ) from error
    except (DecodeError, ValueError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(
            path.name, "contents", "bytes that are no ONNX model, or half of one", "an ONNX model"
        ) from error
    if not model.HasField("graph") or not model.graph.node:
        raise ArtifactError(path.name, "graph", "no node", "an ONNX model")
    if model.functions:
        raise ArtifactError(
            path.name, "functions", f"{len(model.functions)} local functions", "none"
        )
    return model


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _check_opsets(file: str, model: onnx.ModelProto) -> None:
    seen = set()
    for entry in model.opset_import:
        domain = _domain(entry.domain)
        allowed = _DOMAINS.get(domain)
        if allowed is None or entry.version not in allowed or domain in seen:
            known = ", ".join(
                f"{d or 'ai.onnx'} {r.start}..{r.stop - 1}" for d, r in _DOMAINS.items()
            )
            raise ArtifactError(
                file,
                "opset_import",
                f"{domain or 'ai.onnx'} {entry.version}",
                f"one each of {known}",
            )
        seen.add(domain)
    if "" not in seen:
        raise ArtifactError(file, "opset_import", "no version of ai.onnx", "one")


def _attributes(node: onnx.NodeProto, index: int, file: str, files: DataFiles) -> dict[str, Any]:
    values: dict[str, Any] = {}
    where = f"node {node.name or index} ({node.op_type})"
    for attribute in node.attribute:
        if attribute.name in values:
            raise ArtifactError(file, f"{where}, attribute {attribute.name}", "two", "one")
        if attribute.type == AttributeProto.TENSOR:
            values[attribute.name] = _tensor(attribute.t, file, files, name=where).read()
        elif attribute.type == AttributeProto.STRING:
            values[attribute.name] = attribute.s.decode(errors="replace")
        elif attribute.type in (AttributeProto.INT, AttributeProto.FLOAT):
            values[attribute.name] = (
                attribute.i if attribute.type == AttributeProto.INT else attribute.f
            )
        elif attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS):
            values[attribute.name] = tuple(
                attribute.ints if attribute.type == AttributeProto.INTS else attribute.floats
            )
        else:
            raise ArtifactError(
                file,
                f"{where}, attribute {attribute.name}",
                f"an attribute of type {attribute.type}",
                "a number, a string, a list of numbers or a tensor",
            )
    return values


def _tensor(proto: TensorProto, file: str, files: DataFiles, *, name: str = "") -> Tensor:
    where = name or f"initializer {proto.name}"
    data_type = proto.data_type
    if data_type not in _DTYPES and data_type not in _NIBBLES:
        known = ", ".join(type_name(t) for t in (*_DTYPES, *_NIBBLES))
        raise ArtifactError(file, where, f"data type {type_name(data_type)}", f"one of {known}")
    shape = tuple(proto.dims)
    if any(d < 0 for d in shape) or math.prod(shape) >= 1 << 62:
        raise ArtifactError(file, where, f"shape {list(shape)}", "sizes that can exist")
    if proto.HasField("segment"):
        raise ArtifactError(file, where, "a segmented tensor", "a whole one")
    place, inline = None, None
    if proto.data_location == TensorProto.EXTERNAL:
        place = _place(proto, where, shape, file, files)
    else:
        inline = _inline(proto, where, shape, file)
    return Tensor(proto.name, data_type, shape, file, place, inline, files)


def _place(
    proto: TensorProto, where: str, shape: tuple[int, ...], file: str, files: DataFiles
) -> Place:
    entries: dict[str, str] = {}
    for entry in proto.external_data:
        if entry.key in entries:
            raise ArtifactError(file, f"{where}, external_data", f"two of {entry.key!r}", "one")
        entries[entry.key] = entry.value
    needed = stored_bytes(proto.data_type, shape)
    location = entries.get("location", "")
    path = contained(files.folder, location, file, f"{where}, location")
    size = files.size(path)
    offset = _count(entries.get("offset", "0"), f"{where}, offset", file)
    length = _count(entries.get("length", str(max(size - offset, 0))), f"{where}, length", file)
    if length != needed:
        raise ArtifactError(
            file,
            where,
            f"{length} bytes in {location}",
            f"{needed} bytes for {type_name(proto.data_type)} {list(shape)}",
        )
    if offset + length > size:
        raise ArtifactError(
            file,
            where,
            f"bytes {offset}..{offset + length} of {location}, which has {size}",
            "an offset and length inside the file",
        )
    return Place(path, location, offset, length)


def _count(text: str, where: str, file: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        raise ArtifactError(file, where, repr(text), "a decimal number of bytes")
    return int(text)


_FIELDS: dict[int, str] = {
    FLOAT: "float_data",
    FLOAT16: "int32_data",
    BFLOAT16: "int32_data",
    UINT8: "int32_data",
    INT32: "int32_data",
    INT4: "int32_data",
    UINT4: "int32_data",
    INT64: "int64_data",
}


def _inline(proto: TensorProto, where: str, shape: tuple[int, ...], file: str) -> Array:
    """Values stored in the graph itself, in ``raw_data`` or in the field of their type."""
    data_type = proto.data_type
    needed = stored_bytes(data_type, shape)
    if proto.HasField("raw_data"):
        if len(proto.raw_data) != needed:
            raise ArtifactError(
                file,
                where,
                f"{len(proto.raw_data)} bytes of raw_data",
                f"{needed} bytes for {type_name(data_type)} {list(shape)}",
            )
        return _decode(np.frombuffer(proto.raw_data, np.uint8), data_type, shape)
    field = _FIELDS[data_type]
    numbers = getattr(proto, field)
    # A packed 4-bit element pair takes one entry, every other element one of its own.
    entries = needed if data_type in _NIBBLES else math.prod(shape)
    if len(numbers) != entries:
        raise ArtifactError(
            file,
            where,
            f"{len(numbers)} entries of {field}",
            f"{entries} for {type_name(data_type)} {list(shape)}",
        )
    if data_type in (FLOAT16, BFLOAT16):  # int32_data holds the bit patterns, not the values
        patterns = np.asarray(numbers, np.int64)
        _in_range(patterns, 0, 0xFFFF, where, file)
        return patterns.astype(np.uint16).view(_DTYPES[data_type]).reshape(shape)
    if data_type in _NIBBLES:
        patterns = np.asarray(numbers, np.int64)
        _in_range(patterns, 0, 0xFF, where, file)
        return _decode(patterns.astype(np.uint8), data_type, shape)
    values = np.asarray(numbers, np.float32 if data_type == FLOAT else np.int64)
    if data_type == UINT8:
        _in_range(values, 0, 0xFF, where, file)
    return values.astype(_DTYPES[data_type]).reshape(shape)


def _in_range(values: Array, low: int, high: int, where: str, file: str) -> None:
    if values.size and (values.min() < low or values.max() > high):
        raise ArtifactError(file, where, "entries out of range", f"{low}..{high}")
