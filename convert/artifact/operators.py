"""The ONNX operators that are implemented: their inputs by role, and their attributes.

Sources: the onnx operator reference, and the contrib operator reference of onnxruntime 1.32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from convert.artifact.graph import MICROSOFT


@dataclasses.dataclass(frozen=True)
class Attribute:
    """An attribute: its type, its default, and the implemented values."""

    type: type | tuple[type, ...]
    default: Any = None  # None: required
    allowed: tuple[Any, ...] | None = None  # None: any of the type


def _fixed(value: Any, *, required: bool = False) -> Attribute:
    return Attribute(type(value), None if required else value, (value,))


_SILU = ("silu", "swish")
"""Two names of one function."""

_INT = Attribute(int)

_COUNT = Attribute(int, 0)

_ATTENTION = {
    "num_heads": _INT,
    "kv_num_heads": _INT,
    "scale": Attribute(float, 0.0),
    "local_window_size": Attribute(int, -1),
    "softcap": Attribute(float, 0.0),
    "do_rotary": Attribute(int, 0, (0, 1)),
    "rotary_interleaved": _fixed(0),
    "qk_norm_epsilon": Attribute(float, 1e-6),
    "k_quant_type": _fixed("NONE"),
    "v_quant_type": _fixed("NONE"),
}

_ROTARY = {
    "interleaved": _fixed(0),
    "rotary_embedding_dim": _COUNT,
    "num_heads": _COUNT,
    "is_packed_batching": Attribute(int, 0, (0, 1)),
    "scale": _fixed(1.0),
}

_MOE = {
    "k": Attribute(int, 1),
    "activation_type": _fixed("swiglu", required=True),
    "activation_alpha": _fixed(1.0),
    "activation_beta": _fixed(0.0),
    "swiglu_fusion": _fixed(1, required=True),
    "swiglu_limit": Attribute(float, math.inf, (math.inf,)),
    "normalize_routing_weights": _fixed(1, required=True),
    "use_sparse_mixer": _fixed(0),
}


@dataclasses.dataclass(frozen=True)
class Operator:
    """The implemented part of an operator.

    ``inputs`` names the inputs in order. ``name`` must be there, ``name?`` may be, and ``name!``
    must not: the schema has it and this package does not implement it.
    """

    domain: str
    inputs: str
    attributes: Mapping[str, Attribute] = dataclasses.field(default_factory=dict)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the inputs in order, with their marks."""
        return tuple(self.inputs.split())


