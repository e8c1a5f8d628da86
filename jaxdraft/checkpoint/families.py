"""The architectures of targets, and the properties that each uses: the one table of them.

Reader, writer, ``inspect`` and the table in the documentation come from it.

Source: the configuration classes and models of transformers 5.24.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from jaxdraft.checkpoint.forms import Form
from jaxdraft.config import Activation, LayerKind, Norms
from jaxdraft.rope import RopeKind

Windows = Literal["none", "switch", "number", "pattern"]

PRE = ("input_layernorm", "", "post_attention_layernorm", "")
"""Names of a layer's norms, in the order: mixer's input and output, feed-forward part's input and
output. An empty name means that there is no such norm."""

SCORES, LOGITS = "attn_logit_softcapping", "final_logit_softcapping"
"""Keys of soft-caps."""

FULL, SLIDING = "full_attention", "sliding_attention"

_ATTENTION: tuple[tuple[LayerKind, str], ...] = (("attention", FULL), ("sliding", SLIDING))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture of targets.

    Attributes:
      model_type: name in ``config.json``.
      architecture: class name in transformers and the model builder.
      models: published models of it, for documentation.
      text_type, text_architecture: the same for the text model, if it is part of a larger one.
      composite: the text model is a part of a model with a vision tower: its settings are in
        ``text_config``.
      tower: the vision tower is written, too, because the class does not load without one.
      prefixes: allowed name prefixes of the text model's tensors; the first is written.
      aside: name prefixes of the tensors that text does not need.
      kinds: kinds of layers, with their names in ``layer_types``.
      windows: rule that gives layers a window. "switch": ``use_sliding_window``, from layer
        ``max_window_layers`` on. "number": a number in ``sliding_window``, all layers. "pattern":
        all layers but every ``sliding_window_pattern``-th.
      bias: projections of attention that always have a bias, of the letters q, k, v, o.
      bias_key: projections that have one if ``attention_bias`` is true.
      mlp_bias_key: whether ``mlp_bias`` gives the feed-forward part biases.
      norms: stored names of a layer's norms; see :data:`PRE`.
      offset_norms: norms store their weight minus 1.
      qk_norm: norm of queries and keys, over each head or over all at once.
      fused: parts that are stored as one tensor: "qkv", "gate_up".
      gated: queries carry a gate.
      rotary: share of each head's channels that is rotated, if the file does not state it.
      partial: whether the file may state it, in ``partial_rotary_factor``.
      interleaved: neighbouring channels are rotated together.
      ropes: schemes of rotary embedding.
      own_tables: layers with a window have rotary tables of their own.
      activation: activation of the feed-forward part.
      embedding_scaled: embeddings are multiplied by the root of the width.
      query_scalar: scores are divided by the root of ``query_pre_attn_scalar``, not of the width
        of a head.
      softcaps: keys of soft-caps: ``attn_logit_softcapping`` the scores of attention,
        ``final_logit_softcapping`` the logits.
      sinks: every query head has an attention sink.
      experts: form in which experts are stored, if there are any. "stacked": as one tensor [E, out,
        in], beside a shared expert. "separate": as a tensor for each. "transposed": as one
        [E, in, out], gate and up in turn, with biases, and clamped.
      tied: whether the head is the embedding if the file does not state it; None: exactly if no
        head is stored.
      defaults: values of keys that are absent or null. Files saved by transformers may leave out
        values that equal those of its configuration class.
    """

    model_type: str
    architecture: str
    models: str
    text_type: str = ""
    text_architecture: str = ""
    composite: bool = False
    tower: bool = False
    prefixes: tuple[str, ...] = ("model.",)
    aside: tuple[str, ...] = ()
    kinds: tuple[tuple[LayerKind, str], ...] = (("attention", FULL),)
    windows: Windows = "none"
    bias: str = ""
    bias_key: str = ""
    mlp_bias_key: bool = False
    norms: tuple[str, str, str, str] = PRE
    offset_norms: bool = False
    qk_norm: Literal["", "head", "whole"] = ""
    fused: tuple[Literal["qkv", "gate_up"], ...] = ()
    gated: bool = False
    rotary: float = 1.0
    partial: bool = False
    interleaved: bool = False
    ropes: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn", "longrope")
    own_tables: bool = False
    activation: Activation = "silu"
    embedding_scaled: bool = False
    query_scalar: bool = False
    softcaps: tuple[str, ...] = ()
    sinks: bool = False
    experts: Literal["", "stacked", "separate", "transposed"] = ""
    tied: bool | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def sides(self) -> Norms:
        """Sides of each part of a layer that have a norm."""
        before, after = bool(self.norms[0]), bool(self.norms[1])
        return "both" if before and after else "pre" if before else "post"

    @property
    def prefix(self) -> str:
        """Beginning of the names of the text model's tensors, as they are written."""
        return self.prefixes[0]

    @property
    def norm(self) -> Form:
        """Form of the stored norms."""
        return Form.OFFSET if self.offset_norms else Form.PLAIN

    @property
    def activation_key(self) -> str:
        """Key of the activation."""
        return "hidden_act" if self.activation == "silu" else "hidden_activation"

    def alone(self) -> Family:
        """Return the family of the text model when it is not part of another model."""
        return dataclasses.replace(
            self,
            model_type=self.text_type,
            architecture=self.text_architecture,
            composite=False,
            tower=False,
            prefixes=("model.",),
            aside=(),
        )


