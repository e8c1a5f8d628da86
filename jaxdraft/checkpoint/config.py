"""``config.json`` of a target: description -> content of the file.

Settings that a layout cannot express raise ``ValueError`` here, before anything is written.
The other direction is :mod:`convert.checkpoint.config`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxdraft.checkpoint.families import (
    FAMILIES,
    FULL,
    GPT_OSS,
    LLAMA,
    LOGITS,
    QWEN3,
    QWEN3_MOE,
    QWEN35,
    QWEN35_MOE,
    SCORES,
    SLIDING,
    Family,
)
from jaxdraft.checkpoint.forms import INT4_GROUP
from jaxdraft.config import (
    AttentionConfig,
    MlpConfig,
    MoeConfig,
    MtpConfig,
    TargetConfig,
)
from jaxdraft.rope import Rope

Json = dict[str, Any]

TOWER = {
    "depth": 1,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "in_channels": 3,
    "intermediate_size": 64,
    "model_type": "qwen3_5_vision",
    "num_heads": 2,
    "num_position_embeddings": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
"""The smallest vision tower. The architecture has one, and its classes do not load without."""


def vision_tower(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the (zero) tensors of :data:`TOWER`, which text does not use."""
    width, inner = TOWER["hidden_size"], TOWER["intermediate_size"]
    merged = width * TOWER["spatial_merge_size"] ** 2
    patch = TOWER["patch_size"]
    vectors = {
        "blocks.0.attn.proj.bias": width,
        "blocks.0.attn.qkv.bias": 3 * width,
        "blocks.0.mlp.linear_fc1.bias": inner,
        "blocks.0.mlp.linear_fc2.bias": width,
        "blocks.0.norm1.bias": width,
        "blocks.0.norm1.weight": width,
        "blocks.0.norm2.bias": width,
        "blocks.0.norm2.weight": width,
        "merger.linear_fc1.bias": merged,
        "merger.linear_fc2.bias": config.width,
        "merger.norm.bias": width,
        "merger.norm.weight": width,
        "patch_embed.proj.bias": width,
    }
    matrices = {
        "blocks.0.attn.proj.weight": (width, width),
        "blocks.0.attn.qkv.weight": (3 * width, width),
        "blocks.0.mlp.linear_fc1.weight": (inner, width),
        "blocks.0.mlp.linear_fc2.weight": (width, inner),
        "merger.linear_fc1.weight": (merged, merged),
        "merger.linear_fc2.weight": (config.width, merged),
        "patch_embed.proj.weight": (
            width,
            TOWER["in_channels"],
            TOWER["temporal_patch_size"],
            patch,
            patch,
        ),
        "pos_embed.weight": (TOWER["num_position_embeddings"], width),
    }
    tensors = {**{name: (size,) for name, size in vectors.items()}, **matrices}
    return {f"{QWEN35.aside[0]}{name}": shape for name, shape in sorted(tensors.items())}


def family_of(config: TargetConfig) -> Family:
    """Return the architecture whose checkpoints can hold this target.

    It is the architecture that the target was loaded from, or else the first that can hold it.

    Raises:
      ValueError: there is none.
    """
    if not config.softmax:
        raise ValueError(f"layers are {config.layers}; a checkpoint needs an attention layer")
    if config.architecture:
        if config.architecture not in FAMILIES:
            raise ValueError(
                f"architecture is {config.architecture!r}; expected one of {', '.join(FAMILIES)}"
            )
        family = FAMILIES[config.architecture]
        return family.alone() if family.composite and not family.tower else family
    a = config.softmax[0]
    moe = isinstance(config.mlp, MoeConfig)
    if a.gated or config.delta_net is not None:
        return QWEN35_MOE if moe else QWEN35
    closest = QWEN3 if a.qk_norm else LLAMA
    if moe:
        closest = GPT_OSS if a.sinks else QWEN3_MOE
    for family in (closest, *FAMILIES.values()):
        with contextlib.suppress(ValueError):
            _check_properties(config, family)
            return family.alone() if family.composite and not family.tower else family
    return closest


