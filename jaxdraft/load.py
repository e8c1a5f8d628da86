"""Folders and names of the hub -> models.

The one module that imports the reading half, ``convert``, and lazily.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.typing import DTypeLike

from jaxdraft.base import Drafter
from jaxdraft.config import DRAFT_MODEL
from jaxdraft.draft.none import NoDrafter
from jaxdraft.kernels import XLA
from jaxdraft.model import Model, ModelInfo
from jaxdraft.nn import choice
from jaxdraft.sharding.placement import AnyMesh, Placement, ShardingError
from jaxdraft.text import Text, shared_tokens

if TYPE_CHECKING:
    import convert
    from convert.gguf.text import GgufText


class LoadWarning(UserWarning):
    """Warning that a model was loaded without applying all settings of its files."""


def load(
    folder: str | Path,
    *,
    dtype: DTypeLike | None = None,
    packed: bool | None = None,
    blocked: bool = False,
    drafter: str | Path | Model | None = None,
    revision: str | None = None,
    adapter: str | Path | None = None,
    kernels: str | None = None,
    context_length: int | None = None,
    mesh: AnyMesh | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Model:
    """Read an artifact of onnxruntime-genai's model builder, or a checkpoint.

    Everything is checked before any array is allocated: the configuration, both graphs node by
    node or every tensor of the checkpoint, file sizes, and the consistency of target and drafter.

    Args:
      folder: an artifact holds ``genai_config.json``, ``model.onnx``, perhaps a drafter, perhaps a
        tokenizer. A checkpoint holds ``config.json`` and safetensors of a target, or a folder
        ``target`` that does, with block drafters in folders ``dflash2`` and ``dspark``; see
        :func:`jaxdraft.checkpoint.save`. A name like ``"Qwen/Qwen3-4B"`` that is nothing local is
        a repository of the Hugging Face hub; see :func:`locate`.
      dtype: type of the weights and activations. Default: the artifact's own.
      packed: whether to keep quantized matrices packed and dequantize them inside every product,
        to the same numbers; see :mod:`jaxdraft.nn.packed`. Of a checkpoint, head, embedding and
        experts stay packed, too, where the files quantize them. Of an artifact these are
        dequantized on load. Default: False, but experts in MXFP4 (gpt-oss) stay packed.
      blocked: whether to keep the target's matrices in blocks, too, which takes twice the memory.
        On CPUs it makes windows of two to six rows (one request with one to five drafts) cheaper:
        up to five rows cost little more than one. See
        :class:`jaxdraft.nn.linear.BlockedLinear`.
      drafter: drafter of a checkpoint: its kind, its folder, or the name of its repository;
        "smollm2" for the one that comes with this package (:data:`jaxdraft.SMOLLM2_DRAFTER`);
        "none" to read no drafter. Also a small language model with the same tokens: its folder, its
        GGUF file, its repository, or a model that was loaded. Default: the first kind that the
        checkpoint has; an artifact has at most one.
      revision: branch, tag or commit of a repository. Default: the part of ``folder`` after an
        ``@``, else ``main``.
      adapter: LoRA adapter of a checkpoint's target in PEFT's layout: its folder, or the name of
        its repository. It is merged into the matrices that it adapts, in float32 and rounded once.
        Those become floats, with ``packed``, too.
      kernels: "xla", or "pallas" for kernels that were compiled for GPUs but never run on one; see
        :mod:`jaxdraft.kernels`. Default: the environment variable ``JAXDRAFT_KERNELS``, or "xla".
      context_length: maximum length of a sequence, for which a checkpoint's rotary tables are made:
        at most ``max_position_embeddings``, the default. LongRoPE has other factors for long texts
        than for short ones: its default is the length that the short ones serve, and a greater
        ``context_length`` chooses the long ones, for all positions. An artifact has its tables.
      mesh: devices to divide the model over, along the axes "data" and "model"; or the sizes of
        these, like ``{"model": 2}`` or ``"model=2"``; or a :class:`jaxdraft.Placement` if the axes
        have other names. Arrays are read one at a time, and every device gets its slice. See
        :func:`jaxdraft.shard`.
      progress: function called with (bytes done, total bytes, name of the current item).

    Returns:
      The model, on JAX's default device or on the mesh.

    Raises:
      ArtifactError: a ``ValueError`` with the file, the tensor, node or key, the value found and
        the value expected.
      HubError: a ``ValueError``; a repository cannot be had.
      ShardingError: a ``ValueError``; the mesh has other axes.
      ValueError: an argument that does not apply to this kind of folder or device.

    Warns:
      LoadWarning: settings of the files are unknown or not applied, or tensors of a drafter are
        missing. One warning lists all of them.
    """
    from convert import load_folder

    kernels = choice.check(kernels)
    if packed and blocked:
        raise ValueError("packed and blocked are True; expected one of them at most")
    placement = _placement(mesh, kernels, blocked)
    home, small = locate(folder, revision), drafter if isinstance(drafter, Model) else None
    drafter = locate_drafter("none" if isinstance(drafter, Model) else drafter)
    beside = _draft_model(home, drafter)
    if beside is not None:
        _check_tokens(home, beside)
        drafter = "none"
    name = Path(folder).resolve().name if Path(folder).exists() else str(folder)
    loaded = load_folder(
        home,
        drafter=drafter,
        dtype=dtype,
        packed=packed,
        adapter=None if adapter is None else locate(adapter),
        context_length=context_length,
        progress=progress,
        placement=placement,
    )
    _warn(loaded, folder)
    model = assemble(loaded, loaded.folder, name=name, blocked=blocked, placement=placement)
    if beside is not None:
        small = load(
            beside, dtype=dtype, packed=packed, drafter="none", mesh=placement, progress=progress
        )
        if small.text is None:  # compared already
            small = dataclasses.replace(small, text=model.text)
    if small is not None:
        model = model.with_draft_model(small)
    return model if placement is not None else choice.apply(model, kernels)


def _placement(mesh: AnyMesh | None, kernels: str, blocked: bool) -> Placement | None:
    """Return the placement on a mesh, checked against other arguments of :func:`load`."""
    if mesh is None:
        return None
    if blocked:
        raise ShardingError("blocked is True; blocks are for one CPU: expected no mesh")
    if kernels != XLA:
        raise ShardingError(
            f"kernels is {kernels!r}; on a mesh XLA divides the programs, and kernels cannot be "
            f"divided: expected {XLA!r}"
        )
    return Placement.like(mesh)


def _draft_model(home: Path, drafter: str | Path | None) -> Path | None:
    """Return the path of the language model that is to draft, if one is.

    Without a choice it is the one in the target's folder, if there is no other drafter.
    """
    from convert import draft_model

    if drafter is not None:
        return draft_model.draft_model_folder(home, drafter)
    found = draft_model.beside(home)
    return None if found is None or drafter_kinds(home) != (DRAFT_MODEL,) else found


def _check_tokens(home: Path, beside: Path) -> None:
    """Check that a model and its draft model have the same tokens, before their weights are read.

    Raises:
      ValueError: they have not. Other faults of the files are left to the reading.
    """
    from convert import inspect_folder

    reports = [inspect_folder(path, "none") for path in (home, beside)]
    if not any(report.problems for report in reports):
        _compare_tokens(home, beside, *reports)


def _compare_tokens(
    home: Path, beside: Path, target: convert.Report, small: convert.Report
) -> None:
    """Compare the vocabularies of a model and its draft model, of which there are reports.

    Raises:
      ValueError: they differ.
    """
    from convert.draft_model import beside as saved_beside

    ours, theirs = _text_of(home), _text_of(beside)
    if theirs is None and saved_beside(home) == beside:
        theirs = ours  # saved together, with one tokenizer
    sizes = []
    for part in (target.target, small.target):
        assert part is not None and part.config is not None
        sizes.append(part.config.vocab_size)
    shared_tokens((sizes[0], ours), (sizes[1], theirs))


def locate(name: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the local path of a model, downloaded from the Hugging Face hub if need be.

    ``"owner/name"`` is a repository, ``"owner/name@revision"`` a branch, tag or commit of it, and
    ``"owner/name/file.gguf"`` a file of it. Something local of the same spelling comes first.

    Downloads need ``huggingface_hub`` (``pip install "jaxdraft[hub]"``). They show progress bars
    and fill its cache, of which the environment variables ``HF_HUB_CACHE`` and ``HF_HOME`` name the
    folder. Only the needed files are downloaded. Every call looks for a newer commit of the
    revision, unless the revision is a commit, or ``HF_HUB_OFFLINE=1``. A complete snapshot in the
    cache is read without the package and without a network.

    Args:
      name: a folder, a file, or the name of a repository.
      revision: branch, tag or commit. Default: as in ``name``, else ``main``.
      weights: whether weights are needed; without, a few small files are enough.

    Returns:
      A folder or a GGUF file. It may not exist if ``name`` is of another form.

    Raises:
      HubError: a ``ValueError``; the repository is not in the cache and cannot be downloaded, or
        has nothing that this package reads.
      ValueError: a revision of something local.
    """
    from convert.hub import locate

    return locate(name, revision, weights=weights)


