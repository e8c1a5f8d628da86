"""Make a hybrid Qwen3.5 artifact with random weights, in a size of choice.

Timing a hybrid model does not need a trained checkpoint. This script draws a target model (gated
delta net layers, every fourth layer full attention) and a DFlash2 drafter for it, and exports them
with the onnxruntime-genai model builder:

==========================  ======  =========================================================
``checkpoint/target``       142 MB  the target in float32, as transformers stores it
``checkpoint/drafter``       33 MB  the drafter in float32, in the layout the builder reads
``dense_fp32``              143 MB  the target alone, dense cache, for the CPU
``paged_fp32_dflash2``      175 MB  the target with a paged cache, and its drafter
==========================  ======  =========================================================

Sizes are those of the default geometry: 35 million parameters, and 8 million in the drafter. That
takes half a minute. The same arguments give the same weights again.

Two things to know about the results:

* **The drafter is untrained**, and its proposals are practically never accepted. The artifact is
  for timing (decoding, drafting, verifying) and for checking that speculation does not change the
  output. It gives no information about acceptance.
* The builder refuses a paged cache in float32 because onnxruntime has no such kernel. Here that
  check is lifted, and the drafter stays in float32 too instead of bfloat16, so that other runtimes
  can be compared with the dense export at full precision. onnxruntime cannot run this export.

Needed packages (Python 3.11, CPU only)::

    pip install numpy torch==2.13.0 transformers==5.24.0 safetensors tokenizers \\
        onnx onnx-ir onnxscript onnxruntime==1.32.0 onnxruntime-genai==0.18.0

Usage::

    python prepare_hybrid.py OUT
    python prepare_hybrid.py OUT --hidden 1024 --layers 16 --mlp 3072 --heads 16 --kv-heads 4
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

# Libraries that can download from a model hub are imported in the functions that use them, after
# main() has switched downloads off.

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
PAD, _, EOS, MASK = range(len(SPECIAL_TOKENS))
# The architecture needs four ids for images and video; they come from the end of the vocabulary.
VISION_TOKENS = 4
MIN_VOCABULARY = len(SPECIAL_TOKENS) + 256 + VISION_TOKENS

FULL_ATTENTION_EVERY = 4
ROTARY_FRACTION = 0.5
DRAFTER_CONV_TAPS = 2  # the builder's graph is wrong for more
ROPE_THETA = 10000.0
RMS_NORM_EPS = 1e-6


def size(default: int, text: str) -> Any:
    """Return a field of ``Geometry``; the text describes its command line option."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes of the target and its drafter."""

    hidden: int = size(512, "width of the residual stream")
    layers: int = size(8, "layers of the target, every fourth with full attention")
    mlp: int = size(1536, "inner width of the MLPs")
    vocabulary: int = size(8192, "vocabulary")
    context: int = size(2048, "positions")
    heads: int = size(8, "query heads of full attention")
    kv_heads: int = size(2, "key/value heads of full attention")
    head_size: int = size(64, "head size of full attention")
    delta_key_heads: int = size(4, "key heads of the gated delta net")
    delta_value_heads: int = size(8, "value heads of the gated delta net")
    delta_head_size: int = size(64, "key and value head size of the gated delta net")
    delta_conv: int = size(4, "width of the convolution of the gated delta net")
    draft_layers: int = size(2, "layers of the drafter; heads and MLP are as in the target")
    draft_block: int = size(8, "block of the drafter: one anchor and the drafts")
    draft_top_k: int = size(8, "candidates per draft")
    draft_rank: int = size(64, "rank of the candidate selector")
    draft_conv_group: int = size(16, "channels that share a convolution kernel of the drafter")
    page_size: int = size(16, "tokens in a page of the cache, a power of two from 16 on")
    pages: int = size(512, "pages of the cache")
    max_batch: int = size(4, "requests at a time")

    def __post_init__(self) -> None:
        conditions = {
            f"vocabulary of at least {MIN_VOCABULARY}": self.vocabulary >= MIN_VOCABULARY,
            "layers: a multiple of four": self.layers % FULL_ATTENTION_EVERY == 0 < self.layers,
            "heads: a multiple of kv-heads": self.heads % self.kv_heads == 0,
            "delta-value-heads: a multiple of delta-key-heads": (
                self.delta_value_heads % self.delta_key_heads == 0
            ),
            "head-size: a multiple of 4, at least 12": (
                self.head_size % 4 == 0 and self.head_size >= 12
            ),
            "hidden: a multiple of draft-conv-group": self.hidden % self.draft_conv_group == 0,
            "pages for one whole request": self.pages * self.page_size >= self.context,
        }
        broken = [text for text, holds in conditions.items() if not holds]
        if broken:
            raise ValueError("not a possible geometry; needed: " + "; ".join(broken))

    @property
    def drafter_inputs(self) -> list[int]:
        """Target layers whose outputs the drafter reads: an early, a middle and a late one."""
        first, last = 1, self.layers - 2
        return sorted({first, (first + last) // 2, last})


# ------------------------------------------------------------------------------------ checkpoints


def write_tokenizer(out: Path, context: int) -> None:
    """Write a stand-in tokenizer: special tokens first, then one token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[PAD],
        eos_token=SPECIAL_TOKENS[EOS],
        model_max_length=context,
    ).save_pretrained(out)


def target_config(geometry: Geometry) -> Any:
    """Return the target's configuration, with a vision tower as small as the class allows."""
    from transformers import Qwen3_5Config

    # Rotary frequencies are divided among time, height and width; text uses all in the same way.
    frequencies = int(geometry.head_size * ROTARY_FRACTION) // 2
    share = frequencies // 3
    text = {
        "vocab_size": geometry.vocabulary,
        "hidden_size": geometry.hidden,
        "intermediate_size": geometry.mlp,
        "num_hidden_layers": geometry.layers,
        "full_attention_interval": FULL_ATTENTION_EVERY,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_size,
        "linear_num_key_heads": geometry.delta_key_heads,
        "linear_num_value_heads": geometry.delta_value_heads,
        "linear_key_head_dim": geometry.delta_head_size,
        "linear_value_head_dim": geometry.delta_head_size,
        "linear_conv_kernel_dim": geometry.delta_conv,
        "max_position_embeddings": geometry.context,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": ROPE_THETA,
            "partial_rotary_factor": ROTARY_FRACTION,
            "mrope_interleaved": True,
            "mrope_section": [frequencies - 2 * share, share, share],
        },
        "tie_word_embeddings": False,  # the builder attaches drafters to untied targets only
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "num_position_embeddings": 16,
        "out_hidden_size": geometry.hidden,
    }
    last = geometry.vocabulary - 1
    return Qwen3_5Config(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        image_token_id=last,
        video_token_id=last - 1,
        vision_start_token_id=last - 2,
        vision_end_token_id=last - 3,
    )


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Draw weights that exercise every part of the model.

    Initial values of the class are no good for comparisons: norms are neutral, gates hardly open,
    and the logits so close to each other that rounding decides about greedy tokens.
    """
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        if name.endswith("A_log"):  # logarithm of the decay rates
            parameter.uniform_(0.5, 3.5).log_()
        elif name.endswith("dt_bias"):
            parameter.copy_(1.0 + 0.3 * noise)
        elif parameter.dim() == 1:  # norms and biases: around their neutral value
            parameter.add_(0.1 * noise)
        elif name.endswith("embed_tokens.weight"):
            parameter.copy_(noise)
        else:
            fan_in = parameter.numel() // parameter.shape[0]
            gain = 3.0 if name.endswith("lm_head.weight") else 1.0  # clear winners among logits
            parameter.copy_(gain * fan_in**-0.5 * noise)


def write_target(geometry: Geometry, seed: int, out: Path) -> None:
    """Write a random target checkpoint and its tokenizer."""
    from transformers import Qwen3_5ForConditionalGeneration

    torch.manual_seed(seed)
    model = Qwen3_5ForConditionalGeneration(target_config(geometry)).float()
    randomize(model)
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = PAD
    model.save_pretrained(out)
    write_tokenizer(out, geometry.context)


def drafter_config(geometry: Geometry) -> dict[str, Any]:
    """Return the content of the drafter's config.json."""
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "vocab_size": geometry.vocabulary,
        "hidden_size": geometry.hidden,
        "intermediate_size": geometry.mlp,
        "num_hidden_layers": geometry.draft_layers,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_size,
        "max_position_embeddings": geometry.context,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "is_causal": False,
        "tie_word_embeddings": False,
        "dflash_config": {
            "target_layer_ids": geometry.drafter_inputs,
            "mask_token_id": MASK,
            "block_size": geometry.draft_block,
            "conv_kernel_size": DRAFTER_CONV_TAPS,
            "conv_group_size": geometry.draft_conv_group,
            "selector_rank": geometry.draft_rank,
            "selector_top_k": geometry.draft_top_k,
            "input_embedding_scale": 1.0,
        },
    }


