"""Everything that can be known about a checkpoint without allocating an array."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike

from convert.build import Shell
from convert.checkpoint.folders import (
    BlockFolder,
    TargetFolder,
    choose_drafter,
    find_drafters,
    open_block,
    open_target,
    weights_file,
    with_adapter,
    with_head,
)
from convert.checkpoint.tensors import make_shell
from convert.errors import ArtifactError, Problems
from convert.tensors import Array, DataFiles
from convert.unused import Remarks
from jaxdraft.checkpoint.layout import ROTARY
from jaxdraft.config import DrafterConfig, DrafterKind, TargetConfig
from jaxdraft.kinds import KINDS
from jaxdraft.nn.decoder import Decoder


@dataclasses.dataclass
class CheckpointPlan:
    """The content of a checkpoint. A part that could not be read is None, with a problem for it.

    Attributes:
      folder: folder as passed by the caller.
      problems: problems of the target, or else of the drafter.
      files: files of both.
      config: the target's description, with the outputs that the drafter needs.
      drafters: kinds of all drafters that are present, read or not.
      kind: kind of the chosen drafter.
      remarks: remarks about the files.
      shells: modules without numbers, ``"target"`` and perhaps ``"drafter"``.
      dtypes: types of their activations.
    """

    folder: Path
    problems: Problems
    files: DataFiles
    target: TargetFolder | None = None
    block: BlockFolder | None = None
    config: TargetConfig | None = None
    drafters: tuple[DrafterKind, ...] = ()
    kind: DrafterKind | None = None
    remarks: Remarks = dataclasses.field(default_factory=Remarks)
    shells: dict[str, Shell] = dataclasses.field(default_factory=dict)
    dtypes: dict[str, jnp.dtype] = dataclasses.field(default_factory=dict)

    @property
    def inside(self) -> bool:
        """Whether the chosen drafter lies in the target's files."""
        return self.kind is not None and KINDS[self.kind].inside

    @property
    def drafter(self) -> DrafterConfig | None:
        """The chosen drafter's description."""
        if self.block is not None:
            return self.block.facts.config
        return self.target.facts.mtp if self.inside and self.target is not None else None


def plan_checkpoint(
    folder: Path,
    drafter: str | Path | None = None,
    dtype: DTypeLike | None = None,
    *,
    numbers: bool = True,
    context_length: int | None = None,
    packed: bool | None = None,
    adapter: Path | None = None,
) -> CheckpointPlan:
    """Read configurations and headers, for loading and for reports, which judge by the same rules.

    Args:
      folder, drafter, dtype: as in :func:`~convert.checkpoint.load.load_checkpoint`.
      numbers: whether to read a drafter's copies of the target's tensors and compare them. Without,
        a target without weights is enough.
      context_length: as in :func:`~convert.checkpoint.load.load_checkpoint`.
      packed: keep quantized matrices packed; None: those in MXFP4 alone.
      adapter: folder of a LoRA adapter for the target.

    Raises:
      ValueError: there is no such drafter.
    """
    plan = CheckpointPlan(folder, Problems(), DataFiles(folder))
    try:
        target = plan.target = open_target(
            folder, plan.files, plan.remarks, outline=not numbers, context=context_length
        )
        plan.config = target.facts.config
        if adapter is not None:
            target = plan.target = with_adapter(target, adapter, plan.files, plan.remarks)
        found = find_drafters(folder, target)
        plan.drafters = tuple(found)
        chosen = choose_drafter(drafter, folder, found, target)
        if isinstance(chosen, Path):
            plan.block = open_block(chosen, folder, target, plan.files, numbers, plan.remarks)
            plan.kind = plan.block.facts.config.kind
            plan.config = dataclasses.replace(plan.config, taps=plan.block.facts.taps)
        elif chosen is not None:
            plan.kind, plan.target = chosen, with_head(target, folder)
            plan.config = dataclasses.replace(plan.config, hidden_states=True)
    except ArtifactError as error:
        plan.problems.extend(error.problems)
    if plan.target is not None:
        _add_shells(plan, plan.target, dtype, packed)
    return plan


def _add_shells(
    plan: CheckpointPlan, target: TargetFolder, dtype: DTypeLike | None, packed: bool | None
) -> None:
    facts, config = target.facts, plan.config
    assert config is not None
    tables = {name: functools.partial(_target_tables, config, name) for name in ROTARY}
    tables = {name: functools.cache(make) for name, make in tables.items()}
    file, compute = weights_file(target.folder), target.dtype(dtype)
    plan.dtypes["target"] = compute
    plan.shells["target"] = make_shell(
        Decoder,
        config,
        target.layout,
        target.tensors,
        tables,
        compute,
        file,
        facts.quantized,
        packed,
        target.deltas,
    )
    if plan.block is not None:
        described, rope = plan.block.facts.config, plan.block.facts.rope
        wide = described.attention.rotary_dim
        own = {ROTARY[0]: functools.cache(lambda: rope.tables(config.context_length, wide))}
        file, compute = weights_file(plan.block.folder), plan.block.dtype(dtype)
        module = KINDS[described.kind].module
        plan.dtypes["drafter"] = compute
        plan.shells["drafter"] = make_shell(
            module,
            described,
            plan.block.layout,
            plan.block.tensors,
            own,
            compute,
            file,
            plan.block.facts.quantized,
            packed,
        )
    elif plan.inside:
        assert plan.kind is not None and facts.mtp is not None
        plan.dtypes["drafter"] = compute
        plan.shells["drafter"] = make_shell(
            KINDS[plan.kind].module,
            facts.mtp,
            target.head,
            target.tensors,
            tables,
            compute,
            file,
            facts.quantized,
            packed,
        )


def _target_tables(config: TargetConfig, name: str) -> tuple[Array, Array]:
    """Return the cosines and sines of one of :data:`~jaxdraft.checkpoint.layout.ROTARY`."""
    rope, dim = config.rope, config.rotary_dim
    if name != ROTARY[0]:
        assert config.sliding is not None
        rope, dim = config.sliding_rope, config.sliding.rotary_dim
    assert rope is not None
    return rope.target_tables(config.context_length, dim)
