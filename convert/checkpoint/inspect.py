"""Reports about checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from convert.build import recipe_bytes
from convert.checkpoint.folders import PartFolder, TargetFolder, weights_file
from convert.checkpoint.outline import is_outline
from convert.checkpoint.plan import CheckpointPlan, plan_checkpoint
from convert.paths import CONFIG
from convert.report import (
    Counts,
    PartReport,
    Report,
    bytes_by_type,
    experts_of,
    files_of,
    weight_bytes_of,
)
from convert.tensors import Tensor
from jaxdraft.checkpoint.forms import Form
from jaxdraft.checkpoint.layout import MTP, Entry, is_matrix


def inspect_checkpoint(folder: str | Path, drafter: str | Path | None = None) -> Report:
    """Inspect a checkpoint; see :func:`convert.inspect_folder`.

    Reads only configurations and headers. Only loading compares a drafter's copies of the target's
    embedding and head with the originals.
    """
    folder = Path(folder)
    plan = plan_checkpoint(folder, drafter, numbers=False)
    plan.files.close()
    target = plan.target
    drafter_report = None
    if plan.block is not None:
        drafter_report = _stored_part(plan, "drafter", plan.block, plan.block.tensors.values())
    elif target is not None and plan.inside:
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
        files=files_of(folder),
        problems=tuple(plan.problems),
        notes=tuple(_checkpoint_notes(plan)),
        weights=target is None or not is_outline(target.folder),
    )


def _stored_part(
    plan: CheckpointPlan, part: str, home: PartFolder, tensors: Iterable[Tensor]
) -> PartReport:
    """Return the report of a part with a valid configuration and valid tensors."""
    shell, inside = plan.shells[part], home.folder == plan.folder
    config = plan.config if part == "target" else plan.drafter
    assert plan.target is not None
    kind = plan.target.facts.family.model_type if part == "target" else plan.kind
    assert kind is not None
    layout = plan.target.head if part == "drafter" and plan.inside else home.layout
    computed = sum(
        shell.wanted[path].size * shell.wanted[path].dtype.itemsize
        for path, recipe in shell.recipes.items()
        if not any(piece.tensors for piece in recipe.pieces)
    )
    file = CONFIG if is_outline(home.folder) else weights_file(home.folder)
    return PartReport(
        kind=kind,
        file=("" if inside else f"{home.folder.name}/") + file,
        config=config,
        dtype=plan.dtypes[part].name,
        layout=None,
        nodes=None,
        tensors=bytes_by_type(tensors),
        stored_bytes=recipe_bytes(shell.recipes),
        weight_bytes=weight_bytes_of(shell),
        counts=_counts(layout, *experts_of(config), computed),
        shell=shell,
    )


def _counts(layout: Sequence[Entry], experts: int, active: int, computed: int) -> Counts:
    """Count the numbers of a layout, which do not depend on quantization."""
    total = chosen = matrices = rows = 0
    for entry in layout:
        if entry.form is Form.OFFSETS:  # token ids
            continue
        size = sum(part.size for part in entry.tensors)
        routed = bool(experts) and any(".experts." in part.name for part in entry.tensors)
        total += size
        chosen += size * active // experts if routed else size
        if is_matrix(entry) or (routed and len(entry.shape) > 2):
            matrices += size
            rows += size // entry.shape[-1]
    return Counts(
        parameters=total, active=chosen, matrices=matrices, rows=rows, computed_bytes=computed
    )


def _checkpoint_notes(plan: CheckpointPlan) -> Iterator[str]:
    yield from plan.remarks.all
    metadata = plan.target.metadata if plan.target is not None else None
    if plan.target is not None and metadata is not None and "tokenizer.ggml.model" in metadata:
        from convert.gguf.tokenizer import text_problem

        problem = text_problem(metadata, plan.target.folder.name)
        if problem is not None:
            yield f"{problem}: the model would be loaded without a tokenizer"
    others = [kind for kind in plan.drafters if kind != plan.kind]
    if others:
        yield f"drafters that were not inspected: {', '.join(others)}"
    used: set[str] = set()
    for shell in plan.shells.values():
        for recipe in shell.recipes.values():
            used |= {tensor.name for piece in recipe.pieces for tensor in piece.tensors}
    for home in (plan.target, plan.block):
        if home is None:
            continue
        aside = (MTP, *home.facts.family.aside) if isinstance(home, TargetFolder) else (MTP,)
        unused = [name for name in home.tensors.keys() - used if not name.startswith(aside)]
        if unused:
            yield (
                f"{len(unused)} tensors of {home.folder.name} are not used: {min(unused)}"
                + (" and so on" if len(unused) > 1 else "")
            )