def locate_drafter(drafter: str | Path | None) -> str | Path | None:
    """Return a drafter as the reader takes it: a repository becomes its local folder.

    Args:
      drafter: as in :func:`load`.

    Raises:
      HubError: as :func:`locate`.
    """
    return locate(drafter) if isinstance(drafter, str) and "/" in drafter else drafter


def inspect(
    folder: str | Path, drafter: str | Path | None = None, *, revision: str | None = None
) -> convert.Report:
    """Read everything about an artifact or a checkpoint except its weights.

    Faults of the files do not raise: the report lists them, together with all settings that would
    have no effect.

    Args:
      folder: as in :func:`load`. The target's weights are not downloaded.
      drafter: as in :func:`load`.
      revision: as in :func:`load`.

    Raises:
      FileNotFoundError: there is no such folder.
      HubError: a ``ValueError``; a repository cannot be had.
      ValueError: there is no such drafter.
    """
    from convert import ArtifactError, inspect_folder

    home, drafter = locate(folder, revision, weights=False), locate_drafter(drafter)
    beside = _draft_model(home, drafter)
    if beside is None:
        return inspect_folder(home, drafter)
    report, small = inspect_folder(home, "none"), inspect_folder(beside, "none")
    problems = [*report.problems, *small.problems]
    if not problems:
        try:
            _compare_tokens(home, beside, report, small)
        except ValueError as error:
            problems.append(ArtifactError(beside.name, "tokens", str(error), "the target's"))
    part = small.target
    if part is not None:
        part = dataclasses.replace(part, kind=DRAFT_MODEL, file=f"{beside.name}/{part.file}")
    notes = [*report.notes, *(f"{beside.name}/{note}" for note in small.notes)]
    return dataclasses.replace(report, drafter=part, problems=tuple(problems), notes=tuple(notes))


