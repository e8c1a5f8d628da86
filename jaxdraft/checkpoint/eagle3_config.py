"""``config.json`` of an EAGLE-3 head: its description -> the content of the file.

The other direction is :mod:`convert.checkpoint.eagle3_config`.
"""

from __future__ import annotations

from typing import Any

from jaxdraft.checkpoint.config import quantization_json
from jaxdraft.config import Eagle3Config
from jaxdraft.rope import Rope

Json = dict[str, Any]

TAPS = "eagle_aux_hidden_state_layer_ids"


def default_taps(layers: int) -> tuple[int, ...]:
    """Return the layers whose entering rows a head reads if its file names none.

    Args:
      layers: number of layers of the target.
    """
    return (2, layers // 2, layers - 3)


def eagle3_json(
    config: Eagle3Config,
    taps: tuple[int, ...],
    rope: Rope,
    *,
    layers: int,
    dtype: str,
    bits: int | None = None,
) -> Json:
    """Return ``config.json`` of an EAGLE-3 head, in the layout of its ``spelling``.

    Args:
      config: its description.
      taps: the target's layers whose entering residual it reads, in order.
      rope: its rotary embedding.
      layers: number of layers of the target.
      dtype: name of the dtype to compute in.
      bits: number of bits per stored matrix entry, 8 or 4; None: matrices stay floats.

    Raises:
      ValueError: the layout cannot express ``config``.
    """
    _check(config, taps)
    layer = _layer_json(config)
    quantized = {} if bits is None else {"quantization_config": quantization_json(bits)}
    shared = {
        "draft_vocab_size": config.draftable,
        "tie_word_embeddings": False,
        **quantized,
    }
    if config.tap_width != config.width:
        shared["target_hidden_size"] = config.tap_width
    if config.spelling == "speculators":
        method = {"proposal_type": "greedy", "speculative_tokens": config.draft_tokens}
        return {
            "architectures": ["Eagle3DraftModel"],
            "dtype": dtype,
            TAPS: list(taps),
            "fc_norm": config.fc_norm,
            "norm_before_fc": False,
            "norm_before_residual": config.norm_before_residual,
            "norm_output": config.norm_output,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [method],
            },
            "speculators_model_type": "eagle3",
            "transformer_layer_config": {**layer, "rope_parameters": rope.json()},
            **shared,
        }
    # The spelling of transformers before version 5, which the readers of these files support.
    scaling = {key: value for key, value in rope.json().items() if key != "rope_theta"}
    json: Json = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "torch_dtype": dtype,
        **layer,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
        **shared,
    }
    if taps != default_taps(layers):
        if min(taps) < 1:
            raise ValueError(
                f"taps are {taps}; a file with {TAPS} names the layer before each, so 0 needs "
                "the speculators layout"
            )
        json["eagle_config"] = {TAPS: [tap - 1 for tap in taps], "use_aux_hidden_state": True}
    return json


def _layer_json(config: Eagle3Config) -> Json:
    """Return the settings of the decoder layer."""
    a = config.attention
    return {
        "attention_bias": False,
        "head_dim": a.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.width,
        "intermediate_size": config.mlp.hidden,
        "max_position_embeddings": config.context_length,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": a.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": a.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "vocab_size": config.vocab_size,
    }


def _check(config: Eagle3Config, taps: tuple[int, ...]) -> None:
    """Raise for settings that neither layout can express, or not the one of ``spelling``."""
    a = config.attention
    usual = a.head_dim**-0.5
    for name, found, expected in (
        ("attention.gated", a.gated, False),
        ("attention.qk_norm", a.qk_norm, False),
        ("attention.rotary_dim", a.rotary_dim, a.head_dim),
        ("attention.softcap", a.softcap, 0.0),
        ("attention.scale", a.scale, a.scale if abs(a.scale / usual - 1) < 1e-6 else usual),
        ("taps", len(taps), config.taps),
    ):
        if found != expected:
            raise ValueError(f"{name} is {found!r}; an EAGLE-3 file can only express {expected!r}")
    if config.spelling == "midlayer":
        for name in ("fc_norm", "norm_before_residual", "norm_output"):
            if getattr(config, name):
                raise ValueError(f"{name} is True; that needs the speculators layout")
