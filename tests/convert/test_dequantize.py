"""Quantized weights: the reference rows bit for bit, and every layout against plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from convert import ArtifactError, load_artifact
from convert.artifact.graph import Graph
from convert.artifact.products import embedding, linear
from convert.artifact.quantized import Blocks, dequantize, unpack_zero_points
from convert.artifact.walk import Walk
from convert.errors import Problems
from convert.recipes import Matrix
from convert.tensors import DataFiles
from tests.paths import artifact, artifact_names

QUANTIZED = [name for name in artifact_names() if "int4" in name or "int8" in name]


@pytest.mark.parametrize("name", QUANTIZED)
def test_rows_equal_the_reference_bit_for_bit(name: str) -> None:
    with np.load(artifact(name) / "golden.npz") as file:
        expected = {key: file[key] for key in file.files if key.startswith("quant/")}
    loaded = load_artifact(artifact(name), dtype="float32")
    layer = loaded.target.params["layers"][0]
    embed = loaded.target.params["embed"]["weight"]
    found = {
        "quant/projection": layer["mixer"]["qkvz"]["weight"],
        "quant/embedding": embed,
        "quant/lm_head": embed
        if loaded.target_config.tied
        else loaded.target.params["head"]["weight"],
    }
    if "quant/experts_down" in expected:
        gate_up = np.asarray(layer["mlp"]["gate_up"])[0]
        half = len(gate_up) // 2
        found["quant/experts_gate_up"] = np.stack([gate_up[:half], gate_up[half:]], 1).reshape(
            gate_up.shape
        )
        found["quant/experts_down"] = layer["mlp"]["down"][0]
    if "quant/drafter_projection" in expected:
        mlp = loaded.drafter.params["layers"][0]["mlp"]
        found["quant/drafter_projection"] = mlp["gate_up"]["weight"]
    assert set(found) == set(expected)
    for key, rows in expected.items():
        np.testing.assert_array_equal(np.asarray(found[key])[: len(rows)], rows, err_msg=key)


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Values [..., n] of ``bits`` bits, low bits first: bytes [..., n * bits / 8]."""
    per = 8 // bits
    parts = values.reshape(*values.shape[:-1], -1, per).astype(np.uint16)
    shifts = np.arange(per) * bits
    return (parts << shifts.astype(np.uint16)).sum(-1).astype(np.uint8)


def plain(values: np.ndarray, scales: np.ndarray, zeros: np.ndarray, width: int) -> np.ndarray:
    """``(q - zero) * scale`` one number at a time. values [N, blocks, block]."""
    rows, _, block = values.shape
    out = np.empty((rows, width), np.float32)
    for n in range(rows):
        for k in range(width):
            b = k // block
            centred = np.float32(values[n, b, k % block]) - np.float32(zeros[n, b])
            out[n, k] = centred * np.float32(scales[n, b])
    return out


def matmul_graph(
    folder: Path, arrays: dict[str, Any], inputs: list[str], **attributes: int
) -> Walk:
    """A graph of one MatMulNBits node with weights in the graph itself."""
    node = helper.make_node(
        "MatMulNBits", inputs, ["y"], name="product", domain="com.microsoft", **attributes
    )
    tensors = [
        t if isinstance(t, TensorProto) else numpy_helper.from_array(t, name)
        for name, t in arrays.items()
    ]
    return one_node(folder, node, tensors)


def one_node(folder: Path, node: onnx.NodeProto, tensors: list[onnx.TensorProto]) -> Walk:
    """A walk over a graph of one node from ``x`` (float) or ``ids`` to ``y``."""
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", None]),
            helper.make_tensor_value_info("ids", TensorProto.INT64, ["rows"]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        tensors,
    )
    opsets = [helper.make_opsetid("", 22), helper.make_opsetid("com.microsoft", 1)]
    path = folder / "graph.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=opsets).SerializeToString())
    return Walk(Graph(path, DataFiles(folder)), Problems())


def numbers(matrix: Matrix) -> np.ndarray:
    """The matrix in float32."""
    out = np.empty(matrix.shape, np.float32)
    matrix.write(out)
    return out


