"""``config.json`` of a checkpoint -> what the model is. Read strictly, as an artifact's is.

Every key that is acted on is checked for type and range. A key that would change what is computed
must have the one value that is implemented; in a block drafter's file a key nobody here knows is
an error, because a setting that is silently ignored costs acceptance and nobody notices. In a
target's file unknown keys are let pass: transformers writes many that concern training.

The other direction is :mod:`jaxdraft.checkpoint.config`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from convert.errors import ArtifactError, Problems
from convert.parts import shortest
from jaxdraft.checkpoint.forms import DTYPES
from jaxdraft.checkpoint.layout import FAMILIES, Family
from jaxdraft.checkpoint.rotary import Rope
from jaxdraft.config import (
    FULL_ATTENTION,
    AttentionConfig,
    BlockDrafterConfig,
    ConvConfig,
    DeltaNetConfig,
    LayerKind,
    MlpConfig,
    MoeConfig,
    MtpConfig,
    TargetConfig,
)

CONFIG = "config.json"
_INT32 = 2**31 - 1

MAX_POSITIONS = 1 << 24
"""No context is that long, and the rotary tables of one would be gigabytes."""

DSPARK_CANDIDATES = 16
"""C of a DSpark drafter whose file does not say: the model builder's ``dspark_top_k``."""

