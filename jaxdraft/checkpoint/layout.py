"""Map between the tensors of a checkpoint and the parameters of a module, in one table.

A parameter is one or more stored tensors one after another in memory: our modules fuse tensors that
share an input (q, k and v; gate and up; the delta net's qkv and z, b and a), checkpoints do not.
Some kinds of parameters are stored in another form: :class:`jaxdraft.checkpoint.forms.Form`. Rotary
tables are not stored at all: :mod:`jaxdraft.checkpoint.rotary`.

Matrices may be stored in eight bits, with a tensor of scales for each, or in four, where three
tensors replace one; see :func:`is_matrix`. Embeddings, heads and the codebooks of
pair scores are tables, not matrices.

Source: the state dictionaries of transformers' ``qwen3_5``, ``qwen3_5_moe``, ``qwen3`` and
``llama``; the names read by the ``dflash2`` and ``dspark`` builders of onnxruntime-genai.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from jaxdraft.checkpoint.families import LLAMA, PRE, QWEN35, QWEN35_MOE, Family
from jaxdraft.checkpoint.forms import Form
from jaxdraft.config import (
    AttentionConfig,
    BlockDrafterConfig,
    DeltaNetConfig,
    Eagle3Config,
    MlpConfig,
    MoeConfig,
    MtpConfig,
    TargetConfig,
)
from jaxdraft.kinds import axes, block_of

Path = tuple[str | int, ...]
"""Path of a parameter in a module's pure state: ``("layers", 0, "mixer", "qkv", "weight")``."""

TARGET = "target"
"""Folder of the target in a saved checkpoint; those of drafters, named by kind, are beside it."""

MTP = "mtp."
"""Name prefix of the tensors of a drafter in the target's files."""

MEMBERS = "t2d"
"""Tensor [V] bool of a drafter with a head of its own: the tokens of its draft vocabulary. ``d2t``
holds the same."""

ROTARY = ("rotary", "sliding_rotary")
"""Modules whose two parameters, ``cos`` and ``sin``, are computed and not stored."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A stored tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A parameter and its stored tensors, in memory order.

    Attributes:
      path: path of the parameter.
      tensors: the tensors.
      form: stored form of its values.
      reshaped: shape of the parameter, if it differs from that of the concatenated tensors.
    """

    path: Path
    tensors: tuple[StoredTensor, ...]
    form: Form = Form.PLAIN
    reshaped: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter. Only defined for parameters that are stored."""
        if self.reshaped is not None:
            return self.reshaped
        return (sum(tensor.shape[0] for tensor in self.tensors), *self.tensors[0].shape[1:])


def target_layout(config: TargetConfig, family: Family) -> list[Entry]:
    """Return every stored parameter of a :class:`jaxdraft.nn.decoder.Decoder`."""
    width, vocab, prefix = config.width, config.vocab_size, family.prefix
    entries = [
        _one(("embed", "weight"), f"{prefix}embed_tokens.weight", vocab, width),
        _one(("norm", "weight"), f"{prefix}norm.weight", width, form=family.norm),
    ]
    if not config.tied:
        entries.append(_one(("head", "weight"), "lm_head.weight", vocab, width))
    for i, kind in enumerate(config.layers):
        path, name = ("layers", i), f"{prefix}layers.{i}"
        entries += _norms(path, name, width, family.norm, family.norms)
        shape = getattr(config, kind)
        if isinstance(shape, AttentionConfig):
            entries += _attention((*path, "mixer"), f"{name}.self_attn", width, shape, family)
        else:
            assert isinstance(shape, DeltaNetConfig)
            entries += _delta_net((*path, "mixer"), f"{name}.linear_attn", width, shape)
        part = config.feed_forward(i)
        entries += _feed_forward((*path, "mlp"), f"{name}.mlp", width, part, family)
    return entries


def mtp_layout(config: MtpConfig) -> list[Entry]:
    """Return every stored parameter of a :class:`jaxdraft.nn.mtp.Mtp` inside its target's files."""
    width, norm, layer = config.width, Form.OFFSET, f"{MTP}layers.0"
    return [
        _one(("fc", "weight"), f"{MTP}fc.weight", width, 2 * width),
        _one(("embedding_norm", "weight"), f"{MTP}pre_fc_norm_embedding.weight", width, form=norm),
        _one(("hidden_norm", "weight"), f"{MTP}pre_fc_norm_hidden.weight", width, form=norm),
        _one(("norm", "weight"), f"{MTP}norm.weight", width, form=norm),
        *_norms((), layer, width, norm),
        *_attention(("mixer",), f"{layer}.self_attn", width, config.attention, QWEN35),
        *_feed_forward(("mlp",), f"{layer}.mlp", width, config.mlp, QWEN35_MOE),
    ]


