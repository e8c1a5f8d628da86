"""Copies of golden artifacts with one thing changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from tests.paths import artifact

Config = dict[str, Any]


def copied(name: str, folder: Path) -> Path:
    """A copy of an artifact that may be changed: its files share nothing with the original."""
    target = folder / name
    target.mkdir()
    for source in artifact(name).iterdir():
        if source.suffix in (".onnx", ".data") or source.name == "genai_config.json":
            shutil.copyfile(source, target / source.name)
    return target


def edit_config(folder: Path, change: Callable[[Config], object]) -> Path:
    """Apply ``change`` to the configuration."""
    path = folder / "genai_config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    return folder


def edit_graph(
    folder: Path, change: Callable[[onnx.GraphProto], object], file: str = "model.onnx"
) -> Path:
    """Apply ``change`` to a graph; external data stays where it is."""
    path = folder / file
    model = onnx.load(str(path), load_external_data=False)
    change(model.graph)
    path.write_bytes(model.SerializeToString())
    return folder


def node_of(graph: onnx.GraphProto, op: str, index: int = 0) -> onnx.NodeProto:
    """The ``index``-th node of an operator."""
    return [node for node in graph.node if node.op_type == op][index]


def tensor_of(graph: onnx.GraphProto, name: str) -> onnx.TensorProto:
    """The initializer of a name."""
    return next(tensor for tensor in graph.initializer if tensor.name == name)


def set_attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    """Set or replace an attribute."""
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def set_external(tensor: onnx.TensorProto, key: str, value: str) -> None:
    """Set or replace an entry of ``external_data``."""
    for entry in tensor.external_data:
        if entry.key == key:
            entry.value = value
            return
    tensor.external_data.add(key=key, value=value)
