"""The reading half of jaxdraft: artifacts of onnxruntime-genai's model builder, and checkpoints.

:mod:`jaxdraft.load` is its only user; the writing half is :mod:`jaxdraft.checkpoint`. Two
packages share its modules. ``convert.artifact`` reads ONNX graphs, ``convert.checkpoint`` reads
``config.json`` and safetensors. This module is the entry to both: a package is imported when a
folder needs it, so that reading a checkpoint does not import ``onnx``.

The converter is strict. It accounts for every node, attribute and initializer of a graph, for every
tensor of a checkpoint, and for every key of a configuration. Anything not
implemented raises an :class:`ArtifactError` with the file, the place, the value found and the value
expected. Harmless entries are listed with a reason in :mod:`convert.unused`; all others without
effect are reported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.typing import DTypeLike

from convert.build import Loaded
from convert.errors import ArtifactError
from convert.paths import ADAPTER_CONFIG, is_checkpoint
from convert.report import Report
from jaxdraft.config import DrafterKind

if TYPE_CHECKING:
    from convert.artifact.inspect import inspect_artifact as inspect_artifact
    from convert.artifact.load import load_artifact as load_artifact
    from convert.checkpoint.inspect import inspect_checkpoint as inspect_checkpoint
    from convert.checkpoint.load import load_checkpoint as load_checkpoint
    from jaxdraft.sharding.placement import Placement

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
"""Functions of one package, and the modules that their first use imports."""


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
    packed: bool | None = None,
    adapter: str | Path | None = None,
    context_length: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    placement: Placement | None = None,
) -> Loaded:
    """Read the artifact or the checkpoint in ``folder``.

    Args:
      folder: as in :func:`jaxdraft.load`.
      drafter: likewise.
      dtype: likewise.
      packed: likewise.
      adapter: likewise; only for checkpoints.
      context_length: likewise; only for checkpoints.
      progress: likewise.
      placement: the mesh that the arrays are divided over; None: JAX's default device.

    Raises:
      ArtifactError: with every problem found.
      FileNotFoundError: there is no such folder.
      ValueError: an argument does not apply to this kind of folder.
    """
    options: dict[str, Any] = dict(
        drafter=drafter, dtype=dtype, progress=progress, placement=placement
    )
    if not is_checkpoint(folder):
        from convert.artifact.load import load_artifact

        if (Path(folder) / ADAPTER_CONFIG).is_file():
            raise ArtifactError(
                Path(folder).name,
                ADAPTER_CONFIG,
                "an adapter",
                "its base, as in load(BASE, adapter=FOLDER)",
            )

        if context_length is not None:
            raise ValueError(
                f"context_length is {context_length}; an ONNX artifact has the tables of its own"
            )
        if adapter is not None:
            raise ValueError(f"adapter is {str(adapter)!r}; an ONNX artifact takes none")
        return load_artifact(folder, packed=bool(packed), **options)
    from convert.checkpoint.load import load_checkpoint

    options |= dict(context_length=context_length, packed=packed, adapter=adapter)
    return load_checkpoint(folder, **options)


def inspect_folder(folder: str | Path, drafter: str | Path | None = None) -> Report:
    """Read everything about an artifact or a checkpoint but its weights.

    Never raises for an invalid folder: the report lists the problems.

    Args:
      folder: as in :func:`jaxdraft.load`.
      drafter: drafter of a checkpoint, as in :func:`jaxdraft.load`.

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
    """Return the kinds of all drafters of a checkpoint; empty for an artifact.

    Args:
      folder: as in :func:`jaxdraft.load`.

    Raises:
      ArtifactError: the target is invalid.
    """
    if not is_checkpoint(folder):
        return ()
    from convert.checkpoint.plan import plan_checkpoint

    plan = plan_checkpoint(Path(folder), "none")
    plan.files.close()
    plan.problems.raise_any()
    return plan.drafters