OPERATORS: dict[str, Operator] = {
    "Add": Operator("", "a b"),
    "Cast": Operator("", "x", {"to": _INT, "saturate": Attribute(int, 1)}),
    "Concat": Operator("", "*", {"axis": _INT}),
    "Gather": Operator("", "data indices", {"axis": _COUNT}),
    "Greater": Operator("", "a b"),
    "Identity": Operator("", "x"),
    "LpNormalization": Operator("", "x", {"axis": _fixed(-1), "p": _fixed(2)}),
    "MatMul": Operator("", "a b"),
    "Mod": Operator("", "a b", {"fmod": _fixed(0)}),
    "Mul": Operator("", "a b"),
    "Range": Operator("", "start limit delta"),
    "ReduceSum": Operator(
        "", "data axes", {"keepdims": Attribute(int, 1), "noop_with_empty_axes": _COUNT}
    ),
    "Reshape": Operator("", "data shape", {"allowzero": _fixed(0)}),
    "Shape": Operator("", "data", {"start": _fixed(0)}),
    "Sigmoid": Operator("", "x"),
    "SimplifiedLayerNormalization": Operator(
        "",
        "x scale",
        {"axis": _fixed(-1), "epsilon": Attribute(float, 1e-5), "stash_type": _fixed(1)},
    ),
    "Slice": Operator("", "data starts ends axes steps!"),
    "Split": Operator("", "data split?", {"axis": _COUNT, "num_outputs": _COUNT}),
    "Squeeze": Operator("", "data axes"),
    "Sub": Operator("", "a b"),
    "Tile": Operator("", "data repeats"),
    "TopK": Operator("", "x k", {"axis": _fixed(-1), "largest": _fixed(1), "sorted": _fixed(1)}),
    "Transpose": Operator("", "data", {"perm": Attribute(tuple, ())}),
    "Unsqueeze": Operator("", "data axes"),
    "CausalConvWithState": Operator(
        MICROSOFT,
        "x weight bias past",
        {
            "ndim": _fixed(1),
            "activation": Attribute(str, None, _SILU),
            "dilation": _fixed(1),
            "state_window": _fixed(0),
        },
    ),
    "GatedAdd": Operator(MICROSOFT, "x y gate"),
    "GatedDeltaNet": Operator(
        MICROSOFT,
        "query key value cu_seqlens a b state A_log dt_bias capture_count? active?",
        {
            "update_rule": _fixed("gated_delta"),
            "scale": Attribute(float, 0.0),
            # Two names of one function.
            "gate_activation": Attribute(str, None, ("qwen", "softplus")),
            "beta_activation": _fixed("sigmoid", required=True),
            "qk_l2_norm": _fixed(1, required=True),
            "chunk_size": Attribute(int, 64),
            "state_update_capacity": _COUNT,
        },
    ),
    "GatedRMSNorm": Operator(
        MICROSOFT,
        "x scale gate",
        {"epsilon": Attribute(float, 1e-5), "activation": Attribute(str, "silu", _SILU)},
    ),
    "GatherBlockQuantized": Operator(
        MICROSOFT,
        "data indices scales zero_points?",
        {
            "bits": Attribute(int, 4, (2, 4, 8)),
            "block_size": Attribute(int, 128),
            "gather_axis": Attribute(int, 0, (0, -2)),
            "quantize_axis": Attribute(int, 1, (1, -1)),
        },
    ),
    "GroupQueryAttention": Operator(
        MICROSOFT,
        "query key? value? past_key past_value seqlens_k total_sequence_length"
        " cos_cache? sin_cache? position_ids! attention_bias! head_sink! k_scale! v_scale!"
        " q_norm_weight? k_norm_weight?",
        {
            **_ATTENTION,
            # Buffers as long as the window: how the runtime keeps the keys that the mask shows.
            "sliding_window_cache": Attribute(int, 0, (0, 1)),
            "smooth_softmax": Attribute(int, 0, (0, -1)),
            "qk_output": _fixed(0),
            "causal": _fixed(1),
            "kv_cache_bit_width": _fixed(0),
        },
    ),
    "LinearAttention": Operator(
        MICROSOFT,
        "query key value state decay beta",
        {
            "q_num_heads": _INT,
            "kv_num_heads": _INT,
            "update_rule": _fixed("gated_delta"),
            "scale": Attribute(float, 0.0),
            "chunk_size": Attribute(int, 64),
            "state_window": _fixed(0),
        },
    ),
    "LinearAttentionGate": Operator(MICROSOFT, "a dt_bias decay_scale b"),
    "MRotaryEmbedding": Operator(
        MICROSOFT,
        "x position_ids cos_cache sin_cache",
        {
            **_ROTARY,
            "mrope_section": Attribute(tuple),
            "mrope_layout": Attribute(int, 0, (0, 1)),
        },
    ),
    "MatMulNBits": Operator(
        MICROSOFT,
        "a b scales zero_points? g_idx! bias!",
        {
            "K": _INT,
            "N": _INT,
            "bits": Attribute(int, 4, (2, 4, 8)),
            "block_size": _INT,
            # How far onnxruntime may round activations: a kernel's choice, not the model's.
            "accuracy_level": Attribute(int, 0, (0, 1, 2, 3, 4)),
            "weight_prepacked": _fixed(0),
        },
    ),
    "MoE": Operator(
        MICROSOFT,
        "x router fc1 fc1_bias? fc2 fc2_bias? fc3! fc3_bias!",
        _MOE,
    ),
    "PagedAttention": Operator(
        MICROSOFT,
        "query key? value? key_cache value_cache cumulative_sequence_length past_seqlens"
        " block_table cos_cache? sin_cache? slot_mapping! head_sink! q_norm_weight? k_norm_weight?"
        " k_scale! v_scale! attention_metadata?",
        {**_ATTENTION, "is_causal": Attribute(int, 1, (0, 1))},
    ),
    "QMoE": Operator(
        MICROSOFT,
        "x router fc1 fc1_scales fc1_bias? fc2 fc2_scales fc2_bias? fc3! fc3_scales! fc3_bias!"
        " fc1_zero_points! fc2_zero_points! fc3_zero_points! router_weights!",
        {
            **_MOE,
            "expert_weight_bits": Attribute(int, 4, (4, 8)),
            "block_size": _COUNT,
            # The CPU takes both as the plain layout.
            "weights_prepacked": Attribute(int, -1, (-1, 0)),
        },
    ),
    "RotaryEmbedding": Operator(MICROSOFT, "x position_ids cos_cache sin_cache", _ROTARY),
    "SkipSimplifiedLayerNormalization": Operator(
        MICROSOFT, "input skip gamma bias!", {"epsilon": Attribute(float, 1e-12)}
    ),
    "VarlenCausalConvWithState": Operator(
        MICROSOFT,
        "x weight cu_seqlens bias state capture_count?",
        {
            "activation": Attribute(str, None, _SILU),
            "dilation": _fixed(1),
            "state_update_capacity": _COUNT,
        },
    ),
}
"""Everything that is implemented. Sources: the onnx operator reference, and the contrib operator
reference of onnxruntime 1.32."""
