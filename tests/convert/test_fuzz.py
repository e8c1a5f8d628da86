"""Damaged artifacts: whatever the bytes, the only exception is :class:`ArtifactError`."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert import ArtifactError, inspect_artifact
from tests.convert.helpers import Config, copied
from tests.examples import examples
from tests.paths import artifact

DFLASH2 = "qwen35_paged_fp16_dflash2"
MTP = "qwen35_fp32_cpu_mtp"
MOE = "qwen35_moe_int4_cpu"

EXAMPLES = examples(25)

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=12),
    st.sampled_from(["", "%d", "..", "/", "input_ids", "0", "model.onnx", "\ud800", "a\0b"]),
    st.lists(st.integers(-5, 500), max_size=4),
    # Made anew for each example, which may put more into them.
    st.builds(dict),
    st.builds(lambda: [{}]),
)


def paths_of(value: Any, path: tuple = ()) -> list[tuple]:
    """Every path into a configuration."""
    found = [path] if path else []
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        found += paths_of(inner, (*path, key))
    return found


def drawn(data: st.DataObject, parts: Sequence[Any]) -> Any:
    """One of the parts, by its place: they have no order and no hash of their own."""
    return parts[data.draw(st.integers(0, len(parts) - 1))]


def judged(folder: Path) -> None:
    """Reading ends, with or without problems, and the report can be printed."""
    report = inspect_artifact(folder)
    assert all(isinstance(problem, ArtifactError) for problem in report.problems)
    json.dumps(report.summary())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies that the examples of this module damage and repair."""
    folder = tmp_path_factory.mktemp("fuzz")
    return {name: copied(name, folder) for name in (DFLASH2, MTP, MOE)}


@pytest.mark.parametrize("name", [DFLASH2, MTP, MOE])
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_configurations(folders: dict[str, Path], name: str, data: st.DataObject) -> None:
    folder = folders[name]
    original: Config = json.loads((artifact(name) / "genai_config.json").read_text())
    config = copy.deepcopy(original)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(paths_of(config)))
        parent = config
        for key in path[:-1]:
            parent = parent[key]
        action = data.draw(st.sampled_from(["set", "drop", "add"]))
        if action == "set":
            parent[path[-1]] = data.draw(JUNK)
        elif action == "drop":
            del parent[path[-1]]
        elif isinstance(parent, dict):
            parent[data.draw(st.text(max_size=8))] = data.draw(JUNK)
    try:
        (folder / "genai_config.json").write_text(json.dumps(config))
        judged(folder)
    finally:
        (folder / "genai_config.json").write_text(json.dumps(original))


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_bytes_of_configurations(folders: dict[str, Path], data: st.DataObject) -> None:
    judged_with_bytes(folders[DFLASH2], DFLASH2, "genai_config.json", data)


@pytest.mark.parametrize(
    ("name", "file"),
    [(DFLASH2, "model.onnx"), (DFLASH2, "dflash2.onnx"), (MTP, "mtp.onnx"), (MOE, "model.onnx")],
)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_bytes_of_graphs(
    folders: dict[str, Path], name: str, file: str, data: st.DataObject
) -> None:
    judged_with_bytes(folders[name], name, file, data)


def judged_with_bytes(folder: Path, name: str, file: str, data: st.DataObject) -> None:
    """Some bytes flipped, a run removed or repeated, or the end cut off."""
    original = (artifact(name) / file).read_bytes()
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        action = data.draw(st.sampled_from(["flip", "cut", "drop", "repeat"]))
        if action == "flip":
            damaged[at] ^= data.draw(st.integers(1, 255))
        elif action == "cut" and at:
            del damaged[at:]
        elif action == "drop":
            del damaged[at : at + data.draw(st.integers(1, 64))]
        else:
            damaged[at:at] = damaged[at : at + 64]
        if not damaged:
            break
    try:
        (folder / file).write_bytes(bytes(damaged))
        judged(folder)
    finally:
        (folder / file).write_bytes(original)


@pytest.mark.parametrize(
    ("name", "file"), [(DFLASH2, "model.onnx"), (DFLASH2, "dflash2.onnx"), (MOE, "model.onnx")]
)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_structure_of_graphs(
    folders: dict[str, Path], name: str, file: str, data: st.DataObject
) -> None:
    """Valid protobuf of a graph that says something else: names, shapes and numbers moved."""
    folder = folders[name]
    original = (artifact(name) / file).read_bytes()
    model = onnx.ModelProto.FromString(original)
    graph = model.graph
    names = [n for node in graph.node for n in node.output] + [t.name for t in graph.initializer]
    for _ in range(data.draw(st.integers(1, 2))):
        node = drawn(data, graph.node)
        action = data.draw(st.sampled_from(["input", "op", "dim", "type", "drop", "attribute"]))
        if action == "input" and node.input:
            index = data.draw(st.integers(0, len(node.input) - 1))
            node.input[index] = data.draw(st.sampled_from(["", *names]))
        elif action == "op":
            node.op_type = data.draw(st.sampled_from(["Add", "MatMul", "Cast", "Erf", "Constant"]))
        elif action == "dim":
            tensor = drawn(data, graph.initializer)
            index = data.draw(st.integers(0, len(tensor.dims) - 1))
            tensor.dims[index] = data.draw(st.integers(-(2**40), 2**40))
        elif action == "type":
            tensor = drawn(data, graph.initializer)
            tensor.data_type = data.draw(st.integers(0, 30))
        elif action == "drop":
            graph.node.remove(node)
        elif node.attribute:
            attribute = drawn(data, node.attribute)
            attribute.i = data.draw(st.integers(-(2**40), 2**40))
            attribute.f = data.draw(st.floats(width=32))
    try:
        (folder / file).write_bytes(model.SerializeToString())
        judged(folder)
    finally:
        (folder / file).write_bytes(original)
