"""A loaded model: a target, perhaps a drafter, and what the artifact says about them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax import struct
from jax.typing import DTypeLike

from jaxdraft import guard
from jaxdraft.base import Drafter, Target, full_drafter
from jaxdraft.draft.fallback import FallbackDrafter
from jaxdraft.draft.ngram import NgramDrafter
from jaxdraft.draft.none import NoDrafter
from jaxdraft.kernels import choice
from jaxdraft.text import Text

EMBEDDED = Path(__file__).parent / "data" / "family"
"""The checkpoint that comes with the package: a small trained target and its three drafters."""

SMOLLM2_DRAFTER = Path(__file__).parent / "data" / "smollm2"
"""A trained DFlash2 drafter for SmolLM2-135M-Instruct; the target does not come with it."""


class LoadWarning(UserWarning):
    """A model was loaded, and not with everything that its files ask for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What is known about a model beside its arrays.

    Attributes:
      name: of the artifact's folder, for people.
      stop_ids: tokens that end a sequence.
      context_length: the longest sequence.
      drafter: kind of the drafter, or "none".
    """

    name: str = "model"
    stop_ids: tuple[int, ...] = ()
    context_length: int
    drafter: str = "none"


@struct.dataclass
class Model:
    """A target with its drafter. A pytree: pass it through ``jit`` like any array."""

    target: Target
    drafter: Drafter
    info: ModelInfo = struct.field(pytree_node=False)
    text: Text | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def of(
        cls,
        target: Target,
        drafter: Drafter | None = None,
        *,
        stop_ids: tuple[int, ...] = (),
        text: Text | None = None,
        name: str = "model",
    ) -> Model:
        """A model from a target and a drafter of your own.

        Args:
          target: anything that is a :class:`jaxdraft.base.Target`.
          drafter: anything that is a :class:`jaxdraft.base.Drafter`; none: plain decoding.
          stop_ids: tokens that end a sequence.
          text: tokenizer and chat template, for prompts that are strings.
          name: for people.

        Raises:
          ValueError: a member of the target or the drafter is missing.
        """
        info = ModelInfo(
            name=name,
            stop_ids=tuple(stop_ids),
            context_length=guard.check_target(target).context_length,
            drafter="none" if drafter is None else type(drafter).__name__,
        )
        own = NoDrafter() if drafter is None else guard.check_drafter(drafter)
        return cls(target, own, info, text)

    def choose(self, drafter: str | Drafter, draft_tokens: int | None = None) -> Drafter:
        """The drafter that a name means.

        Args:
          drafter: "auto", the model's own; its kind, as in ``info.drafter``; "ngram" and "none",
            which need no weights and always work; two of these with a plus between, "ngram+auto",
            for the second where the first is silent; or a drafter, which is what it is.
          draft_tokens: K, of a drafter that can have any ("ngram", "mtp"), or up to as many as its
            block has (DFlash2, DSpark). Default: its own.

        Raises:
          ValueError: there is no such drafter, or its K is fixed.
        """
        chosen = self._named(drafter) if isinstance(drafter, str) else drafter
        guard.check_drafter(chosen)
        if draft_tokens is None or draft_tokens == chosen.draft_tokens:
            return chosen
        if draft_tokens < 1:
            raise ValueError(f"draft_tokens is {draft_tokens}; expected at least 1")
        return full_drafter(chosen).with_draft_tokens(draft_tokens)

    def _named(self, name: str) -> Drafter:
        own = self.info.drafter
        first, plus, second = name.partition("+")
        if plus:
            return FallbackDrafter(self._named(first), self._named(second))
        if name in ("auto", own):
            return self.drafter
        if name == "none":
            return NoDrafter()
        if name == "ngram":
            return NgramDrafter()
        raise ValueError(
            f"drafter {name!r} is not here: this model has "
            + (f"{own!r}" if own != "none" else "no drafter of its own")
            + "; 'auto', 'none' and 'ngram' always work, and two with a plus between"
        )


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
        comes with this package (:data:`SMOLLM2_DRAFTER`); "none": none is read, whatever there is.
        Default: the first there is of DFlash2, DSpark and MTP. An artifact has one at most.
      kernels: "xla", or "pallas" for GPU kernels that nobody has run on a GPU yet; see
        :mod:`jaxdraft.kernels`. Default: what ``JAXDRAFT_KERNELS`` says, or else "xla".
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
    # The converter depends on this package, not the reverse.
    from convert import load_artifact
    from convert.checkpoint.folders import is_checkpoint, load_checkpoint

    kernels = choice.check(kernels)
    if packed and blocked:
        raise ValueError("packed and blocked are True; expected one of them at most")
    if is_checkpoint(folder):
        if packed:
            raise ValueError(
                "packed is True; only the matrices of an ONNX artifact stay packed, a "
                "checkpoint's become floats"
            )
        loaded = load_checkpoint(folder, drafter=drafter, dtype=dtype, progress=progress)
        name = Path(folder).resolve().name
        _warn(loaded, folder)
        model = assemble(loaded, loaded.folder, name=name, blocked=blocked)
        return choice.apply(model, kernels)
    loaded = load_artifact(folder, drafter=drafter, dtype=dtype, packed=packed, progress=progress)
    _warn(loaded, folder)
    return choice.apply(assemble(loaded, Path(folder), blocked=blocked), kernels)


def _warn(loaded: Any, folder: str | Path) -> None:
    """Warn once about what the files ask for and do not get."""
    if loaded.warnings:
        lines = "".join(f"\n  {text}" for text in loaded.warnings)
        warnings.warn(f"{folder} asks for what it does not get:{lines}", LoadWarning, stacklevel=3)


def assemble(loaded: Any, folder: Path, *, name: str | None = None, blocked: bool = False) -> Model:
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
    if loaded.drafter is not None:
        shared = dict(
            embedding=embedding,
            head=head,
            config=loaded.drafter_config,
            dtype=jax.tree.leaves(loaded.drafter.params["norm"])[0].dtype,
        )
        drafter = KINDS[loaded.drafter_kind].make(loaded.drafter, **shared)
    text = Text.from_folder(folder) if (folder / "tokenizer.json").exists() else None
    info = ModelInfo(
        name=name or folder.resolve().name,
        stop_ids=tuple(loaded.eos_token_ids),
        context_length=loaded.context_length,
        drafter=loaded.drafter_kind or "none",
    )
    return Model(target, drafter, info, text)
