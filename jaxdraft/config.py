"""Descriptions of models: frozen and hashable, without arrays, input or output.

Every field is read from an artifact (``genai_config.json`` and the ONNX graph) or written by a
user; nothing here has a default that an artifact could silently disagree with, except where
"absent" has one meaning. Letters are those of the glossary in :mod:`jaxdraft.base`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from jaxdraft.checks import check_int
from jaxdraft.rope import Rope

LayerKind = Literal["attention", "sliding", "delta_net"]
DrafterKind = Literal["dflash2", "dspark", "dflash", "eagle3", "mtp"]
"""Kinds of drafters with weights, which :data:`jaxdraft.kinds.KINDS` declares."""

MarkovKind = Literal["vanilla", "gated", "rnn"]
BlockLayout = Literal["nested", "flat", "speculators"]

DRAFT_MODEL = "draft_model"
"""Name of a small language model as the drafter of a large one, and of its folder."""

FULL_ATTENTION = -1
"""``window`` of a layer that sees every earlier key."""

Norms = Literal["pre", "post", "both"]
"""Sides of a mixer or a feed-forward part that have a norm: its input, its output, or both."""

Activation = Literal["silu", "gelu_tanh"]
"""Activations of gates. "gelu_tanh" is GELU by its approximation with a hyperbolic tangent."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvShape:
    """The shape of the keys and values of some attention layers.

    Attributes:
      layers: L.
      kv_heads: G.
      head_dim: H.
      dtype: type of keys and values; equal types in any spelling compare equal.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: Any

    def __post_init__(self) -> None:
        check_int("layers", self.layers, 0)
        check_int("kv_heads", self.kv_heads)
        check_int("head_dim", self.head_dim)
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return self.dtype.itemsize

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page, all layers: ``2 * L * Z * G * H * itemsize``."""
        return 2 * self.layers * page_size * self.kv_heads * self.head_dim * self.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """One softmax-attention layer.

    Attributes:
      heads: query heads N.
      kv_heads: key/value heads G; N is a multiple of G.
      head_dim: width H of one head (independent of the model width).
      rotary_dim: leading channels of a head that are rotated; 0 for none.
      interleaved: whether neighbouring channels 2 j and 2 j + 1 are rotated together, rather than j
        and j + rotary_dim / 2.
      gated: the query projection carries a gate per head, ``[query(H), gate(H)]``; the
        attention output is multiplied by ``sigmoid(gate)``.
      qk_norm: queries and keys pass an RMSNorm over H before rotation.
      norm_whole: whether that norm runs over all heads at once, N * H channels of queries and G * H
        of keys, rather than over each head.
      bias: whether the projections of queries, keys and values have a bias.
      out_bias: whether the output projection has a bias.
      norm_eps: epsilon of that norm.
      window: keys visible to a query, itself counted; ``FULL_ATTENTION`` for all.
      scale: multiplier of ``q . k``.
      softcap: scores become ``softcap * tanh(scores / softcap)``; 0 for none.
      sinks: every query head has a score of its own in its softmax, to which no key and no value
        belongs; see :func:`jaxdraft.nn.attention.attend`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool = False
    gated: bool = False
    qk_norm: bool = False
    norm_whole: bool = False
    bias: bool = False
    out_bias: bool = False
    norm_eps: float = 1e-6
    window: int = FULL_ATTENTION
    scale: float
    softcap: float = 0.0
    sinks: bool = False

    @property
    def query_rows(self) -> int:
        """Output rows of the query projection (queries, and gates when gated)."""
        return self.heads * self.head_dim * (2 if self.gated else 1)

    @property
    def kv_rows(self) -> int:
        """Output rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    def kv_shape(self, layers: int, dtype: Any) -> KvShape:
        """Return the shape of the keys and values of ``layers`` such layers."""
        return KvShape(layers=layers, kv_heads=self.kv_heads, head_dim=self.head_dim, dtype=dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNetConfig:
    """One gated delta-net layer (``com.microsoft.GatedDeltaNet``; arXiv:2412.06464).

    Attributes:
      key_heads: heads Hk of queries and keys.
      value_heads: heads Hv of values and of the state; a key head serves Hv / Hk of them.
      key_dim: width Dk of a key.
      value_dim: width Dv of a value.
      conv_width: taps W of the depthwise causal convolution before the recurrence.
      norm_eps: epsilon of the gated RMSNorm after it.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float = 1e-6

    @property
    def key_rows(self) -> int:
        """Channels of all keys (and of all queries)."""
        return self.key_heads * self.key_dim

    @property
    def value_rows(self) -> int:
        """Channels of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_rows + self.value_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """A gated MLP: ``down(activation(gate(x)) * up(x))`` with ``hidden`` inner channels.

    Attributes:
      hidden: inner channels.
      activation: activation of the gate.
      bias: whether all three projections have a bias.
    """

    hidden: int
    activation: Activation = "silu"
    bias: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Routed experts, perhaps beside one shared expert.

    Attributes:
      experts: number of experts E.
      active: number of experts per token; their weights are the best ``active`` of a softmax over
        E.
      hidden: inner channels of one expert.
      shared_hidden: inner channels of the shared expert, which a sigmoid gate scales; 0 for none.
      renormalized: the weights of a token's experts are divided by their sum, which makes them a
        softmax over the chosen experts alone.
      router_bias: whether the router has a bias.
      bias: whether all projections of the experts have a bias.
      limit: 0 for experts of ``silu(gate) * up``; else bound of gate and up in the activation
        ``(clip(up, -limit, limit) + 1) * g * sigmoid(1.702 * g)``, ``g = min(gate, limit)``.
      shards: number of devices that ``hidden`` is divided over; see :mod:`jaxdraft.nn.fused`.
    """

    experts: int
    active: int
    hidden: int
    shared_hidden: int
    renormalized: bool = True
    router_bias: bool = False
    bias: bool = False
    limit: float = 0.0
    shards: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The description of a decoder.

    Attributes:
      vocab_size: V.
      width: D.
      layers: the kind of each layer, in order. ``attention`` sees every earlier key, ``sliding``
        those of a window, ``delta_net`` has a recurrent state.
      attention: shape of the softmax-attention layers that see everything, if there are any.
      sliding: shape of the softmax-attention layers with a window, if there are any.
      delta_net: shape of the delta-net layers, if there are any.
      mlp: the feed-forward part of every layer but ``dense_layers``.
      norm_eps: epsilon of the RMSNorms on the residual stream.
      tied: the head is the embedding, one array.
      context_length: positions the rotary table covers; no sequence is longer.
      taps: layers whose *entering* residual is exposed, in the artifact's order; the auxiliary
        states are their concatenation, A = len(taps) * D.
      hidden_states: the artifact names an output with the hidden rows after the final norm.
      norms: sides of each layer's two parts that have a norm.
      embedding_scale: multiplier of the embeddings, rounded to the dtype of the activations.
      softcap: logits become ``softcap * tanh(logits / softcap)``; 0 for none.
      own_tables: whether layers with a window have rotary tables of their own.
      rope: description of the rotary tables, which are weights and therefore not compared here;
        None: there is no description, as in an artifact.
      sliding_rope: description of the tables of layers with a window, if those are their own.
      dense: the feed-forward part of ``dense_layers``, if there are any.
      dense_layers: indices of layers with ``dense`` in place of ``mlp``.
      architecture: ``model_type`` of the checkpoint that it came from, and in whose layout it is
        saved again; "": any that can hold it. Not compared.
    """

    vocab_size: int
    width: int
    layers: tuple[LayerKind, ...]
    attention: AttentionConfig | None
    delta_net: DeltaNetConfig | None
    mlp: MlpConfig | MoeConfig
    norm_eps: float
    tied: bool
    context_length: int
    taps: tuple[int, ...] = ()
    hidden_states: bool = False
    sliding: AttentionConfig | None = None
    norms: Norms = "pre"
    embedding_scale: float = 1.0
    softcap: float = 0.0
    own_tables: bool = False
    dense: MlpConfig | None = None
    dense_layers: tuple[int, ...] = ()
    rope: Rope | None = dataclasses.field(default=None, compare=False)
    sliding_rope: Rope | None = dataclasses.field(default=None, compare=False)
    architecture: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.attention is not None and self.attention.window != FULL_ATTENTION:
            raise ValueError(
                f"attention.window is {self.attention.window}; layers with a window are of the "
                "kind 'sliding'"
            )
        if self.sliding is not None and self.sliding.window < 1:
            raise ValueError(f"sliding.window is {self.sliding.window}; expected at least 1")
        for kind in dict.fromkeys(self.layers):
            if getattr(self, kind) is None:
                raise ValueError(f"layers has the kind {kind!r}, and {kind} is None")
        if self.dense_layers and self.dense is None:
            raise ValueError(f"dense_layers are {self.dense_layers}, and dense is None")
        if not set(self.dense_layers) <= set(range(len(self.layers))):
            last = len(self.layers) - 1
            raise ValueError(f"dense_layers are {self.dense_layers}; expected layers in 0..{last}")
        rotated = {shape.rotary_dim for shape in self.softmax} - {0}
        if len(rotated) > 1 and not self.own_tables:
            raise ValueError(
                f"attention and sliding rotate {sorted(rotated)} channels; they share one table "
                "unless own_tables is set"
            )
        if self.own_tables and len(self.softmax) < 2:
            raise ValueError(
                f"own_tables is set and layers are {self.layers}; expected attention and sliding"
            )

    @property
    def softmax(self) -> tuple[AttentionConfig, ...]:
        """Shapes of the kinds of softmax-attention layers in this decoder."""
        shapes = {"attention": self.attention, "sliding": self.sliding}
        return tuple(s for kind, s in shapes.items() if s is not None and kind in self.layers)

    @property
    def rotary_dim(self) -> int:
        """Channels that the (first) rotary table rotates; 0: no layer rotates."""
        if self.own_tables:
            assert self.attention is not None
            return self.attention.rotary_dim
        return max((shape.rotary_dim for shape in self.softmax), default=0)

    @property
    def aux_width(self) -> int:
        """A, the width of one row of auxiliary hidden states (0 without taps)."""
        return len(self.taps) * self.width

    def feed_forward(self, layer: int) -> MlpConfig | MoeConfig:
        """Return the feed-forward part of a layer."""
        if layer not in self.dense_layers:
            return self.mlp
        assert self.dense is not None
        return self.dense

    def count(self, kind: LayerKind) -> int:
        """Return the number of layers of ``kind``."""
        return sum(layer == kind for layer in self.layers)

    def kv_shape(self, kind: Literal["attention", "sliding"], dtype: Any) -> KvShape:
        """Return the shape of the keys and values of all layers of ``kind``; there may be none."""
        shape = self.attention if kind == "attention" else self.sliding
        if shape is None:
            return KvShape(layers=0, kv_heads=1, head_dim=1, dtype=dtype)
        return shape.kv_shape(self.count(kind), dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvConfig:
    """The dynamic grouped convolution over the rows of a DFlash2 block.

    Attributes:
      taps: rows a kernel covers (tap 0 is the row itself); none reaches past the block's start.
      group: channels that share one predicted kernel.
    """

    taps: int
    group: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockDrafterConfig:
    """A DFlash, DFlash2 or DSpark drafter.

    Attributes:
      kind: kind of the head that scores the lattice.
      vocab_size: V, the target's.
      width: D, the target's.
      aux_width: A, the width of the target's auxiliary states that the drafter reads.
      layers: number of layers.
      attention: shape of every layer's attention; its ``window`` decides the cache: a bounded ring,
        or pages like the target's.
      mlp_hidden: inner channels of every MLP.
      norm_eps: epsilon of the RMSNorms on the residual stream.
      block_size: query rows Q of a block: the anchor and Q - 1 masks.
      draft_tokens: K. Q: every row predicts the token after its own position (DSpark). Q - 1: every
        row but the anchor's predicts the token at its own position (DFlash, DFlash2).
      candidates: C, tokens kept per step.
      rank: inner width of the pairwise scores; 0: there are none.
      mask_token: token id of the block's mask rows.
      context_length: positions the rotary table covers.
      embedding_scale: multiplier of the block's embeddings.
      conv: the block convolutions, DFlash2 only.
      draft_vocab_size: V', if drafts come from a part of the vocabulary, usually its most frequent
        tokens: head and pair scores have V' rows (Zhao et al., "FR-Spec",
        arXiv:2502.14856; ``draft_vocab_size`` of EAGLE-3). None: from all of it.
      own_head: the drafter has a head of its own over its draft vocabulary, and scores pairs with
        any token before the draft. False: the head is the target's, or its rows.
      full_layers: layers that see everything although ``attention`` has a window. Their keys are in
        pages, those of the other layers in a ring.
      causal_layers: layers in which a block's row sees the rows before it and itself. In the
        others it sees the whole block.
      logit_multiplier: multiplier of the head's logits.
      logit_softcap: after that, logits become ``softcap * tanh(logits / softcap)``; 0: they do not.
      markov: how DSpark scores a draft after a predecessor; see :mod:`jaxdraft.nn.dspark`.
      chained: drafts are chosen one after another from the scores of all V or V' tokens, as DSpark
        was trained. False: from a lattice of the C best tokens per row.
      confidence: input of DSpark's confidence head: a block's row ("row"), or the row and the token
        before the draft ("pair"). None: there is no such head.
      layout: form of its ``config.json``: settings in ``dflash_config`` ("nested"; z-lab and
        SpecForge), all at the top ("flat"; DeepSpec), or the decoder's in
        ``transformer_layer_config`` ("speculators").
    """

    kind: DrafterKind
    vocab_size: int
    width: int
    aux_width: int
    layers: int
    attention: AttentionConfig
    mlp_hidden: int
    norm_eps: float
    block_size: int
    draft_tokens: int
    candidates: int
    rank: int
    mask_token: int
    context_length: int
    embedding_scale: float = 1.0
    conv: ConvConfig | None = None
    draft_vocab_size: int | None = None
    own_head: bool = False
    full_layers: tuple[int, ...] = ()
    causal_layers: tuple[int, ...] = ()
    logit_multiplier: float = 1.0
    logit_softcap: float = 0.0
    markov: MarkovKind = "vanilla"
    chained: bool = False
    confidence: Literal["row", "pair"] | None = None
    layout: BlockLayout = "nested"

    def __post_init__(self) -> None:
        if self.attention.sinks:
            raise ValueError("attention.sinks is True; block drafters have no sinks")
        size = self.draft_vocab_size
        if size is not None and not self.candidates <= size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {size}; expected {self.candidates} (candidates) to "
                f"{self.vocab_size} (vocab_size)"
            )
        if self.own_head and size is None:
            raise ValueError("own_head is True and draft_vocab_size is None; expected its size")
        if not self.block_size - 1 <= self.draft_tokens <= self.block_size:
            raise ValueError(
                f"draft_tokens is {self.draft_tokens}; a block of {self.block_size} rows has "
                f"{self.block_size} drafts, or {self.block_size - 1} if the anchor's row has none"
            )
        if self.markov == "rnn" and not self.chained:
            raise ValueError(
                "markov is 'rnn' and chained is False: a recurrent head scores a draft after a "
                "whole path, and a lattice has scores of pairs alone"
            )
        for name in ("full_layers", "causal_layers"):
            layers = getattr(self, name)
            if list(layers) != sorted(set(layers) & set(range(self.layers))):
                raise ValueError(f"{name} is {layers}; expected layers in 0..{self.layers - 1}")

    @property
    def first_row(self) -> int:
        """Row of the block that predicts draft 0; with 1, the anchor's row predicts nothing."""
        return self.block_size - self.draft_tokens

    def window(self, layer: int) -> int:
        """Return the window of a layer, or :data:`FULL_ATTENTION`."""
        return FULL_ATTENTION if layer in self.full_layers else self.attention.window

    @property
    def ring_layers(self) -> tuple[int, ...]:
        """Layers with a window, in order."""
        return tuple(i for i in range(self.layers) if self.window(i) != FULL_ATTENTION)

    @property
    def page_layers(self) -> tuple[int, ...]:
        """Layers that see everything, in order."""
        return tuple(i for i in range(self.layers) if self.window(i) == FULL_ATTENTION)

    @property
    def draftable(self) -> int:
        """Number of tokens that can be drafts: V', or V."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def windowed(self) -> bool:
        """Whether the cache is a bounded ring: every layer has a window."""
        return not self.page_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """The target's own multi-token-prediction head: one full-attention layer, chained.

    Attributes:
      vocab_size: V.
      width: D.
      attention: shape of its attention layer.
      mlp: its feed-forward part.
      norm_eps: epsilon of its RMSNorms.
      context_length: positions the rotary table covers.
      rope: description of the rotary tables, as in :class:`TargetConfig`.
    """

    vocab_size: int
    width: int
    attention: AttentionConfig
    mlp: MlpConfig | MoeConfig
    norm_eps: float
    context_length: int
    rope: Rope | None = dataclasses.field(default=None, compare=False)

    @property
    def kind(self) -> DrafterKind:
        """The kind of the drafter."""
        return "mtp"

    @classmethod
    def of(cls, target: TargetConfig) -> MtpConfig:
        """Return the description of a head shaped like the full-attention layers of ``target``.

        Raises:
          ValueError: the target has no such layer.
        """
        if target.attention is None:
            raise ValueError(f"layers are {target.layers}; a head needs one of kind 'attention'")
        return cls(
            vocab_size=target.vocab_size,
            width=target.width,
            attention=target.attention,
            mlp=target.mlp,
            norm_eps=target.norm_eps,
            context_length=target.context_length,
            rope=target.rope,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """An EAGLE-3 head: one full-attention layer over rows of several layers of the target, chained.

    Attributes:
      vocab_size: V, the target's.
      width: D of the head; the target's unless it has an embedding of its own.
      tap_width: D of the target.
      taps: number of the target's layers that it reads.
      attention: shape of its attention layer.
      mlp: its feed-forward part.
      norm_eps: epsilon of its RMSNorms.
      context_length: positions the rotary table covers.
      draft_tokens: K, unless another number is chosen.
      draft_vocab_size: V', if drafts come from a part of the vocabulary. None: from all of it.
      own_embedding: whether the head has an embedding of its own. Else it reads the target's.
      own_head: whether it has an output head of its own, [V', D]. Else it uses the target's.
      fc_norm: whether each tap passes an RMSNorm before they are fused.
      norm_before_residual: whether the residual is the normed row.
      norm_output: whether the next link reads rows after the final norm.
      spelling: layout of its checkpoint: "midlayer", of SafeAILab and SpecForge, or "speculators".
      rope: description of the rotary tables, as in :class:`TargetConfig`.
    """

    vocab_size: int
    width: int
    tap_width: int
    taps: int
    attention: AttentionConfig
    mlp: MlpConfig
    norm_eps: float
    context_length: int
    draft_tokens: int
    draft_vocab_size: int | None = None
    own_embedding: bool = False
    own_head: bool = True
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    spelling: Literal["midlayer", "speculators"] = "midlayer"
    rope: Rope | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        size = self.draft_vocab_size
        if size is not None and not 1 <= size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size is {size}; expected 1 to {self.vocab_size}")
        if size is not None and not self.own_head:
            raise ValueError(f"draft_vocab_size is {size}; expected own_head with it")
        if not (self.own_embedding and self.own_head) and self.width != self.tap_width:
            raise ValueError(
                f"width is {self.width} and the target's is {self.tap_width}; expected the "
                "same width unless the drafter has its own embedding and head"
            )

    @property
    def kind(self) -> DrafterKind:
        """The kind of the drafter."""
        return "eagle3"

    @property
    def aux_width(self) -> int:
        """A, the width of one row of auxiliary states."""
        return self.taps * self.tap_width

    @property
    def draftable(self) -> int:
        """Number of tokens that can be drafts: V', or V."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size


DrafterConfig = BlockDrafterConfig | Eagle3Config | MtpConfig