def target_json(
    config: TargetConfig,
    family: Family,
    ropes: Sequence[Rope],
    *,
    dtype: str,
    mtp: MtpConfig | None = None,
    stop_ids: tuple[int, ...] = (),
    int4: bool = False,
) -> Json:
    """Return ``config.json`` of a target.

    Args:
      config: its description.
      family: from :func:`family_of`.
      ropes: its rotary embeddings: one for all layers, or one without and one with a window.
      dtype: name of the dtype to compute in.
      mtp: description of the multi-token-prediction head stored with it, if there is one.
      stop_ids: tokens that end a sequence.
      int4: whether the matrices are stored in four bits.

    Raises:
      ValueError: if the family cannot express ``config``.
    """
    a = config.softmax[0]
    check_target(config, family, ropes, mtp)
    text = {
        "attention_bias": (a.bias or a.out_bias) and not family.bias,
        "dtype": dtype,
        "eos_token_id": _ids(stop_ids),
        "head_dim": a.head_dim,
        "hidden_act": _ACTIVATIONS[family.activation],
        "hidden_size": config.width,
        "max_position_embeddings": config.context_length,
        "num_attention_heads": a.heads,
        "num_hidden_layers": len(config.layers),
        "num_key_value_heads": a.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "use_cache": True,
        "vocab_size": config.vocab_size,
        **_rope_json(config, family, ropes),
        **_feed_forward_json(config, family),
        **_windows_json(config, family),
        **_own_json(config, family),
    }
    ignored = ["lm_head", *(["re:.*visual.*"] if family.composite else [])]
    quantized = {"quantization_config": quantization_json(4, ignored)} if int4 else {}
    if family.gated:
        text |= _hybrid_json(config)
        text |= {
            "mtp_num_hidden_layers": 0 if mtp is None else 1,
            "mtp_use_dedicated_embeddings": False,
        }
    if not family.composite:
        known = {"architectures": [family.architecture], "model_type": family.model_type}
        return {**known, **text, **quantized}
    text["model_type"] = family.text_type
    last = config.vocab_size - 1  # four ids required by the class, unused in text
    return {
        "architectures": [family.architecture],
        "dtype": dtype,
        "image_token_id": last,
        "model_type": family.model_type,
        "text_config": dict(sorted(text.items())),
        "tie_word_embeddings": config.tied,
        "video_token_id": last - 1,
        "vision_config": {
            **TOWER,
            "model_type": f"{family.model_type}_vision",
            "out_hidden_size": config.width,
        },
        "vision_end_token_id": last - 3,
        "vision_start_token_id": last - 2,
        **quantized,
    }


def generation_json(stop_ids: tuple[int, ...]) -> Json:
    """Return ``generation_config.json``, where runtimes find the tokens that end a sequence."""
    return {"_from_model_config": True, "eos_token_id": _ids(stop_ids), "use_cache": True}


def quantization_json(bits: int, ignore: Sequence[str] = ()) -> Json:
    """Return ``quantization_config`` of matrices in eight or four bits; activations are floats.

    Source: compressed-tensors. Eight bits use a scale per row (``int-quantized``), four one for
    each :data:`jaxdraft.checkpoint.forms.INT4_GROUP` inputs (``pack-quantized``).

    Args:
      bits: 8 or 4.
      ignore: names of linear maps that stay floats.
    """
    weights: Json = {"num_bits": bits, "type": "int", "symmetric": True}
    weights |= (
        {"strategy": "channel"} if bits == 8 else {"strategy": "group", "group_size": INT4_GROUP}
    )
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if bits == 8 else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**weights, "dynamic": False},
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": list(ignore),
    }


MXFP4: Json = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
"""``quantization_config`` of experts in MXFP4, as gpt-oss has it."""


def check_target(
    config: TargetConfig, family: Family, ropes: Sequence[Rope], mtp: MtpConfig | None
) -> None:
    """Raise for settings that ``config.json`` of this family cannot express unambiguously."""
    what = f"a {family.model_type} checkpoint"
    _check_properties(config, family)
    for rope in ropes:
        if rope.kind not in family.ropes:
            require(what, "rope", rope.kind, family.ropes[0])
    a = config.softmax[0]
    rotary = int(a.rotary_dim / a.head_dim * a.head_dim) if family.partial else a.head_dim
    require(what, "attention.rotary_dim", a.rotary_dim, rotary)
    if config.delta_net is not None:
        require(what, "delta_net.norm_eps", config.delta_net.norm_eps, config.norm_eps)
    if mtp is None:
        return
    if not family.gated:
        raise ValueError(f"{what} cannot hold a multi-token-prediction head")
    for field in ("vocab_size", "width", "attention", "mlp", "norm_eps", "context_length"):
        require(what, f"mtp.{field}", getattr(mtp, field), getattr(config, field))


