"""GGUF files: their numbers against the package ``gguf``, and small models written with it."""

from __future__ import annotations

import dataclasses
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file

import jaxdraft
from convert import ArtifactError
from convert.checkpoint.gguf import halves
from convert.gguf.file import read_gguf
from convert.gguf.formats import FORMATS, NAMES, SIZES, GgufTensor
from convert.packed import Quantized
from convert.tensors import DataFiles, Place
from jaxdraft.nn.packed import PackedEmbedding, PackedLinear, PackedRows

Array = np.ndarray

_FACTORS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Bytes of float16 numbers in blocks with more than one of them, or not at the beginning."""

ROWS = 3


def stored(number: int, tmp_path: Path, rows: Array | None = None) -> tuple[GgufTensor, Array]:
    """A matrix of two blocks per row whose bytes are random, and its numbers."""
    form, rng = FORMATS[number], np.random.default_rng(number)
    raw = rng.integers(0, 256, (ROWS * 2, form.size), dtype=np.uint8)
    for at in _FACTORS.get(form.name, (0, 2) if form.name.endswith("_1") else (0,)):
        raw[:, at : at + 2] = rng.normal(size=(len(raw), 1)).astype(np.float16).view(np.uint8)
    (tmp_path / "bytes").write_bytes(raw.tobytes())
    place = Place(tmp_path / "bytes", "bytes", 0, raw.nbytes)
    shape, files = (ROWS, 2 * form.values), DataFiles(tmp_path)
    tensor = GgufTensor.of("x", shape, "bytes", place, files, form)
    wide = gguf.quants.dequantize(raw.reshape(ROWS, -1), Type(number))
    if rows is not None:
        return dataclasses.replace(tensor, rows=rows), wide[rows]
    return tensor, wide


@pytest.mark.parametrize("number", FORMATS, ids=[form.name for form in FORMATS.values()])
def test_numbers_equal_those_of_the_package(number: int, tmp_path: Path) -> None:
    """Dequantized bit for bit, on load and from the packed form."""
    assert gguf.GGML_QUANT_SIZES[Type(number)] == SIZES[number]
    tensor, expected = stored(number, tmp_path, rows=np.asarray([2, 0, 1]))
    source = tensor.source()
    found = np.empty(tensor.shape, np.float32)
    Quantized(source).write(found)
    np.testing.assert_array_equal(found, expected)
    arrays: dict[str, Any] = {n: jnp.asarray(source.read(n, 0, ROWS)) for n in source.parts}
    assert {name: array.dtype for name, array in arrays.items()} == dict(source.types)
    packed = PackedLinear(
        **arrays,
        bits=source.bits,
        block=source.block,
        inputs=source.inputs,
        dtype="float32",
        fine=source.fine,
    )
    within = 1e-6 * np.abs(expected).max()  # where a device multiplies and adds at once
    np.testing.assert_allclose(packed.dequantized(), expected, rtol=0, atol=within)


def test_names_of_types() -> None:
    assert NAMES == {number: Type(number).name for number in NAMES}


# --------------------------------------------------------------------------- whole files

WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 4, 2, 16, 96

Tensors = dict[str, Array]


def numbers(tied: bool, biased: bool, normed: bool) -> Tensors:
    """The tensors of a model of one layer, by the names of checkpoints."""
    rng, layer = np.random.default_rng(7), "model.layers.0."
    normal = lambda *shape: rng.normal(0, 0.2, shape).astype(np.float32)  # noqa: E731
    found = {
        "model.embed_tokens.weight": normal(VOCAB, WIDTH),
        "model.norm.weight": 1 + normal(WIDTH),
        f"{layer}input_layernorm.weight": 1 + normal(WIDTH),
        f"{layer}post_attention_layernorm.weight": 1 + normal(WIDTH),
        f"{layer}self_attn.o_proj.weight": normal(WIDTH, HEADS * HEAD_DIM),
        f"{layer}mlp.gate_proj.weight": normal(HIDDEN, WIDTH),
        f"{layer}mlp.up_proj.weight": normal(HIDDEN, WIDTH),
        f"{layer}mlp.down_proj.weight": normal(WIDTH, HIDDEN),
    }
    for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        found[f"{layer}self_attn.{name}_proj.weight"] = normal(heads * HEAD_DIM, WIDTH)
        if biased:
            found[f"{layer}self_attn.{name}_proj.bias"] = normal(heads * HEAD_DIM)
        if normed and name != "v":
            found[f"{layer}self_attn.{name}_norm.weight"] = 1 + normal(HEAD_DIM)
    return found if tied else {**found, "lm_head.weight": normal(VOCAB, WIDTH)}


THEIRS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.0.input_layernorm": "blk.0.attn_norm",
    "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    "model.layers.0.self_attn.q_proj": "blk.0.attn_q",
    "model.layers.0.self_attn.k_proj": "blk.0.attn_k",
    "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
    "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
    "model.layers.0.self_attn.q_norm": "blk.0.attn_q_norm",
    "model.layers.0.self_attn.k_norm": "blk.0.attn_k_norm",
    "model.layers.0.mlp.gate_proj": "blk.0.ffn_gate",
    "model.layers.0.mlp.up_proj": "blk.0.ffn_up",
    "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
}

KINDS = {"q_proj": Type.Q4_0, "k_proj": Type.Q4_0, "v_proj": Type.Q8_0, "down_proj": Type.Q4_1}
"""Formats of matrices; values are stored otherwise than queries, as in files of llama.cpp."""


def permuted(values: Array, heads: int) -> Array:
    """Rows of queries or keys as the converter of llama.cpp orders them."""
    return (
        values.reshape(heads, 2, HEAD_DIM // 2, *values.shape[1:])
        .swapaxes(1, 2)
        .reshape(values.shape)
    )


def write(
    path: Path,
    arch: str,
    tensors: Tensors,
    *,
    plain: Type | None = None,
    text: Mapping[str, Any] | None = None,
) -> Tensors:
    """Write a GGUF file, and return the numbers that its tensors stand for.

    Args:
      path: the file.
      arch: its architecture.
      tensors: its numbers, by the names of checkpoints.
      plain: type of the matrices. Default: :data:`KINDS`, else Q8_0.
      text: metadata of a tokenizer. Default: two tokens.
    """
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if text is None:
        writer.add_token_list([b"a", "ü".encode()])
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(5)
    else:
        add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}
        for key, value in text.items():
            add[type(value)](key, value)
    found: Tensors = {}
    for name, values in tensors.items():
        module, _, part = name.rpartition(".")
        theirs = f"{THEIRS[module]}.{part}" if module in THEIRS else name
        kind = Type.F32
        if values.ndim == 2:
            kind = plain or KINDS.get(module.rpartition(".")[2], Type.Q8_0)
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(theirs.split(".")[-2], 0)
        order = arch == "llama" and heads
        raw = gguf.quants.quantize(permuted(values, heads) if order else values, kind)
        writer.add_tensor(theirs, raw, raw_dtype=kind)
        found[name] = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def checkpoint(folder: Path, model_type: str, tensors: Tensors) -> Path:
    """The same model as a checkpoint in float32."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": [2, 5],
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