def drafter_tensors(geometry: Geometry) -> dict[str, torch.Tensor]:
    """Return random weights of the drafter, with the target's embedding and output matrix."""
    hidden = geometry.hidden
    query_rows = geometry.heads * geometry.head_size
    kv_rows = geometry.kv_heads * geometry.head_size

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return gain * columns**-0.5 * torch.randn(rows, columns)

    def norm(width: int) -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(width)

    def base_kernel() -> torch.Tensor:
        # Before and after the sublayer, for every tap and channel; about the identity.
        kernel = 0.1 * torch.randn(2, DRAFTER_CONV_TAPS, hidden)
        kernel[:, 0] += 1.0
        return kernel

    kernel_rows = 2 * DRAFTER_CONV_TAPS * (hidden // geometry.draft_conv_group)
    tensors = {
        "fc.weight": matrix(hidden, hidden * len(geometry.drafter_inputs)),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
        "candidate_selector.hidden_projection.weight": matrix(geometry.draft_rank, hidden),
        "candidate_selector.predecessor_codebook": matrix(geometry.vocabulary, geometry.draft_rank),
        "candidate_selector.successor_codebook": matrix(geometry.vocabulary, geometry.draft_rank),
    }
    for index in range(geometry.draft_layers):
        layer = {
            "input_layernorm.weight": norm(hidden),
            "self_attn.q_proj.weight": matrix(query_rows, hidden),
            "self_attn.k_proj.weight": matrix(kv_rows, hidden),
            "self_attn.v_proj.weight": matrix(kv_rows, hidden),
            "self_attn.o_proj.weight": matrix(hidden, query_rows),
            "self_attn.q_norm.weight": norm(geometry.head_size),
            "self_attn.k_norm.weight": norm(geometry.head_size),
            "attention_conv.kernel_projection.weight": matrix(kernel_rows, hidden, 0.3),
            "attention_conv.base_kernel": base_kernel(),
            "post_attention_layernorm.weight": norm(hidden),
            "mlp.gate_proj.weight": matrix(geometry.mlp, hidden),
            "mlp.up_proj.weight": matrix(geometry.mlp, hidden),
            "mlp.down_proj.weight": matrix(hidden, geometry.mlp),
            "mlp_conv.kernel_projection.weight": matrix(kernel_rows, hidden, 0.3),
            "mlp_conv.base_kernel": base_kernel(),
        }
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in layer.items()}
    return tensors


