"""Checkpoint folders (``config.json`` and safetensors) -> Flax modules, without ONNX.

As strict as the reading of artifacts: every tensor is accounted for, and everything is checked
before the first array is allocated. The numbers are those that exporting the same checkpoint in
float32 and converting the artifact gives (rotary tables of targets to the last place of float32).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from convert.artifact.genai_config import CONFIG as ARTIFACT
from convert.artifact.graph import FLOATS, INT8, INT32, INT64, DataFiles, Tensor, type_name
from convert.artifact.load import Loaded, fill_shells
from convert.artifact.parts import Recipes
from convert.artifact.plan import Shell
from convert.build import abstract, check, split
from convert.checkpoint.config import (
    CONFIG,
    BlockFacts,
    Quantized,
    TargetFacts,
    read_block,
    read_target,
)
from convert.checkpoint.shards import read_json, read_tensors, same_numbers
from convert.errors import ArtifactError, Problems
from convert.recipes import Dense, Piece, Plain, Recipe, convert_into
from convert.unused import (
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    Remarks,
    report_files,
    report_generation,
    report_tokenizer,
    stop_ids,
    unused_tensor,
)
from jaxdraft.checkpoint.files import INDEX, SINGLE
from jaxdraft.checkpoint.forms import (
    Form,
    decode,
    float_dtype,
    from_int4,
    from_int8,
    unpack_int4,
)
from jaxdraft.checkpoint.layout import (
    MTP,
    ROTARY,
    TARGET,
    VISION,
    Entry,
    Part,
    block_layout,
    is_matrix,
    mtp_layout,
    packed_of,
    scales_of,
    shape_of,
    target_layout,
)
from jaxdraft.config import DrafterConfig, DrafterKind, TargetConfig
from jaxdraft.model import SMOLLM2_DRAFTER
from jaxdraft.nn.decoder import Decoder
from jaxdraft.nn.dflash2 import DFlash2
from jaxdraft.nn.dspark import DSpark
from jaxdraft.nn.mtp import Mtp

GENERATION = "generation_config.json"
HEAD = "lm_head.weight"

_MODULES: Mapping[str, type[nnx.Module]] = {"dflash2": DFlash2, "dspark": DSpark, "mtp": Mtp}
_HEADS: Mapping[DrafterKind, str] = {"dflash2": "candidate_selector.", "dspark": "markov_head."}
"""What the names of the tensors begin with that only this kind of drafter has."""

INTEGERS: Mapping[Form, tuple[int, ...]] = {Form.OFFSETS: (INT64,)}
"""Forms that are no floats, and what they are stored in."""

SHIPPED = {"smollm2": SMOLLM2_DRAFTER}
"""Drafters that come with the package, for targets that do not."""

_NAMED = 20
"""Tensors that one message names."""

Array = np.ndarray
Tensors = Mapping[str, Tensor]
Tables = Callable[[], tuple[Array, Array]]


def is_checkpoint(folder: str | Path) -> bool:
    """Whether ``folder`` holds a checkpoint and no ONNX artifact."""
    folder = Path(folder)
    if (folder / ARTIFACT).exists():
        return False
    return (folder / CONFIG).is_file() or (folder / TARGET / CONFIG).is_file()


def load_checkpoint(
    folder: str | Path,
    *,
    drafter: str | Path | None = None,
    dtype: DTypeLike | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Loaded:
    """Read the checkpoint of a target, and of one of its drafters.

    Args:
      folder: holds ``config.json`` and ``model.safetensors`` (or shards and their index) of the
        target, or a folder ``target`` that does. Block drafters are looked for in folders
        ``dflash2`` and ``dspark`` beside or inside it; a multi-token-prediction head lies in the
        target's own files.
      drafter: "dflash2", "dspark", "mtp" or "none"; the folder of a block drafter; or the name of
        one in :data:`SHIPPED`. Default: the first kind that is there.
      dtype: float dtype of weights and activations. Default: what ``config.json`` says, else the
        stored one, for the target and for the drafter on its own.
      progress: called with (stored bytes read, stored bytes in all, the parameter just made).

    Raises:
      ArtifactError: with every problem found.
      ValueError: there is no such drafter, or ``dtype`` is not one that is supported.
    """
    if dtype is not None:
        dtype = float_dtype(dtype)
    plan = plan_checkpoint(Path(folder), drafter, dtype)
    try:
        plan.problems.raise_any()
        return _build(plan, progress)
    finally:
        plan.files.close()


@dataclasses.dataclass
class CheckpointPlan:
    """What a checkpoint holds. A part that could not be read is None, and a problem says why.

    Attributes:
      folder: as it was given.
      problems: everything that is wrong with the target, or else with the drafter.
      files: of both.
      config: the target's, with what the drafter asks of it.
      drafters: kinds of all drafters that are there, read or not.
      kind: of the one that was chosen.
      remarks: what is fine, or has no effect.
      shells: modules without numbers, ``"target"`` and perhaps ``"drafter"``.
      dtypes: of their activations.
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
    def drafter(self) -> DrafterConfig | None:
        """The chosen drafter's description."""
        if self.block is not None:
            return self.block.facts.config
        return self.target.facts.mtp if self.kind == "mtp" and self.target is not None else None