def case(
    bits: int, width: int, block: int, rows: int = 5
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random values [N, blocks, block] (the padding too), scales of both signs, zero points."""
    rng = np.random.default_rng([bits, width, block])
    blocks = -(-width // block)
    values = rng.integers(0, 1 << bits, (rows, blocks, block))
    scales = rng.normal(size=(rows, blocks)).astype(np.float32)
    zeros = rng.integers(0, 1 << bits, (rows, blocks))
    return values, scales, zeros


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("width", "block"), [(64, 32), (40, 32), (80, 32), (96, 16), (2048, 512)])
@pytest.mark.parametrize("zero_points", ["none", "empty", "packed", "packed_flat", "float"])
def test_matmul_nbits(tmp_path: Path, bits: int, width: int, block: int, zero_points: str) -> None:
    values, scales, zeros = case(bits, width, block)
    rows, blocks, _ = values.shape
    arrays: dict[str, Any] = {"b": pack(values, bits), "s": scales}
    inputs = ["x", "b", "s"]
    if zero_points == "empty":
        inputs.append("")
    if zero_points in ("none", "empty"):
        zeros = np.full_like(zeros, 1 << (bits - 1))
    elif zero_points == "float":
        zeros = zeros + 0.5
        arrays["z"] = zeros.astype(np.float32)
        inputs.append("z")
    else:
        per = 8 // bits
        padded = np.full((rows, -(-blocks // per) * per), (1 << bits) - 1)  # garbage in the padding
        padded[:, :blocks] = zeros
        arrays["z"] = pack(padded, bits)
        if zero_points == "packed_flat":
            arrays["z"] = arrays["z"].reshape(-1)
        inputs.append("z")
    walk = matmul_graph(tmp_path, arrays, inputs, bits=bits, block_size=block, K=width, N=rows)
    source, matrix = linear(walk, "y", width, rows)
    assert source == "x"
    np.testing.assert_array_equal(numbers(matrix), plain(values, scales, zeros, width))
    np.testing.assert_array_equal(
        numbers(matrix.rows(1, 4)), plain(values, scales, zeros, width)[1:4]
    )


@pytest.mark.parametrize("block", [128, 256, 512])
def test_large_blocks_do_not_give_zeros(tmp_path: Path, block: int) -> None:
    """microsoft/onnxruntime#28551: bytes 0x22, scale 0.5, zero point 3 over 2048 ones is -1024."""
    blocks = 2048 // block
    arrays = {
        "b": np.full((4, blocks, block // 2), 0x22, np.uint8),
        "s": np.full((4, blocks), 0.5, np.float32),
        "z": np.full((4, blocks), 3.0, np.float32),
    }
    walk = matmul_graph(
        tmp_path, arrays, ["x", "b", "s", "z"], bits=4, block_size=block, K=2048, N=4
    )
    _, matrix = linear(walk, "y", 2048, 4)
    np.testing.assert_array_equal(numbers(matrix).sum(axis=1), np.full(4, -1024.0))


def test_zero_point_that_names_nothing_is_refused(tmp_path: Path) -> None:
    """microsoft/onnxruntime-genai#1951."""
    arrays = {"b": np.zeros((4, 2, 16), np.uint8), "s": np.ones((4, 2), np.float32)}
    with pytest.raises(ArtifactError, match=r"product.*'z'.*undefined"):
        matmul_graph(tmp_path, arrays, ["x", "b", "s", "z"], bits=4, block_size=32, K=64, N=4)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((8, 1), np.uint8), ((4, 2), np.uint8), ((4, 1), np.float32)]
)
def test_zero_points_of_another_shape_are_refused(
    tmp_path: Path, shape: tuple[int, int], dtype: type
) -> None:
    arrays = {
        "b": np.zeros((4, 2, 16), np.uint8),
        "s": np.ones((4, 2), np.float32),
        "z": np.zeros(shape, dtype),
    }
    walk = matmul_graph(tmp_path, arrays, ["x", "b", "s", "z"], bits=4, block_size=32, K=64, N=4)
    with pytest.raises(ArtifactError, match="initializer z: found shape"):
        linear(walk, "y", 64, 4)


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"bits": 3}, "attribute bits: found 3"),
        ({"block_size": 24}, "block_size"),
        ({"block_size": 4}, "block_size"),
        ({"K": 128}, "K: found 128, expected 64"),
        ({"N": 8}, "N: found 8, expected 4"),
        ({"weight_prepacked": 1}, "weight_prepacked: found 1"),
        ({"surprise": 1}, "surprise.*not implemented"),
    ],
)
def test_matmul_attributes_that_are_not_implemented(
    tmp_path: Path, attributes: dict[str, int], match: str
) -> None:
    arrays = {"b": np.zeros((4, 2, 16), np.uint8), "s": np.ones((4, 2), np.float32)}
    values = {"bits": 4, "block_size": 32, "K": 64, "N": 4} | attributes
    walk = matmul_graph(tmp_path, arrays, ["x", "b", "s"], **values)
    with pytest.raises(ArtifactError, match=match):
        linear(walk, "y", 64, 4)


