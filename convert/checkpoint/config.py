"""``config.json`` of a target -> what the model is. Read strictly, as an artifact's is.

Every key that is acted on is checked for type and range. A key that would change what is computed
must have the one value that is implemented. Unknown keys become remarks; see
:mod:`convert.unused`. Keys that are absent or null have the defaults of transformers.

The other direction is :mod:`jaxdraft.checkpoint.config`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from convert.checkpoint.section import MROPE, PLAIN_ROPE, ModelSection, Quantized
from convert.errors import ArtifactError, Problems
from convert.paths import CONFIG
from convert.recipes import shortest
from convert.unused import (
    CONFIG_KEYS,
    DECODING_KEYS,
    GENERATION_KEYS,
    Remarks,
    Tracked,
    report_generation,
)
from jaxdraft.checkpoint.layout import FAMILIES, Family
from jaxdraft.checkpoint.rotary import Rope
from jaxdraft.config import (
    AttentionConfig,
    DeltaNetConfig,
    LayerKind,
    MlpConfig,
    MoeConfig,
    MtpConfig,
    TargetConfig,
)

MAX_POSITIONS = 1 << 24
"""No context is that long, and the rotary tables of one would be gigabytes."""

_QWEN35_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "intermediate_size": 12288,
}

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3_5": _QWEN35_DEFAULTS,
    "qwen3_5_moe": {
        **_QWEN35_DEFAULTS,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
}
"""What a key that is absent stands for, by ``model_type``: files that transformers saves may leave
out what is as in its configuration class. Source: transformers 5.24, ``configuration_*.py``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """The content of a target's ``config.json``.

    Attributes:
      config: the description, taps and ``hidden_states`` left empty.
      family: its architecture.
      rope: its rotary embedding.
      mtp: description of the multi-token-prediction head, if it has one that is implemented.
      mtp_problems: why the head that it has is not implemented.
      dtype: the dtype of computation that the file names, or None.
      stop_ids: tokens that end a sequence.
      bos_token_id, pad_token_id: or None.
      quantized: how matrices may be stored in few bits, or None.
    """

    config: TargetConfig
    family: Family
    rope: Rope
    mtp: MtpConfig | None
    mtp_problems: tuple[ArtifactError, ...]
    dtype: str | None
    stop_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    quantized: Quantized | None


def read_target(
    body: Mapping[str, Any],
    *,
    head_stored: bool,
    problems: Problems,
    remarks: Remarks | None = None,
) -> TargetFacts:
    """Read a target's ``config.json``.

    Args:
      body: its content.
      head_stored: whether ``lm_head.weight`` is among the tensors; decides about tied embeddings
        where the file does not say.
      problems: where to report what does not stop the reading.
      remarks: where to report what does not stop a load.

    Raises:
      ArtifactError: it is not a target that is implemented.
    """
    return _Target(body, problems, remarks or Remarks()).read(head_stored)


def _generation(body: Tracked) -> dict[str, Any]:
    """Return the settings of decoding that older files hold beside those of the model."""
    names = DECODING_KEYS | (GENERATION_KEYS.keys() - CONFIG_KEYS.keys())
    return {key: body[key] for key in set(body) & names}


