"""Stored tensors, where their bytes may lie, and files that are no graphs."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from convert import ArtifactError
from convert.artifact.graph import Graph
from convert.tensors import TYPES, DataFiles, stored_bytes, type_name, unpack_nibbles


def write_graph(folder: Path, *tensors: TensorProto, nodes: list | None = None, **model) -> Path:
    """A graph with these initializers and one node."""
    nodes = nodes or [helper.make_node("Identity", ["x"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows"])],
        list(tensors),
    )
    model.setdefault("opset_imports", [helper.make_opsetid("", 22)])
    path = folder / "graph.onnx"
    path.write_bytes(helper.make_model(graph, **model).SerializeToString())
    return path


def read_one(folder: Path, tensor: TensorProto) -> np.ndarray:
    """The values of a lone initializer."""
    graph = Graph(write_graph(folder, tensor), DataFiles(folder))
    return graph.initializers[tensor.name].read()


def external(name: str, data_type: int, dims: list[int], **entries: str) -> TensorProto:
    """An initializer whose bytes are elsewhere."""
    tensor = TensorProto(name=name, data_type=data_type, dims=dims)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


# bfloat16 and 4-bit storage (onnx/onnx#6604; microsoft/onnxruntime#29172).


def test_bfloat16_in_raw_bytes_and_in_int32_data(tmp_path: Path) -> None:
    raw = TensorProto(name="w", data_type=TensorProto.BFLOAT16, dims=[1], raw_data=b"\x80\x3e")
    field = TensorProto(name="w", data_type=TensorProto.BFLOAT16, dims=[1], int32_data=[16000])
    for tensor in (raw, field):
        values = read_one(tmp_path, tensor)
        assert values.dtype == ml_dtypes.bfloat16
        assert values.astype(np.float32).tolist() == [0.25]


def test_float16_in_int32_data_is_a_bit_pattern(tmp_path: Path) -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT16, dims=[1], int32_data=[0x3E80])
    assert read_one(tmp_path, tensor).tolist() == [1.625]


@pytest.mark.parametrize("pattern", [-1, 0x10000])
def test_bit_patterns_out_of_range_are_refused(tmp_path: Path, pattern: int) -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT16, dims=[1], int32_data=[pattern])
    with pytest.raises(ArtifactError, match="out of range"):
        read_one(tmp_path, tensor)


@pytest.mark.parametrize("where", ["raw_data", "int32_data", "external"])
def test_nibbles_low_first(tmp_path: Path, where: str) -> None:
    data = bytes([0x21, 0x43, 0x05])
    tensor = TensorProto(name="w", data_type=TensorProto.INT4, dims=[5])
    if where == "raw_data":
        tensor.raw_data = data
    elif where == "int32_data":
        tensor.int32_data.extend(data)
    else:
        (tmp_path / "d").write_bytes(data)
        tensor = external("w", TensorProto.INT4, [5], location="d", offset="0", length="3")
    assert read_one(tmp_path, tensor).tolist() == [1, 2, 3, 4, 5]


def test_nibbles_signed_and_unsigned() -> None:
    packed = np.array([0xF8], np.uint8)
    assert unpack_nibbles(packed, 2, signed=True).tolist() == [-8, -1]
    assert unpack_nibbles(packed, 2, signed=False).tolist() == [8, 15]


@pytest.mark.parametrize("count", [2, 4])
def test_nibbles_with_a_byte_too_many_or_too_few(tmp_path: Path, count: int) -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.INT4, dims=[5], raw_data=b"\0" * count)
    with pytest.raises(ArtifactError, match=f"initializer w: found {count} bytes.*expected 3"):
        read_one(tmp_path, tensor)
    (tmp_path / "d").write_bytes(b"\0" * 8)
    tensor = external("w", TensorProto.UINT4, [5], location="d", length=str(count))
    with pytest.raises(ArtifactError, match=f"initializer w: found {count} bytes.*expected 3"):
        read_one(tmp_path, tensor)


def test_stored_bytes() -> None:
    assert stored_bytes(TensorProto.INT4, (5,)) == 3
    assert stored_bytes(TensorProto.BFLOAT16, (3, 4)) == 24
    assert stored_bytes(TensorProto.FLOAT, ()) == 4
    assert stored_bytes(TensorProto.FLOAT, (0, 4)) == 0


@pytest.mark.parametrize(
    ("data_type", "field", "values"),
    [
        (TensorProto.FLOAT, "float_data", [1.5, -2.0]),
        (TensorProto.INT64, "int64_data", [2**40, -1]),
        (TensorProto.INT32, "int32_data", [7, -7]),
        (TensorProto.UINT8, "int32_data", [0, 255]),
    ],
)
def test_values_in_the_field_of_their_type(
    tmp_path: Path, data_type: int, field: str, values: list
) -> None:
    tensor = TensorProto(name="w", data_type=data_type, dims=[2])
    getattr(tensor, field).extend(values)
    assert read_one(tmp_path, tensor).tolist() == values
    tensor.dims[0] = 3
    with pytest.raises(ArtifactError, match=f"2 entries of {field}"):
        read_one(tmp_path, tensor)


def test_data_types_that_are_not_read(tmp_path: Path) -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.DOUBLE, dims=[1], double_data=[1.0])
    with pytest.raises(ArtifactError, match="initializer w: found data type DOUBLE"):
        read_one(tmp_path, tensor)


# Where external data may lie (onnx/onnx#3991, #7686).


def leaving(folder: Path) -> None:
    """A secret beside the folder, and links that lead to it."""
    (folder.parent / "secret").write_bytes(b"\0" * 64)
    (folder / "sub").mkdir()
    (folder / "link").symlink_to(folder.parent / "secret")
    (folder / "door").symlink_to(folder.parent)
    (folder / "inner").symlink_to(folder / "sub" / "data")
    (folder / "sub" / "data").write_bytes(np.arange(4, dtype=np.float32).tobytes())


@pytest.mark.parametrize(
    "location",
    [
        "../secret",
        "sub/../../secret",
        "sub/../sub/data",
        "/etc/passwd",
        "//etc/passwd",
        "C:\\x",
        "C:x",
        "sub\\data",
        "..\\secret",
        "",
        "a\0b",
        "link",
        "door/secret",
        "sub",
        ".",
        "missing",
        "x" * 2000,
    ],
)
def test_locations_that_are_refused_before_anything_is_opened(
    tmp_path: Path, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "artifact"
    folder.mkdir()
    leaving(folder)
    tensor = external("w", TensorProto.FLOAT, [4], location=location, offset="0", length="16")
    path = write_graph(folder, tensor)

    def refuse(*arguments: object, **keywords: object) -> None:
        raise AssertionError("a data file was opened")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ArtifactError, match="initializer w, location") as caught:
        Graph(path, DataFiles(folder))
    assert caught.value.file == "graph.onnx"


@pytest.mark.parametrize("location", ["sub/data", "./sub/data", "inner"])
def test_locations_inside_the_folder(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "artifact"
    folder.mkdir()
    leaving(folder)
    tensor = external("w", TensorProto.FLOAT, [4], location=location)
    assert read_one(folder, tensor).tolist() == [0, 1, 2, 3]


def test_a_folder_that_is_itself_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "d").write_bytes(np.ones(4, np.float32).tobytes())
    (tmp_path / "alias").symlink_to(real)
    tensor = external("w", TensorProto.FLOAT, [4], location="d")
    assert read_one(tmp_path / "alias", tensor).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"offset": "1", "length": "16"}, r"bytes 1\.\.17 of d, which has 16"),
        ({"offset": "4096", "length": "16"}, "which has 16"),
        ({"offset": str(2**62), "length": "16"}, "which has 16"),
        ({"offset": "0", "length": "12"}, r"12 bytes in d, expected 16 bytes for FLOAT \[4\]"),
        ({"offset": "8"}, "8 bytes in d, expected 16"),
        ({"offset": "-1", "length": "16"}, "offset: found '-1'"),
        ({"offset": "1e3", "length": "16"}, "offset: found '1e3'"),
        ({"offset": "0", "length": "١٦"}, "length: found"),
        ({"offset": "0", "length": "9" * 30}, "length: found"),
    ],
)
def test_offsets_and_lengths(tmp_path: Path, entries: dict[str, str], match: str) -> None:
    (tmp_path / "d").write_bytes(b"\0" * 16)
    with pytest.raises(ArtifactError, match=match):
        read_one(tmp_path, external("w", TensorProto.FLOAT, [4], location="d", **entries))


def test_more_than_two_gibibytes(tmp_path: Path) -> None:
    """onnx/onnx#3559: a sparse file of 2.5 GiB, mapped and not read."""
    values = np.arange(64, dtype=np.float32)
    offset = 2**31 + 16
    with open(tmp_path / "d", "wb") as file:
        file.seek(offset)
        file.write(values.tobytes())
        file.truncate(2**31 + 2**29)
    if os.stat(tmp_path / "d").st_blocks * 512 > 2**30:
        pytest.skip("no sparse files here")
    tensor = external("w", TensorProto.FLOAT, [64], location="d", offset=str(offset), length="256")
    files = DataFiles(tmp_path)
    graph = Graph(write_graph(tmp_path, tensor), files)
    before = resident_bytes()
    np.testing.assert_array_equal(graph.initializers["w"].read(), values)
    assert resident_bytes() - before < 64 << 20
    graph.initializers["w"].release()
    np.testing.assert_array_equal(graph.initializers["w"].read(), values)
    files.close()


