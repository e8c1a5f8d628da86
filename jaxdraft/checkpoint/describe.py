"""The table of architectures in words, for ``docs/models.md``."""

from __future__ import annotations

from jaxdraft.checkpoint.families import FAMILIES, LOGITS, Family

_EXPERTS = {
    "stacked": "experts beside a shared one",
    "separate": "experts, in some layers",
    "transposed": "experts with biases, clamped",
}


def properties(family: Family) -> dict[str, str]:
    """Return the distinguishing properties of the architecture in words, by topic."""
    before, after = bool(family.norms[0]), bool(family.norms[1])
    windows = {
        "none": "",
        "switch": "some layers, if use_sliding_window",
        "number": "all layers, if sliding_window is a number",
        "pattern": "some layers",
    }[family.windows]
    biases = [", ".join(family.bias)] * bool(family.bias)
    biases += [f"{', '.join(family.bias_key)} if attention_bias"] * bool(family.bias_key)
    biases += ["feed-forward if mlp_bias"] * family.mlp_bias_key
    others = {
        "gated queries": family.gated,
        "delta-net layers": "delta_net" in dict(family.kinds),
        "attention sinks": family.sinks,
        _EXPERTS.get(family.experts, ""): bool(family.experts),
        "gelu_tanh": family.activation == "gelu_tanh",
        "scaled embedding": family.embedding_scaled,
        "query_pre_attn_scalar": family.query_scalar,
        "soft-caps": len(family.softcaps) == 2,
        "soft-cap of logits": family.softcaps == (LOGITS,),
        "norms multiply by 1 + w": family.offset_norms,
        "fused " + " and ".join(family.fused): bool(family.fused),
        "part of a model for images": bool(family.aside),
    }
    rotary = [f"first {family.rotary:g} of each head"] * (family.rotary != 1)
    rotary += ["share in partial_rotary_factor"] * (family.partial and family.rotary == 1)
    rotary += ["neighbouring pairs"] * family.interleaved
    rotary += ["own tables for windows"] * family.own_tables
    return {
        "windows": windows,
        "biases": "; ".join(biases),
        "norms": " and ".join(["before"] * before + ["after"] * after),
        "norm of q and k": {"": "", "head": "per head", "whole": "over all heads"}[family.qk_norm],
        "rotary": ", ".join(rotary),
        "others": ", ".join(name for name, has in others.items() if has),
    }


def table() -> str:
    """Return the architectures and their properties as a table in Markdown."""
    whole = [family for family in FAMILIES.values() if not family.model_type.endswith("_text")]
    topics = list(properties(whole[0]))
    lines = [["`model_type`", "models", *topics], ["---"] * (2 + len(topics))]
    for family in whole:
        names = [family.model_type, *[family.text_type] * bool(family.text_type)]
        named = ", ".join(f"`{name}`" for name in names)
        lines.append([named, family.models, *properties(family).values()])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