def write_drafter(geometry: Geometry, seed: int, out: Path) -> None:
    """Write a random drafter checkpoint."""
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(drafter_config(geometry), indent=2) + "\n")
    save_file(drafter_tensors(geometry), out / "model.safetensors", metadata={"format": "pt"})


# ---------------------------------------------------------------------------------------- exports


@contextlib.contextmanager
def paged_float32() -> Iterator[None]:
    """Let the model builder export paged attention and block drafters in float32.

    One method of the builder compares the type of inputs and outputs with those of the existing
    kernels, and does nothing else; it is given a type that it accepts. The type of the drafter is
    an argument of its constructor, with bfloat16 as default.
    """
    import onnx_ir
    from builders.base import Model
    from builders.dflash2 import DFlash2Builder

    check_attention, init_drafter = Model.make_attention_init, DFlash2Builder.__init__

    @functools.wraps(check_attention)
    def attention_init(self: Any, config: Any) -> None:
        real_type = self.io_dtype
        if self.use_paged_attention:
            self.io_dtype = onnx_ir.DataType.FLOAT16
        try:
            check_attention(self, config)
        finally:
            self.io_dtype = real_type

    @functools.wraps(init_drafter)
    def drafter_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init_drafter(self, *args, **(kwargs | {"compute_dtype": onnx_ir.DataType.FLOAT}))

    with (
        mock.patch.object(Model, "make_attention_init", attention_init),
        mock.patch.object(DFlash2Builder, "__init__", drafter_init),
    ):
        yield


def export(checkpoint: Path, out: Path, provider: str, options: dict[str, Any]) -> None:
    """Run the model builder in float32 on a checkpoint."""
    from builder import create_model, parse_extra_options

    common = (None, str(checkpoint), str(out), "fp32", provider, str(out.parent / "cache"))
    words = [f"{name}={value}" for name, value in options.items()]
    create_model(*common, **parse_extra_options(*common, words))

    # onnxruntime-genai 0.18 does not know the tokenizer class that transformers names.
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "Qwen2Tokenizer"
    path.write_text(json.dumps(settings, indent=2) + "\n")


def export_dense(target: Path, out: Path) -> None:
    """Export the target with a dense cache, for the CPU."""
    export(target, out, "cpu", {"exclude_mtp": "true"})


def export_paged(target: Path, drafter: Path, geometry: Geometry, out: Path) -> None:
    """Export the target with a paged cache, and the drafter beside it."""
    options = {
        "use_paged_attention": "true",
        "paged_block_size": geometry.page_size,
        "num_blocks": geometry.pages,
        "max_batch_size": geometry.max_batch,
        "dflash2_path": drafter,
        # The builder counts the residual entering a layer, the drafter the one leaving it.
        "aux_hidden_state_layers": ",".join(str(i + 1) for i in geometry.drafter_inputs),
        # Delta net states of a whole block can be rolled back.
        "state_update_capacity": geometry.draft_block,
        "prune_lm_head": "true",
    }
    with paged_float32():
        export(target, out, "cuda", options)


def parse_arguments() -> tuple[Path, Geometry, int]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for checkpoints and exports")
    parser.add_argument("--seed", type=int, default=0)
    for field in dataclasses.fields(Geometry):
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=int,
            default=field.default,
            help=f"{field.metadata['help']} (default: {field.default})",
        )
    values = vars(parser.parse_args())
    out, seed = values.pop("out"), values.pop("seed")
    try:
        return out, Geometry(**values), seed
    except ValueError as error:
        parser.error(str(error))


def main() -> None:
    out, geometry, seed = parse_arguments()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import onnxruntime_genai.models  # noqa: F401  (puts the model builder's folder on the path)

    target, drafter = out / "checkpoint" / "target", out / "checkpoint" / "drafter"
    write_target(geometry, seed, target)
    write_drafter(geometry, seed + 1, drafter)
    export_dense(target, out / "dense_fp32")
    export_paged(target, drafter, geometry, out / "paged_fp32_dflash2")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
