"""``config.json`` of an EAGLE-3 head -> its description.

Two layouts are in use. *midlayer* (SafeAILab, SpecForge): the settings of a decoder lie at the top,
and the layer's tensors begin with ``midlayer.``. *speculators*: they lie in
``transformer_layer_config``, and the tensors begin with ``layers.0.``.

A layer of the target is counted in two ways: SpecForge names the layer that a row leaves, and
speculators the layer that it enters. Without any setting the rows enter layers 2, L // 2 and L - 3
of a target of L layers.

The other direction is :mod:`jaxdraft.checkpoint.eagle3_config`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

from convert.checkpoint.section import PLAIN_ROPE, DrafterFacts, ModelSection
from convert.checkpoint.tensors import HEAD
from convert.errors import Problems
from convert.paths import CONFIG
from convert.recipes import shortest
from convert.unused import CONFIG_KEYS, DRAFTER_KEYS, Remarks
from jaxdraft.checkpoint.eagle3_config import TAPS, default_taps
from jaxdraft.config import AttentionConfig, Eagle3Config, MlpConfig, TargetConfig
from jaxdraft.draft.links import DRAFT_TOKENS
from jaxdraft.rope import RopeKind

EMBEDDING = "embed_tokens.weight"

LAYERS: Mapping[str, str] = {"midlayer": "midlayer.", "speculators": "layers.0."}
"""Prefix of the names of the layer's tensors, by layout."""

_DEFAULTS: Mapping[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}


