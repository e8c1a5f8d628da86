"""``config.json`` of a target -> its description, read as strictly as an artifact's.

Every key with an effect is checked for type and range. A key that would change the computation
must have the one implemented value. Unknown keys become remarks; see
:mod:`convert.unused`. Keys that are absent or null have the defaults of transformers.

The other direction is :mod:`jaxdraft.checkpoint.config`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from convert.checkpoint.quantization import Quantized
from convert.checkpoint.section import MROPE, PLAIN_ROPE, ModelSection
from convert.errors import ArtifactError, Problems
from convert.paths import CONFIG
from convert.recipes import shortest
from convert.unused import (
    CONFIG_KEYS,
    DECODING_KEYS,
    GENERATION_KEYS,
    Remarks,
    Tracked,
    is_integer,
    report_generation,
)
from jaxdraft.checkpoint.families import FAMILIES, FULL, LOGITS, SCORES, SLIDING, Family
from jaxdraft.config import (
    AttentionConfig,
    DeltaNetConfig,
    LayerKind,
    MlpConfig,
    MoeConfig,
    MtpConfig,
    TargetConfig,
)
from jaxdraft.rope import Rope

MAX_POSITIONS = 1 << 24
"""No context is that long, and the rotary tables of one would be gigabytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """The content of a target's ``config.json``.

    Attributes:
      config: the description, taps and ``hidden_states`` left empty.
      family: its architecture.
      mtp: description of the multi-token-prediction head, if it has one that is implemented.
      mtp_problems: reasons why its head is not implemented.
      dtype: the dtype of computation that the file names, or None.
      stop_ids: tokens that end a sequence.
      bos_token_id, pad_token_id: or None.
      quantized: allowed storage of matrices in few bits, or None.
    """

    config: TargetConfig
    family: Family
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
    context: int | None = None,
) -> TargetFacts:
    """Read a target's ``config.json``.

    Args:
      body: its content.
      head_stored: whether ``lm_head.weight`` is among the tensors; decides about tied embeddings
        if the file does not state it.
      problems: destination of problems that do not prevent further reading.
      remarks: destination of remarks, which do not prevent loading.
      context: maximum length of a sequence. Default: as in the file.

    Raises:
      ArtifactError: the target is not implemented.
    """
    return _Target(body, problems, remarks or Remarks(), context).read(head_stored)


def _generation(body: Tracked) -> dict[str, Any]:
    """Return the settings of decoding that older files hold among those of the model."""
    names = DECODING_KEYS | (GENERATION_KEYS.keys() - CONFIG_KEYS.keys())
    return {key: body[key] for key in set(body) & names}