@pytest.mark.parametrize("form", ["INT4", "UINT4", "UINT8"])
def test_gather_block_quantized(tmp_path: Path, form: str) -> None:
    """Typed tables have no implied zero point, tables of bytes have 8."""
    values, scales, _ = case(4, 64, 32, rows=6)
    zeros = np.zeros(scales.shape)
    stored = values
    if form == "INT4":
        stored = np.where(values > 7, values - 16, values)
    elif form == "UINT8":
        zeros = zeros + 8
    packed = pack(values.reshape(6, -1), 4)
    if form == "UINT8":
        table = numpy_helper.from_array(packed, "t")
    else:
        table = TensorProto(
            name="t", data_type=getattr(TensorProto, form), dims=[6, 64], raw_data=packed.tobytes()
        )
    node = helper.make_node(
        "GatherBlockQuantized",
        ["t", "ids", "s"],
        ["y"],
        domain="com.microsoft",
        block_size=32,
        gather_axis=0,
        quantize_axis=1,
    )
    walk = one_node(tmp_path, node, [table, numpy_helper.from_array(scales, "s")])
    matrix = embedding(walk, "y", "ids", 6, 64)
    np.testing.assert_array_equal(numbers(matrix), plain(stored, scales, zeros, 64))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_scales(dtype: str) -> None:
    import ml_dtypes

    values, scales, _ = case(4, 64, 32)
    narrow = scales.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    out = np.empty((5, 64), np.float32)
    dequantize(pack(values, 4).reshape(5, -1), narrow, None, Blocks(4, 32, 64, zero=8), out)
    wide = narrow.astype(np.float32)
    np.testing.assert_array_equal(out, plain(values, wide, np.full(scales.shape, 8), 64))


def test_rounding_happens_once() -> None:
    values, scales, _ = case(8, 64, 32)
    blocks = Blocks(8, 32, 64, zero=128)
    exact, rounded = np.empty((5, 64), np.float32), np.empty((5, 64), np.float16)
    packed = pack(values, 8).reshape(5, -1)
    dequantize(packed, scales, None, blocks, exact)
    dequantize(packed, scales, None, blocks, rounded)
    np.testing.assert_array_equal(rounded, exact.astype(np.float16))


def test_zero_points_of_an_odd_number_of_blocks() -> None:
    packed = np.array([[0x98, 0xF7]], np.uint8)  # the last nibble is padding
    found = unpack_zero_points(packed, Blocks(4, 32, 80, zero=8))
    np.testing.assert_array_equal(found, [[8, 9, 7]])


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values, scales, _ = case(4, 64, 32, rows=7)
    blocks = Blocks(4, 32, 64, zero=8)
    whole, parts = np.empty((7, 64), np.float32), np.empty((7, 64), np.float32)
    dequantize(pack(values, 4).reshape(7, -1), scales, None, blocks, whole)
    monkeypatch.setattr("convert.artifact.quantized._CHUNK_VALUES", 130)
    dequantize(pack(values, 4).reshape(7, -1), scales, None, blocks, parts)
    np.testing.assert_array_equal(parts, whole)