def plan_checkpoint(
    folder: Path,
    drafter: str | Path | None = None,
    dtype: DTypeLike | None = None,
    *,
    numbers: bool = True,
) -> CheckpointPlan:
    """Read configurations and headers. :func:`load_checkpoint` and reports judge by the same rules.

    Args:
      folder, drafter, dtype: as in :func:`load_checkpoint`.
      numbers: compare what a drafter stores a second time with the target's own, for which both are
        read.

    Raises:
      ValueError: there is no such drafter.
    """
    plan = CheckpointPlan(folder, Problems(), DataFiles(folder))
    try:
        target = plan.target = _read_target(folder, plan.files, plan.remarks)
        plan.config = target.facts.config
        found = _drafters(folder, target)
        plan.drafters = tuple(found)
        chosen = _choose(drafter, folder, found)
        if chosen == "mtp":
            target = plan.target = _with_head(target, folder)
            plan.kind = "mtp"
            plan.config = dataclasses.replace(plan.config, hidden_states=True)
        elif isinstance(chosen, Path):
            plan.block = _read_block(chosen, folder, target, plan.files, numbers, plan.remarks)
            plan.kind = plan.block.facts.config.kind
            plan.config = dataclasses.replace(plan.config, taps=plan.block.facts.taps)
    except ArtifactError as error:
        plan.problems.extend(error.problems)
    if plan.target is not None:
        _add_shells(plan, plan.target, dtype)
    return plan


def _add_shells(plan: CheckpointPlan, target: TargetFolder, dtype: DTypeLike | None) -> None:
    facts, config = target.facts, plan.config
    assert config is not None
    tables = functools.cache(
        lambda: facts.rope.target_tables(config.context_length, config.rotary_dim)
    )
    file, compute = weights_file(target.folder), target.dtype(dtype)
    plan.dtypes["target"] = compute
    plan.shells["target"] = _shell(
        Decoder, config, target.layout, target.tensors, tables, compute, file
    )
    if plan.block is not None:
        described, rope = plan.block.facts.config, plan.block.facts.rope
        wide = described.attention.rotary_dim
        own = functools.cache(lambda: rope.tables(config.context_length, wide))
        file, compute = weights_file(plan.block.folder), plan.block.dtype(dtype)
        module = _MODULES[described.kind]
        plan.dtypes["drafter"] = compute
        plan.shells["drafter"] = _shell(
            module, described, plan.block.layout, plan.block.tensors, own, compute, file
        )
    elif plan.kind == "mtp":
        assert facts.mtp is not None
        plan.dtypes["drafter"] = compute
        plan.shells["drafter"] = _shell(
            Mtp, facts.mtp, target.head, target.tensors, tables, compute, file
        )