class _Target:
    def __init__(
        self, body: Mapping[str, Any], problems: Problems, remarks: Remarks, context: int | None
    ):
        self.problems, self.wanted = problems, context
        name = body.get("model_type")
        self.top = ModelSection(body, CONFIG, "", problems, remarks)
        if not isinstance(name, str) or name not in FAMILIES:
            raise self.top.fail("model_type", "one of " + ", ".join(FAMILIES))
        self.family = FAMILIES[name]
        defaults = self.family.defaults
        if self.family.composite:
            self.text = self.top.section("text_config", defaults)
        else:  # the text model without the one it may be a part of
            self.text = self.top
            self.top.defaults = defaults
        self.hybrid = self.family.gated

    def read(self, head_stored: bool) -> TargetFacts:
        text, top = self.text, self.top
        for section in {id(s): s for s in (top, text)}.values():
            for key in ("is_encoder_decoder", "add_cross_attention", "lm_head_bias"):
                section.only(key, False)
            section.only("use_bidirectional_attention", False)
            section.only("pruned_heads", {}, [])
        if top is not text and text.body.get("quantization_config") is not None:
            raise text.fail(
                "quantization_config", "none here, because the file has one at the top level"
            )
        text.only("attn_output_gate", self.family.gated)
        width, vocab = text.integer("hidden_size"), text.integer("vocab_size")
        self._activation()
        config = self._config(width, vocab, head_stored)
        mtp, mtp_problems = self._mtp(config)
        facts = TargetFacts(
            config=config,
            family=self.family,
            mtp=mtp,
            mtp_problems=mtp_problems,
            dtype=self._dtype(),
            stop_ids=self._stop_ids(vocab),
            bos_token_id=text.token("bos_token_id", vocab),
            pad_token_id=text.token("pad_token_id", vocab),
            quantized=top.quantized(),
        )
        self._report()
        return facts

    def _config(self, width: int, vocab: int, head_stored: bool) -> TargetConfig:
        text, family = self.text, self.family
        eps = text.number("rms_norm_eps")
        context = text.integer("max_position_embeddings", high=MAX_POSITIONS)
        layers, window = self._layers(text.integer("num_hidden_layers", high=4096), context)
        if not {"attention", "sliding"} & set(layers):
            raise text.fail("layer_types", "at least one full_attention")
        own = family.own_tables and {"attention", "sliding"} <= set(layers)
        attention, full_rope, own_rope = self._attention(width, eps)
        if "attention" not in layers and own_rope is not None:
            full_rope = own_rope
        context, full_rope = self._context(context, full_rope)
        sliding = None
        if "sliding" in layers:
            sliding = dataclasses.replace(attention, window=window)
        return TargetConfig(
            vocab_size=vocab,
            width=width,
            layers=layers,
            attention=attention if "attention" in layers else None,
            sliding=sliding,
            delta_net=self._delta_net(eps) if "delta_net" in layers else None,
            **self._feed_forward(len(layers)),
            norm_eps=eps,
            tied=self._tied(head_stored),
            context_length=context,
            norms=family.sides,
            embedding_scale=shortest(width**0.5) if family.embedding_scaled else 1.0,
            softcap=self._softcap(LOGITS),
            own_tables=own,
            rope=full_rope,
            sliding_rope=own_rope if own else None,
            architecture=family.model_type,
        )

    def _activation(self) -> None:
        """Check the activation, which has two names in some families."""
        name = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[self.family.activation]
        for section in {id(s): s for s in (self.top, self.text)}.values():
            section.only("hidden_act", name)
            section.only("hidden_activation", name)

    def _softcap(self, key: str) -> float:
        text = self.text
        if key not in self.family.softcaps:
            if self.family.softcaps:  # elsewhere it is an unknown key
                text.only(key)
            return 0.0
        # Null is no cap, and an absent key is the family's.
        value = text.body[key] if key in text else text.defaults.get(key)
        return 0.0 if value is None else shortest(text.number(key))

    def _context(self, longest: int, rope: Rope) -> tuple[int, Rope]:
        """Return the maximum length of a sequence, and the embedding that serves it."""
        wanted = self.wanted
        if wanted is not None and not (is_integer(wanted) and 1 <= wanted <= longest):
            raise ArtifactError(
                CONFIG,
                self.text.at("max_position_embeddings"),
                f"{longest}, and context_length {wanted}",
                "a context_length of 1 up to that",
            )
        short = rope.original_length
        if rope.kind != "longrope" or short >= longest:
            return wanted or longest, rope
        if wanted is not None and wanted > short:
            return wanted, dataclasses.replace(rope, long=True)
        self.top.remarks.note(
            CONFIG,
            f"rope_type is longrope: sequences end at {wanted or short} tokens, with the factors "
            f"for texts of up to {short}; load(context_length=...) takes those for longer texts, "
            f"of up to {longest}",
        )
        return wanted or short, rope

    def _stop_ids(self, vocab: int) -> tuple[int, ...]:
        """Return the stop ids of the text model, else of the whole model, else the default."""
        self.top.inert("eos_token_id")  # where both have it
        given = "eos_token_id" in self.text or "eos_token_id" not in self.top
        first, second = (self.text, self.top) if given else (self.top, self.text)
        return first.stop_ids(vocab) or second.stop_ids(vocab)

    def _report(self) -> None:
        """Remark on keys that were not read."""
        for section in {id(s): s for s in (self.top, self.text)}.values():
            generation = _generation(section.body)
            report_generation(generation, CONFIG, self.top.remarks, where=section.where, known=())
            section.inert(*generation)
            section.report_unread(CONFIG_KEYS)

    def _dtype(self) -> str | None:
        """Return the dtype of the whole model, which the text model repeats."""
        outer, inner = self.top.dtype(), self.text.dtype()
        return outer or inner

    def _layers(self, count: int, context: int) -> tuple[tuple[LayerKind, ...], int]:
        """Return the kind of each layer, and the window of those that have one."""
        text, windows = self.text, self.family.windows
        kinds = {word: kind for kind, word in self.family.kinds}
        text.only("use_sliding_window", False, *([True] if windows == "switch" else []))
        window = self._window(context)
        names = text.body.get("layer_types")
        text.inert("full_attention_interval", "max_window_layers")
        text.inert("sliding_window_pattern", "_sliding_window_pattern")
        if names is None:
            names = self._usual_layers(count, window)
        if (
            not isinstance(names, list)
            or len(names) != count
            or not all(name in list(kinds) for name in names)  # an entry may be anything
        ):
            raise text.fail("layer_types", f"{count} of {' and '.join(kinds)}")
        if SLIDING in names and window is None:
            if windows == "switch":
                raise text.fail("use_sliding_window", "true, with layers of sliding_attention")
            raise text.fail("sliding_window", "an integer, with layers of sliding_attention")
        return tuple(kinds[name] for name in names), window or 0

    def _window(self, context: int) -> int | None:
        """Return the window of the layers that have one; None: no layer may have one."""
        text, windows = self.text, self.family.windows
        inactive = windows == "switch" and not text.body.get("use_sliding_window")
        if windows == "none" or inactive:
            text.inert("sliding_window", "max_window_layers")
            return None
        given = text.body if "sliding_window" in text else text.defaults
        if windows == "number" and given.get("sliding_window") is None:  # null is none
            return None
        window = text.integer("sliding_window")
        text.only("sliding_window_size", window)  # Gemma 2 has it twice
        if windows == "number" and window >= context:
            self.top.remarks.note(
                CONFIG, f"sliding_window is {window}: no text of {context} tokens is longer"
            )
            return None
        return window

    def _usual_layers(self, count: int, window: int | None) -> list[str]:
        """Return the names of the layers where the file has no ``layer_types``."""
        text, windows = self.text, self.family.windows
        if self.hybrid:
            every = text.integer("full_attention_interval")
            return ["linear_attention" if (i + 1) % every else FULL for i in range(count)]
        if window is None:
            return [FULL] * count
        if windows == "number":
            return [SLIDING] * count
        if windows == "switch":
            first = text.integer("max_window_layers", 0)
            return [FULL if i < first else SLIDING for i in range(count)]
        key = "_sliding_window_pattern" if "_sliding_window_pattern" in text else ""
        every = text.integer(key or "sliding_window_pattern")
        return [SLIDING if (i + 1) % every else FULL for i in range(count)]

    def _attention(self, width: int, eps: float) -> tuple[AttentionConfig, Rope, Rope | None]:
        """Return the shape of attention, and the embeddings of layers without and with a window."""
        text, family = self.text, self.family
        heads, kv_heads, head_dim = text.heads(width, even=False)
        rope, own_rope, section = self._ropes()
        rotary = self._rotary(head_dim, section)
        divisors = {"short_factor": rope.short_factors, "long_factor": rope.long_factors}
        for name, factors in divisors.items():
            if rope.kind == "longrope" and len(factors) != rotary // 2:
                found = f"{len(factors)} numbers"
                raise section.fail(name, f"{rotary // 2}, one for each pair of channels", found)
        bias, out_bias = self._bias()
        scalar = text.number("query_pre_attn_scalar") if family.query_scalar else head_dim
        config = AttentionConfig(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary,
            interleaved=family.interleaved,
            gated=family.gated,
            qk_norm=bool(family.qk_norm),
            norm_whole=family.qk_norm == "whole",
            bias=bias,
            out_bias=out_bias,
            norm_eps=eps if family.qk_norm else 1e-6,
            scale=shortest(scalar**-0.5),
            softcap=self._softcap(SCORES),
            sinks=family.sinks,
        )
        return config, rope, own_rope

    def _ropes(self) -> tuple[Rope, Rope | None, ModelSection]:
        """Return the embeddings of layers without and with a window, and the first one's object."""
        text, family = self.text, self.family
        keys = PLAIN_ROPE | (MROPE if self.hybrid else set())
        inner = text.rope_section()
        if not family.own_tables:
            rope, inner = text.rope(keys, family.ropes, inner)
            return rope, None, inner
        if {FULL, SLIDING} & inner.body.keys():
            inner.known({FULL, SLIDING})
            both = [inner.section(kind, inner.defaults) for kind in (FULL, SLIDING)]
            both[1].defaults = {"rope_theta": text.number("rope_local_base_freq")}
            full, sliding = (text.rope(keys, family.ropes, part)[0] for part in both)
            return full, sliding, both[0]
        full, inner = text.rope(keys, family.ropes, inner)
        return full, Rope(theta=text.number("rope_local_base_freq")), inner

    def _rotary(self, head_dim: int, section: ModelSection) -> int:
        """Return the number of channels that are rotated."""
        fraction, key = self.family.rotary, "partial_rotary_factor"
        places = {id(s): s for s in (section, self.text)}.values()  # files may repeat it
        stated = [place.number(key) for place in places if place.body.get(key) is not None]
        if stated:
            fraction = stated[0]
        if stated and fraction != stated[-1]:
            self.text.report(key, f"{fraction:g}, as {section.at(key)}")
        rotary = int(head_dim * fraction)
        if rotary % 2 or not 2 <= rotary <= head_dim:
            raise ArtifactError(
                CONFIG,
                section.at("partial_rotary_factor"),
                f"{rotary} of {head_dim} channels",
                "an even number, from 2 on",
            )
        return rotary

    def _bias(self) -> tuple[bool, bool]:
        """Return whether queries, keys and values have a bias, and whether outputs have one."""
        family, text = self.family, self.text
        for section in {id(s): s for s in (self.top, text)}.values():
            section.only("mlp_bias", False, *([True] if family.mlp_bias_key else []))
            if not family.bias:  # otherwise no key states these
                section.only("attention_bias", False, *([True] if family.bias_key else []))
        letters = family.bias + family.bias_key * text.flag("attention_bias")
        return "q" in letters, "o" in letters

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

    def _feed_forward(self, layers: int) -> dict[str, Any]:
        """Return the feed-forward parts, as ``mlp``, ``dense`` and ``dense_layers``."""
        text, form = self.text, self.family.experts
        if not form:
            text.inert("mlp_only_layers")  # all are
            return {"mlp": self._dense()}
        key = "num_local_experts" if "num_local_experts" in text or form == "transposed" else ""
        experts = text.integer(key or "num_experts")
        active = text.integer("num_experts_per_tok", high=experts)
        if form == "transposed":
            text.only("experts_per_token", active)
            text.only("swiglu_alpha", 1.702)
            text.inert("initial_context_length")  # the rotary embedding has it, too
            hidden, limit = text.integer("intermediate_size"), text.number("swiglu_limit")
            moe = MoeConfig(
                experts=experts,
                active=active,
                hidden=hidden,
                shared_hidden=0,
                router_bias=True,
                bias=True,
                limit=shortest(limit),
            )
            return {"mlp": moe}
        shared = 0
        if form == "stacked":
            text.only("mlp_only_layers", [])
            text.only("decoder_sparse_step", 1)
            text.only("norm_topk_prob", True)
            shared = text.integer("shared_expert_intermediate_size")
        text.only("norm_topk_prob", True, False)
        moe = MoeConfig(
            experts=experts,
            active=active,
            hidden=text.integer("moe_intermediate_size"),
            shared_hidden=shared,
            renormalized=form == "stacked" or text.flag("norm_topk_prob"),
        )
        places = self._dense_layers(layers) if form == "separate" else ()
        if not places:
            text.inert("intermediate_size")
            return {"mlp": moe}
        return {"mlp": moe, "dense": self._dense(), "dense_layers": places}

    def _dense(self) -> MlpConfig:
        return MlpConfig(
            hidden=self.text.integer("intermediate_size"),
            activation=self.family.activation,
            bias=self.text.flag("mlp_bias"),
        )

    def _dense_layers(self, layers: int) -> tuple[int, ...]:
        """Return the layers without experts among others that have some."""
        text = self.text
        named: tuple[int, ...] = ()
        if text.body.get("mlp_only_layers") is not None:
            named = text.integers("mlp_only_layers", 0, layers - 1)
        every = text.integer("decoder_sparse_step")
        places = tuple(i for i in range(layers) if i in named or (i + 1) % every)
        if len(places) == layers:
            found = f"{layers} of {layers} layers without experts"
            raise text.fail("mlp_only_layers", "at least one layer with experts", found)
        return places

    def _tied(self, head_stored: bool) -> bool:
        stated = [
            section.body["tie_word_embeddings"]
            for section in (self.top, self.text)
            if section.body.get("tie_word_embeddings") is not None
        ]
        if not all(isinstance(tied, bool) and tied == stated[0] for tied in stated):
            raise self.text.fail("tie_word_embeddings", "true or false, the same everywhere")
        if stated:
            return stated[0]
        return not head_stored if self.family.tied is None else self.family.tied

    def _mtp(self, config: TargetConfig) -> tuple[MtpConfig | None, tuple[ArtifactError, ...]]:
        """Return the head that the settings describe, or why it is not implemented.

        The target does not depend on the head, so a problem of the head is not one of the target.
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
        return MtpConfig.of(config), ()
