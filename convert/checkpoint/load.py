"""Checkpoint folders (``config.json`` and safetensors) -> Flax modules, without ONNX.

As strict as the reading of artifacts: every tensor is accounted for, and everything is checked
before the first array is allocated. The numbers are those that exporting the same checkpoint in
float32 and converting the artifact gives (rotary tables of targets to the last place of float32).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jax.typing import DTypeLike

from convert.build import Loaded, fill_shells
from convert.checkpoint.folders import TargetFolder
from convert.checkpoint.plan import CheckpointPlan, plan_checkpoint
from convert.errors import ArtifactError
from jaxdraft.checkpoint.forms import float_dtype

if TYPE_CHECKING:
    from convert.gguf.text import GgufText
    from jaxdraft.sharding.placement import Placement


def load_checkpoint(
    folder: str | Path,
    *,
    drafter: str | Path | None = None,
    dtype: DTypeLike | None = None,
    context_length: int | None = None,
    packed: bool | None = None,
    adapter: str | Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    placement: Placement | None = None,
) -> Loaded:
    """Read the checkpoint of a target, and of one of its drafters.

    Args:
      folder: folder with ``config.json`` and ``model.safetensors`` (or shards and their index) of
        the target, or one that contains it as ``target``. Block drafters are searched in folders
        ``dflash2`` and ``dspark`` beside or inside it; a multi-token-prediction head lies in the
        target's own files.
      drafter: "dflash2", "dspark", "mtp" or "none"; the folder of a block drafter; or the name of
        one in :data:`~jaxdraft.data.SHIPPED`. Default: the first kind that is there.
      dtype: float dtype of weights and activations. Default: as in ``config.json``, else the
        stored one, for the target and for the drafter on its own.
      context_length: maximum length of a sequence; see :func:`jaxdraft.load`.
      packed: keep quantized matrices packed in memory; see :func:`convert.packed.pack`. Default:
        those in MXFP4 alone.
      adapter: folder of a LoRA adapter for the target; see :mod:`convert.checkpoint.adapter`.
      progress: called with (stored bytes read, stored bytes in all, the parameter just made).
      placement: the mesh that the arrays are divided over; None: JAX's default device.

    Raises:
      ArtifactError: with every problem found.
      ValueError: there is no such drafter, or ``dtype`` is not supported.
    """
    if dtype is not None:
        dtype = float_dtype(dtype)
    plan = plan_checkpoint(
        Path(folder),
        drafter,
        dtype,
        context_length=context_length,
        packed=packed,
        adapter=None if adapter is None else Path(adapter),
    )
    try:
        plan.problems.raise_any()
        return _build(plan, progress, placement)
    finally:
        plan.files.close()


def _build(
    plan: CheckpointPlan,
    progress: Callable[[int, int, str], None] | None,
    placement: Placement | None,
) -> Loaded:
    target, config = plan.target, plan.config
    assert target is not None and config is not None
    facts = target.facts
    frozen, stored, weights = fill_shells(plan.shells, progress, placement)
    text, warnings = _text(plan, target)
    return Loaded(
        target_config=config,
        target=frozen["target"],
        drafter_kind=plan.kind,
        drafter_config=plan.drafter,
        drafter=frozen.get("drafter"),
        eos_token_ids=target.stop_ids,
        bos_token_id=facts.bos_token_id,
        pad_token_id=facts.pad_token_id,
        context_length=config.context_length,
        model_type=facts.family.model_type,
        vocab_size=config.vocab_size,
        page_size=None,
        max_batch=None,
        folder=target.folder,
        stored_bytes=stored,
        weight_bytes=weights,
        warnings=warnings,
        text=text,
    )


def _text(plan: CheckpointPlan, target: TargetFolder) -> tuple[GgufText | None, tuple[str, ...]]:
    """Return the tokenizer of a GGUF file, and all warnings. Others lie in files of their own."""
    warnings = tuple(plan.remarks.warnings)
    if target.metadata is None or "tokenizer.ggml.model" not in target.metadata:
        return None, warnings
    from convert.gguf.tokenizer import read_text

    try:
        return read_text(target.metadata, target.folder.name), warnings
    except ArtifactError as error:
        return None, (*warnings, f"{error}: the model is loaded without a tokenizer")