def resident_bytes() -> int:
    """Memory of this process that is in use, where the system says so."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


# Files that are no graphs, and graphs that are not well formed.


@pytest.mark.parametrize("content", [b"", b"{}", b"\x7fELF\x02", b"\0" * 100, bytes(range(256))])
def test_files_that_are_no_models(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "graph.onnx").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"^graph\.onnx: .*ONNX model"):
        Graph(tmp_path / "graph.onnx", DataFiles(tmp_path))


def test_truncated_models(tmp_path: Path) -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], float_data=[0] * 4)
    path = write_graph(tmp_path, tensor)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ArtifactError):
            Graph(path, DataFiles(tmp_path))


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        ([("Identity", ["z"], ["y"])], "input 'z': found an undefined tensor"),
        ([("Add", ["x", "y"], ["y"])], "input 'y': found an undefined tensor"),
        ([("Identity", ["x"], ["y"]), ("Identity", ["x"], ["y"])], "output 'y': found a name in"),
        ([("Identity", ["x"], ["x"])], "output 'x': found a name in use"),
        ([("Identity", ["x"], ["z"])], "output 'y': found no node that computes it"),
    ],
)
def test_names(tmp_path: Path, nodes: list, match: str) -> None:
    path = write_graph(tmp_path, nodes=[helper.make_node(*node) for node in nodes])
    with pytest.raises(ArtifactError, match=match):
        Graph(path, DataFiles(tmp_path))


def test_two_initializers_of_one_name(tmp_path: Path) -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1], float_data=[0])
    with pytest.raises(ArtifactError, match="initializer w: found two"):
        Graph(write_graph(tmp_path, tensor, tensor), DataFiles(tmp_path))


@pytest.mark.parametrize(
    "imports",
    [[], [("", 9)], [("", 22), ("", 21)], [("", 22), ("ai.onnx.ml", 3)], [("", 22), ("my", 1)]],
)
def test_opsets(tmp_path: Path, imports: list[tuple[str, int]]) -> None:
    opsets = [helper.make_opsetid(*entry) for entry in imports]
    path = write_graph(tmp_path, opset_imports=opsets)
    if not imports:  # the helper would put one in
        model = onnx.load(str(path))
        del model.opset_import[:]
        path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="opset_import"):
        Graph(path, DataFiles(tmp_path))


def test_attributes_that_are_graphs(tmp_path: Path) -> None:
    inner = helper.make_graph([], "inner", [], [])
    node = helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)
    with pytest.raises(ArtifactError, match="attribute (then|else)_branch"):
        Graph(write_graph(tmp_path, nodes=[node]), DataFiles(tmp_path))


def test_a_file_is_mapped_once(tmp_path: Path) -> None:
    (tmp_path / "d").write_bytes(np.arange(8, dtype=np.float32).tobytes())
    files = DataFiles(tmp_path)
    first, second = (
        Graph(
            write_graph(tmp_path, external("w", TensorProto.FLOAT, [8], location="d", offset="0")),
            files,
        )
        for _ in range(2)
    )
    a, b = first.initializers["w"].read(), second.initializers["w"].read()
    assert a.ctypes.data == b.ctypes.data
    assert not a.flags.writeable


def test_numbers_of_types_are_those_of_onnx() -> None:
    for number, name in TYPES.items():
        assert onnx.TensorProto.DataType.Value(name) == number
    assert type_name(onnx.TensorProto.FLOAT) == "FLOAT" and type_name(99) == "type 99"