def _check_properties(config: TargetConfig, family: Family) -> None:
    """Raise for properties of a target that the family does not have."""
    what, a = f"a {family.model_type} checkpoint", config.softmax[0]
    for kind in dict.fromkeys(config.layers):
        if kind not in dict(family.kinds):
            raise ValueError(f"layers are {config.layers}; {what} has no layers of kind {kind!r}")
    if family.windows == "number" and len(set(config.layers)) > 1:
        raise ValueError(f"layers are {config.layers}; {what} has layers of one kind only")
    for shape in config.softmax:
        require_attention(
            shape,
            config.norm_eps,
            what,
            gated=family.gated,
            qk_norm=bool(family.qk_norm),
            softcap=SCORES in family.softcaps,
            scale=family.query_scalar,
        )
        require(what, "attention.interleaved", shape.interleaved, family.interleaved)
        require(what, "attention.norm_whole", shape.norm_whole, family.qk_norm == "whole")
        require(what, "sliding", dataclasses.replace(shape, window=a.window), a)
    biases = [family.bias + family.bias_key * flag for flag in (False, True)]
    if (a.bias, a.out_bias) not in [("q" in letters, "o" in letters) for letters in biases]:
        raise ValueError(
            f"attention.bias is {a.bias} and out_bias {a.out_bias}; {what} has biases of "
            f"{' or of '.join(letters or 'none' for letters in dict.fromkeys(biases))}"
        )
    require(what, "attention.sinks", a.sinks, family.sinks)
    require(what, "norms", config.norms, family.sides)
    if LOGITS not in family.softcaps:
        require(what, "softcap", config.softcap, 0.0)
    _require_nearly(
        what,
        "embedding_scale",
        config.embedding_scale,
        config.width**0.5 if family.embedding_scaled else 1.0,
    )
    both = {"attention", "sliding"} <= set(config.layers)
    require(what, "own_tables", config.own_tables, family.own_tables and both)
    _check_feed_forward(config, family, what)


def _check_feed_forward(config: TargetConfig, family: Family, what: str) -> None:
    mlp, form = config.mlp, family.experts
    if isinstance(mlp, MoeConfig) != bool(form):
        raise ValueError(f"mlp is {mlp}; {what} has {'experts' if form else 'no experts'}")
    if form != "separate":
        require(what, "dense_layers", config.dense_layers, ())
    for part in (mlp, config.dense):
        if isinstance(part, MlpConfig):
            require(what, "mlp.activation", part.activation, family.activation)
            if not family.mlp_bias_key:
                require(what, "mlp.bias", part.bias, False)
    if not isinstance(mlp, MoeConfig):
        return
    if form == "stacked" and not mlp.shared_hidden:
        raise ValueError(f"mlp.shared_hidden is 0; {what} has a shared expert")
    if form != "stacked":
        require(what, "mlp.shared_hidden", mlp.shared_hidden, 0)
    if form != "separate":
        require(what, "mlp.renormalized", mlp.renormalized, True)
    transposed = form == "transposed"
    require(what, "mlp.router_bias", mlp.router_bias, transposed)
    require(what, "mlp.bias", mlp.bias, transposed)
    if bool(mlp.limit) != transposed:
        has = "a limit" if transposed else "no limit"
        raise ValueError(f"mlp.limit is {mlp.limit}; {what} has {has}")


def require_attention(
    a: AttentionConfig,
    eps: float,
    what: str,
    *,
    gated: bool,
    qk_norm: bool,
    softcap: bool = False,
    scale: bool = False,
) -> None:
    """Check a shape of attention; ``softcap`` and ``scale``: whether any value is allowed."""
    require(what, "attention.gated", a.gated, gated)
    require(what, "attention.qk_norm", a.qk_norm, qk_norm)
    if a.qk_norm:
        require(what, "attention.norm_eps", a.norm_eps, eps)
    if not softcap:
        require(what, "attention.softcap", a.softcap, 0.0)
    if not scale:
        _require_nearly(what, "attention.scale", a.scale, a.head_dim**-0.5)


def require(what: str, field: str, found: Any, expected: Any) -> None:
    """Raise for a value that a layout has no place for."""
    if found != expected:
        raise ValueError(f"{field} is {found!r}; {what} can only express {expected!r}")


def _require_nearly(what: str, field: str, found: float, expected: float) -> None:
    if abs(found - expected) > 1e-6 * expected:
        require(what, field, found, expected)


_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