def _defaults(**values: Any) -> Mapping[str, Any]:
    return MappingProxyType({"rope_theta": 10000.0, "rms_norm_eps": 1e-6, **values})


_QWEN35 = dict(
    vocab_size=248320,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=32768,
    full_attention_interval=4,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    intermediate_size=12288,
)

QWEN35 = Family(
    model_type="qwen3_5",
    architecture="Qwen3_5ForConditionalGeneration",
    models="Qwen3.5",
    text_type="qwen3_5_text",
    text_architecture="Qwen3_5ForCausalLM",
    composite=True,
    tower=True,
    prefixes=("model.language_model.",),
    aside=("model.visual.",),
    kinds=(("attention", FULL), ("delta_net", "linear_attention")),
    offset_norms=True,
    qk_norm="head",
    gated=True,
    rotary=0.25,
    partial=True,
    ropes=("default",),
    defaults=_defaults(**_QWEN35),
)

QWEN35_MOE = dataclasses.replace(
    QWEN35,
    model_type="qwen3_5_moe",
    architecture="Qwen3_5MoeForConditionalGeneration",
    models="Qwen3.5 MoE",
    text_type="qwen3_5_moe_text",
    text_architecture="Qwen3_5MoeForCausalLM",
    experts="stacked",
    defaults=_defaults(
        **{
            **_QWEN35,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "num_experts": 256,
        }
    ),
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    models="Qwen3",
    kinds=_ATTENTION,
    windows="switch",
    bias_key="qkvo",
    qk_norm="head",
    defaults=_defaults(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=22016,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=32768,
        sliding_window=4096,
        max_window_layers=28,
    ),
)

QWEN3_MOE = dataclasses.replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    kinds=(("attention", FULL),),
    windows="none",
    experts="separate",
    defaults=_defaults(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        decoder_sparse_step=1,
        moe_intermediate_size=768,
        num_experts_per_tok=8,
        num_experts=128,
        norm_topk_prob=False,
    ),
)

GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    models="gpt-oss-20b, gpt-oss-120b",
    kinds=_ATTENTION,
    windows="pattern",
    bias_key="qkvo",
    sinks=True,
    experts="transposed",
    defaults=_defaults(
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=36,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        attention_bias=True,
        sliding_window=128,
        sliding_window_pattern=2,
        num_local_experts=128,
        num_experts_per_tok=4,
        swiglu_limit=7.0,
    ),
)

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    models="Qwen2, Qwen2.5",
    kinds=_ATTENTION,
    windows="switch",
    bias="qkv",
    defaults=_defaults(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=22016,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=32768,
        sliding_window=4096,
        max_window_layers=28,
    ),
)

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    models="Llama 2, 3, 3.1, 3.2, 3.3, SmolLM2",
    bias_key="qkvo",
    mlp_bias_key=True,
    defaults=_defaults(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
    ),
)

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    models="Mistral 7B v0.1 to v0.3, Mistral Nemo",
    kinds=_ATTENTION,
    windows="number",
    defaults=_defaults(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        sliding_window=4096,
        bos_token_id=1,
        eos_token_id=2,
    ),
)

PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    kinds=_ATTENTION,
    windows="number",
    fused=("qkv", "gate_up"),
    partial=True,
    ropes=("default", "longrope"),
    defaults=_defaults(
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=32000,
        pad_token_id=32000,
    ),
)

GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    models="GLM-4-0414 (9B, 32B)",
    bias_key="qkv",
    norms=(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
    fused=("gate_up",),
    rotary=0.5,
    partial=True,
    interleaved=True,
    defaults=_defaults(
        vocab_size=151552,
        hidden_size=4096,
        intermediate_size=13696,
        num_hidden_layers=40,
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1.5625e-07,
        attention_bias=True,
        pad_token_id=151329,
    ),
)

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    models="OLMo 2",
    bias_key="qkvo",
    norms=("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    qk_norm="whole",
    defaults=_defaults(
        vocab_size=50304,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        eos_token_id=50279,
        pad_token_id=1,
    ),
)

_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    models="Gemma 2",
    kinds=_ATTENTION,
    windows="pattern",
    bias_key="qkvo",
    norms=_GEMMA_NORMS,
    offset_norms=True,
    activation="gelu_tanh",
    embedding_scaled=True,
    query_scalar=True,
    softcaps=(SCORES, LOGITS),
    tied=True,
    defaults=_defaults(
        vocab_size=256000,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=8192,
        query_pre_attn_scalar=256,
        sliding_window=4096,
        sliding_window_pattern=2,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    ),
)

GEMMA3 = dataclasses.replace(
    GEMMA2,
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    models="Gemma 3",
    text_type="gemma3_text",
    text_architecture="Gemma3ForCausalLM",
    composite=True,
    prefixes=("language_model.model.", "model.language_model."),
    aside=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
    qk_norm="head",
    own_tables=True,
    softcaps=(LOGITS,),
    defaults=_defaults(
        **{
            **GEMMA2.defaults,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": 6,
            "final_logit_softcapping": None,
        }
    ),
)

FAMILIES = {
    family.model_type: family
    for family in (
        QWEN35,
        QWEN35_MOE,
        QWEN3,
        QWEN3_MOE,
        GPT_OSS,
        QWEN2,
        LLAMA,
        MISTRAL,
        PHI3,
        GLM4,
        OLMO2,
        GEMMA2,
        GEMMA3,
    )
}
"""Families by ``model_type``; those of text models alone are added below."""

FAMILIES |= {family.text_type: family.alone() for family in FAMILIES.values() if family.composite}
