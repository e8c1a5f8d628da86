"""``config.json`` of a block drafter -> what the model is.

Three layouts are in use. *Nested*: the settings of drafting lie in ``dflash_config``, or some of
them at the top (z-lab's DFlash and DFlash2, SpecForge's DSpark). *Flat*: all lie at the top
(DeepSpec's DSpark). *Speculators*: the decoder's settings lie in ``transformer_layer_config``, and
those of drafting at the top.

A key that nothing here knows is an error, because a setting that is ignored costs acceptance
unnoticed.

The other direction is :mod:`jaxdraft.checkpoint.block_config`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

from convert.checkpoint.section import PLAIN_ROPE, DrafterFacts, ModelSection
from convert.checkpoint.tensors import HEAD
from convert.errors import Problems
from convert.paths import CONFIG
from convert.recipes import shortest
from convert.unused import DRAFTER_KEYS, SPECULATORS_KEYS, Remarks, is_integer
from jaxdraft.checkpoint.block_config import usual_candidates
from jaxdraft.config import (
    FULL_ATTENTION,
    AttentionConfig,
    BlockDrafterConfig,
    BlockLayout,
    ConvConfig,
    DrafterKind,
    MarkovKind,
    TargetConfig,
)
from jaxdraft.kinds import block_of

TRUST = "confidence_head."
"""Prefix of the names of a confidence head's tensors."""

_DECODER = DRAFTER_KEYS.keys() | {
    "attention_bias",
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
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "torch_dtype",
    "use_sliding_window",
    "vocab_size",
}
"""Settings of the decoder."""

_TOP = {"dflash_config", "draft_vocab_size", "quantization_config", "target_hidden_size"}
"""Settings beside those of the decoder."""

_SPECULATORS = (DRAFTER_KEYS.keys() - {"model_type"}) | {
    "aux_hidden_state_layer_ids",
    "block_size",
    "draft_vocab_size",
    "dtype",
    "mask_token_id",
    "max_anchors",
    "quantization_config",
    "sample_from_anchor",
    "selector_top_k",
    "sliding_window_non_causal",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "target_hidden_size",
    "torch_dtype",
    "transformer_layer_config",
}
"""Settings at the top of the speculators layout."""

_COMMON_BLOCK = {"block_size", "mask_token_id", "selector_top_k", "target_layer_ids"}

_HEAD: dict[DrafterKind, set[str]] = {
    "dflash": {
        "attention_mode",
        "final_logit_softcapping",
        "output_multiplier",
        "projector_type",
    },
    "dflash2": {
        "conv_group_size",
        "conv_kernel_size",
        "final_logit_softcapping",
        "input_embedding_scale",
        "output_multiplier",
        "selector_rank",
    },
    # How a confidence head was trained changes none of the drafts.
    "dspark": {
        "attention_mode",
        "confidence_head_alpha",
        "confidence_head_with_markov",
        "enable_confidence_head",
        "markov_head_type",
        "markov_rank",
        "num_anchors",
        "projector_type",
    },
}
"""Settings of the drafting itself that a kind has of its own."""

_DRAFTER_DEFAULTS: Mapping[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}


def read_block(
    body: Mapping[str, Any],
    kind: DrafterKind,
    target: TargetConfig,
    problems: Problems,
    remarks: Remarks | None = None,
    names: Collection[str] = (),
) -> DrafterFacts[BlockDrafterConfig]:
    """Read a block drafter's ``config.json``.

    Args:
      body: its content.
      kind: "dflash", "dflash2" or "dspark".
      target: what it drafts for; widths and taps must agree.
      problems: where to report what does not stop the reading.
      remarks: where to report what does not stop a load.
      names: names of the stored tensors, which show whether there is a head.

    Raises:
      ArtifactError: it is not a drafter that is implemented.
    """
    return _Block(body, kind, target, problems, remarks or Remarks(), names).read()