LAYOUTS = {
    "llama": (False, False, False),
    "qwen2": (True, True, False),
    "qwen3": (False, False, True),
}


@pytest.mark.parametrize("arch", LAYOUTS)
def test_a_file_equals_the_checkpoint_of_its_numbers(arch: str, tmp_path: Path) -> None:
    originals = write(tmp_path / "model.gguf", arch, numbers(*LAYOUTS[arch]))
    expected = jaxdraft.load(checkpoint(tmp_path / "wide", arch, originals))
    found = jaxdraft.load(tmp_path / "model.gguf")
    assert found.target.config == expected.target.config  # type: ignore[attr-defined]
    assert found.info == dataclasses.replace(expected.info, name="model.gguf")
    jax.tree.map(np.testing.assert_array_equal, found.target, expected.target)
    packed = jaxdraft.load(tmp_path / "model.gguf", packed=True)
    wide = dict(nnx.iter_modules(expected.target.decoder()))  # type: ignore[attr-defined]
    kinds = []
    for path, module in nnx.iter_modules(packed.target.decoder()):  # type: ignore[attr-defined]
        if isinstance(module, PackedLinear | PackedRows) and "below" not in path:
            kinds.append(type(module))
            matrix: Any = wide[path]
            np.testing.assert_allclose(module.dequantized(), matrix.weight[...], atol=1e-6)
    assert kinds.count(PackedEmbedding) == 1 and kinds.count(PackedRows) == 1  # q and k, v
    assert kinds.count(PackedLinear) == 3 + (not LAYOUTS[arch][0])