def drafter_kinds(folder: str | Path, *, revision: str | None = None) -> tuple[str, ...]:
    """Return the kinds of all drafters of a checkpoint; an artifact has none to choose from.

    Args:
      folder: as in :func:`load`.
      revision: as in :func:`load`.

    Raises:
      ArtifactError: the target is invalid.
    """
    from convert import draft_model, drafter_kinds

    home = locate(folder, revision)
    found = drafter_kinds(home)
    return found if draft_model.beside(home) is None else (*found, DRAFT_MODEL)


def _warn(loaded: convert.Loaded, folder: str | Path) -> None:
    """Warn once about all settings of the files that are not applied."""
    if loaded.warnings:
        lines = "".join(f"\n  {text}" for text in loaded.warnings)
        warnings.warn(
            f"{folder} has settings that are not applied:{lines}", LoadWarning, stacklevel=3
        )


def _text_of(folder: Path) -> Text | None:
    """Return the tokenizer of a GGUF file or a folder, or of the target in it, if there is one."""
    from convert.paths import is_gguf
    from jaxdraft.checkpoint.layout import TARGET

    if is_gguf(folder):
        from convert.gguf.tokenizer import text_of

        found = text_of(folder)
        return None if found is None else _wrapped(found, folder)
    homes = [home for home in (folder, folder / TARGET) if (home / "tokenizer.json").exists()]
    return Text.from_folder(homes[0]) if homes else None


def _wrapped(found: GgufText, path: Path) -> Text:
    """Return the tokenizer in a GGUF file."""
    return Text(
        tokenizer=found.tokenizer,
        chat_template=found.chat_template,
        special_tokens=found.special_tokens,
        source=str(path),
    )


def assemble(
    loaded: convert.Loaded,
    folder: Path,
    *,
    name: str | None = None,
    blocked: bool = False,
    placement: Placement | None = None,
) -> Model:
    """Return the model for the converter's result.

    Args:
      loaded: a ``convert.Loaded``.
      folder: folder of the tokenizer.
      name: name for display. Default: that of ``folder``.
      blocked: see :func:`load`.
      placement: the mesh that the arrays lie on, if there is one.
    """
    from jaxdraft.kinds import KINDS
    from jaxdraft.target import DecoderTarget

    decoder = loaded.target
    tables = decoder()
    embedding, head = tables.embed.table, tables.head_weight
    copied = _copied(placement)
    config = copied(loaded.target_config)
    target = DecoderTarget(decoder, config, embedding.dtype, placement)
    if blocked:
        target = target.blocked()
    drafter: Drafter = NoDrafter()
    if loaded.drafter is not None and loaded.drafter_kind is not None:
        own: Any = loaded.drafter
        shared: dict[str, Any] = dict(
            embedding=embedding,
            head=head,
            config=copied(loaded.drafter_config),
            dtype=jax.tree.leaves(own.params["norm"])[0].dtype,
        )
        drafter = KINDS[loaded.drafter_kind].make(own, **shared)
        if placement is not None:
            drafter = _placed_head(drafter, head, placement)
    text = _text_of(folder) if loaded.text is None else _wrapped(loaded.text, folder)
    info = ModelInfo(
        name=name or folder.resolve().name,
        stop_ids=tuple(loaded.eos_token_ids),
        context_length=loaded.context_length,
        drafter=loaded.drafter_kind or "none",
    )
    return Model(target, drafter, info, text)


def _copied(placement: Placement | None) -> Callable[[Any], Any]:
    """Return a function from descriptions to those with key/value heads copied for the mesh."""
    if placement is None:
        return lambda config: config
    from jaxdraft.sharding.rules import with_copies

    return functools.partial(with_copies, parts=placement.parts)


def _placed_head(drafter: Any, head: Any, placement: Placement) -> Any:
    """Divide a drafter's rows of the target's head, if it has rows of its own."""
    own = vars(drafter).get("head", head)
    if own is head:
        return drafter
    from jaxdraft.sharding.place import replaced_head

    return dataclasses.replace(drafter, head=replaced_head(own, placement))