def eagle3_layout(config: Eagle3Config) -> list[Entry]:
    """Return every stored parameter of a :class:`jaxdraft.nn.eagle3.Eagle3`."""
    width, a, norm = config.width, config.attention, Form.PLAIN
    layer = "midlayer" if config.spelling == "midlayer" else "layers.0"
    inner, rows = (
        f"{layer}.self_attn",
        dict(q_proj=a.query_rows, k_proj=a.kv_rows, v_proj=a.kv_rows),
    )
    entries = [
        _one(("fc", "weight"), "fc.weight", width, config.aux_width),
        _one(("norm", "weight"), "norm.weight", width),
        _one(("hidden_norm", "weight"), f"{layer}.hidden_norm.weight", width),
        *_norms((), layer, width, norm),
        _rows(("mixer", "qkv", "weight"), inner, 2 * width, **rows),
        _one(("mixer", "o", "weight"), f"{inner}.o_proj.weight", width, a.heads * a.head_dim),
        *_feed_forward(("mlp",), f"{layer}.mlp", width, config.mlp),
    ]
    if config.fc_norm:
        entries += [
            _one(("fc_norm", i, "weight"), f"fc_norm.{i}.weight", config.tap_width)
            for i in range(config.taps)
        ]
    if config.own_embedding:
        table = "embed_tokens.weight"
        entries.append(_one(("embed", "weight"), table, config.vocab_size, width))
    if config.own_head:
        entries.append(_one(("head", "weight"), "lm_head.weight", config.draftable, width))
    if config.draft_vocab_size is not None:
        entries.append(_one(("vocabulary",), "d2t", config.draftable, form=Form.OFFSETS))
    return entries


def block_layout(config: BlockDrafterConfig) -> list[Entry]:
    """Return every stored parameter of a :class:`jaxdraft.nn.block_drafter.BlockBackbone`.

    Embedding and head are the target's, and not stored a second time; a head of its own is stored.
    """
    width, a, mlp = config.width, config.attention, MlpConfig(hidden=config.mlp_hidden)
    entries = [
        _one(("fc", "weight"), "fc.weight", width, config.aux_width),
        _one(("hidden_norm", "weight"), "hidden_norm.weight", width),
        _one(("norm", "weight"), "norm.weight", width),
        *_pair_scores(config),
    ]
    for i in range(config.layers):
        path, name = ("layers", i), f"layers.{i}"
        entries += [
            *_norms(path, name, width, Form.PLAIN),
            _one((*path, "q", "weight"), f"{name}.self_attn.q_proj.weight", a.query_rows, width),
            _rows(
                (*path, "kv", "weight"),
                f"{name}.self_attn",
                width,
                k_proj=a.kv_rows,
                v_proj=a.kv_rows,
            ),
            *_head_norms(path, f"{name}.self_attn", a, Form.PLAIN),
            _one(
                (*path, "o", "weight"),
                f"{name}.self_attn.o_proj.weight",
                width,
                a.heads * a.head_dim,
            ),
            *_feed_forward((*path, "mlp"), f"{name}.mlp", width, mlp),
        ]
        if config.conv is not None:
            taps, groups = config.conv.taps, width // config.conv.group
            for conv in ("attention_conv", "mlp_conv"):
                projection, base = f"{name}.{conv}.kernel_projection", f"{name}.{conv}.base_kernel"
                entries += [
                    _one(
                        (*path, conv, "projection", "weight"),
                        f"{projection}.weight",
                        2 * taps * groups,
                        width,
                    ),
                    _one((*path, conv, "base"), base, 2, taps, width),
                ]
    return entries


