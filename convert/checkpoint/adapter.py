"""LoRA adapters in the layout of PEFT, merged into a target's matrices as they are read.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors``. For a matrix W [out, in]
of the target, ``base_model.model.X.lora_A.weight`` is A [r, in] and ``...lora_B.weight`` is B
[out, r], and the merged matrix is ``W + s * B @ A`` with ``s = lora_alpha / r``, or
``lora_alpha / sqrt(r)`` with ``use_rslora``. For an embedding, ``lora_embedding_A`` [r, V] and
``lora_embedding_B`` [D, r] add the transpose. Modules of ``modules_to_save`` are stored whole and
take the place of the target's. So does ``X.base_layer.weight``, the matrix that a change is added
to: PEFT stores it for embeddings.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from convert.checkpoint.section import ModelSection
from convert.checkpoint.shards import read_file
from convert.errors import ArtifactError, Problems
from convert.json_reader import Section, read_json
from convert.paths import ADAPTER_CONFIG as CONFIG
from convert.recipes import Piece, as_float32, convert_into
from convert.tensors import FLOATS, Array, DataFiles, Tensor
from convert.unused import Remarks
from jaxdraft.checkpoint.layout import Entry

T = TypeVar("T")

WEIGHTS = "adapter_model.safetensors"

_PREFIX = "base_model.model."

_BASE = ".base_layer.weight"

_FACTOR = re.compile(r"(.*)\.lora_(embedding_)?([AB])(?:\.weight)?")

_HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "inference_mode",
    "layer_replication",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_config",
    "megatron_core",
    "modules_to_save",
    "peft_version",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "ensure_weight_tying",
}
"""Settings without effect: the tensors show which modules are adapted, and the rest is training."""

_VARIANTS = ("kasa_config", "monteclora_config")
"""Settings of variants with another formula."""

_RESIDUAL = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the matrices of the base, so that the adapter is for another base."""


@dataclasses.dataclass(frozen=True)
class Delta:
    """A change of a matrix: ``scale * B @ A``, transposed for an embedding.

    Attributes:
      a, b: the factors.
      scale: s.
      transposed: whether the change is the transpose of the product.
    """

    a: Tensor
    b: Tensor
    scale: float
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the change."""
        rows, columns = self.b.shape[0], self.a.shape[1]
        return (columns, rows) if self.transposed else (rows, columns)

    def rows(self, start: int, stop: int) -> Array:
        """Return some rows of the change, float32."""
        a, b = as_float32(self.a.read()), as_float32(self.b.read())
        if self.transposed:
            a, b = b.T, a.T
        return np.float32(self.scale) * (b[start:stop] @ a)


@dataclasses.dataclass(frozen=True)
class Merged:
    """A matrix with a change added, rounded once from float32."""

    piece: Piece
    delta: Delta

    @property
    def shape(self) -> tuple[int, ...]:
        return self.piece.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.piece.tensors, self.delta.a, self.delta.b)

    def write(self, out: Array) -> None:
        wide = np.empty(self.shape, np.float32)
        self.piece.write(wide)
        wide += self.delta.rows(0, len(wide))
        convert_into(out, wide)


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter, checked against a target.

    Attributes:
      deltas: changes of matrices, by the name of the matrix.
      whole: tensors that take the place of the target's.
    """

    deltas: Mapping[str, Delta]
    whole: Mapping[str, Tensor]


def read_adapter(
    folder: Path, layout: Sequence[Entry], files: DataFiles, remarks: Remarks
) -> Adapter:
    """Read an adapter for a target.

    Args:
      folder: the adapter's folder.
      layout: parameters of the target.
      files: owner of the maps.
      remarks: destination of remarks, which do not prevent loading.

    Raises:
      ArtifactError: with every problem found.
    """
    problems = Problems()
    if not (folder / CONFIG).is_file():
        raise ArtifactError(str(folder), "adapter", f"no {CONFIG}", "a folder written by PEFT")
    if not (folder / WEIGHTS).is_file():
        older = (folder / "adapter_model.bin").is_file()
        found = "adapter_model.bin, which can hold programs" if older else f"no {WEIGHTS}"
        raise ArtifactError(str(folder), "adapter", found, f"{WEIGHTS}; PEFT converts to it")
    section = ModelSection(read_json(folder, CONFIG), CONFIG, "", problems, remarks)
    scale = _scales(section)
    tensors = read_file(folder, WEIGHTS, files)
    wanted = {part.name: part.shape for entry in layout for part in entry.tensors}
    factors, whole = _parts(tensors, wanted, problems)
    deltas = {}
    for name, parts in factors.items():
        if (delta := _delta(name, parts, wanted.get(name), scale, problems)) is not None:
            deltas[name] = delta
    if not deltas and not whole and not problems:
        problems.report(WEIGHTS, "tensors", "nothing", "at least one adapted matrix")
    problems.raise_any()
    remarks.note(WEIGHTS, f"{len(deltas)} matrices are merged with the adapter {folder.name}")
    return Adapter(deltas, whole)