def _build(plan: CheckpointPlan, progress: Callable[[int, int, str], None] | None) -> Loaded:
    target, config = plan.target, plan.config
    assert target is not None and config is not None
    facts = target.facts
    frozen, stored, weights = fill_shells(plan.shells, progress)
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
        warnings=tuple(plan.remarks.warnings),
    )


# ---------------------------------------------------------------------------------------- folders


@dataclasses.dataclass(frozen=True)
class PartFolder:
    """A folder, read and checked."""

    folder: Path
    layout: Sequence[Entry]
    tensors: Tensors

    def stored(self, requested: DTypeLike | None, said: str | None) -> jnp.dtype:
        """What was asked for, what the configuration says, or what the first tensor is."""
        names = (part.name for e in self.layout for part in e.parts)
        types = (self.tensors[name].data_type for name in names if name in self.tensors)
        first = FLOATS[next(each for each in types if each in FLOATS)]
        return jnp.dtype(requested if requested is not None else said or first)


@dataclasses.dataclass(frozen=True)
class TargetFolder(PartFolder):
    facts: TargetFacts
    head: Sequence[Entry]  # of a multi-token-prediction head; empty: none is loaded
    stop_ids: tuple[int, ...]

    def dtype(self, requested: DTypeLike | None) -> jnp.dtype:
        return self.stored(requested, self.facts.dtype)


@dataclasses.dataclass(frozen=True)
class BlockFolder(PartFolder):
    facts: BlockFacts

    def dtype(self, requested: DTypeLike | None) -> jnp.dtype:
        return self.stored(requested, self.facts.dtype)


def _read_target(folder: Path, files: DataFiles, remarks: Remarks) -> TargetFolder:
    home = folder if (folder / CONFIG).is_file() else folder / TARGET
    with _problems_of(home, folder) as problems, _remarks_of(home, folder, remarks) as own:
        body, tensors = read_json(home, CONFIG), read_tensors(home, files, own)
        stored_head = HEAD in tensors
        facts = read_target(body, head_stored=stored_head, problems=problems, remarks=own)
        if facts.config.tied and stored_head:
            facts, tensors = _tied(facts, dict(tensors), own)
        stop_ids = _stop_ids(home, facts, own)
        layout = target_layout(facts.config, facts.family)
        aside = (VISION, MTP) if facts.family.composite else (MTP,)
        _check_tensors(layout, tensors, weights_file(home), aside, problems, facts.quantized, own)
        _report_head(facts, tensors, own)
        _report_files(home, tensors, own)
    return TargetFolder(home, layout, tensors, facts, [], stop_ids)


def _tied(facts: TargetFacts, tensors: Tensors, remarks: Remarks) -> tuple[TargetFacts, Tensors]:
    """A tied head that is stored all the same.

    If its numbers are those of the embedding, or there is no other embedding, it is a second name
    of it. If they are others, the target is not tied, as transformers takes it.
    """
    table = f"{facts.family.prefix}embed_tokens.weight"
    head, others = tensors[HEAD], {n: t for n, t in tensors.items() if n != HEAD}
    if table not in tensors:
        remarks.note(head.file, f"{HEAD} is the embedding, too: there is no tensor {table}")
        return facts, {**others, table: head}
    if same_numbers(head, tensors[table]):
        remarks.note(head.file, f"{HEAD} is stored a second time; it is equal to {table}")
        return facts, others
    remarks.warn(
        CONFIG,
        f"tie_word_embeddings is true, but the numbers of {HEAD} are not those of {table}: the "
        "target is loaded with both",
    )
    return dataclasses.replace(facts, config=dataclasses.replace(facts.config, tied=False)), tensors


def _report_head(facts: TargetFacts, tensors: Tensors, remarks: Remarks) -> None:
    """Remark on a multi-token-prediction head that settings and tensors disagree about."""
    stored = sorted(name for name in tensors if name.startswith(MTP))
    described = facts.mtp is not None or facts.mtp_problems
    if described and not stored:
        remarks.warn(
            CONFIG,
            f"mtp_num_hidden_layers describes a head, but there is no tensor {MTP}*: the target is "
            "loaded without it",
        )
    elif stored and not described:
        remarks.warn(
            tensors[stored[0]].file,
            f"{len(stored)} tensors {MTP}* are not used: {CONFIG} says no mtp_num_hidden_layers",
        )