class _Target:
    def __init__(self, body: Mapping[str, Any], problems: Problems, remarks: Remarks):
        self.problems = problems
        name = body.get("model_type")
        alone = {f"{n}_text": f for n, f in FAMILIES.items() if f.composite}
        known = {**FAMILIES, **alone}
        self.top = ModelSection(body, CONFIG, "", problems, remarks)
        if not isinstance(name, str) or name not in known:
            raise self.top.fail("model_type", "one of " + ", ".join(known))
        defaults = _DEFAULTS[known[name].model_type]
        if known[name].composite and name not in alone:
            self.family = known[name]
            self.text = self.top.section("text_config", defaults)
        else:  # the text model without the one it may be a part of
            self.family = dataclasses.replace(known[name], composite=False)
            self.text = self.top
            self.top.defaults = defaults
        self.hybrid = self.family.gated

    def read(self, head_stored: bool) -> TargetFacts:
        text, top = self.text, self.top
        for section in {id(s): s for s in (top, text)}.values():
            section.only("hidden_act", "silu")
            for key in ("attention_bias", "mlp_bias", "is_encoder_decoder", "add_cross_attention"):
                section.only(key, False)
            section.only("pruned_heads", {}, [])
        if top is not text and text.body.get("quantization_config") is not None:
            raise text.fail("quantization_config", "none here: it stands outside")
        text.only("attn_output_gate", self.family.gated)
        width, vocab = text.integer("hidden_size"), text.integer("vocab_size")
        eps = text.number("rms_norm_eps")
        attention, rope = self._attention(width, eps)
        config = self._config(width, vocab, eps, attention, head_stored)
        mtp, mtp_problems = self._mtp(config, attention)
        facts = TargetFacts(
            config=config,
            family=self.family,
            rope=rope,
            mtp=mtp,
            mtp_problems=mtp_problems,
            dtype=self._dtype(),
            stop_ids=text.stop_ids(vocab) or top.stop_ids(vocab),
            bos_token_id=text.token("bos_token_id", vocab),
            pad_token_id=text.token("pad_token_id", vocab),
            quantized=top.quantized(),
        )
        self._report()
        return facts

    def _config(
        self, width: int, vocab: int, eps: float, attention: AttentionConfig, head_stored: bool
    ) -> TargetConfig:
        text = self.text
        layers = self._layers(text.integer("num_hidden_layers", high=4096))
        if not {"attention", "sliding"} & set(layers):
            raise text.fail("layer_types", "at least one full_attention")
        sliding = None
        if "sliding" in layers:
            sliding = dataclasses.replace(attention, window=text.integer("sliding_window"))
        return TargetConfig(
            vocab_size=vocab,
            width=width,
            layers=layers,
            attention=attention if "attention" in layers else None,
            sliding=sliding,
            delta_net=self._delta_net(eps) if "delta_net" in layers else None,
            mlp=self._feed_forward(),
            norm_eps=eps,
            tied=self._tied(head_stored),
            context_length=text.integer("max_position_embeddings", high=MAX_POSITIONS),
        )

    def _report(self) -> None:
        """Remark on what has not been read."""
        for section in {id(s): s for s in (self.top, self.text)}.values():
            generation = _generation(section.body)
            report_generation(generation, CONFIG, self.top.remarks, where=section.where, known=())
            section.inert(*generation)
            section.report_unread(CONFIG_KEYS)

    def _dtype(self) -> str | None:
        """That of the whole, which the part repeats."""
        outer, inner = self.top.dtype(), self.text.dtype()
        return outer or inner

    def _layers(self, count: int) -> tuple[LayerKind, ...]:
        text = self.text
        kinds = {word: kind for kind, word in self.family.kinds}
        windowed = "sliding_attention" in kinds and text.body.get("use_sliding_window")
        text.only("use_sliding_window", False, *([True] if "sliding_attention" in kinds else []))
        if not windowed:
            text.inert("sliding_window", "max_window_layers")
        names = text.body.get("layer_types")
        if names is not None:
            text.inert("full_attention_interval", "max_window_layers")
        if names is None and self.hybrid:
            every = text.integer("full_attention_interval")
            names = [
                "linear_attention" if (i + 1) % every else "full_attention" for i in range(count)
            ]
        elif names is None:
            first = text.integer("max_window_layers", 0) if windowed else count
            names = ["full_attention" if i < first else "sliding_attention" for i in range(count)]
        if (
            not isinstance(names, list)
            or len(names) != count
            or not all(name in list(kinds) for name in names)  # anything may stand there
        ):
            raise text.fail("layer_types", f"{count} of {' and '.join(kinds)}")
        if "sliding_attention" in names and not windowed:
            raise text.fail("use_sliding_window", "true, with layers of sliding_attention")
        return tuple(kinds[name] for name in names)

    def _attention(self, width: int, eps: float) -> tuple[AttentionConfig, Rope]:
        text, family = self.text, self.family
        heads = text.integer("num_attention_heads")
        kv_heads = text.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise text.fail("num_key_value_heads", f"a divisor of the {heads} query heads")
        if text.value("head_dim") is None and width % heads:
            raise text.fail("head_dim", "an integer")
        head_dim = (
            text.integer("head_dim") if text.value("head_dim") is not None else width // heads
        )
        keys = PLAIN_ROPE | (MROPE if self.hybrid else set())
        rope, section = text.rope(keys, ("default",))
        fraction = 0.25 if self.hybrid else 1.0
        if section.body.get("partial_rotary_factor") is not None:
            fraction = section.number("partial_rotary_factor")
        elif text.body.get("partial_rotary_factor") is not None:
            fraction = text.number("partial_rotary_factor")
        rotary = int(head_dim * fraction)
        if rotary % 2 or not 2 <= rotary <= head_dim:
            raise ArtifactError(
                CONFIG,
                section.at("partial_rotary_factor"),
                f"{rotary} of {head_dim} channels",
                "an even number, from 2 on",
            )
        config = AttentionConfig(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary,
            gated=family.gated,
            qk_norm=family.qk_norm,
            norm_eps=eps if family.qk_norm else 1e-6,
            scale=shortest(head_dim**-0.5),
        )
        return config, rope

    def _delta_net(self, eps: float) -> DeltaNetConfig:
        text = self.text
        text.only("mamba_ssm_dtype", "float32")
        keys, values = text.integer("linear_num_key_heads"), text.integer("linear_num_value_heads")
        if values % keys:
            raise text.fail("linear_num_value_heads", f"a multiple of the {keys} key heads")
        return DeltaNetConfig(
            key_heads=keys,
            value_heads=values,
            key_dim=text.integer("linear_key_head_dim"),
            value_dim=text.integer("linear_value_head_dim"),
            conv_width=text.integer("linear_conv_kernel_dim", 2),
            norm_eps=eps,
        )

    def _feed_forward(self) -> MlpConfig | MoeConfig:
        text = self.text
        if not self.family.model_type.endswith("_moe"):
            text.inert("mlp_only_layers")  # all are
            return MlpConfig(hidden=text.integer("intermediate_size"))
        text.only("mlp_only_layers", [])
        text.only("decoder_sparse_step", 1)
        text.only("norm_topk_prob", True)
        experts = text.integer("num_experts")
        return MoeConfig(
            experts=experts,
            active=text.integer("num_experts_per_tok", high=experts),
            hidden=text.integer("moe_intermediate_size"),
            shared_hidden=text.integer("shared_expert_intermediate_size"),
        )

    def _tied(self, head_stored: bool) -> bool:
        stated = [
            section.body["tie_word_embeddings"]
            for section in (self.top, self.text)
            if section.body.get("tie_word_embeddings") is not None
        ]
        if not all(isinstance(tied, bool) and tied == stated[0] for tied in stated):
            raise self.text.fail("tie_word_embeddings", "true or false, the same everywhere")
        return stated[0] if stated else not head_stored

    def _mtp(
        self, config: TargetConfig, attention: AttentionConfig
    ) -> tuple[MtpConfig | None, tuple[ArtifactError, ...]]:
        """Return the head that the settings describe, or why it is not implemented.

        The target does not depend on it, so what is wrong with it is no problem of the target.
        """
        text = self.text
        if not self.hybrid:
            text.inert("mtp_num_hidden_layers")
            return None, ()
        problems = Problems()
        apart = ModelSection(text.body, CONFIG, text.where, problems, text.remarks)
        apart.only("mtp_use_dedicated_embeddings", False)
        text.inert("mtp_use_dedicated_embeddings", "mtp_num_hidden_layers")
        try:
            if apart.integer("mtp_num_hidden_layers", 0, 1, default=0) == 0:
                return None, ()
        except ArtifactError as error:
            problems.append(error)
        if problems:
            return None, tuple(problems)
        head = MtpConfig(
            vocab_size=config.vocab_size,
            width=config.width,
            attention=attention,
            mlp=config.mlp,
            norm_eps=config.norm_eps,
            context_length=config.context_length,
        )
        return head, ()
