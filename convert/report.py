"""What an artifact or a checkpoint is, and everything that is wrong with it, without loading it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from convert.artifact.block import DrafterPlan
from convert.artifact.graph import FLOATS, Graph, Tensor, type_name
from convert.artifact.load import stored_bytes
from convert.artifact.plan import Plan, Shell, plan_artifact
from convert.checkpoint.folders import (
    CheckpointPlan,
    PartFolder,
    is_checkpoint,
    plan_checkpoint,
    weights_file,
)
from convert.errors import ArtifactError
from jaxdraft.checkpoint.layout import MTP
from jaxdraft.config import (
    FULL_ATTENTION,
    AttentionConfig,
    BlockDrafterConfig,
    DeltaNetConfig,
    MlpConfig,
    MoeConfig,
    MtpConfig,
    TargetConfig,
)

Facts = dict[str, Any]


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
      tensors: stored bytes by ONNX type.
      stored_bytes: bytes on disk of what becomes parameters.
      weight_bytes: bytes of the parameters as they would be loaded.
    """

    kind: str
    file: str
    config: TargetConfig | BlockDrafterConfig | MtpConfig | None
    dtype: str | None
    layout: str | None
    nodes: int | None
    tensors: Mapping[str, int]
    stored_bytes: int
    weight_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """An artifact or a checkpoint.

    Attributes:
      folder: where it lies.
      target, drafter: its parts; None where there is none, or it could not be read.
      context_length, eos_token_ids, page_size, max_batch: as configured; a checkpoint says nothing
        of pages and batches.
      files: bytes of every file in the folder.
      problems: everything that would make loading refuse it.
      notes: what is fine and worth knowing, and what files ask for and do not get.
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

    @property
    def loads(self) -> bool:
        """Whether it would load."""
        return not self.problems

    def summary(self) -> Facts:
        """The report as plain values, for people and for JSON."""
        facts: Facts = {
            "folder": str(self.folder),
            "loads": self.loads,
            "context_length": self.context_length,
            "eos_token_ids": list(self.eos_token_ids),
            "page_size": self.page_size,
            "max_batch": self.max_batch,
            "target": _part(self.target),
            "drafter": _part(self.drafter),
            "files": dict(self.files),
            "problems": [str(problem) for problem in self.problems],
            "notes": list(self.notes),
        }
        return facts


def inspect_folder(folder: str | Path, drafter: str | Path | None = None) -> Report:
    """Read everything about an artifact or a checkpoint but its weights.

    Never raises for a bad one: what is wrong is in the report.

    Args:
      folder: as in :func:`jaxdraft.load`.
      drafter: which drafter of a checkpoint, as there.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: there is no such drafter.
    """
    folder = Path(folder)
    if is_checkpoint(folder):
        return inspect_checkpoint(folder, drafter)
    return inspect_artifact(folder, drafter)


def inspect_checkpoint(folder: str | Path, drafter: str | Path | None = None) -> Report:
    """:func:`inspect_folder` of a folder that is known to be a checkpoint.

    Only configurations and headers are read. That copies which a drafter may have of the target's
    embedding and head hold the same numbers is seen by loading alone.
    """
    folder = Path(folder)
    plan = plan_checkpoint(folder, drafter, numbers=False)
    plan.files.close()
    target = plan.target
    drafter_report = None
    if plan.block is not None:
        drafter_report = _stored_part(plan, "drafter", plan.block, plan.block.tensors.values())
    elif target is not None and plan.kind == "mtp":
        head = [tensor for name, tensor in target.tensors.items() if name.startswith(MTP)]
        drafter_report = _stored_part(plan, "drafter", target, head)
    target_report = None
    if target is not None:
        body = [tensor for name, tensor in target.tensors.items() if not name.startswith(MTP)]
        target_report = _stored_part(plan, "target", target, body)
    return Report(
        folder=folder,
        target=target_report,
        drafter=drafter_report,
        context_length=plan.config.context_length if plan.config else None,
        eos_token_ids=target.stop_ids if target else (),
        page_size=None,
        max_batch=None,
        files=_files(folder),
        problems=tuple(plan.problems),
        notes=tuple(_checkpoint_notes(plan)),
    )


def _stored_part(
    plan: CheckpointPlan, part: str, home: PartFolder, tensors: Iterable[Tensor]
) -> PartReport:
    """A part whose configuration and tensors are as they should be."""
    shell, inside = plan.shells[part], home.folder == plan.folder
    config = plan.config if part == "target" else plan.drafter
    assert plan.target is not None
    kind = plan.target.facts.family.model_type if part == "target" else plan.kind
    assert kind is not None
    return PartReport(
        kind=kind,
        file=("" if inside else f"{home.folder.name}/") + weights_file(home.folder),
        config=config,
        dtype=plan.dtypes[part].name,
        layout=None,
        nodes=None,
        tensors=_bytes_by_type(tensors),
        stored_bytes=stored_bytes(shell.recipes),
        weight_bytes=_weight_bytes(shell),
    )


def _checkpoint_notes(plan: CheckpointPlan) -> Iterator[str]:
    yield from plan.remarks.all
    others = [kind for kind in plan.drafters if kind != plan.kind]
    if others:
        yield f"drafters that were not looked at: {', '.join(others)}"
    used: set[str] = set()
    for shell in plan.shells.values():
        for recipe in shell.recipes.values():
            used |= {tensor.name for piece in recipe.pieces for tensor in piece.tensors}
    for home in (plan.target, plan.block):
        if home is None:
            continue
        unused = [name for name in home.tensors.keys() - used if not name.startswith(MTP)]
        if unused:
            yield (
                f"{len(unused)} tensors of {home.folder.name} are not used: {min(unused)}"
                + (" and so on" if len(unused) > 1 else "")
            )


def inspect_artifact(folder: str | Path, drafter: str | Path | None = None) -> Report:
    """Read everything about an artifact but its weights.

    Never raises for a bad artifact: what is wrong is in the report.

    Args:
      folder: as in :func:`convert.load_artifact`.
      drafter: likewise.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: there is no such drafter.
    """
    folder = Path(folder)
    plan = plan_artifact(folder, drafter=drafter)
    config = plan.config
    target = plan.target
    section = plan.section
    return Report(
        folder=folder,
        target=_report(
            plan.target_graph,
            config.model_type if config else "",
            target.config if target else None,
            target.dtype if target else None,
            target.layout if target else None,
            stored_bytes(target.recipes) if target else 0,
            plan.target_shell,
        ),
        drafter=_drafter_report(plan, plan.drafter),
        context_length=plan.context_length if config else None,
        eos_token_ids=config.eos_token_ids if config else (),
        page_size=config.page_size if config else None,
        max_batch=config.max_batch if config else None,
        files=_files(folder),
        problems=tuple(plan.problems),
        notes=tuple(_notes(plan, section is not None)),
    )


def _drafter_report(plan: Plan, drafter: DrafterPlan | None) -> PartReport | None:
    section = plan.section
    if section is None:
        return None
    return _report(
        plan.drafter_graph,
        section.kind,
        drafter.config if drafter else None,
        drafter.dtype if drafter else None,
        (plan.target.layout if plan.target else None) if section.kind == "mtp" else "paged",
        stored_bytes(drafter.recipes) if drafter else 0,
        plan.drafter_shell,
    )


def _report(
    graph: Graph | None,
    kind: str,
    config: TargetConfig | BlockDrafterConfig | MtpConfig | None,
    dtype: int | None,
    layout: str | None,
    stored: int,
    shell: Shell | None,
) -> PartReport | None:
    if graph is None:
        return None
    return PartReport(
        kind=kind,
        file=graph.file,
        config=config,
        dtype=None if dtype is None else FLOATS[dtype].name,
        layout=layout,
        nodes=len(graph.nodes),
        tensors=_bytes_by_type(graph.initializers.values()),
        stored_bytes=stored,
        weight_bytes=_weight_bytes(shell) if shell else 0,
    )


def _files(folder: Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _bytes_by_type(tensors: Iterable[Tensor]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for tensor in tensors:
        found[type_name(tensor.data_type)] += tensor.nbytes
    return dict(found)


def _weight_bytes(shell: Shell) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in shell.wanted.values())


def _notes(plan: Plan, has_drafter: bool) -> list[str]:
    notes = []
    config, target, drafter = plan.config, plan.target, plan.drafter
    if config is None:
        return notes
    notes += config.remarks.all
    if target is not None and target.config.context_length < config.context_length:
        notes.append(
            f"the rotary tables cover {target.config.context_length} positions, less than "
            f"model.context_length {config.context_length}"
        )
    sliding = config.decoder.sliding
    if target is not None and sliding is not None and not sliding.layers:
        notes.append(
            f"the configuration names a window of {sliding.window} that no layer of the graph has"
        )
    if (
        target is not None
        and not has_drafter
        and (target.config.taps or target.config.hidden_states)
    ):
        notes.append("the target has outputs for a drafter, and the artifact has none")
    if drafter is not None and drafter.config.context_length < plan.context_length:
        end = drafter.config.context_length
        notes.append(f"no drafts past position {end}, where the drafter's rotary tables end")
    return notes


def _part(part: PartReport | None) -> Facts | None:
    if part is None:
        return None
    facts: Facts = {
        "kind": part.kind,
        "file": part.file,
        "dtype": part.dtype,
        "layout": part.layout,
        "nodes": part.nodes,
        "stored_bytes": part.stored_bytes,
        "weight_bytes": part.weight_bytes,
        "tensor_bytes": dict(part.tensors),
    }
    if part.config is not None:
        facts |= _describe(part.config)
    return facts


def _describe(config: TargetConfig | BlockDrafterConfig | MtpConfig) -> Facts:
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
        facts["hidden_states"] = config.hidden_states
        if config.delta_net is not None:
            facts["delta_net"] = _delta_net(config.delta_net)
        facts["mlp"] = _mlp(config.mlp)
    elif isinstance(config, BlockDrafterConfig):
        facts["layers"] = config.layers
        facts["block_size"] = config.block_size
        facts["draft_tokens"] = config.draft_tokens
        facts["candidates"] = config.candidates
        facts["rank"] = config.rank
        facts["mask_token"] = config.mask_token
        facts["aux_width"] = config.aux_width
        facts["mlp"] = str(config.mlp_hidden)
        if config.conv is not None:
            facts["conv"] = f"{config.conv.taps} taps, groups of {config.conv.group}"
    else:
        facts["mlp"] = _mlp(config.mlp)
    return facts


def _attention(config: AttentionConfig) -> str:
    words = [f"{config.heads} heads over {config.kv_heads} of {config.head_dim}"]
    words.append(f"{config.rotary_dim} channels rotated")
    words += ["gated"] * config.gated + ["head norms"] * config.qk_norm
    if config.window != FULL_ATTENTION:
        words.append(f"window {config.window}")
    return ", ".join(words)


def _delta_net(config: DeltaNetConfig) -> str:
    return (
        f"{config.value_heads} value heads of {config.value_dim} over {config.key_heads} key heads "
        f"of {config.key_dim}, convolution of {config.conv_width}"
    )


def _mlp(config: MlpConfig | MoeConfig) -> str:
    if isinstance(config, MlpConfig):
        return str(config.hidden)
    shared = f", shared expert of {config.shared_hidden}" if config.shared_hidden else ""
    return f"{config.active} of {config.experts} experts of {config.hidden}{shared}"