def _report_files(home: Path, tensors: Tensors, remarks: Remarks) -> None:
    """Remark on what lies in the folder and is not read."""
    used = {CONFIG, GENERATION, INDEX, SINGLE, *TOKENIZER_FILES}
    used |= {*_HEADS, TARGET, *(t.place.location for t in tensors.values() if t.place)}
    report_files([path.name for path in home.iterdir()], used, home.name, remarks)
    for kind in _HEADS:
        if (home / kind).is_dir() and not (home / kind / CONFIG).is_file():
            remarks.note(f"{kind}/", f"no drafter: it holds no {CONFIG}")
    if (home / TOKENIZER_CONFIG).is_file():
        report_tokenizer(read_json(home, TOKENIZER_CONFIG), TOKENIZER_CONFIG, remarks)


def _with_head(target: TargetFolder, folder: Path) -> TargetFolder:
    """The target with its multi-token-prediction head, whose tensors are all there."""
    facts = target.facts
    with _problems_of(target.folder, folder) as problems:
        problems.extend(facts.mtp_problems)
        if facts.mtp is None:
            return target
        head = mtp_layout(facts.mtp)
        stored = {n: t for n, t in target.tensors.items() if n.startswith(MTP)}
        stored = _without_copies(stored, target, True, problems, prefix=MTP)
        _check_tensors(head, stored, weights_file(target.folder), (), problems, facts.quantized)
    return dataclasses.replace(target, head=head)


def _drafters(folder: Path, target: TargetFolder) -> dict[DrafterKind, Path]:
    """The drafters that are there, and their folders; in the order in which they are preferred."""
    home = target.folder
    bases = [folder, home, *([home.parent] if home.resolve().name == TARGET else [])]
    found: dict[DrafterKind, Path] = {}
    for kind in _HEADS:
        for base in bases:
            if (base / kind / CONFIG).is_file():
                found.setdefault(kind, base / kind)
    described = target.facts.mtp is not None or target.facts.mtp_problems
    if described and any(name.startswith(MTP) for name in target.tensors):
        found["mtp"] = home
    return found


def _choose(
    drafter: str | Path | None, folder: Path, found: Mapping[DrafterKind, Path]
) -> Path | Literal["mtp"] | None:
    """The folder of a block drafter, or "mtp", or None."""
    if drafter is None:
        drafter = next(iter(found), "none")
    if isinstance(drafter, str):
        if drafter == "none":
            return None
        if drafter in found:
            return "mtp" if drafter == "mtp" else found[drafter]
        drafter = SHIPPED.get(drafter, drafter)
    if (Path(drafter) / CONFIG).is_file():
        return Path(drafter)
    names = ", ".join([*found, "none", *SHIPPED])
    raise ValueError(
        f"drafter is {str(drafter)!r}: there is no such drafter at {folder}, and no {CONFIG} in a "
        f"folder of that name; expected {names}, or a folder"
    )


def _read_block(
    path: Path,
    folder: Path,
    target: TargetFolder,
    files: DataFiles,
    numbers: bool,
    remarks: Remarks,
) -> BlockFolder:
    with _problems_of(path, folder) as problems, _remarks_of(path, folder, remarks) as own:
        body, tensors = read_json(path, CONFIG), read_tensors(path, files, own)
        kinds = [k for k, head in _HEADS.items() if any(n.startswith(head) for n in tensors)]
        if len(kinds) != 1:
            raise ArtifactError(
                weights_file(path),
                "tensors",
                f"tensors of {' and '.join(kinds) or 'no drafter'}",
                " or ".join(f"{head}* of {kind}" for kind, head in _HEADS.items()),
            )
        facts = read_block(body, kinds[0], target.facts.config, problems, own)
        layout = block_layout(facts.config)
        tensors = _without_copies(tensors, target, numbers, problems)
        # A confidence head says how many drafts are worth verifying. We verify all.
        aside = ("confidence_head.",) if kinds[0] == "dspark" else ()
        _check_tensors(layout, tensors, weights_file(path), aside, problems, facts.quantized, own)
        if facts.config.draft_vocab_size is not None and not problems:
            _check_vocabulary(tensors["d2t"], facts.config.vocab_size, problems)
        used = {CONFIG, INDEX, SINGLE, *(t.place.location for t in tensors.values() if t.place)}
        report_files([each.name for each in path.iterdir()], used, path.name, own)
    return BlockFolder(path, layout, tensors, facts)