_SILENT = {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "model_type",
    "num_target_layers",
    "pad_token_id",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Keys of a drafter's file that say nothing about what it computes."""

_DRAFTER = _SILENT | {
    "attention_bias",
    "dflash_config",
    "dtype",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "is_causal",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "num_attention_heads",
    "num_hidden_layers",
    "draft_vocab_size",
    "num_key_value_heads",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_sliding_window",
    "vocab_size",
}
_COMMON_BLOCK = {"block_size", "mask_token_id", "selector_top_k", "target_layer_ids"}
_BLOCK = {
    "dflash2": _COMMON_BLOCK
    | {"conv_group_size", "conv_kernel_size", "input_embedding_scale", "selector_rank"},
    # How a confidence head was trained changes which drafts are verified, and none of the drafts.
    "dspark": _COMMON_BLOCK
    | {
        "confidence_head_alpha",
        "confidence_head_with_markov",
        "enable_confidence_head",
        "markov_head_type",
        "markov_rank",
        "num_anchors",
        "projector_type",
    },
}
"""Settings of the drafting itself. They stand in ``dflash_config`` or at the top."""

_PLAIN_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_MROPE = {"mrope_interleaved", "mrope_section"}
_YARN_ROPE = {
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "truncate",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized:
    """How matrices are stored in few bits.

    Attributes:
      bits: 8 or 4.
      group: inputs that share a scale; None: those of a row, or all.
    """

    bits: int
    group: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What a target's ``config.json`` says.

    Attributes:
      config: the description, taps and ``hidden_states`` left empty.
      family: its architecture.
      rope: its rotary embedding.
      mtp: description of the multi-token-prediction head, if it has one.
      dtype: what it says it is computed in, or None.
      stop_ids: tokens that end a sequence.
      bos_token_id, pad_token_id: or None.
      quantized: how matrices may be stored in few bits, or None.
    """

    config: TargetConfig
    family: Family
    rope: Rope
    mtp: MtpConfig | None
    dtype: str | None
    stop_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    quantized: Quantized | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFacts:
    """What a block drafter's ``config.json`` says.

    Attributes:
      config: the description.
      taps: layers of the target whose entering residual it reads.
      rope: its rotary embedding.
      dtype: what it says it is computed in, or None.
      quantized: how matrices may be stored in few bits, or None.
    """

    config: BlockDrafterConfig
    taps: tuple[int, ...]
    rope: Rope
    dtype: str | None
    quantized: Quantized | None


def read_target(body: Mapping[str, Any], *, head_stored: bool, problems: Problems) -> TargetFacts:
    """Read a target's ``config.json``.

    Args:
      body: its content.
      head_stored: whether ``lm_head.weight`` is among the tensors; decides about tied embeddings
        where the file does not say.
      problems: where to report what does not stop the reading.

    Raises:
      ArtifactError: it is not a target that is implemented.
    """
    return _Target(body, problems).read(head_stored)


def read_block(
    body: Mapping[str, Any], kind: str, target: TargetConfig, problems: Problems
) -> BlockFacts:
    """Read a block drafter's ``config.json``.

    Args:
      body: its content.
      kind: "dflash2" or "dspark".
      target: what it drafts for; widths and taps must agree.
      problems: where to report what does not stop the reading.

    Raises:
      ArtifactError: it is not a drafter that is implemented.
    """
    return _Block(body, kind, target, problems).read()


class _Section:
    """An object of the file, read key by key."""

    def __init__(self, body: Mapping[str, Any], where: str, problems: Problems):
        self.body, self.where, self.problems = body, where, problems

    def at(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def fail(self, key: str, expected: str) -> ArtifactError:
        found = json.dumps(self.body[key])[:80] if key in self.body else "nothing"
        return ArtifactError(CONFIG, self.at(key), found, expected)

    def whole(self, key: str, low: int = 1, high: int = _INT32, default: int | None = None) -> int:
        value = self.body.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(key, f"an integer in {low}..{high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.body.get(key)
        if value is None and default is not None:
            return default
        if (
            not isinstance(value, (int, float))
            or isinstance(value, bool)
            or not math.isfinite(value)
            or value <= 0
        ):
            raise self.fail(key, "a positive number")
        return float(value)

    def only(self, key: str, *allowed: Any) -> None:
        """The key is absent, null, or has a value that is implemented."""
        value = self.body.get(key)
        if value is not None and value not in allowed:
            expected = " or ".join(json.dumps(a) for a in allowed)
            self.problems.append(self.fail(key, expected))

    def known(self, keys: set[str]) -> None:
        for key in sorted(self.body.keys() - keys):
            expected = "one of " + ", ".join(sorted(keys))
            self.problems.report(CONFIG, self.at(key), "an unknown key", expected)

    def section(self, key: str) -> _Section:
        value = self.body.get(key)
        if not isinstance(value, dict):
            raise self.fail(key, "an object")
        return _Section(value, self.at(key), self.problems)

    def token(self, key: str, vocab: int) -> int | None:
        if self.body.get(key) is None:
            return None
        return self.whole(key, 0, vocab - 1)

    def tokens(self, key: str, vocab: int) -> tuple[int, ...]:
        value = self.body.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        good = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab for i in ids)
        if not good:
            raise self.fail(key, f"a token id in 0..{vocab - 1}, or a list of them")
        return tuple(dict.fromkeys(ids))

    def dtype(self) -> str | None:
        value = self.body.get("dtype", self.body.get("torch_dtype"))
        if value is not None and value not in DTYPES:
            key = "dtype" if "dtype" in self.body else "torch_dtype"
            raise self.fail(key, "one of " + ", ".join(DTYPES))
        return value

    def rope(self, keys: set[str], kinds: tuple[str, ...]) -> tuple[Rope, _Section]:
        """The rotary embedding, of the newer or the older spelling."""
        if self.body.get("rope_parameters") is not None:
            inner = self.section("rope_parameters")
        else:
            scaling = self.body.get("rope_scaling") or {}
            if not isinstance(scaling, dict):
                raise self.fail("rope_scaling", "an object")
            body = {**scaling, "rope_theta": self.body.get("rope_theta")}
            inner = _Section(body, self.at("rope_scaling"), self.problems)
        kind = inner.body.get("rope_type", inner.body.get("type", "default"))
        if kind not in kinds:
            raise ArtifactError(CONFIG, inner.at("rope_type"), json.dumps(kind), " or ".join(kinds))
        inner.known(keys | (_YARN_ROPE if kind == "yarn" else set()))
        inner.number("rope_theta")
        if kind == "yarn":
            inner.number("factor")
            inner.whole("original_max_position_embeddings")
            for key in ("beta_fast", "beta_slow", "attention_factor"):
                inner.number(key, 1.0)
            inner.only("truncate", True, False)
        return Rope.of_json({**inner.body, "rope_type": kind}), inner

    def quantized(self) -> Quantized | None:
        """How matrices are stored in few bits: of compressed-tensors' ways, two are implemented."""
        if self.body.get("quantization_config") is None:
            return None
        whole = self.section("quantization_config")
        whole.only("quant_method", "compressed-tensors")
        whole.only("format", "int-quantized", "pack-quantized")
        whole.only("kv_cache_scheme", None)
        bits = 4 if whole.body.get("format") == "pack-quantized" else 8
        groups = whole.section("config_groups")
        sizes: dict[int | None, None] = {}
        for name in groups.body:
            group = groups.section(name)
            group.only("input_activations", None)
            group.only("output_activations", None)
            weights = group.section("weights")
            weights.only("num_bits", bits)
            weights.only("type", "int")
            weights.only("symmetric", True)
            weights.only("dynamic", False)
            weights.only("actorder", None, "static", "weight")  # "group" permutes the inputs
            weights.only("strategy", "channel", "tensor" if bits == 8 else "group")
            grouped = weights.body.get("strategy") == "group"
            sizes[weights.whole("group_size") if grouped else None] = None
        if len(sizes) > 1:
            raise groups.fail("group_size", f"the same everywhere, not {list(sizes)}")
        return Quantized(bits=bits, group=next(iter(sizes), None))


class _Target:
    def __init__(self, body: Mapping[str, Any], problems: Problems):
        self.top = _Section(body, "", problems)
        name = body.get("model_type")
        alone = {f"{n}_text": f for n, f in FAMILIES.items() if f.composite}
        if not isinstance(name, str) or name not in {**FAMILIES, **alone}:
            raise self.top.fail("model_type", "one of " + ", ".join({**FAMILIES, **alone}))
        if name in alone:  # the text model without the one it is a part of
            self.family = dataclasses.replace(alone[name], composite=False)
        else:
            self.family = FAMILIES[name]
        self.text = self.top.section("text_config") if self.family.composite else self.top
        self.hybrid = self.family.gated

    def read(self, head_stored: bool) -> TargetFacts:
        text, top = self.text, self.top
        for section in {id(s): s for s in (top, text)}.values():
            section.only("hidden_act", "silu")
            for key in ("attention_bias", "mlp_bias"):
                section.only(key, False)
        if top is not text and text.body.get("quantization_config") is not None:
            raise text.fail("quantization_config", "none here: it stands outside")
        text.only("attn_output_gate", self.family.gated)
        width, vocab = text.whole("hidden_size"), text.whole("vocab_size")
        count = text.whole("num_hidden_layers", high=4096)
        eps = text.number("rms_norm_eps", 1e-6)
        layers = self._layers(count)
        if not {"attention", "sliding"} & set(layers):
            raise text.fail("layer_types", "at least one full_attention")
        attention, rope = self._attention(width, eps)
        sliding = None
        if "sliding" in layers:
            sliding = dataclasses.replace(attention, window=text.whole("sliding_window"))
        config = TargetConfig(
            vocab_size=vocab,
            width=width,
            layers=layers,
            attention=attention if "attention" in layers else None,
            sliding=sliding,
            delta_net=self._delta_net(eps) if "delta_net" in layers else None,
            mlp=self._feed_forward(),
            norm_eps=eps,
            tied=self._tied(head_stored),
            context_length=text.whole("max_position_embeddings", high=MAX_POSITIONS),
        )
        return TargetFacts(
            config=config,
            family=self.family,
            rope=rope,
            mtp=self._mtp(config, attention),
            dtype=top.dtype() or text.dtype(),
            stop_ids=text.tokens("eos_token_id", vocab) or top.tokens("eos_token_id", vocab),
            bos_token_id=text.token("bos_token_id", vocab),
            pad_token_id=text.token("pad_token_id", vocab),
            quantized=top.quantized(),
        )

    def _layers(self, count: int) -> tuple[LayerKind, ...]:
        text = self.text
        kinds = {word: kind for kind, word in self.family.kinds}
        windowed = "sliding_attention" in kinds and text.body.get("use_sliding_window")
        text.only("use_sliding_window", False, *([True] if "sliding_attention" in kinds else []))
        names = text.body.get("layer_types")
        if names is None and self.hybrid:
            every = text.whole("full_attention_interval", default=4)
            names = [
                "linear_attention" if (i + 1) % every else "full_attention" for i in range(count)
            ]
        elif names is None:
            first = text.whole("max_window_layers", 0, default=28) if windowed else count
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
        heads = text.whole("num_attention_heads")
        kv_heads = text.whole("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise text.fail("num_key_value_heads", f"a divisor of the {heads} query heads")
        if text.body.get("head_dim") is None and width % heads:
            raise text.fail("head_dim", "an integer")
        head_dim = text.whole("head_dim", default=width // heads)
        keys = _PLAIN_ROPE | (_MROPE if self.hybrid else set())
        rope, section = text.rope(keys, ("default",))
        fraction = 0.25 if self.hybrid else 1.0
        if "partial_rotary_factor" in section.body:
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
        keys, values = text.whole("linear_num_key_heads"), text.whole("linear_num_value_heads")
        if values % keys:
            raise text.fail("linear_num_value_heads", f"a multiple of the {keys} key heads")
        return DeltaNetConfig(
            key_heads=keys,
            value_heads=values,
            key_dim=text.whole("linear_key_head_dim"),
            value_dim=text.whole("linear_value_head_dim"),
            conv_width=text.whole("linear_conv_kernel_dim", 2),
            norm_eps=eps,
        )

    def _feed_forward(self) -> MlpConfig | MoeConfig:
        text = self.text
        if not self.family.model_type.endswith("_moe"):
            return MlpConfig(hidden=text.whole("intermediate_size"))
        text.only("mlp_only_layers", [])
        text.only("decoder_sparse_step", 1)
        text.only("norm_topk_prob", True)
        experts = text.whole("num_experts")
        return MoeConfig(
            experts=experts,
            active=text.whole("num_experts_per_tok", high=experts),
            hidden=text.whole("moe_intermediate_size"),
            shared_hidden=text.whole("shared_expert_intermediate_size"),
        )

    def _tied(self, head_stored: bool) -> bool:
        said = [
            section.body["tie_word_embeddings"]
            for section in (self.top, self.text)
            if section.body.get("tie_word_embeddings") is not None
        ]
        if not all(isinstance(tied, bool) and tied == said[0] for tied in said):
            raise self.text.fail("tie_word_embeddings", "true or false, the same everywhere")
        return said[0] if said else not head_stored

    def _mtp(self, config: TargetConfig, attention: AttentionConfig) -> MtpConfig | None:
        text = self.text
        if not self.hybrid:
            return None
        text.only("mtp_use_dedicated_embeddings", False)
        if text.whole("mtp_num_hidden_layers", 0, 1, default=0) == 0:
            return None
        return MtpConfig(
            vocab_size=config.vocab_size,
            width=config.width,
            attention=attention,
            mlp=config.mlp,
            norm_eps=config.norm_eps,
            context_length=config.context_length,
        )


class _Block:
    def __init__(
        self, body: Mapping[str, Any], kind: str, target: TargetConfig, problems: Problems
    ):
        self.kind, self.target, self.problems = kind, target, problems
        self.top = _Section(body, "", problems)
        self.top.known(_DRAFTER | _BLOCK[kind])
        inner = body.get("dflash_config", {})
        if not isinstance(inner, dict):
            raise self.top.fail("dflash_config", "an object")
        _Section(inner, "dflash_config", problems).known(_BLOCK[kind])
        for key in sorted(_BLOCK[kind] & inner.keys() & body.keys()):
            if inner[key] != body[key]:
                problems.append(self.top.fail(key, f"{json.dumps(inner[key])}, of dflash_config"))
        outer = {key: body[key] for key in _BLOCK[kind] & body.keys()}
        self.block = _Section({**outer, **inner}, "dflash_config", problems)

    def read(self) -> BlockFacts:
        top, block, target = self.top, self.block, self.target
        dflash2 = self.kind == "dflash2"
        top.only("hidden_act", "silu")
        top.only("attention_bias", False)
        top.only("is_causal", False)
        self._agree("hidden_size", target.width)
        self._agree("vocab_size", target.vocab_size)
        layers = top.whole("num_hidden_layers", high=4096)
        eps = top.number("rms_norm_eps", 1e-6)
        taps = self._taps()
        size = block.whole("block_size", 2 if dflash2 else 1, 4096)
        kinds = ("default",) if dflash2 else ("default", "yarn")
        rope, section = top.rope(_PLAIN_ROPE, kinds)
        section.only("partial_rotary_factor", 1, 1.0)
        candidates = self._candidates()
        config = BlockDrafterConfig(
            kind="dflash2" if dflash2 else "dspark",
            vocab_size=target.vocab_size,
            width=target.width,
            aux_width=len(taps) * target.width,
            layers=layers,
            attention=self._attention(eps, layers),
            mlp_hidden=top.whole("intermediate_size"),
            norm_eps=eps,
            block_size=size,
            draft_tokens=size - 1 if dflash2 else size,
            candidates=candidates,
            rank=self._rank(),
            mask_token=block.whole("mask_token_id", 0, target.vocab_size - 1),
            # Positions are the target's, and the tables are made for all of them.
            context_length=target.context_length,
            embedding_scale=shortest(block.number("input_embedding_scale", 1.0)),
            conv=self._conv() if dflash2 else None,
            draft_vocab_size=self._draft_vocab(candidates),
        )
        return BlockFacts(
            config=config, taps=taps, rope=rope, dtype=top.dtype(), quantized=top.quantized()
        )

    def _draft_vocab(self, candidates: int) -> int | None:
        if self.top.body.get("draft_vocab_size") is None:
            return None
        return self.top.whole("draft_vocab_size", candidates, self.target.vocab_size)

    def _agree(self, key: str, expected: int) -> None:
        if self.top.whole(key) != expected:
            self.problems.append(self.top.fail(key, f"{expected}, the target's"))

    def _taps(self) -> tuple[int, ...]:
        last = len(self.target.layers) - 2
        ids = self.block.body.get("target_layer_ids")
        good = isinstance(ids, list) and all(
            isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= last for i in ids
        )
        if not good or not ids or len(set(ids)) != len(ids):
            raise self.block.fail("target_layer_ids", f"layers in 0..{last}, each once")
        return tuple(i + 1 for i in ids)  # what leaves layer i enters layer i + 1

    def _attention(self, eps: float, layers: int) -> AttentionConfig:
        top = self.top
        heads = top.whole("num_attention_heads")
        kv_heads = top.whole("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise top.fail("num_key_value_heads", f"a divisor of the {heads} query heads")
        head_dim = top.whole("head_dim", 2)
        if head_dim % 2:
            raise top.fail("head_dim", "an even number")
        return AttentionConfig(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=head_dim,
            qk_norm=True,
            norm_eps=eps,
            window=self._window(layers),
            scale=shortest(head_dim**-0.5),
        )

    def _window(self, layers: int) -> int:
        """One window for all layers, or none."""
        top = self.top
        top.only("use_sliding_window", True, False)
        windowed = bool(top.body.get("use_sliding_window"))
        kind = "sliding_attention" if windowed else "full_attention"
        types = top.body.get("layer_types")
        if types is not None and types != [kind] * layers:
            raise top.fail(
                "layer_types", f"{layers} of {kind}, since use_sliding_window is {windowed}"
            )
        if not windowed:
            return FULL_ATTENTION
        top.only("max_window_layers", 0, layers)
        return top.whole("sliding_window")

    def _candidates(self) -> int:
        vocab = self.target.vocab_size
        if self.kind == "dflash2":
            return self.block.whole("selector_top_k", 1, vocab)
        return self.block.whole("selector_top_k", 1, vocab, min(DSPARK_CANDIDATES, vocab))

    def _rank(self) -> int:
        if self.kind == "dflash2":
            return self.block.whole("selector_rank")
        self.block.only("markov_head_type", "vanilla")
        return self.block.whole("markov_rank")

    def _conv(self) -> ConvConfig:
        group = self.block.whole("conv_group_size", 1, self.target.width)
        if self.target.width % group:
            raise self.block.fail("conv_group_size", f"a divisor of {self.target.width}")
        return ConvConfig(taps=self.block.whole("conv_kernel_size", 1, 64), group=group)