def _scalar(scale: float) -> float:
    """Return x with ``x**-0.5 = scale``, as a whole number if one is near."""
    exact = scale**-2
    return round(exact) if abs(round(exact) - exact) < 1e-5 * exact else exact


def _own_json(config: TargetConfig, family: Family) -> Json:
    """Return the keys that few families have."""
    json: Json = {}
    if family.activation != "silu":
        json["hidden_activation"] = _ACTIVATIONS[family.activation]
    if family.mlp_bias_key:
        json["mlp_bias"] = isinstance(config.mlp, MlpConfig) and config.mlp.bias
    if family.query_scalar:
        json["query_pre_attn_scalar"] = _scalar(config.softmax[0].scale)
    caps = {SCORES: config.softmax[0].softcap, LOGITS: config.softcap}
    json |= {key: caps[key] or None for key in family.softcaps}
    if "pad_token_id" in family.defaults:  # else a token that small vocabularies do not have
        json["pad_token_id"] = None
    return json


def _rope_json(config: TargetConfig, family: Family, ropes: Sequence[Rope]) -> Json:
    a, first = config.softmax[0], ropes[0].json()
    json: Json = {"rope_parameters": first}
    if family.own_tables:  # a kind without layers has the other's
        json = {"rope_parameters": {FULL: first, SLIDING: ropes[-1].json()}}
    if family.partial:
        first["partial_rotary_factor"] = a.rotary_dim / a.head_dim
        if not family.gated:
            json["partial_rotary_factor"] = a.rotary_dim / a.head_dim  # where 4.x looks for it
    if family.gated:
        # Rotary channels are dealt out to time, height and width; text uses them all alike.
        frequencies = a.rotary_dim // 2
        share = frequencies // 3
        first |= {
            "mrope_interleaved": True,
            "mrope_section": [frequencies - 2 * share, share, share],
        }
    if ropes[0].kind == "longrope":
        length = ropes[0].original_length
        longest = round(length * ropes[0].factor)  # the context may be limited to the short one
        json |= {
            "original_max_position_embeddings": length,
            "max_position_embeddings": max(config.context_length, longest),
        }
    return json


def _windows_json(config: TargetConfig, family: Family) -> Json:
    window = None if config.sliding is None else config.sliding.window
    if family.windows == "number":
        return {"sliding_window": window if "sliding" in config.layers else None}
    if len(family.kinds) == 1:
        return {}
    json: Json = {"layer_types": [dict(family.kinds)[kind] for kind in config.layers]}
    if family.windows == "pattern":
        json["sliding_window"] = window or config.context_length
    elif family.windows == "switch" and window is not None:
        # transformers reads layer_types alone; the builder reads the index of the first such layer.
        json |= {
            "max_window_layers": config.layers.index("sliding"),
            "sliding_window": window,
            "use_sliding_window": True,
        }
    return json


def _hybrid_json(config: TargetConfig) -> Json:
    d = config.delta_net
    if d is None:
        return {}
    return {
        "linear_conv_kernel_dim": d.conv_width,
        "linear_key_head_dim": d.key_dim,
        "linear_num_key_heads": d.key_heads,
        "linear_num_value_heads": d.value_heads,
        "linear_value_head_dim": d.value_dim,
    }


def _feed_forward_json(config: TargetConfig, family: Family) -> Json:
    mlp = config.mlp
    if isinstance(mlp, MlpConfig):
        return {"intermediate_size": mlp.hidden}
    if family.experts == "transposed":
        return {
            "experts_per_token": mlp.active,
            "intermediate_size": mlp.hidden,
            "num_experts_per_tok": mlp.active,
            "num_local_experts": mlp.experts,
            "swiglu_limit": mlp.limit,
        }
    json: Json = {
        "moe_intermediate_size": mlp.hidden,
        "num_experts": mlp.experts,
        "num_experts_per_tok": mlp.active,
    }
    if family.experts == "stacked":
        return {**json, "shared_expert_intermediate_size": mlp.shared_hidden}
    return json | {
        "decoder_sparse_step": 1,
        "intermediate_size": (config.dense or mlp).hidden,
        "mlp_only_layers": list(config.dense_layers),
        "norm_topk_prob": mlp.renormalized,
    }


def _ids(stop_ids: tuple[int, ...]) -> int | list[int] | None:
    """Return one id as a number, several as a list, none as null."""
    return stop_ids[0] if len(stop_ids) == 1 else list(stop_ids) or None