def _check_vocabulary(tensor: Tensor, vocab_size: int, problems: Problems) -> None:
    ids = decode(tensor.read(), Form.OFFSETS, np.dtype(np.int64))
    if np.any(np.diff(ids) <= 0) or ids[0] < 0 or ids[-1] >= vocab_size:
        found = f"the tokens {', '.join(map(str, ids[:5]))}, ..."
        expected = f"tokens in 0..{vocab_size - 1}, each greater than the one before"
        problems.report(tensor.file, "tensor d2t", found, expected)


def _without_copies(
    tensors: Tensors, target: TargetFolder, numbers: bool, problems: Problems, prefix: str = ""
) -> Tensors:
    """Some drafters are stored with copies of the target's embedding and head: equal, or refused.

    They are not loaded. The drafter uses the target's own arrays. Without ``numbers`` only the
    shapes are compared. ``prefix`` begins the names of the drafter's tensors.
    """
    config = target.facts.config
    table = f"{target.facts.family.prefix}embed_tokens.weight"
    head = table if config.tied else HEAD
    copies = {f"{prefix}embed_tokens.weight": table, f"{prefix}{HEAD}": head}
    for name, original in copies.items():
        if name not in tensors or original not in target.tensors:
            continue
        ours, theirs = tensors[name], target.tensors[original]
        if ours.shape != theirs.shape or (numbers and not same_numbers(ours, theirs)):
            problems.report(
                ours.file, f"tensor {name}", "other numbers", f"those of the target's {original}"
            )
    return {name: tensor for name, tensor in tensors.items() if name not in copies}


@contextlib.contextmanager
def _problems_of(part: Path, folder: Path) -> Generator[Problems]:
    """Raises the problems of a folder together, its name before those of its files."""
    problems = Problems()
    try:
        yield problems
    except ArtifactError as error:
        problems.extend(error.problems)
    label = "" if part == folder else f"{part.name}/"
    named = Problems()
    for p in problems:
        named.report(f"{label}{p.file}", p.where, p.found, p.expected)
    named.raise_any()


@contextlib.contextmanager
def _remarks_of(part: Path, folder: Path, remarks: Remarks) -> Generator[Remarks]:
    """Collects the remarks about a folder, its name before those of its files."""
    own = Remarks()
    yield own
    label = "" if part == folder else f"{part.name}/"
    remarks.notes += [label + text for text in own.notes]
    remarks.warnings += [label + text for text in own.warnings]


def weights_file(folder: Path) -> str:
    """What messages about tensors name."""
    return INDEX if (folder / INDEX).exists() else SINGLE


def _stop_ids(folder: Path, target: TargetFacts, remarks: Remarks) -> tuple[int, ...]:
    """Of ``generation_config.json``, which runtimes prefer, else of ``config.json``."""
    if not (folder / GENERATION).is_file():
        return target.stop_ids
    body = read_json(folder, GENERATION)
    report_generation(body, GENERATION, remarks, known=("eos_token_id",))
    vocab = target.config.vocab_size
    found = stop_ids(body.get("eos_token_id"), "eos_token_id", GENERATION, vocab, remarks)
    return found or target.stop_ids


