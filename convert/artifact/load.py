"""An artifact's folder -> Flax modules with their numbers in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike

from convert.artifact.parts import Recipes
from convert.artifact.plan import Plan, Shell, plan_artifact
from convert.build import fill
from jaxdraft.config import DrafterConfig, DrafterKind, TargetConfig
from jaxdraft.nn.decoder import Decoder
from jaxdraft.nn.dflash2 import DFlash2
from jaxdraft.nn.dspark import DSpark
from jaxdraft.nn.linear import Frozen
from jaxdraft.nn.mtp import Mtp

_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """A converted artifact.

    Attributes:
      target_config: the target's description.
      target: its module, split.
      drafter_kind: which drafter there is, if any.
      drafter_config: the drafter's description.
      drafter: its module, split. It holds no embedding and no head: those are the target's.
      eos_token_ids: tokens that end a sequence.
      bos_token_id, pad_token_id: as configured, or None.
      context_length: the longest sequence.
      model_type: ``model.type`` of the configuration.
      vocab_size: V.
      page_size, max_batch: of the engine's section, or None.
      folder: where it came from.
      stored_bytes: bytes read from disk, for ``"target"`` and ``"drafter"``.
      weight_bytes: bytes of the arrays, likewise.
      warnings: what the files ask for and do not get.
    """

    target_config: TargetConfig
    target: Frozen[Decoder]
    drafter_kind: DrafterKind | None
    drafter_config: DrafterConfig | None
    drafter: Frozen[DFlash2] | Frozen[DSpark] | Frozen[Mtp] | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    context_length: int
    model_type: str
    vocab_size: int
    page_size: int | None
    max_batch: int | None
    folder: Path
    stored_bytes: Mapping[str, int]
    weight_bytes: Mapping[str, int]
    warnings: tuple[str, ...] = ()


def load_artifact(
    folder: str | Path,
    *,
    drafter: str | Path | None = None,
    dtype: DTypeLike | None = None,
    packed: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Loaded:
    """Convert the artifact in ``folder``.

    Configuration, graphs, file sizes and the contract between target and drafter are all checked
    before the first array is allocated.

    Args:
      folder: holds ``genai_config.json`` and the files it names.
      drafter: "none" for the target alone; nothing is then read of a drafter. Default: the one that
        the artifact has, which its kind names, too.
      dtype: float dtype of weights and activations. Default: the stored one, for the target and
        for the drafter on its own (a bfloat16 drafter stays bfloat16 under a float16 target).
        Rotary tables of the target and the gates of its delta nets are float32 always.
      packed: keep the matrices of MatMulNBits packed in memory; see :func:`convert.build.pack`.
      progress: called with (stored bytes read, stored bytes in all, the parameter just made).

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
        return _build(plan, progress)
    finally:
        plan.files.close()


def stored_bytes(recipes: Recipes) -> int:
    """Bytes on disk of all tensors used, each counted once."""
    tensors = {
        tensor.name: tensor.nbytes
        for recipe in recipes.values()
        for piece in recipe.pieces
        for tensor in piece.tensors
    }
    return sum(tensors.values())


def fill_shells(
    shells: Mapping[str, Shell], progress: Callable[[int, int, str], None] | None
) -> tuple[dict[str, Frozen], dict[str, int], dict[str, int]]:
    """Frozen modules by name, and of each the bytes on disk and the bytes of its arrays.

    Args:
      shells: modules without numbers, by name.
      progress: as in :func:`jaxdraft.load`, over all of them together.
    """
    stored = {name: stored_bytes(shell.recipes) for name, shell in shells.items()}
    weights = {
        name: sum(leaf.size * leaf.dtype.itemsize for leaf in shell.wanted.values())
        for name, shell in shells.items()
    }
    recipes = [recipe for shell in shells.values() for recipe in shell.recipes.values()]
    total, so_far = sum(recipe.nbytes for recipe in recipes), 0

    def done(nbytes: int, label: str) -> None:
        nonlocal so_far
        so_far += nbytes
        if progress is not None:
            progress(so_far, total, label)

    frozen = {
        name: fill(shell.structure, shell.wanted, shell.recipes, done)
        for name, shell in shells.items()
    }
    return frozen, stored, weights


def _dtype_name(dtype: DTypeLike) -> str:
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return str(dtype)


def _build(plan: Plan, progress: Callable[[int, int, str], None] | None) -> Loaded:
    config, target = plan.config, plan.target
    assert config is not None and target is not None and plan.target_shell is not None
    shells = {"target": plan.target_shell}
    if plan.drafter is not None:
        assert plan.drafter_shell is not None
        shells["drafter"] = plan.drafter_shell
    frozen, stored, weights = fill_shells(shells, progress)
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