def is_matrix(entry: Entry) -> bool:
    """Return whether a parameter is a matrix of products: a ``Linear`` in torch, not the head.

    The router of experts does not count.
    """
    table = entry.path[0] in ("embed", "head") or "router" in entry.path
    return entry.path[-1] == "weight" and len(entry.shape) == 2 and not table


def scales_of(name: str) -> str:
    """Return the name of the scales of a matrix in eight or four bits."""
    return f"{name}_scale"


def packed_of(name: str) -> str:
    """Return the name of the packed numbers of a matrix in four bits."""
    return f"{name}_packed"


def blocks_of(name: str) -> tuple[str, str]:
    """Return the names of the numbers and of the scales of experts in MXFP4."""
    return f"{name}_blocks", f"{name}_scales"


def shape_of(name: str) -> str:
    """Return the name of the stored shape of a matrix in four bits."""
    return f"{name}_shape"


def _pair_scores(config: BlockDrafterConfig) -> Iterator[Entry]:
    sizes = axes(config)
    if config.draft_vocab_size is not None:
        yield _one(("vocabulary",), "d2t", config.draftable, form=Form.OFFSETS)
    if config.own_head:
        yield _one(("head", "weight"), "lm_head.weight", config.draftable, config.width)
    own = block_of(config.kind)
    for tensor in (*own.pairs, *own.extra):
        if tensor.when(config):
            yield _one(tensor.path, tensor.name, *(sizes[axis] for axis in tensor.shape))


def _one(path: Path, name: str, *shape: int, form: Form = Form.PLAIN) -> Entry:
    return Entry(path, (StoredTensor(name, shape),), form)


def _rows(path: Path, name: str, width: int, **rows: int) -> Entry:
    """Return matrices of one width, concatenated along the first axis."""
    tensors = tuple(
        StoredTensor(f"{name}.{key}.weight", (count, width)) for key, count in rows.items()
    )
    return Entry(path, tensors)


def _biases(path: Path, name: str, **rows: int) -> Entry:
    """Return biases, one after another."""
    tensors = tuple(StoredTensor(f"{name}.{key}.bias", (count,)) for key, count in rows.items())
    return Entry(path, tensors)


def _norms(
    path: Path, name: str, width: int, form: Form, names: tuple[str, ...] = PRE
) -> list[Entry]:
    """Return the norms of a layer, those that have a name."""
    ours = ("input_norm", "mixer_norm", "post_norm", "mlp_norm")
    return [
        _one((*path, norm, "weight"), f"{name}.{stored}.weight", width, form=form)
        for norm, stored in zip(ours, names, strict=True)
        if stored
    ]


def _head_norms(path: Path, name: str, config: AttentionConfig, form: Form) -> list[Entry]:
    """Return the norms of queries and keys, if there are any."""
    if not config.qk_norm:
        return []
    heads = (config.heads, config.kv_heads) if config.norm_whole else (1, 1)
    return [
        _one((*path, norm, "weight"), f"{name}.{norm}.weight", count * config.head_dim, form=form)
        for norm, count in zip(("q_norm", "k_norm"), heads, strict=True)
    ]


def _attention(
    path: Path, name: str, width: int, config: AttentionConfig, family: Family
) -> list[Entry]:
    rows = dict(q_proj=config.query_rows, k_proj=config.kv_rows, v_proj=config.kv_rows)
    if "qkv" in family.fused:
        rows = dict(qkv_proj=sum(rows.values()))
    inner = config.heads * config.head_dim
    entries = [
        _rows((*path, "qkv", "weight"), name, width, **rows),
        *_head_norms(path, name, config, family.norm),
        _one((*path, "o", "weight"), f"{name}.o_proj.weight", width, inner),
    ]
    if config.bias:
        entries.append(_biases((*path, "qkv_bias"), name, **rows))
    if config.out_bias:
        entries.append(_biases((*path, "o_bias"), name, o_proj=width))
    if config.sinks:
        entries.append(_one((*path, "sinks"), f"{name}.sinks", config.heads))
    return entries


