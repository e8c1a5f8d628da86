"""An ONNX graph as data: nodes, attributes, and initializers that stay on disk until they are read.

The protobuf is read without its external data. The place of a tensor's bytes is checked when the
graph is read (file inside the folder, offset and length inside the file, length as required by
dtype and shape), so that nothing can fail later, when memory has been allocated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, TensorProto

from convert.errors import ArtifactError
from convert.paths import contained
from convert.tensors import (
    BFLOAT16,
    DTYPES,
    FLOAT,
    FLOAT16,
    INT4,
    INT32,
    INT64,
    NIBBLES,
    UINT4,
    UINT8,
    Array,
    DataFiles,
    Place,
    Tensor,
    decode_bytes,
    stored_bytes,
    type_name,
)

MICROSOFT = "com.microsoft"

_DOMAINS = {"": range(18, 27), MICROSOFT: range(1, 2)}

_MAX_GRAPH_BYTES = 1 << 30


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
        """Name in messages."""
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
            path.name, "contents", "bytes that are not a whole ONNX model", "an ONNX model"
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
    if data_type not in DTYPES and data_type not in NIBBLES:
        known = ", ".join(type_name(t) for t in (*DTYPES, *NIBBLES))
        raise ArtifactError(file, where, f"data type {type_name(data_type)}", f"one of {known}")
    shape = tuple(proto.dims)
    if any(d < 0 for d in shape) or math.prod(shape) >= 1 << 62:
        raise ArtifactError(file, where, f"shape {list(shape)}", "sizes that are not negative")
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
    """Return values stored in the graph itself, in ``raw_data`` or in the field of their type."""
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
        return decode_bytes(np.frombuffer(proto.raw_data, np.uint8), data_type, shape)
    field = _FIELDS[data_type]
    numbers = getattr(proto, field)
    # A packed 4-bit element pair takes one entry, every other element one of its own.
    entries = needed if data_type in NIBBLES else math.prod(shape)
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
        return patterns.astype(np.uint16).view(DTYPES[data_type]).reshape(shape)
    if data_type in NIBBLES:
        patterns = np.asarray(numbers, np.int64)
        _in_range(patterns, 0, 0xFF, where, file)
        return decode_bytes(patterns.astype(np.uint8), data_type, shape)
    values = np.asarray(numbers, np.float32 if data_type == FLOAT else np.int64)
    if data_type == UINT8:
        _in_range(values, 0, 0xFF, where, file)
    return values.astype(DTYPES[data_type]).reshape(shape)


def _in_range(values: Array, low: int, high: int, where: str, file: str) -> None:
    if values.size and (values.min() < low or values.max() > high):
        raise ArtifactError(file, where, "entries out of range", f"{low}..{high}")
