"""The reading half of jaxdraft: artifacts of onnxruntime-genai's model builder, and checkpoints.

:mod:`jaxdraft.load` is its only user; the writing half is :mod:`jaxdraft.checkpoint`. Two wings
stand on common ground. ``convert.artifact`` reads ONNX graphs, ``convert.checkpoint`` reads
``config.json`` and safetensors. This module is the door to both: a wing is imported when a folder
needs it, so that reading a checkpoint does not import ``onnx``.

The converter is strict. It accounts for every node, attribute and initializer of a graph, for every
tensor of a checkpoint, and for every key of a configuration. What it does not implement is an
:class:`ArtifactError` that names the file and the place, and shows what was found and what was
expected. What changes nothing is listed with its reason in :mod:`convert.unused`; everything else
that has no effect is reported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.typing import DTypeLike

from convert.build import Loaded
from convert.errors import ArtifactError
from convert.paths import is_checkpoint
from convert.report import Report
from jaxdraft.config import DrafterKind

if TYPE_CHECKING:
    from convert.artifact.inspect import inspect_artifact as inspect_artifact
    from convert.artifact.load import load_artifact as load_artifact
    from convert.checkpoint.inspect import inspect_checkpoint as inspect_checkpoint
    from convert.checkpoint.load import load_checkpoint as load_checkpoint

__all__ = [
    "ArtifactError",
    "Loaded",
    "Report",
    "drafter_kinds",
    "inspect_folder",
    "is_checkpoint",
    "load_folder",
]

_LAZY = {
    "inspect_artifact": "convert.artifact.inspect",
    "inspect_checkpoint": "convert.checkpoint.inspect",
    "load_artifact": "convert.artifact.load",
    "load_checkpoint": "convert.checkpoint.load",
}
"""Functions of one wing, and the modules that are imported when one is first used."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'convert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def load_folder(
    folder: str | Path,
    *,
    drafter: str | Path | None = None,
    dtype: DTypeLike | None = None,
    packed: bool = False,
    context_length: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Loaded:
    """Read an artifact or a checkpoint, whichever ``folder`` holds.

    Args:
      folder: as in :func:`jaxdraft.load`.
      drafter: likewise.
      dtype: likewise.
      packed: likewise.
      context_length: likewise; a checkpoint's alone can be chosen.
      progress: likewise.

    Raises:
      ArtifactError: with every problem found.
      FileNotFoundError: there is no such folder.
      ValueError: an argument that this kind of folder has no use for.
    """
    options: dict[str, Any] = dict(drafter=drafter, dtype=dtype, packed=packed, progress=progress)
    if not is_checkpoint(folder):
        from convert.artifact.load import load_artifact

        if context_length is not None:
            raise ValueError(
                f"context_length is {context_length}; an ONNX artifact has the tables of its own"
            )
        return load_artifact(folder, **options)
    from convert.checkpoint.load import load_checkpoint

    return load_checkpoint(folder, context_length=context_length, **options)


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
    if is_checkpoint(folder):
        from convert.checkpoint.inspect import inspect_checkpoint

        return inspect_checkpoint(folder, drafter)
    from convert.artifact.inspect import inspect_artifact

    return inspect_artifact(folder, drafter)


def drafter_kinds(folder: str | Path) -> tuple[DrafterKind, ...]:
    """Return the kinds of all drafters of a checkpoint; an artifact has none to choose from.

    Args:
      folder: as in :func:`jaxdraft.load`.

    Raises:
      ArtifactError: the target is not as it should be.
    """
    if not is_checkpoint(folder):
        return ()
    from convert.checkpoint.plan import plan_checkpoint

    plan = plan_checkpoint(Path(folder), "none")
    plan.files.close()
    plan.problems.raise_any()
    return plan.drafters