def _delta_net(path: Path, name: str, width: int, config: DeltaNetConfig) -> list[Entry]:
    heads, values, channels = config.value_heads, config.value_rows, config.channels
    qkvz = dict(in_proj_qkv=channels, in_proj_z=values)
    taps = config.conv_width
    conv = StoredTensor(
        f"{name}.conv1d.weight", (channels, 1, taps)
    )  # torch's shape: one channel per group
    return [
        _rows((*path, "qkvz", "weight"), name, width, **qkvz),
        _rows((*path, "ba", "weight"), name, width, in_proj_b=heads, in_proj_a=heads),
        Entry((*path, "conv_weight"), (conv,), reshaped=(channels, taps)),
        Entry((*path, "conv_bias"), (), Form.ZERO),
        _one((*path, "decay_scale"), f"{name}.A_log", heads, form=Form.LOG),
        _one((*path, "dt_bias"), f"{name}.dt_bias", heads),
        _one((*path, "norm_weight"), f"{name}.norm.weight", config.value_dim),
        _one((*path, "out", "weight"), f"{name}.out_proj.weight", width, values),
    ]


def _feed_forward(
    path: Path,
    name: str,
    width: int,
    config: MlpConfig | MoeConfig,
    family: Family = LLAMA,
) -> list[Entry]:
    if isinstance(config, MlpConfig):
        hidden = config.hidden
        rows = dict(gate_proj=hidden, up_proj=hidden)
        if "gate_up" in family.fused:
            rows = dict(gate_up_proj=2 * hidden)
        entries = [
            _rows((*path, "gate_up", "weight"), name, width, **rows),
            _one((*path, "down", "weight"), f"{name}.down_proj.weight", width, hidden),
        ]
        if config.bias:
            entries.append(_biases((*path, "gate_up_bias"), name, **rows))
            entries.append(_biases((*path, "down_bias"), name, down_proj=width))
        return entries
    router = "router" if family.experts == "transposed" else "gate"
    entries = [
        _one((*path, "router", "weight"), f"{name}.{router}.weight", config.experts, width),
        *_experts(path, f"{name}.experts", width, config, family),
    ]
    if config.router_bias:
        entries.append(_one((*path, "router_bias"), f"{name}.{router}.bias", config.experts))
    if config.shared_hidden:
        shared = MlpConfig(hidden=config.shared_hidden)
        entries += _feed_forward((*path, "shared"), f"{name}.shared_expert", width, shared)
        gate = f"{name}.shared_expert_gate.weight"
        entries.append(_one((*path, "shared_gate", "weight"), gate, 1, width))
    return entries


def _experts(
    path: Path, name: str, width: int, config: MoeConfig, family: Family
) -> Iterator[Entry]:
    experts, hidden = config.experts, config.hidden
    shapes = {"gate_up": (experts, 2 * hidden, width), "down": (experts, width, hidden)}
    if family.experts == "separate":
        for part, members in (("gate_up", ("gate", "up")), ("down", ("down",))):
            rows = shapes[part][1] // len(members)
            tensors = (
                StoredTensor(f"{name}.{e}.{member}_proj.weight", (rows, shapes[part][2]))
                for e in range(experts)
                for member in members
            )
            yield Entry((*path, part), tuple(tensors), reshaped=shapes[part])
        return
    if family.experts == "stacked":
        for part, shape in shapes.items():
            yield _one((*path, part), f"{name}.{part}_proj", *shape)
        return
    for part, form in (("gate_up", Form.ALTERNATING), ("down", Form.TRANSPOSED)):
        _, rows, columns = shapes[part]
        stored = (StoredTensor(f"{name}.{part}_proj", (experts, columns, rows)),)
        yield Entry((*path, part), stored, form, shapes[part])
        if config.bias:
            bias = f"{name}.{part}_proj_bias"
            form = form if part == "gate_up" else Form.PLAIN
            yield _one((*path, f"{part}_bias"), bias, experts, rows, form=form)