def test_a_packed_file_decodes_alike(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", "qwen2", numbers(*LAYOUTS["qwen2"]))
    outputs = []
    for packed in (False, True):
        model = jaxdraft.load(tmp_path / "model.gguf", packed=packed)
        out = jaxdraft.generate(model, [[3, 1, 4]], max_new_tokens=8, stop_ids=(), drafter="ngram")
        outputs.append(out.ids())
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.F32])
def test_plain_floats(kind: Type, tmp_path: Path) -> None:
    originals = write(tmp_path / "model.gguf", "llama", numbers(*LAYOUTS["llama"]), plain=kind)
    model = jaxdraft.load(tmp_path / "model.gguf")
    names = {Type.F16: "float16", Type.BF16: "bfloat16", Type.F32: "float32"}
    target: Any = model.target
    assert target.dtype == names[kind]
    qkv = target.decoder.params["layers"][0]["mixer"]["qkv"]["weight"]
    query = originals["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(qkv[: len(query)], query)


def test_metadata_and_report(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama", numbers(*LAYOUTS["llama"]))
    file = read_gguf(path)
    theirs = gguf.GGUFReader(path)
    assert file.architecture == "llama"
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "ü"]
    fields = {n: f.contents() for n, f in theirs.fields.items() if not n.startswith("GGUF.")}
    assert dict(file.metadata) == fields
    report = jaxdraft.inspect(path)
    assert report.loads and report.target is not None
    assert report.eos_token_ids == (2, 5)
    assert set(report.target.tensors) == {"Q8_0", "Q4_0", "Q4_1", "FLOAT"}
    assert report.summary()["files"] == {"model.gguf": path.stat().st_size}


def test_halves_undo_the_interleaving() -> None:
    assert halves(1, 4).tolist() == [0, 2, 1, 3]
    rows = np.arange(HEADS * HEAD_DIM)
    np.testing.assert_array_equal(permuted(rows, HEADS)[halves(HEADS, HEAD_DIM)], rows)


def test_rotary_factors_of_llama_3(tmp_path: Path) -> None:
    """The file holds divisors; they are those of the published settings, or refused."""
    inverse = 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    kept = np.clip((8192 * inverse / (2 * np.pi) - 1) / 3, 0, 1)
    factors = (1 / (kept + (1 - kept) / 32)).astype(np.float32)
    tensors = {**numbers(*LAYOUTS["llama"]), "rope_freqs.weight": factors}
    write(tmp_path / "model.gguf", "llama", tensors)
    rope = jaxdraft.load(tmp_path / "model.gguf").target.config.rope  # type: ignore[attr-defined]
    assert rope.kind == "llama3" and rope.factor == 32
    write(tmp_path / "model.gguf", "llama", {**tensors, "rope_freqs.weight": factors * 1.1})
    with pytest.raises(ArtifactError, match="tensor rope_freqs.weight: found 8 divisors up to"):
        jaxdraft.load(tmp_path / "model.gguf")


def _replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data.replace(old, new, 1)


COUNT = struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"x", 9, 0, 2**60)
"""One entry, "x": a list of 2^60 bytes, none of which is there."""

ALIGNED = struct.pack("<4sIQQQ17sII", b"GGUF", 3, 0, 1, 17, b"general.alignment", 4, 24)
"""One entry, an alignment of 24 bytes."""


def _moved(data: bytes) -> bytes:
    """A file whose matrix ``ffn_down`` has the place of the first tensor."""
    name = b"blk.0.ffn_down.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8 + 4
    return data[:at] + struct.pack("<Q", 0) + data[at + 8 :]


REFUSED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "magic": (_replaced(b"GGUF", b"GGML"), "magic: found b'GGML', expected b'GGUF'"),
    "version": (lambda d: d[:4] + struct.pack("<I", 1) + d[8:], "version: found 1, expected 2 or"),
    "endian": (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], "version: found big-endian numbers"),
    "short": (lambda d: d[:-64], "in a file of"),
    "header": (lambda d: d[:600], "header: found"),
    "count": (lambda d: COUNT, "header: found"),
    "alignment": (lambda d: ALIGNED, "general.alignment: found 24, expected a power of two"),
    "overlap": (_moved, "tensor blk.0.ffn_down.weight: found offset 0, expected"),
    "empty": (lambda d: b"", "header: found 0 bytes, expected a GGUF file"),
    "architecture": (_replaced(b"llama", b"mamba"), "found 'mamba', expected llama or qwen2 or q"),
    "name": (_replaced(b"blk.0.ffn_up", b"blk.0.ffn_xx"), "up_proj.weight: found nothing, expect"),
    "setting": (_replaced(b"head_count_kv", b"head_count_xx"), "k_proj.weight: found shape [32, 6"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    path = tmp_path / "model.gguf"
    write(path, "llama", numbers(*LAYOUTS["llama"]))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ArtifactError) as raised:
        jaxdraft.load(path)
    assert message in str(raised.value)
    assert not jaxdraft.inspect(path).loads


def test_other_formats_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama", numbers(*LAYOUTS["llama"]), plain=Type.Q8_0)
    data = path.read_bytes()
    at = data.index(b"blk.0.ffn_down.weight") + len(b"blk.0.ffn_down.weight") + 4 + 2 * 8
    path.write_bytes(data[:at] + struct.pack("<I", int(Type.IQ4_XS)) + data[at + 4 :])
    with pytest.raises(ArtifactError, match="ffn_down.weight: found IQ4_XS, expected one of F32, "):
        jaxdraft.load(path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        jaxdraft.load(tmp_path / "none.gguf")


def test_a_checkpoint_does_not_import_the_wing() -> None:
    code = (
        "import sys, jaxdraft; jaxdraft.load(jaxdraft.EMBEDDED);"
        "assert not [m for m in sys.modules if m.startswith(('gguf', 'convert.gguf'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