def _parts(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], problems: Problems
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Return the factors of each matrix and the tensors that are stored whole."""
    factors: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        inner, where = name.removeprefix(_PREFIX), f"tensor {name}"
        found = _FACTOR.fullmatch(inner)
        if inner.endswith(_BASE):
            inner = inner.removesuffix(_BASE) + ".weight"
        if tensor.data_type not in FLOATS:
            problems.report(WEIGHTS, where, tensor.type_name, "FLOAT or FLOAT16 or BFLOAT16")
        elif found is not None:
            part = factors.setdefault(f"{found[1]}.weight", {})
            if found[3] in part:
                problems.report(WEIGHTS, where, "a second tensor", f"one, {part[found[3]].name}")
            part[found[3]] = tensor
            if found[2]:
                part["embedding"] = tensor
        elif inner not in wanted:
            problems.report(WEIGHTS, where, "a tensor", "lora_A, lora_B, or a tensor of the target")
        elif tensor.shape != wanted[inner]:
            shape = f"shape {list(tensor.shape)}"
            problems.report(WEIGHTS, where, shape, f"shape {list(wanted[inner])}")
        elif inner in whole:
            problems.report(WEIGHTS, where, "a second tensor", f"one, {whole[inner].name}")
        else:
            whole[inner] = tensor
    for name, tensor in whole.items():
        if tensor.name.endswith(_BASE) and name not in factors:
            problems.report(WEIGHTS, f"tensor {tensor.name}", "no lora_A and lora_B", "both")
    return factors, whole


def _delta(
    name: str,
    parts: Mapping[str, Tensor],
    shape: tuple[int, ...] | None,
    scale: _Scale,
    problems: Problems,
) -> Delta | None:
    """Return the change of one matrix, or report its problems."""
    where = f"lora_A and lora_B of {name.removesuffix('.weight')}"
    if not {"A", "B"} <= parts.keys():
        problems.report(WEIGHTS, where, f"{sorted(parts)} alone", "both")
        return None
    a, b, transposed = parts["A"], parts["B"], "embedding" in parts
    if shape is None or len(shape) != 2:
        problems.report(WEIGHTS, where, "an adapted module", "a matrix of the target")
        return None
    rows, columns = shape[::-1] if transposed else shape
    rank = a.shape[0] if a.shape else 0
    if a.shape != (rank, columns) or b.shape != (rows, rank) or not rank:
        found = f"shapes {list(a.shape)} and {list(b.shape)}"
        problems.report(WEIGHTS, where, found, f"[r, {columns}] and [{rows}, r]")
        return None
    wanted = scale.rank(name)
    if rank != wanted:
        problems.report(WEIGHTS, where, f"rank {rank}", f"{wanted}, as in {CONFIG}")
        return None
    return Delta(a, b, scale.of(name, rank), transposed)


@dataclasses.dataclass(frozen=True)
class _Scale:
    """Ranks and factors of an adapter."""

    r: int
    alpha: float
    root: bool
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]

    def rank(self, name: str) -> int:
        """Return r of a matrix."""
        return _matching(self.ranks, name, self.r)

    def of(self, name: str, rank: int) -> float:
        """Return the factor of a matrix's change."""
        alpha = float(_matching(self.alphas, name, self.alpha))
        return alpha / (math.sqrt(rank) if self.root else rank)


def _matching(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value whose pattern is the end of a module's name, as PEFT compares them."""
    module = name.removesuffix(".weight")
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _patterns(section: Section, key: str, read: Callable[[Section, str], T]) -> dict[str, T]:
    """Return the numbers of an object whose keys are regular expressions."""
    if not section.body.get(key):
        section.only(key, {})
        return {}
    inner = section.section(key)
    for pattern in inner.body:
        try:
            re.compile(pattern)
        except re.error as error:
            raise inner.fail(pattern, "a regular expression", str(error)) from error
    return {pattern: read(inner, pattern) for pattern in inner.body}


def _scales(section: Section) -> _Scale:
    """Read the settings; those that would change the formula must have the implemented value."""
    section.only("peft_type", "LORA")
    for key in ("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "use_bdlora"):
        section.only(key, False)
    for key in ("trainable_token_indices", "target_parameters", "alora_invocation_tokens"):
        section.only(key, [], {})
    for key in ("arrow_config", "layer_replication", "velora_config", *_VARIANTS):
        section.only(key)
    section.only("bias", "none")
    start = section.body.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_RESIDUAL):
        section.report("init_lora_weights", "one for the base as it is; PEFT converts to it")
    found = _Scale(
        section.integer("r"),
        section.number("lora_alpha"),
        section.flag("use_rslora"),
        _patterns(section, "rank_pattern", Section.integer),
        _patterns(section, "alpha_pattern", Section.number),
    )
    section.inert("qalora_group_size", "lora_ga_config")
    section.report_unread(_HARMLESS)
    return found
