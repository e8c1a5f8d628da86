"""Reports about artifacts and checkpoints: properties and all problems, without loading."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from convert.build import Shell
from convert.errors import ArtifactError
from convert.tensors import Tensor
from jaxdraft.config import (
    FULL_ATTENTION,
    AttentionConfig,
    BlockDrafterConfig,
    DeltaNetConfig,
    DrafterConfig,
    Eagle3Config,
    MlpConfig,
    MoeConfig,
    TargetConfig,
)
from jaxdraft.native.build import description

Facts = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of a target or a drafter, those that two parts share counted with the target.

    Attributes:
      parameters: all of them, as the field counts: no buffers, no scales of quantization.
      active: those that one token needs: of the experts of a layer, only the chosen ones.
      matrices: those in matrices of products, which may be stored in few bits; neither embedding
        nor head.
      rows: rows of these matrices.
      computed_bytes: bytes of arrays that no file holds, such as rotary tables.
    """

    parameters: int
    active: int
    matrices: int
    rows: int
    computed_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartReport:
    """A target or a drafter.

    Attributes:
      kind: ``model.type`` or ``model_type``, or the kind of the drafter.
      file: its graph; of a checkpoint, its safetensors file or the index of its shards.
      config: what it computes; None if that could not be read.
      dtype: name of the stored type of its weights; of a checkpoint, of the type they would be
        loaded in.
      layout: ``dense`` or ``paged``; None of a checkpoint, whose cache can be either.
      nodes: number of nodes of the graph; None of a checkpoint.
      tensors: stored bytes per ONNX type.
      stored_bytes: bytes on disk of the tensors that become parameters.
      weight_bytes: bytes of the parameters as they would be loaded.
      counts: its numbers; None if they could not be read.
      shell: its module without numbers; None if that could not be read.
    """

    kind: str
    file: str
    config: TargetConfig | DrafterConfig | None
    dtype: str | None
    layout: str | None
    nodes: int | None
    tensors: Mapping[str, int]
    stored_bytes: int
    weight_bytes: int
    counts: Counts | None
    shell: Shell | None = dataclasses.field(default=None, repr=False, compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """An artifact or a checkpoint.

    Attributes:
      folder: its folder.
      target, drafter: its parts; None where there is none, or it could not be read.
      context_length, eos_token_ids, page_size, max_batch: as configured; checkpoints have no
        pages and batches.
      files: bytes of every file in the folder.
      problems: everything that makes loading fail.
      notes: facts worth knowing, and settings of the files that are not applied.
      weights: whether weights are there; without, the report follows from ``config.json`` alone.
    """

    folder: Path
    target: PartReport | None
    drafter: PartReport | None
    context_length: int | None
    eos_token_ids: tuple[int, ...]
    page_size: int | None
    max_batch: int | None
    files: Mapping[str, int]
    problems: tuple[ArtifactError, ...]
    notes: tuple[str, ...]
    weights: bool = True

    @property
    def loads(self) -> bool:
        """Whether the folder would load."""
        return self.weights and not self.problems

    def summary(self) -> Facts:
        """Return the report as plain values, for display and for JSON."""
        facts: Facts = {
            "folder": str(self.folder),
            "loads": self.loads,
            "context_length": self.context_length,
            "eos_token_ids": list(self.eos_token_ids),
            "page_size": self.page_size,
            "max_batch": self.max_batch,
            "target": _part(self.target),
            "drafter": _part(self.drafter),
            "products_of_few_rows_on_cpus": description(),
            "files": dict(self.files),
            "problems": [str(problem) for problem in self.problems],
            "notes": list(self.notes),
        }
        return facts


def files_of(folder: Path) -> dict[str, int]:
    if folder.is_file():
        return {folder.name: folder.stat().st_size}
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def bytes_by_type(tensors: Iterable[Tensor]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for tensor in tensors:
        found[tensor.type_name] += tensor.nbytes
    return dict(found)


def weight_bytes_of(shell: Shell) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in shell.wanted.values())


def shell_counts(shell: Shell, experts: int, active: int) -> Counts:
    """Count the numbers of a module whose parameters are all as wide as they are stored.

    Args:
      shell: the module.
      experts: experts of a layer; 0: there are none.
      active: those that a token chooses.
    """
    made = {path for path, recipe in shell.recipes.items() if any(p.tensors for p in recipe.pieces)}
    total = chosen = matrices = rows = computed = 0
    for path, leaf in shell.wanted.items():
        if path not in made or not jnp.issubdtype(leaf.dtype, jnp.floating):
            computed += leaf.size * leaf.dtype.itemsize
            continue
        total += leaf.size
        router = any(str(key).startswith("router") for key in path)
        routed = bool(experts) and leaf.shape[:1] == (experts,) and not router
        chosen += leaf.size * active // experts if routed else leaf.size
        if leaf.ndim > 1 and path[0] not in ("embed", "head") and not router:
            matrices += leaf.size
            rows += leaf.size // leaf.shape[-1]
    return Counts(
        parameters=total, active=chosen, matrices=matrices, rows=rows, computed_bytes=computed
    )


def experts_of(config: TargetConfig | DrafterConfig | None) -> tuple[int, int]:
    """Return the number of experts of a layer, and of those that a token chooses."""
    mlp = getattr(config, "mlp", None)
    return (mlp.experts, mlp.active) if isinstance(mlp, MoeConfig) else (0, 0)


def _part(part: PartReport | None) -> Facts | None:
    if part is None:
        return None
    facts: Facts = {
        "kind": part.kind,
        "file": part.file,
        "dtype": part.dtype,
        "parameters": part.counts.parameters if part.counts else None,
        "active_parameters": part.counts.active if part.counts else None,
        "layout": part.layout,
        "nodes": part.nodes,
        "stored_bytes": part.stored_bytes,
        "weight_bytes": part.weight_bytes,
        "tensor_bytes": dict(part.tensors),
    }
    if part.config is not None:
        facts |= _describe(part.config)
    return facts


def _describe(config: TargetConfig | DrafterConfig) -> Facts:
    facts: Facts = {
        "vocab_size": config.vocab_size,
        "width": config.width,
        "positions": config.context_length,
    }
    if config.attention is not None:
        facts["attention"] = _attention(config.attention)
    if isinstance(config, TargetConfig) and config.sliding is not None:
        facts["sliding"] = _attention(config.sliding)
    if isinstance(config, TargetConfig):
        facts["layers"] = dict(Counter(config.layers))
        facts["taps"] = list(config.taps)
        facts["tied"] = config.tied
        facts |= _properties(config)
        facts["hidden_states"] = config.hidden_states
        if config.delta_net is not None:
            facts["delta_net"] = _delta_net(config.delta_net)
        facts["mlp"] = _mlp(config.mlp)
        if config.dense is not None and config.dense_layers:
            facts["dense_layers"] = list(config.dense_layers)
            facts["dense"] = _mlp(config.dense)
    elif isinstance(config, BlockDrafterConfig):
        facts |= _block(config)
    else:
        facts["mlp"] = _mlp(config.mlp)
    if isinstance(config, Eagle3Config):
        facts["aux_width"] = config.aux_width
        facts["draft_tokens"] = config.draft_tokens
        facts["draftable"] = config.draftable
        own = {"embedding": config.own_embedding, "head": config.own_head}
        facts["own"] = [name for name, there in own.items() if there]
    return facts


def _block(config: BlockDrafterConfig) -> Facts:
    """Return the properties of a block drafter; those that it does not have are left out."""
    facts: Facts = {
        "layers": config.layers,
        "block_size": config.block_size,
        "draft_tokens": config.draft_tokens,
        "candidates": config.candidates,
        "rank": config.rank,
        "mask_token": config.mask_token,
        "aux_width": config.aux_width,
        "mlp": str(config.mlp_hidden),
        "layout": config.layout,
    }
    if config.conv is not None:
        facts["conv"] = f"{config.conv.taps} taps, groups of {config.conv.group}"
    if config.full_layers:
        facts["full_layers"] = list(config.full_layers)
    if config.causal_layers:
        facts["causal_layers"] = list(config.causal_layers)
    if config.draft_vocab_size is not None:
        facts["draftable"] = config.draftable
        facts["own"] = ["head"] if config.own_head else []
    if config.chained or config.markov != "vanilla":
        facts["markov"] = config.markov + ", chained" * config.chained
    if config.confidence is not None:
        facts["confidence"] = {"row": "rows", "pair": "rows and tokens"}[config.confidence]
    if config.logit_multiplier != 1.0:
        facts["logit_multiplier"] = config.logit_multiplier
    if config.logit_softcap:
        facts["logit_softcap"] = config.logit_softcap
    return facts


def _attention(config: AttentionConfig) -> str:
    words = [f"{config.heads} heads over {config.kv_heads} of {config.head_dim}"]
    words.append(f"{config.rotary_dim} channels rotated" + " in pairs" * config.interleaved)
    words += ["gated"] * config.gated
    words += ["norms over all heads" if config.norm_whole else "head norms"] * config.qk_norm
    biases = "q k v".split() * config.bias + ["o"] * config.out_bias
    words += [f"biases of {', '.join(biases)}"] * bool(biases)
    words += ["sinks"] * config.sinks
    if config.window != FULL_ATTENTION:
        words.append(f"window {config.window}")
    if config.softcap:
        words.append(f"scores capped at {config.softcap:g}")
    if abs(config.scale * config.head_dim**0.5 - 1) > 1e-6:
        words.append(f"scores times {config.scale:.6g}")
    return ", ".join(words)


def _properties(config: TargetConfig) -> Facts:
    """Return the properties of a target that most targets do not have, and its embeddings."""
    facts: Facts = {}
    if config.rope is not None:
        facts["rope"] = str(config.rope)
    if config.sliding_rope is not None:
        facts["sliding_rope"] = str(config.sliding_rope)
    if config.norms != "pre":
        facts["norms"] = {"post": "after each part", "both": "before and after each part"}[
            config.norms
        ]
    if config.embedding_scale != 1:
        facts["embedding_scale"] = config.embedding_scale
    if config.softcap:
        facts["softcap"] = config.softcap
    return facts


def _delta_net(config: DeltaNetConfig) -> str:
    return (
        f"{config.value_heads} value heads of {config.value_dim} over {config.key_heads} key heads "
        f"of {config.key_dim}, convolution of {config.conv_width}"
    )


def _mlp(config: MlpConfig | MoeConfig) -> str:
    if isinstance(config, MlpConfig):
        words = [str(config.hidden)] + [config.activation] * (config.activation != "silu")
        return ", ".join(words + ["biases"] * config.bias)
    words = [f"{config.active} of {config.experts} experts of {config.hidden}"]
    if config.shared_hidden:
        words.append(f"shared expert of {config.shared_hidden}")
    words += ["weights of the softmax over all"] * (not config.renormalized)
    words += ["router bias"] * config.router_bias + ["biases"] * config.bias
    if config.limit:
        words.append(f"clamped at {config.limit:g}")
    return ", ".join(words)
