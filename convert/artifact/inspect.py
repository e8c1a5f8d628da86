"""A report about an artifact."""

from __future__ import annotations

from pathlib import Path

from convert.artifact.block import DrafterPlan
from convert.artifact.graph import Graph
from convert.artifact.plan import Plan, plan_artifact
from convert.build import Shell, recipe_bytes
from convert.report import (
    PartReport,
    Report,
    bytes_by_type,
    experts_of,
    files_of,
    shell_counts,
    weight_bytes_of,
)
from convert.tensors import FLOATS
from jaxdraft.config import BlockDrafterConfig, MtpConfig, TargetConfig
from jaxdraft.kinds import KINDS


def inspect_artifact(folder: str | Path, drafter: str | Path | None = None) -> Report:
    """Read everything about an artifact but its weights.

    Never raises for an invalid artifact: the report lists the problems.

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
            recipe_bytes(target.recipes) if target else 0,
            plan.target_shell,
        ),
        drafter=_drafter_report(plan, plan.drafter),
        context_length=plan.context_length if config else None,
        eos_token_ids=config.eos_token_ids if config else (),
        page_size=config.page_size if config else None,
        max_batch=config.max_batch if config else None,
        files=files_of(folder),
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
        (plan.target.layout if plan.target else None) if KINDS[section.kind].inside else "paged",
        recipe_bytes(drafter.recipes) if drafter else 0,
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
        tensors=bytes_by_type(graph.initializers.values()),
        stored_bytes=stored,
        weight_bytes=weight_bytes_of(shell) if shell else 0,
        counts=shell_counts(shell, *experts_of(config)) if shell else None,
        shell=shell,
    )


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
