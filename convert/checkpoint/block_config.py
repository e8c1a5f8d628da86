"""``config.json`` of a block drafter -> what the model is.

A key that nothing here knows is an error, because a setting that is ignored costs acceptance
unnoticed.

The other direction is :mod:`jaxdraft.checkpoint.config`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from convert.checkpoint.quantization import Quantized
from convert.checkpoint.section import PLAIN_ROPE, ModelSection
from convert.errors import Problems
from convert.paths import CONFIG
from convert.recipes import shortest
from convert.unused import DRAFTER_KEYS, Remarks
from jaxdraft.config import (
    FULL_ATTENTION,
    AttentionConfig,
    BlockDrafterConfig,
    ConvConfig,
    DrafterKind,
    TargetConfig,
)
from jaxdraft.kinds import block_of
from jaxdraft.rope import Rope

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
"""Settings of the drafting itself, in ``dflash_config`` or at the top level."""

_DRAFTER_DEFAULTS: Mapping[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFacts:
    """The content of a block drafter's ``config.json``.

    Attributes:
      config: the description.
      taps: layers of the target whose entering residual it reads.
      rope: its rotary embedding.
      dtype: the dtype of computation that the file names, or None.
      quantized: how matrices may be stored in few bits, or None.
    """

    config: BlockDrafterConfig
    taps: tuple[int, ...]
    rope: Rope
    dtype: str | None
    quantized: Quantized | None


def read_block(
    body: Mapping[str, Any],
    kind: DrafterKind,
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


class _Block:
    def __init__(
        self,
        body: Mapping[str, Any],
        kind: DrafterKind,
        target: TargetConfig,
        problems: Problems,
        remarks: Remarks,
    ):
        self.kind, self.target, self.problems = kind, target, problems
        self.top = ModelSection(body, CONFIG, "", problems, remarks, _DRAFTER_DEFAULTS)
        self.top.known(_DRAFTER | _BLOCK[kind], nulls=True)
        inner = {} if body.get("dflash_config") is None else body["dflash_config"]
        if not isinstance(inner, dict):
            raise self.top.fail("dflash_config", "an object")
        self.top.inner(inner, "dflash_config").known(_BLOCK[kind], nulls=True)
        for key in sorted(_BLOCK[kind] & inner.keys() & body.keys()):
            if inner[key] != body[key]:
                problems.append(self.top.fail(key, f"{json.dumps(inner[key])}, of dflash_config"))
        outer = {key: body[key] for key in _BLOCK[kind] & body.keys()}
        self.block = self.top.inner({**outer, **inner}, "dflash_config")

    def read(self) -> BlockFacts:
        top, block, target = self.top, self.block, self.target
        own = block_of(self.kind)
        top.only("hidden_act", "silu")
        top.only("attention_bias", False)
        top.only("mlp_bias", False)
        top.only("is_causal", False)
        self._check_equal("hidden_size", target.width)
        self._check_equal("vocab_size", target.vocab_size)
        layers = top.integer("num_hidden_layers", high=4096)
        eps = top.number("rms_norm_eps")
        taps = self._taps()
        size = block.integer("block_size", 1 + own.module.first_row, 4096)
        rope, section = top.rope(PLAIN_ROPE, own.ropes)
        section.only("partial_rotary_factor", 1, 1.0)
        candidates = self._candidates()
        config = BlockDrafterConfig(
            kind=self.kind,
            vocab_size=target.vocab_size,
            width=target.width,
            aux_width=len(taps) * target.width,
            layers=layers,
            attention=self._attention(eps, layers),
            mlp_hidden=top.integer("intermediate_size"),
            norm_eps=eps,
            block_size=size,
            draft_tokens=own.draft_tokens(size),
            candidates=candidates,
            rank=self._rank(),
            mask_token=block.integer("mask_token_id", 0, target.vocab_size - 1),
            # Positions are the target's, and the tables are made for all of them.
            context_length=target.context_length,
            embedding_scale=shortest(block.number("input_embedding_scale", 1.0)),
            conv=self._conv() if own.convolves else None,
            draft_vocab_size=self._draft_vocab(candidates),
        )
        return BlockFacts(
            config=config, taps=taps, rope=rope, dtype=top.dtype(), quantized=top.quantized()
        )

    def _draft_vocab(self, candidates: int) -> int | None:
        if self.top.body.get("draft_vocab_size") is None:
            return None
        return self.top.integer("draft_vocab_size", candidates, self.target.vocab_size)

    def _check_equal(self, key: str, expected: int) -> None:
        if self.top.integer(key) != expected:
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
        heads = top.integer("num_attention_heads")
        kv_heads = top.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise top.fail("num_key_value_heads", f"a divisor of the {heads} query heads")
        head_dim = top.integer("head_dim", 2)
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
        """Return the window that all layers share, or FULL_ATTENTION."""
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
        return top.integer("sliding_window")

    def _candidates(self) -> int:
        vocab = self.target.vocab_size
        if self.kind == "dflash2":
            return self.block.integer("selector_top_k", 1, vocab)
        return self.block.integer("selector_top_k", 1, vocab, min(DSPARK_CANDIDATES, vocab))

    def _rank(self) -> int:
        if self.kind == "dflash2":
            return self.block.integer("selector_rank")
        self.block.only("markov_head_type", "vanilla")
        return self.block.integer("markov_rank")

    def _conv(self) -> ConvConfig:
        group = self.block.integer("conv_group_size", 1, self.target.width)
        if self.target.width % group:
            raise self.block.fail("conv_group_size", f"a divisor of {self.target.width}")
        return ConvConfig(taps=self.block.integer("conv_kernel_size", 1, 64), group=group)