# ---------------------------------------------------------------------------------------- tensors


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a tensor has to be."""

    shapes: tuple[tuple[int, ...], ...]
    types: Collection[int]
    wanted: str

    @classmethod
    def of(cls, *shape: int, types: Collection[int] = FLOATS, note: str = "") -> Expected:
        return cls((shape,), types, f"shape {list(shape)}{note}")


def _expected(
    layout: Sequence[Entry], tensors: Tensors, quantized: Quantized | None
) -> dict[str, Expected]:
    """What a layout is stored as. A matrix is in few bits if some of its tensors say so."""
    found: dict[str, Expected] = {}
    for entry in layout:
        bits = quantized.bits if quantized is not None and is_matrix(entry) else None
        for part in entry.parts:
            name, shape = part.name, part.shape
            packed, scales, sizes = packed_of(name), scales_of(name), shape_of(name)
            int8 = name in tensors and tensors[name].data_type == INT8
            if bits == 8 and (int8 or scales in tensors):
                rows = shape[0]
                forms = (rows, 1), (rows,), (1,), ()
                wanted = f"shape [{rows}, 1], a scale a row, or [1], one for all"
                found[name] = Expected.of(*shape, types=(INT8,))
                found[scales] = Expected(forms, FLOATS, wanted)
            elif bits == 4 and {packed, scales, sizes} & tensors.keys():
                assert quantized is not None
                rows, columns = shape
                size = quantized.group or columns
                note = f", eight of a row's {columns} numbers in one"
                found[packed] = Expected.of(rows, -(-columns // 8), types=(INT32,), note=note)
                found[scales] = Expected.of(rows, columns // size, note=f", a scale for {size}")
                if columns % size:
                    found[scales] = Expected((), (), f"groups of {size} that make {columns} inputs")
                found[sizes] = Expected.of(2, types=(INT64,))
            else:
                types = INTEGERS.get(entry.form, FLOATS)
                found[name] = Expected.of(*shape, types=types)
    return found


def _check_tensors(
    layout: Sequence[Entry],
    tensors: Tensors,
    file: str,
    aside: tuple[str, ...],
    problems: Problems,
    quantized: Quantized | None = None,
    remarks: Remarks | None = None,
) -> None:
    """The layout's tensors are there, in their shapes, and no others but those put ``aside``.

    Args:
      layout: of the folder.
      tensors: in it.
      file: that messages name.
      aside: what the names of tensors begin with that are let pass.
      problems: where to report.
      quantized: how matrices may be stored in few bits.
      remarks: destination of what does not stop a load.
    """
    expected = _expected(layout, tensors, quantized)
    found = Problems()
    for name, each in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            found.report(file, f"tensor {name}", "nothing", each.wanted)
        elif tensor.shape not in each.shapes:
            shape = f"shape {list(tensor.shape)}"
            found.report(tensor.file, f"tensor {name}", shape, each.wanted)
        elif tensor.data_type not in each.types:
            _report_type(found, tensor, each.types)
    for part in (part for entry in layout for part in entry.parts):
        sizes = shape_of(part.name)
        if sizes in expected and sizes in tensors and tensors[sizes].shape == (2,):
            said = tuple(tensors[sizes].read().tolist())
            if said != part.shape:
                where = f"tensor {sizes}"
                found.report(tensors[sizes].file, where, f"{list(said)}", f"{list(part.shape)}")
    _check_others(expected, tensors, aside, found, remarks or Remarks())
    problems += found[:_NAMED]
    if len(found) > _NAMED:  # of another architecture, and one line a tensor tells no more
        problems.report(file, "tensors", f"{len(found) - _NAMED} more problems", "none")


def _check_others(
    expected: Mapping[str, Expected],
    tensors: Tensors,
    aside: tuple[str, ...],
    problems: Problems,
    remarks: Remarks,
) -> None:
    """Tensors that no parameter is made of: constants, zeros, or refused."""
    hints = {HEAD: f" ({CONFIG} says tie_word_embeddings)"}
    for name in sorted(tensors.keys() - expected.keys()):
        tensor = tensors[name]
        if name.startswith(aside):
            continue
        reason = unused_tensor(name, tensor.shape)
        if reason is None and _zero_bias(tensor, expected):
            reason = "a bias of zeros"
        if reason is not None:
            remarks.note(tensor.file, f"tensor {name} is not read: {reason}")
            continue
        shape = f"shape {list(tensor.shape)}"
        wanted = f"no such tensor{hints.get(name, '')}"
        problems.report(tensor.file, f"tensor {name}", shape, wanted)


def _zero_bias(tensor: Tensor, expected: Mapping[str, Expected]) -> bool:
    """Whether a tensor is the bias of a matrix that has one here, and changes nothing."""
    stem, dot, last = tensor.name.rpartition(".")
    if not dot or last != "bias" or tensor.data_type not in FLOATS:
        return False
    weights = f"{stem}.weight"
    matrix = expected.get(weights) or expected.get(packed_of(weights))
    if matrix is None or tensor.shape != matrix.shapes[0][:1]:
        return False
    return not np.any(tensor.read())


def _report_type(problems: Problems, tensor: Tensor, types: Collection[int]) -> None:
    expected = " or ".join(type_name(each) for each in types)
    found = type_name(tensor.data_type)
    problems.report(tensor.file, f"tensor {tensor.name}", found, expected)


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A tensor that is not stored as it is; see :class:`jaxdraft.checkpoint.forms.Form`."""

    tensor: Tensor
    form: Form

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    def write(self, out: Array) -> None:
        out[...] = decode(self.tensor.read(), self.form, out.dtype)


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A matrix in eight bits; see :func:`jaxdraft.checkpoint.forms.from_int8`."""

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values, self.scales)

    def write(self, out: Array) -> None:
        convert_into(out, from_int8(self.values.read(), self.scales.read()))


@dataclasses.dataclass(frozen=True)
class Packed:
    """A matrix in four bits; see :func:`jaxdraft.checkpoint.forms.from_int4`."""

    shape: tuple[int, ...]
    values: Tensor
    scales: Tensor
    sizes: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values, self.scales, self.sizes)

    def write(self, out: Array) -> None:
        values = unpack_int4(self.values.read(), self.shape[1])
        convert_into(out, from_int4(values, self.scales.read()))


@dataclasses.dataclass(frozen=True)
class Made:
    """Numbers that no file holds."""

    shape: tuple[int, ...]
    make: Callable[[], Array]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def write(self, out: Array) -> None:
        convert_into(out, self.make())


def _piece(part: Part, form: Form, tensors: Tensors) -> Piece:
    name = part.name
    if name not in tensors:
        packed, scales, sizes = (of(name) for of in (packed_of, scales_of, shape_of))
        return Packed(part.shape, tensors[packed], tensors[scales], tensors[sizes])
    tensor = tensors[name]
    if tensor.data_type == INT8:
        return Scaled(tensor, tensors[scales_of(name)])
    if form is not Form.PLAIN:
        return Decoded(tensor, form)
    # A matrix lets go of its pages while it is copied; see Dense.
    matrix = len(tensor.shape) > 1
    return Dense.of(tensor, transposed=False) if matrix else Plain(tensor, tensor.shape)


def _shell(
    module: Callable[..., nnx.Module],
    config: TargetConfig | DrafterConfig,
    layout: Sequence[Entry],
    tensors: Tensors,
    tables: Tables,
    dtype: DTypeLike,
    file: str,
) -> Shell:
    """The module without numbers, and how each parameter is made."""
    structure, wanted = split(abstract(module, config, dtype))
    recipes: Recipes = {}
    for entry in layout:
        shape = wanted[entry.path].shape
        if entry.form is Form.ZERO:
            zeros = functools.partial(np.zeros, shape, np.float32)
            recipes[entry.path] = Recipe.of(Made(shape, zeros))
        else:
            pieces = [_piece(part, entry.form, tensors) for part in entry.parts]
            recipes[entry.path] = Recipe.stack(shape, pieces)
    for i, path in enumerate(ROTARY):
        table = functools.partial(lambda i: tables()[i], i)
        recipes[path] = Recipe.of(Made(wanted[path].shape, table))
    check(file, wanted, recipes)
    return Shell(structure, wanted, recipes)
