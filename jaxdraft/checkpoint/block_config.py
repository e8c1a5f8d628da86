"""``config.json`` of a block drafter: description -> contents of the file, in its own layout.

Settings that a layout cannot express raise ``ValueError`` here, before anything is written.
The other direction is :mod:`convert.checkpoint.block_config`.
"""

from __future__ import annotations

from jaxdraft.checkpoint.config import Json, quantization_json, require, require_attention
from jaxdraft.checkpoint.rotary import Rope
from jaxdraft.config import FULL_ATTENTION, BlockDrafterConfig
from jaxdraft.kinds import block_of

CANDIDATES = 16
"""C of a drafter whose file does not state it: the model builder's ``dspark_top_k``."""


def usual_candidates(draftable: int) -> int:
    """Return C of a drafter of ``draftable`` tokens whose file does not state it."""
    return min(CANDIDATES, draftable)


def block_json(
    config: BlockDrafterConfig,
    taps: tuple[int, ...],
    rope: Rope,
    *,
    dtype: str,
    bits: int | None = None,
) -> Json:
    """Return ``config.json`` of a block drafter.

    Args:
      config: its description.
      taps: the target's layers whose entering residual it reads, in order.
      rope: its rotary embedding.
      dtype: name of the dtype to compute in.
      bits: number of bits per stored matrix entry, 8 or 4; None: matrices stay floats.

    Raises:
      ValueError: if the layout cannot express ``config``.
    """
    check_block(config, taps, rope)
    if config.layout == "speculators":
        return _speculators(config, taps, rope, dtype, bits)
    own = block_of(config.kind)
    flat = config.layout == "flat"
    json: Json = {
        "architectures": [own.flat_architecture or own.architecture if flat else own.architecture],
        "dtype": dtype,
        **_decoder(config, rope),
    }
    causal = _causal(config)
    if causal is not None:
        json["is_causal"] = causal
    if config.draft_vocab_size is not None:
        json["draft_vocab_size"] = config.draft_vocab_size
    if bits is not None:
        json["quantization_config"] = quantization_json(bits)
    block: Json = {
        # These files name a tap by the layer it leaves, this package by the layer it enters.
        "target_layer_ids": [tap - 1 for tap in taps],
        "mask_token_id": config.mask_token,
        **_candidates(config),
    }
    if config.logit_softcap:
        block["final_logit_softcapping"] = config.logit_softcap
    if config.logit_multiplier != 1.0:
        block["output_multiplier"] = config.logit_multiplier
    if config.conv is not None:
        block |= {
            "block_size": config.block_size,
            "conv_kernel_size": config.conv.taps,
            "conv_group_size": config.conv.group,
            "selector_rank": config.rank,
            "input_embedding_scale": config.embedding_scale,
        }
    else:
        json |= {"block_size": config.block_size, **_markov(config)}
    return {**json, **block} if flat else {**json, "dflash_config": block}


def check_block(config: BlockDrafterConfig, taps: tuple[int, ...], rope: Rope) -> None:
    """Raise for settings that ``config.json`` of a block drafter cannot express."""
    a, what = config.attention, f"a {config.kind} checkpoint"
    own, layout = block_of(config.kind), config.layout
    require_attention(a, config.norm_eps, what, gated=False, qk_norm=True)
    require(what, "attention.rotary_dim", a.rotary_dim, a.head_dim)
    require(what, "aux_width", config.aux_width, len(taps) * config.width)
    if layout not in own.layouts:
        require(what, "layout", layout, own.layouts[0])
    if layout != "speculators":
        require(what, "draft_tokens", config.draft_tokens, own.draft_tokens(config.block_size))
    elif config.draft_vocab_size is not None:
        require(f"{what} of speculators", "own_head", config.own_head, True)
    if (config.conv is not None) != own.convolves:
        has = "has convolutions" if own.convolves else "has no convolutions"
        raise ValueError(f"conv is {config.conv}; {what} {has}")
    if not own.scales_embedding:
        require(what, "embedding_scale", config.embedding_scale, 1.0)
    if not own.caps or layout == "speculators":
        require(what, "logit_softcap", config.logit_softcap, 0.0)
        require(what, "logit_multiplier", config.logit_multiplier, 1.0)
    if not own.chains:
        require(what, "chained", config.chained, False)
    if config.chained or not own.pairs:
        usual = usual_candidates(config.draftable)
        require(f"{what} without selector_top_k", "candidates", config.candidates, usual)
    if rope.kind not in own.ropes:
        require(what, "rope", rope.kind, own.ropes[0])
    _causal(config)


def _decoder(config: BlockDrafterConfig, rope: Rope) -> Json:
    """Return the settings of the layers."""
    a = config.attention
    json: Json = {
        "model_type": "qwen3",
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "intermediate_size": config.mlp_hidden,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.context_length,
        "tie_word_embeddings": False,
        "rope_parameters": rope.json(),
    }
    if config.ring_layers:
        kinds = (
            "full_attention" if config.window(i) == FULL_ATTENTION else "sliding_attention"
            for i in range(config.layers)
        )
        json |= {
            "use_sliding_window": True,
            "sliding_window": a.window,
            "layer_types": list(kinds),
        }
    return json


def _causal(config: BlockDrafterConfig) -> bool | None:
    """Return ``is_causal``; None: unset, so layers with a window are causal."""
    causal, rings = config.causal_layers, config.ring_layers
    if not causal:
        return False
    if causal == rings:
        return None
    everywhere = tuple(range(config.layers))
    if config.layout == "speculators":
        require("a checkpoint of speculators", "causal_layers", causal, rings)
    require(f"a {config.kind} checkpoint", "causal_layers", causal, everywhere)
    return True


def _candidates(config: BlockDrafterConfig) -> Json:
    """Return ``selector_top_k``; empty for chained drafters and those without pairs."""
    if config.chained or not config.rank:
        return {}
    return {"selector_top_k": config.candidates}


def _markov(config: BlockDrafterConfig) -> Json:
    """Return the settings of DSpark's heads."""
    if not config.rank:
        return {}
    json: Json = {
        "markov_rank": config.rank,
        "markov_head_type": config.markov,
        "enable_confidence_head": config.confidence is not None,
    }
    if config.confidence is not None:
        json["confidence_head_with_markov"] = config.confidence == "pair"
    return json


def _speculators(
    config: BlockDrafterConfig, taps: tuple[int, ...], rope: Rope, dtype: str, bits: int | None
) -> Json:
    json: Json = {
        "architectures": [block_of(config.kind).architecture],
        "speculators_model_type": config.kind,
        "dtype": dtype,
        "aux_hidden_state_layer_ids": list(taps),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token,
        "draft_vocab_size": config.draftable,
        "sample_from_anchor": config.first_row == 0,
        "sliding_window_non_causal": bool(config.ring_layers) and not config.causal_layers,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": {"algorithm": config.kind},
        "transformer_layer_config": _decoder(config, rope),
        **_candidates(config),
        **_markov(config),
    }
    if bits is not None:
        json["quantization_config"] = quantization_json(bits)
    return json
