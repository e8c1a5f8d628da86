"""An artifact's folder -> Flax modules with their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike

from convert.artifact.plan import Plan, plan_artifact
from convert.build import Loaded, fill_shells
from jaxdraft.sharding.placement import Placement

_DTYPES = ("float32", "bfloat16", "float16")


def load_artifact(
    folder: str | Path,
    *,
    drafter: str | Path | None = None,
    dtype: DTypeLike | None = None,
    packed: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
    placement: Placement | None = None,
) -> Loaded:
    """Convert the artifact in ``folder``.

    Configuration, graphs, file sizes and the contract between target and drafter are all checked
    before the first array is allocated.

    Args:
      folder: folder with ``genai_config.json`` and the files it names.
      drafter: "none" for the target alone, or the kind of the artifact's drafter. Default: the
        drafter of the artifact, if it has one.
      dtype: float dtype of weights and activations. Default: the stored one, for the target and
        for the drafter on its own (a bfloat16 drafter stays bfloat16 under a float16 target).
        Rotary tables of the target and the gates of its delta nets are float32 always.
      packed: whether to keep the matrices of MatMulNBits packed in memory; see
        :func:`convert.artifact.pack.pack`.
      progress: called with (stored bytes read, stored bytes in all, the parameter just made).
      placement: the mesh that the arrays are divided over; None: JAX's default device.

    Raises:
      ArtifactError: with every problem found.
      FileNotFoundError: there is no such folder.
      ValueError: ``dtype`` is not a float dtype that is supported, or there is no such drafter.
    """
    if dtype is not None and _dtype_name(dtype) not in _DTYPES:
        raise ValueError(f"dtype {_dtype_name(dtype)!r} is not one of {', '.join(_DTYPES)}")
    plan = plan_artifact(Path(folder), dtype, packed=packed, drafter=drafter)
    plan.problems.raise_any()
    try:
        return _build(plan, progress, placement)
    finally:
        plan.files.close()


def _dtype_name(dtype: DTypeLike) -> str:
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return str(dtype)


def _build(
    plan: Plan, progress: Callable[[int, int, str], None] | None, placement: Placement | None
) -> Loaded:
    config, target = plan.config, plan.target
    assert config is not None and target is not None and plan.target_shell is not None
    shells = {"target": plan.target_shell}
    if plan.drafter is not None:
        assert plan.drafter_shell is not None
        shells["drafter"] = plan.drafter_shell
    frozen, stored, weights = fill_shells(shells, progress, placement)
    drafter = plan.drafter
    return Loaded(
        target_config=target.config,
        target=frozen["target"],
        drafter_kind=config.drafter.kind if config.drafter else None,
        drafter_config=drafter.config if drafter else None,
        drafter=frozen.get("drafter"),
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        pad_token_id=config.pad_token_id,
        context_length=plan.context_length,
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        page_size=config.page_size,
        max_batch=config.max_batch,
        folder=plan.folder,
        stored_bytes=stored,
        weight_bytes=weights,
        warnings=tuple(config.remarks.warnings),
    )