def is_eagle3(body: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether a folder holds an EAGLE-3 head, as its settings or its tensors show.

    Args:
      body: the content of ``config.json``.
      names: names of the stored tensors.
    """
    layers = tuple(f"{layer}hidden_norm.weight" for layer in LAYERS.values())
    return body.get("speculators_model_type") == "eagle3" or any(n in names for n in layers)


def read_eagle3(
    body: Mapping[str, Any],
    names: Collection[str],
    target: TargetConfig,
    problems: Problems,
    remarks: Remarks,
) -> DrafterFacts[Eagle3Config]:
    """Read an EAGLE-3 head's ``config.json``.

    Args:
      body: its content.
      names: names of the stored tensors, which show whether it has its own embedding and head.
      target: the target; widths, vocabulary and layers must agree.
      problems: destination of problems that do not prevent further reading.
      remarks: destination of remarks, which do not prevent loading.

    Raises:
      ArtifactError: the head is not implemented.
    """
    return _Eagle3(body, names, target, problems, remarks).read()


class _Eagle3:
    def __init__(
        self,
        body: Mapping[str, Any],
        names: Collection[str],
        target: TargetConfig,
        problems: Problems,
        remarks: Remarks,
    ):
        self.names, self.target = names, target
        self.top = ModelSection(body, CONFIG, "", problems, remarks, _DEFAULTS)
        self.spelling: Literal["midlayer", "speculators"] = "midlayer"
        self.layer = self.top
        if "speculators_model_type" in body:
            self.spelling = "speculators"
            self.top.only("speculators_model_type", "eagle3")
            self.layer = self.top.section("transformer_layer_config", _DEFAULTS)

    def read(self) -> DrafterFacts[Eagle3Config]:
        top, layer, target = self.top, self.layer, self.target
        layer.only("hidden_act", "silu")
        layer.only("num_hidden_layers", 1)
        for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
            layer.only(key, False)
        layer.inert("sliding_window", "max_window_layers")
        for section in (top, layer):
            section.only("tie_word_embeddings", False)
        self._check_target()
        width, eps = layer.integer("hidden_size"), layer.number("rms_norm_eps")
        if width != target.width and EMBEDDING not in self.names:
            expected = f"{target.width}, the target's, or a tensor {EMBEDDING} of its own"
            raise layer.fail("hidden_size", expected)
        taps = self._taps()
        vocabulary = self._draft_vocab()
        rope, section = layer.rope(PLAIN_ROPE, ROPES)
        section.only("partial_rotary_factor", 1, 1.0)
        config = Eagle3Config(
            vocab_size=target.vocab_size,
            width=width,
            tap_width=target.width,
            taps=len(taps),
            attention=self._attention(width),
            mlp=MlpConfig(hidden=layer.integer("intermediate_size")),
            norm_eps=eps,
            # Positions are the target's, and the tables are made for all of them.
            context_length=target.context_length,
            draft_tokens=self._draft_tokens(),
            draft_vocab_size=vocabulary,
            own_embedding=EMBEDDING in self.names,
            own_head=HEAD in self.names or vocabulary is not None or width != target.width,
            fc_norm=self._switch("fc_norm"),
            norm_before_residual=self._switch("norm_before_residual"),
            norm_output=self._switch("norm_output"),
            spelling=self.spelling,
            rope=rope,
        )
        dtype, quantized = top.dtype() or layer.dtype(), top.quantized()
        for each in {id(s): s for s in (top, layer)}.values():
            each.inert("speculators_version")  # a name
            each.report_unread(DRAFTER_KEYS)
        return DrafterFacts(config=config, taps=taps, rope=rope, dtype=dtype, quantized=quantized)

    def _check_target(self) -> None:
        """Check what the file states about the target."""
        top, layer, target = self.top, self.layer, self.target
        if layer.integer("vocab_size") != target.vocab_size:
            layer.report("vocab_size", f"{target.vocab_size}, the target's")
        top.only("target_hidden_size", target.width)

    def _taps(self) -> tuple[int, ...]:
        """Return the layers whose entering rows are read."""
        layers = len(self.target.layers)
        if self.spelling == "speculators":
            section, entered = self.top, 0
        else:
            inner = self.top.body.get("eagle_config")
            section = self.top if inner is None else self.top.section("eagle_config")
            section.only("use_aux_hidden_state", True)
            entered = 1  # a row that leaves layer i enters layer i + 1
        if section.body.get(TAPS) is not None:
            taps = tuple(i + entered for i in section.integers(TAPS, 0, layers - 1 - entered))
            if not taps:
                raise section.fail(TAPS, "at least one layer")
        else:
            taps = default_taps(layers)
            if not 0 <= min(taps) <= max(taps) < layers:
                raise section.fail(TAPS, f"layers of the target, which has {layers}", "nothing")
        if section is not self.top:
            section.report_unread()
        return taps

    def _draft_vocab(self) -> int | None:
        top, whole = self.top, self.target.vocab_size
        if top.body.get("draft_vocab_size") is None:
            return None
        size = top.integer("draft_vocab_size", 1, whole)
        return None if size == whole and "d2t" not in self.names else size

    def _draft_tokens(self) -> int:
        """Return K, which speculators' files state."""
        if self.spelling != "speculators" or self.top.body.get("speculators_config") is None:
            return DRAFT_TOKENS
        section = self.top.section("speculators_config")
        section.only("algorithm", "eagle3")
        methods = list(section.sections("proposal_methods"))
        section.report_unread(SPECULATORS_KEYS)
        for method in methods:
            method.only("proposal_type", "greedy")
            method.inert("accept_tolerance", "verifier_accept_k")
        if not methods:
            return DRAFT_TOKENS
        return methods[0].integer("speculative_tokens", 1, 4096, DRAFT_TOKENS)

    def _switch(self, key: str) -> bool:
        """Return a setting that only speculators' files have."""
        if self.spelling != "speculators":
            return False
        self.top.only("norm_before_fc", False)
        return False if self.top.body.get(key) is None else self.top.boolean(key)

    def _attention(self, width: int) -> AttentionConfig:
        layer = self.layer
        heads, kv_heads, head_dim = layer.heads(width)
        return AttentionConfig(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=head_dim,
            scale=shortest(head_dim**-0.5),
        )


ROPES = get_args(RopeKind)
"""Kinds of rotary embedding that a head may have."""

SPECULATORS_KEYS = (*CONFIG_KEYS, "verifier", "default_proposal_method")
"""Keys of ``speculators_config`` without effect on drafts."""
