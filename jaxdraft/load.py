"""Folders -> models: the one module that imports the reading half, ``convert``, and lazily."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.typing import DTypeLike

from jaxdraft.base import Drafter
from jaxdraft.config import DrafterKind
from jaxdraft.draft.none import NoDrafter
from jaxdraft.model import Model, ModelInfo
from jaxdraft.nn import choice
from jaxdraft.text import Text

if TYPE_CHECKING:
    import convert


class LoadWarning(UserWarning):
    """A model was loaded, and not with everything that its files ask for."""


def load(
    folder: str | Path,
    *,
    dtype: DTypeLike | None = None,
    packed: bool = False,
    blocked: bool = False,
    drafter: str | Path | None = None,
    kernels: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Model:
    """Read an artifact of onnxruntime-genai's model builder, or a checkpoint.

    Everything is checked before any array is allocated: the configuration, both graphs node by
    node or every tensor of the checkpoint, file sizes, and what target and drafter must agree on.

    Args:
      folder: an artifact holds ``genai_config.json``, ``model.onnx``, perhaps a drafter, perhaps a
        tokenizer. A checkpoint holds ``config.json`` and safetensors of a target, or a folder
        ``target`` that does, with block drafters in folders ``dflash2`` and ``dspark``; see
        :func:`jaxdraft.checkpoint.save`.
      dtype: of the weights and activations; default: the artifact's own.
      packed: keep the matrices of MatMulNBits packed in memory and dequantize them inside every
        product, to the same numbers. Head, embedding and experts are dequantized on load always,
        and so is every matrix of a checkpoint.
      blocked: keep the target's matrices in blocks, too, which takes twice the memory. On CPUs
        windows of two to six rows, which is to say one request with one to five drafts, cost less
        then, and up to five rows little more than one. See
        :class:`jaxdraft.nn.linear.BlockedLinear`.
      drafter: which drafter of a checkpoint: its kind, or its folder; "smollm2" for the one that
        comes with this package (:data:`jaxdraft.SMOLLM2_DRAFTER`); "none": none is read, whatever
        there is. Default: the first there is of DFlash2, DSpark and MTP. An artifact has one at
        most.
      kernels: "xla", or "pallas" for kernels that were compiled for GPUs but never run on one; see
        :mod:`jaxdraft.kernels`. Default: the environment variable ``JAXDRAFT_KERNELS``, or "xla".
      progress: called with (bytes done, bytes in all, what is being read).

    Returns:
      The model, on JAX's default device.

    Raises:
      ArtifactError: a ``ValueError`` that names the file and the tensor, node or key, and says what
        was found and what was expected.
      ValueError: an argument that this kind of folder or device has no use for.

    Warns:
      LoadWarning: the files ask for what they do not get: settings that are not applied or not
        known, a drafter whose tensors are missing. Once, with all of them.
    """
    from convert import load_folder

    kernels = choice.check(kernels)
    if packed and blocked:
        raise ValueError("packed and blocked are True; expected one of them at most")
    loaded = load_folder(folder, drafter=drafter, dtype=dtype, packed=packed, progress=progress)
    _warn(loaded, folder)
    model = assemble(loaded, loaded.folder, name=Path(folder).resolve().name, blocked=blocked)
    return choice.apply(model, kernels)


def inspect(folder: str | Path, drafter: str | Path | None = None) -> convert.Report:
    """Read everything about an artifact or a checkpoint but its weights.

    Nothing that is wrong with the files raises: the report lists it, and everything that would have
    no effect.

    Args:
      folder: as in :func:`load`.
      drafter: likewise.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: there is no such drafter.
    """
    from convert import inspect_folder

    return inspect_folder(folder, drafter)


def drafter_kinds(folder: str | Path) -> tuple[DrafterKind, ...]:
    """Return the kinds of all drafters of a checkpoint; an artifact has none to choose from.

    Args:
      folder: as in :func:`load`.

    Raises:
      ArtifactError: the target is not as it should be.
    """
    from convert import drafter_kinds

    return drafter_kinds(folder)


def _warn(loaded: convert.Loaded, folder: str | Path) -> None:
    """Warn once about what the files ask for and do not get."""
    if loaded.warnings:
        lines = "".join(f"\n  {text}" for text in loaded.warnings)
        warnings.warn(f"{folder} asks for what it does not get:{lines}", LoadWarning, stacklevel=3)


def assemble(
    loaded: convert.Loaded, folder: Path, *, name: str | None = None, blocked: bool = False
) -> Model:
    """The model of what the converter read.

    Args:
      loaded: a ``convert.Loaded``.
      folder: where the tokenizer is.
      name: for people; default: that of ``folder``.
      blocked: see :func:`load`.
    """
    from jaxdraft.kinds import KINDS
    from jaxdraft.nn.decoder import DecoderTarget

    decoder = loaded.target
    params = decoder.params
    embedding = params["embed"]["weight"]
    head = embedding if loaded.target_config.tied else params["head"]["weight"]
    target = DecoderTarget(decoder, loaded.target_config, embedding.dtype)
    if blocked:
        target = target.blocked()
    drafter: Drafter = NoDrafter()
    if loaded.drafter is not None and loaded.drafter_kind is not None:
        own: Any = loaded.drafter
        shared: dict[str, Any] = dict(
            embedding=embedding,
            head=head,
            config=loaded.drafter_config,
            dtype=jax.tree.leaves(own.params["norm"])[0].dtype,
        )
        drafter = KINDS[loaded.drafter_kind].make(own, **shared)
    text = Text.from_folder(folder) if (folder / "tokenizer.json").exists() else None
    info = ModelInfo(
        name=name or folder.resolve().name,
        stop_ids=tuple(loaded.eos_token_ids),
        context_length=loaded.context_length,
        drafter=loaded.drafter_kind or "none",
    )
    return Model(target, drafter, info, text)
