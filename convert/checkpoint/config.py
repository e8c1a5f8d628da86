"""``config.json`` of a checkpoint -> what the model is. Read strictly, as an artifact's is.

Every key that is acted on is checked for type and range. A key that would change what is computed
must have the one value that is implemented; in a block drafter's file a key nobody here knows is
an error, because a setting that is ignored costs acceptance unnoticed. In a target's file unknown
keys become remarks; see :mod:`convert.unused`. Keys that are absent or null have the defaults of
transformers.

The other direction is :mod:`jaxdraft.checkpoint.config`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from convert.artifact.parts import shortest
from convert.errors import ArtifactError, Problems
from convert.unused import (
    CONFIG_KEYS,
    DECODING_KEYS,
    DRAFTER_KEYS,
    GENERATION_KEYS,
    QUANTIZATION_KEYS,
    Remarks,
    Tracked,
    is_integer,
    report_generation,
    report_unread,
    shown,
    stop_ids,
)
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

_DRAFTER = DRAFTER_KEYS.keys() | {
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
    "mlp_bias",
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
    "torch_dtype",
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

_DRAFTER_DEFAULTS: Mapping[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}


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
      mtp: description of the multi-token-prediction head, if it has one that is implemented.
      mtp_problems: why the head that it has is not implemented.
      dtype: what it says it is computed in, or None.
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


def read_block(
    body: Mapping[str, Any],
    kind: str,
    target: TargetConfig,
    problems: Problems,
    remarks: Remarks | None = None,
) -> BlockFacts:
    """Read a block drafter's ``config.json``.

    Args:
      body: its content.
      kind: "dflash2" or "dspark".
      target: what it drafts for; widths and taps must agree.
      problems: where to report what does not stop the reading.
      remarks: where to report what does not stop a load.

    Raises:
      ArtifactError: it is not a drafter that is implemented.
    """
    return _Block(body, kind, target, problems, remarks or Remarks()).read()


def _generation(body: Tracked) -> dict[str, Any]:
    """Settings of decoding that older files hold beside those of the model."""
    names = DECODING_KEYS | (GENERATION_KEYS.keys() - CONFIG_KEYS.keys())
    return {key: body[key] for key in set(body) & names}


class _Section:
    """An object of the file, read key by key. Keys that are absent or null have ``defaults``."""

    def __init__(
        self,
        body: Mapping[str, Any],
        where: str,
        problems: Problems,
        remarks: Remarks,
        defaults: Mapping[str, Any] | None = None,
    ):
        self.body = Tracked(body)
        self.where, self.problems, self.remarks = where, problems, remarks
        self.defaults = defaults or {}

    def at(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def fail(self, key: str, expected: str) -> ArtifactError:
        found = json.dumps(self.body[key])[:80] if key in self.body else "nothing"
        return ArtifactError(CONFIG, self.at(key), found, expected)

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key, else ``default`` if it is null, else that of the family."""
        value = self.body.get(key)
        if value is not None:
            return value
        if default is not None and key in self.body:
            return default
        return self.defaults.get(key, default)

    def whole(self, key: str, low: int = 1, high: int = _INT32, default: int | None = None) -> int:
        value = self.value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(key, f"an integer in {low}..{high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key, default)
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

    def inert(self, *keys: str) -> None:
        """These keys have no effect beside others that have been read."""
        self.body.read.update(keys)

    def report_unread(self, harmless: Mapping[str, str]) -> None:
        """Remark on keys that nothing has read."""
        report_unread(self.body, self.where, CONFIG, harmless, self.remarks)

    def known(self, keys: Collection[str]) -> None:
        """Report every other key. One whose value is null asks for nothing and is noted."""
        for key in sorted(self.body.keys() - set(keys)):
            if self.body[key] is None:
                self.remarks.note(CONFIG, f"{self.at(key)} is null: not a setting that is known")
            else:
                expected = "one of " + ", ".join(sorted(keys))
                self.problems.report(CONFIG, self.at(key), "an unknown key", expected)

    def section(self, key: str, defaults: Mapping[str, Any] | None = None) -> _Section:
        value = self.body.get(key)
        if not isinstance(value, dict):
            raise self.fail(key, "an object")
        return _Section(value, self.at(key), self.problems, self.remarks, defaults)

    def token(self, key: str, vocab: int) -> int | None:
        """A token that nothing here acts on: what is no token is noted."""
        value = self.value(key)
        if value is None or (is_integer(value) and 0 <= value < vocab):
            return value
        text = f"{self.at(key)} is {shown(value)}, not a token in 0..{vocab - 1}: it is not used"
        self.remarks.note(CONFIG, text)
        return None

    def stop_ids(self, vocab: int) -> tuple[int, ...]:
        value = self.body.get("eos_token_id")
        if "eos_token_id" not in self.body:
            value = self.defaults.get("eos_token_id")
        return stop_ids(value, self.at("eos_token_id"), CONFIG, vocab, self.remarks)

    def dtype(self) -> str | None:
        """The dtype that the file names; None: none, or that of the stored tensors."""
        key = next((k for k in ("dtype", "torch_dtype") if self.body.get(k) is not None), None)
        if key is None:
            return None
        self.inert("torch_dtype")  # the older name, beside the newer
        value = self.body[key]
        name = value.removeprefix("torch.") if isinstance(value, str) else value
        if name == "auto":
            return None
        if name not in DTYPES:
            raise self.fail(key, "one of " + ", ".join(DTYPES))
        return name

    def rope(self, keys: set[str], kinds: tuple[str, ...]) -> tuple[Rope, _Section]:
        """The rotary embedding, of the newer or the older spelling."""
        if self.body.get("rope_parameters") is not None:
            inner = self.section("rope_parameters")
            self.only("rope_scaling", {}, self.body["rope_parameters"])
        else:
            scaling = self.body.get("rope_scaling") or {}
            if not isinstance(scaling, dict):
                raise self.fail("rope_scaling", "an object")
            where = self.at("rope_scaling")
            inner = _Section(dict(scaling), where, self.problems, self.remarks)
        theta = self.value("rope_theta")  # beside an object that may hold it, too
        inner.defaults = {} if theta is None else {"rope_theta": theta}
        kind = inner.value("rope_type") or inner.value("type") or "default"
        if kind not in kinds:
            raise ArtifactError(CONFIG, inner.at("rope_type"), json.dumps(kind), " or ".join(kinds))
        inner.known(keys | (_YARN_ROPE if kind == "yarn" else set()))
        if kind == "yarn":
            inner.number("factor")
            inner.whole("original_max_position_embeddings")
            for key in ("beta_fast", "beta_slow", "attention_factor"):
                inner.number(key, 1.0)
            inner.only("truncate", True, False)
        said = {**inner.body, "rope_type": kind, "rope_theta": inner.number("rope_theta")}
        return Rope.of_json(said), inner

    def quantized(self) -> Quantized | None:
        """How matrices are stored in few bits: of compressed-tensors' ways, two are implemented."""
        if self.body.get("quantization_config") is None:
            return None
        whole = self.section("quantization_config")
        whole.only("quant_method", "compressed-tensors")
        whole.only("format", "int-quantized", "pack-quantized")
        for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            whole.only(key, {} if key != "kv_cache_scheme" else None)
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
            weights.only("block_structure")
            grouped = weights.body.get("strategy") == "group"
            sizes[weights.whole("group_size") if grouped else None] = None
            weights.inert("group_size", "scale_dtype", "zp_dtype")  # the stored tensors decide
            group.only("format", whole.body.get("format"))
            group.report_unread(QUANTIZATION_KEYS)
            weights.report_unread(QUANTIZATION_KEYS)
        whole.report_unread(QUANTIZATION_KEYS)
        if len(sizes) > 1:
            raise groups.fail("group_size", f"the same everywhere, not {list(sizes)}")
        return Quantized(bits=bits, group=next(iter(sizes), None))


class _Target:
    def __init__(self, body: Mapping[str, Any], problems: Problems, remarks: Remarks):
        self.problems = problems
        name = body.get("model_type")
        alone = {f"{n}_text": f for n, f in FAMILIES.items() if f.composite}
        known = {**FAMILIES, **alone}
        self.top = _Section(body, "", problems, remarks)
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
        width, vocab = text.whole("hidden_size"), text.whole("vocab_size")
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
        layers = self._layers(text.whole("num_hidden_layers", high=4096))
        if not {"attention", "sliding"} & set(layers):
            raise text.fail("layer_types", "at least one full_attention")
        sliding = None
        if "sliding" in layers:
            sliding = dataclasses.replace(attention, window=text.whole("sliding_window"))
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
            context_length=text.whole("max_position_embeddings", high=MAX_POSITIONS),
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
            every = text.whole("full_attention_interval")
            names = [
                "linear_attention" if (i + 1) % every else "full_attention" for i in range(count)
            ]
        elif names is None:
            first = text.whole("max_window_layers", 0) if windowed else count
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
        if text.value("head_dim") is None and width % heads:
            raise text.fail("head_dim", "an integer")
        head_dim = text.whole("head_dim") if text.value("head_dim") is not None else width // heads
        keys = _PLAIN_ROPE | (_MROPE if self.hybrid else set())
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

    def _mtp(
        self, config: TargetConfig, attention: AttentionConfig
    ) -> tuple[MtpConfig | None, tuple[ArtifactError, ...]]:
        """The head that the settings describe, or why it is not implemented.

        The target does not depend on it, so what is wrong with it is no problem of the target.
        """
        text = self.text
        if not self.hybrid:
            text.inert("mtp_num_hidden_layers")
            return None, ()
        problems = Problems()
        apart = _Section(text.body, text.where, problems, text.remarks)
        apart.only("mtp_use_dedicated_embeddings", False)
        text.inert("mtp_use_dedicated_embeddings", "mtp_num_hidden_layers")
        try:
            if apart.whole("mtp_num_hidden_layers", 0, 1, default=0) == 0:
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


class _Block:
    def __init__(
        self,
        body: Mapping[str, Any],
        kind: str,
        target: TargetConfig,
        problems: Problems,
        remarks: Remarks,
    ):
        self.kind, self.target, self.problems = kind, target, problems
        self.top = _Section(body, "", problems, remarks, _DRAFTER_DEFAULTS)
        self.top.known(_DRAFTER | _BLOCK[kind])
        inner = {} if body.get("dflash_config") is None else body["dflash_config"]
        if not isinstance(inner, dict):
            raise self.top.fail("dflash_config", "an object")
        _Section(inner, "dflash_config", problems, remarks).known(_BLOCK[kind])
        for key in sorted(_BLOCK[kind] & inner.keys() & body.keys()):
            if inner[key] != body[key]:
                problems.append(self.top.fail(key, f"{json.dumps(inner[key])}, of dflash_config"))
        outer = {key: body[key] for key in _BLOCK[kind] & body.keys()}
        self.block = _Section({**outer, **inner}, "dflash_config", problems, remarks)

    def read(self) -> BlockFacts:
        top, block, target = self.top, self.block, self.target
        dflash2 = self.kind == "dflash2"
        top.only("hidden_act", "silu")
        top.only("attention_bias", False)
        top.only("mlp_bias", False)
        top.only("is_causal", False)
        self._agree("hidden_size", target.width)
        self._agree("vocab_size", target.vocab_size)
        layers = top.whole("num_hidden_layers", high=4096)
        eps = top.number("rms_norm_eps")
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