class _Block:
    def __init__(
        self,
        body: Mapping[str, Any],
        kind: DrafterKind,
        target: TargetConfig,
        problems: Problems,
        remarks: Remarks,
        names: Collection[str],
    ):
        self.kind, self.target, self.problems = kind, target, problems
        self.remarks, self.names, self.own = remarks, names, block_of(kind)
        file = ModelSection(body, CONFIG, "", problems, remarks, _DRAFTER_DEFAULTS)
        self.file = file
        if "speculators_model_type" in body:
            if "speculators" not in self.own.layouts:
                raise file.fail(
                    "speculators_model_type",
                    f"none: a {kind} drafter is not supported in this layout",
                )
            self.layout: BlockLayout = "speculators"
            file.only("speculators_model_type", kind)
            file.known(_SPECULATORS | _HEAD[kind], nulls=True)
            self.top = file.section("transformer_layer_config", _DRAFTER_DEFAULTS)
            self.top.known(_DECODER, nulls=True)
            self.block = file
        else:
            self._nested(body)

    def _nested(self, body: Mapping[str, Any]) -> None:
        """Open the settings of a nested or flat file."""
        top, settings = self.file, _COMMON_BLOCK | _HEAD[self.kind]
        top.known(_DECODER | _TOP | settings, nulls=True)
        inner = {} if body.get("dflash_config") is None else body["dflash_config"]
        if not isinstance(inner, dict):
            raise top.fail("dflash_config", "an object")
        top.inner(inner, "dflash_config").known(settings, nulls=True)
        for key in sorted(settings & inner.keys() & body.keys()):
            if inner[key] != body[key]:
                self.problems.append(top.fail(key, f"{json.dumps(inner[key])}, of dflash_config"))
        outer = {key: body[key] for key in settings & body.keys()}
        self.layout = "nested" if inner else "flat"
        self.top, self.block = top, top.inner({**outer, **inner}, "dflash_config")

    def read(self) -> DrafterFacts[BlockDrafterConfig]:
        top, block, target = self.top, self.block, self.target
        own = self.own
        top.only("hidden_act", "silu")
        top.only("attention_bias", False)
        top.only("mlp_bias", False)
        self._check_target()
        layers = top.integer("num_hidden_layers", high=4096)
        eps = top.number("rms_norm_eps")
        taps = self._taps()
        skipped = self._first_row()
        size = block.integer("block_size", 1 + skipped, 4096)
        rope, section = top.rope(PLAIN_ROPE, own.ropes)
        section.only("partial_rotary_factor", 1, 1.0)
        candidates = self._candidates()
        vocabulary = self._draft_vocab(candidates)
        attention = self._attention(eps)
        window, full, causal = self._layers(layers)
        self._check_reach(window, size, len(full) < layers and not causal)
        config = BlockDrafterConfig(
            kind=self.kind,
            vocab_size=target.vocab_size,
            width=target.width,
            aux_width=len(taps) * target.width,
            layers=layers,
            attention=dataclasses.replace(attention, window=window),
            mlp_hidden=top.integer("intermediate_size"),
            norm_eps=eps,
            block_size=size,
            draft_tokens=size - skipped,
            candidates=candidates,
            rank=self._rank(),
            mask_token=block.integer("mask_token_id", 0, target.vocab_size - 1),
            # Positions are the target's, and the tables are made for all of them.
            context_length=target.context_length,
            embedding_scale=shortest(block.number("input_embedding_scale", 1.0)),
            conv=self._conv() if own.convolves else None,
            draft_vocab_size=vocabulary,
            own_head=self._own_head(vocabulary),
            full_layers=full if len(full) < layers else (),
            causal_layers=causal,
            logit_multiplier=shortest(block.number("output_multiplier", 1.0)),
            logit_softcap=self._softcap(),
            markov=self._markov(),
            chained=own.chains and block.body.get("selector_top_k") is None,
            confidence=self._confidence(),
            layout=self.layout,
        )
        return DrafterFacts(
            config=config,
            taps=taps,
            rope=rope,
            dtype=self.file.dtype() or top.dtype(),
            quantized=self.file.quantized(),
        )

    def _first_row(self) -> int:
        """Return the first row of a block that predicts a draft."""
        if self.layout != "speculators":
            return self.own.first_row
        return 0 if self.block.boolean("sample_from_anchor") else 1

    def _softcap(self) -> float:
        if self.block.body.get("final_logit_softcapping") in (None, 0, 0.0):
            return 0.0
        return shortest(self.block.number("final_logit_softcapping"))

    def _markov(self) -> MarkovKind:
        if not self.own.chains:
            return "vanilla"
        found = self.block.value("markov_head_type", "vanilla")
        if found not in get_args(MarkovKind):
            known = " or ".join(json.dumps(kind) for kind in get_args(MarkovKind))
            raise self.block.fail("markov_head_type", known)
        if found == "rnn" and self.block.body.get("selector_top_k") is not None:
            raise self.block.fail(
                "selector_top_k", "nothing: a recurrent head scores paths, not pairs of candidates"
            )
        return found

    def _confidence(self) -> Literal["row", "pair"] | None:
        """Return the input of the confidence head, which exists if its tensors do."""
        for key in ("enable_confidence_head", "confidence_head_with_markov"):
            self.block.only(key, True, False)
        stored = any(name.startswith(TRUST) for name in self.names)
        enabled = self.block.value("enable_confidence_head")
        if enabled is False and stored:
            self.remarks.note(
                CONFIG, f"enable_confidence_head is false: the tensors {TRUST}* are not read"
            )
        if not (stored if enabled is None else enabled):
            return None
        return "pair" if self.block.value("confidence_head_with_markov", True) else "row"

    def _draft_vocab(self, candidates: int) -> int | None:
        file, vocab = self.file, self.target.vocab_size
        if file.body.get("draft_vocab_size") is None:
            return None
        size = file.integer("draft_vocab_size", candidates, vocab)
        whole = self.layout == "speculators" and size == vocab  # which stores no map then
        return None if whole else size

    def _own_head(self, vocabulary: int | None) -> bool:
        """Return whether the head over the draft vocabulary is the drafter's own."""
        return vocabulary is not None and (self.layout == "speculators" or HEAD in self.names)

    def _check_target(self) -> None:
        """Check that the drafter is for this target; its tensors cannot fit another."""
        width, vocab = self.target.width, self.target.vocab_size
        other = "the target's: the drafter belongs to another target"
        if self.top.integer("hidden_size") != width:
            raise self.top.fail("hidden_size", f"{width}, {other}")
        if self.file.body.get("target_hidden_size") not in (None, width):
            raise self.file.fail("target_hidden_size", f"{width}, {other}")
        if self.top.integer("vocab_size") != vocab:
            self.problems.append(self.top.fail("vocab_size", f"{vocab}, the target's"))
        if self.layout == "speculators":
            if self.file.body.get("speculators_config") is not None:
                inner = self.file.section("speculators_config")
                inner.only("algorithm", self.kind)
                inner.report_unread(SPECULATORS_KEYS)
        else:
            self.block.only("projector_type", self.kind)

    def _taps(self) -> tuple[int, ...]:
        """Return the layers whose entering residual is read.

        Files of speculators name the layer that it enters, others the layer that it leaves. Layer 0
        is entered by the embedding, which leaves layer -1.
        """
        layers = len(self.target.layers)
        enters = self.layout == "speculators"
        key = "aux_hidden_state_layer_ids" if enters else "target_layer_ids"
        first = 0 if enters else -1
        last = first + layers - 1
        ids = self.block.body.get(key)
        good = isinstance(ids, list) and all(is_integer(i) and first <= i <= last for i in ids)
        if not good or not ids or len(set(ids)) != len(ids):
            does = "enters" if enters else "leaves"
            raise self.block.fail(
                key,
                f"layers in {first}..{last}, each once: the target has layers 0 to {layers - 1}, "
                f"and the drafter reads what {does} them",
            )
        return tuple(i - first for i in ids)

    def _attention(self, eps: float) -> AttentionConfig:
        top = self.top
        heads, kv_heads, head_dim = top.heads(None)
        self.block.only("attention_mode", "gqa", *(["mha"] if heads == kv_heads else []))
        return AttentionConfig(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=head_dim,
            qk_norm=True,
            norm_eps=eps,
            scale=shortest(head_dim**-0.5),
        )

    def _layers(self, layers: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Return the window, the layers without one, and the causal layers."""
        top = self.top
        top.only("use_sliding_window", True, False)
        windowed = bool(top.body.get("use_sliding_window"))
        kinds = ["sliding_attention" if windowed else "full_attention"] * layers
        types = top.body.get("layer_types")
        if types is not None:
            allowed = ["full_attention", *(["sliding_attention"] if windowed else [])]
            listed = isinstance(types, list) and len(types) == layers
            if not listed or not all(kind in allowed for kind in types):
                raise top.fail(
                    "layer_types",
                    f"{layers} of {' or '.join(allowed)}, since use_sliding_window is {windowed}",
                )
            kinds = types
        elif windowed:  # the first so many layers would see everything
            top.only("max_window_layers", 0, layers)
        full = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
        ringed = tuple(i for i in range(layers) if i not in full)
        window = top.integer("sliding_window") if ringed else FULL_ATTENTION
        if self.layout == "speculators":
            both = self.file.value("sliding_window_non_causal", False)
            if ringed:
                self.remarks.note(
                    CONFIG,
                    "speculators' training counts the window of sliding layers from the anchor, "
                    "its servers from each row; jaxdraft does the latter",
                )
            return window, full, () if both else ringed
        top.only("is_causal", True, False)
        setting = top.body.get("is_causal")
        causal = ringed if setting is None else tuple(range(layers)) if setting else ()
        return window, full, causal

    def _check_reach(self, window: int, size: int, both_ways: bool) -> None:
        """Refuse a block that is wider than its window, if rows look ahead."""
        if both_ways and size > window:
            raise self.top.fail(
                "sliding_window",
                f"at least the block's {size} rows: shorter windows that look ahead are not "
                "implemented",
            )

    def _candidates(self) -> int:
        vocab = self.target.vocab_size
        if self.own.convolves:
            return self.block.integer("selector_top_k", 1, vocab)
        size = self.file.value("draft_vocab_size")
        most = size if is_integer(size) and 1 <= size <= vocab else vocab
        return self.block.integer("selector_top_k", 1, vocab, usual_candidates(most))

    def _rank(self) -> int:
        if not self.own.pairs:
            return 0
        return self.block.integer("selector_rank" if self.own.convolves else "markov_rank")

    def _conv(self) -> ConvConfig:
        group = self.block.integer("conv_group_size", 1, self.target.width)
        if self.target.width % group:
            raise self.block.fail("conv_group_size", f"a divisor of {self.target.width}")
        return ConvConfig(taps=self.block.integer("conv_kernel_size", 1, 64), group=group)
