"""Files kept as recipes come back to the byte."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.golden.twins import REST, drop, restore

ROWS = np.random.default_rng(0).standard_normal((6, 40, 64)).astype(np.float32)
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def export(folder: Path, dtype: str, *, changed: int = 0) -> None:
    """A graph of six matrices; `changed` of them are not those of the other folders."""
    folder.mkdir()
    arrays = [*ROWS[: 6 - changed], *(ROWS[6 - changed :] + changed)]
    data, tensors = b"", []
    for i, array in enumerate(arrays):
        stored = array.astype(TYPES[dtype]).tobytes()
        kind = TensorProto.DataType.Value(dtype.upper().removesuffix("32"))
        tensor = TensorProto(name=f"w{i}", dims=array.shape, data_type=kind)
        tensor.data_location = TensorProto.EXTERNAL
        where = {"location": "model.onnx.data", "offset": len(data), "length": len(stored)}
        for key, value in where.items():
            tensor.external_data.add(key=key, value=str(value))
        tensors.append(tensor)
        data += stored
    onnx.save(helper.make_model(helper.make_graph([], "g", [], [], tensors)), folder / "model.onnx")
    (folder / "model.onnx.data").write_bytes(data)
    outputs = {f"row{i}": array for i, array in enumerate(arrays[::-1])}
    np.savez_compressed(folder / "golden.npz", **outputs)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    export(tmp_path / "full", "float32")
    export(tmp_path / "half", "float16")
    export(tmp_path / "brain", "bfloat16", changed=2)
    export(tmp_path / "other", "float32", changed=5)
    return tmp_path


def contents(root: Path) -> dict[str, bytes]:
    return {f.relative_to(root).as_posix(): f.read_bytes() for f in root.glob("*/*")}


def test_what_is_dropped_comes_back(root: Path) -> None:
    before = contents(root)
    drop(root)
    kept = contents(root)
    dropped = before.keys() - kept.keys()
    # The graphs are small, and one array of five in common makes no recipe.
    names = {"half/model.onnx.data", "brain/model.onnx.data", "half/golden.npz", "brain/golden.npz"}
    assert dropped == names
    assert (root / ".gitignore").read_text().split() == sorted(f"/{name}" for name in dropped)
    restore(root)
    assert contents(root) == before
    # Of its own each recipe has the changed matrices and the archive's directory.
    rest = lzma.decompress((root / REST).read_bytes())
    own = 2 * ROWS[0].size * 2 + len(before["brain/golden.npz"]) // 3
    assert own < len(rest) < own + 2_000


def test_what_is_dropped_twice_comes_back(root: Path) -> None:
    before = contents(root)
    drop(root)
    first = {f.name: f.read_bytes() for f in root.iterdir() if f.is_file()}
    restore(root)
    drop(root)
    assert {f.name: f.read_bytes() for f in root.iterdir() if f.is_file()} == first
    restore(root)
    assert contents(root) == before


def test_a_file_of_another_time_is_put_right(root: Path) -> None:
    before = contents(root)
    drop(root)
    restore(root)
    stale = root / "half" / "model.onnx.data"
    stale.write_bytes(b"of another commit")
    restore(root)
    assert contents(root) == before


def test_a_recipe_that_gives_another_file_is_refused(root: Path) -> None:
    drop(root)
    listed = json.loads((root / "twins.json").read_text())
    listed["half/model.onnx.data"]["pieces"][0][1] += 4
    (root / "twins.json").write_text(json.dumps(listed))
    with pytest.raises(RuntimeError, match=r"half/model\.onnx\.data.*do not give its sha256"):
        restore(root)
    assert not (root / "half" / "model.onnx.data").exists()


def test_a_file_of_its_own_that_compresses_well(tmp_path: Path) -> None:
    """Here float32 files of bfloat16 numbers, in the folder itself."""
    root = tmp_path / "rounded"
    export(root, "float32")
    data = ROWS.astype(ml_dtypes.bfloat16).astype(np.float32).tobytes()
    (root / "model.onnx.data").write_bytes(data)
    drop(root)
    assert sorted(f.name for f in root.glob("*.on*")) == ["model.onnx"]
    assert (root / REST).stat().st_size < len(data) // 2
    restore(root)
    assert (root / "model.onnx.data").read_bytes() == data
