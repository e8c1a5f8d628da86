"""The folders of a checkpoint: a target, and perhaps its drafters."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from convert.checkpoint.adapter import Delta, read_adapter
from convert.checkpoint.block_config import TRUST, read_block
from convert.checkpoint.config import TargetFacts, read_target
from convert.checkpoint.eagle3_config import is_eagle3, read_eagle3
from convert.checkpoint.outline import described_tensors, is_outline, stored_names
from convert.checkpoint.section import DrafterFacts
from convert.checkpoint.shards import read_tensors
from convert.checkpoint.tensors import HEAD, Tensors, check_tensors
from convert.errors import ArtifactError, Problems
from convert.json_reader import read_json
from convert.paths import CONFIG, is_gguf
from convert.tensors import BOOL, FLOATS, DataFiles, same_numbers, type_name
from convert.unused import (
    FOR_PICTURES,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    Remarks,
    report_files,
    report_generation,
    report_tokenizer,
    stop_ids,
)
from jaxdraft.checkpoint.files import INDEX, SINGLE
from jaxdraft.checkpoint.forms import Form, decode
from jaxdraft.checkpoint.layout import (
    MEMBERS,
    MTP,
    TARGET,
    Entry,
    block_layout,
    eagle3_layout,
    mtp_layout,
    packed_of,
    target_layout,
)
from jaxdraft.config import DRAFT_MODEL, BlockDrafterConfig, DrafterKind, Eagle3Config
from jaxdraft.data import SHIPPED
from jaxdraft.kinds import KINDS, block_of, folders

GENERATION = "generation_config.json"


_HEADS: Mapping[DrafterKind, str | None] = {
    name: kind.block.head for name, kind in KINDS.items() if kind.block is not None
}
"""Prefix of the names of the tensors that only this kind of drafter has; None: there is none."""

_HEAD_NAMES = {HEAD, packed_of(HEAD), "lm_head.qweight"}
"""Tensors of which one is there if a target has a head of its own."""

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class PartFolder:
    """A folder, read and checked."""

    folder: Path
    layout: Sequence[Entry]
    tensors: Tensors

    def stored(self, requested: DTypeLike | None, stated: str | None) -> jnp.dtype:
        """Return the requested dtype, else that of the configuration, else of the first tensor."""
        names = (part.name for e in self.layout for part in e.tensors)
        types = (self.tensors[name].data_type for name in names if name in self.tensors)
        first = FLOATS[next(each for each in types if each in FLOATS)]
        return jnp.dtype(requested if requested is not None else stated or first)


@dataclasses.dataclass(frozen=True)
class TargetFolder(PartFolder):
    facts: TargetFacts
    head: Sequence[Entry]  # of a multi-token-prediction head; empty: none is loaded
    stop_ids: tuple[int, ...]
    deltas: Mapping[str, Delta] = dataclasses.field(default_factory=dict)  # of an adapter
    metadata: Mapping[str, Any] | None = None  # of a GGUF file, which holds a tokenizer, too

    def dtype(self, requested: DTypeLike | None) -> jnp.dtype:
        return self.stored(requested, self.facts.dtype)


@dataclasses.dataclass(frozen=True)
class BlockFolder(PartFolder):
    facts: DrafterFacts[BlockDrafterConfig] | DrafterFacts[Eagle3Config]

    def dtype(self, requested: DTypeLike | None) -> jnp.dtype:
        return self.stored(requested, self.facts.dtype)


def open_target(
    folder: Path,
    files: DataFiles,
    remarks: Remarks,
    *,
    outline: bool = False,
    context: int | None = None,
) -> TargetFolder:
    """Read and check a target.

    Args:
      folder: folder of the target, or the one that contains it as ``target``.
      files: owner of the maps.
      remarks: destination of remarks, which do not prevent loading.
      outline: whether a description without weights is enough.
      context: maximum length of a sequence. Default: as in the file.

    Raises:
      ArtifactError: with every problem found.
    """
    if is_gguf(folder):
        return _open_gguf(folder, files, remarks, context)
    home = folder if (folder / CONFIG).is_file() else folder / TARGET
    with _problems_of(home, folder) as problems, _remarks_of(home, folder, remarks) as own:
        outline = outline and is_outline(home)
        body, names = read_json(home, CONFIG), stored_names(home) if outline else None
        tensors: Tensors = {} if outline else read_tensors(home, files, own)
        stored_head = not _HEAD_NAMES.isdisjoint(names if names is not None else tensors)
        facts = read_target(
            body, head_stored=stored_head, problems=problems, remarks=own, context=context
        )
        facts = _prefixed(facts, tensors if names is None else names)
        if facts.config.tied and HEAD in tensors:
            facts, tensors = _tied(facts, dict(tensors), own)
        stop_ids = _stop_ids(home, facts, own)
        layout = target_layout(facts.config, facts.family)
        aside = (*facts.family.aside, MTP)
        if outline:
            tensors = described_tensors(facts, layout, names, files, aside, problems, own)
        else:
            file = weights_file(home)
            check_tensors(layout, tensors, file, aside, problems, facts.quantized, own)
        _report_head(facts, tensors, own)
        _report_aside(facts.family.aside, tensors, own)
        _report_files(home, tensors, own)
    return TargetFolder(home, layout, tensors, facts, [], stop_ids)


def with_adapter(
    target: TargetFolder, folder: Path, files: DataFiles, remarks: Remarks
) -> TargetFolder:
    """Return a target whose matrices have the changes of an adapter.

    Raises:
      ArtifactError: with every problem found.
    """
    adapter = read_adapter(folder, target.layout, files, remarks)
    for name, tensor in adapter.whole.items():
        stored = target.tensors.get(name)
        if stored is None or stored.data_type not in FLOATS:
            expected = "one that the target stores as floats"
            raise ArtifactError(tensor.file, f"tensor {name}", "a whole matrix", expected)
    tensors = {**target.tensors, **adapter.whole}
    return dataclasses.replace(target, tensors=tensors, deltas=adapter.deltas)


def _prefixed(facts: TargetFacts, names: Collection[str]) -> TargetFacts:
    """Return the facts with the prefix that the tensor names of this folder have."""
    prefixes = facts.family.prefixes
    found = [p for p in prefixes if f"{p}embed_tokens.weight" in names] or prefixes
    family = dataclasses.replace(facts.family, prefixes=(found[0],))
    return dataclasses.replace(facts, family=family)


def _open_gguf(path: Path, files: DataFiles, remarks: Remarks, context: int | None) -> TargetFolder:
    """Read and check a target in a GGUF file."""
    from convert.checkpoint.gguf import open_gguf  # imported for GGUF files alone

    problems = Problems()
    found = open_gguf(path, files, problems, remarks, context)
    problems.raise_any()
    facts, metadata = found.facts, found.file.metadata
    return TargetFolder(
        path, found.layout, found.tensors, facts, [], found.stop_ids, metadata=metadata
    )


def _tied(facts: TargetFacts, tensors: Tensors, remarks: Remarks) -> tuple[TargetFacts, Tensors]:
    """Resolve a tied head that is stored nevertheless.

    If its numbers equal the embedding's, or there is no other embedding, the head is a second name
    of the embedding. Otherwise the target is not tied, as in transformers.
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
    """Remark on a disagreement of settings and tensors about a multi-token-prediction head."""
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
            f"{len(stored)} tensors {MTP}* are not used: {CONFIG} has no mtp_num_hidden_layers",
        )


def _report_aside(prefixes: tuple[str, ...], tensors: Tensors, remarks: Remarks) -> None:
    """Note the tensors of other parts of the model that the text model is a part of."""
    for prefix in prefixes:
        names = [name for name in tensors if name.startswith(prefix)]
        if names:
            remarks.note(
                tensors[names[0]].file,
                f"{len(names)} tensors {prefix}* are not read: {FOR_PICTURES}",
            )


def _report_files(home: Path, tensors: Tensors, remarks: Remarks) -> None:
    """Remark on files of the folder that are not read."""
    used = {CONFIG, GENERATION, INDEX, SINGLE, *TOKENIZER_FILES}
    used |= {
        *folders(),
        DRAFT_MODEL,
        TARGET,
        *(t.place.location for t in tensors.values() if t.place),
    }
    report_files([path.name for path in home.iterdir()], used, home.name, remarks)
    for kind in folders():
        if (home / kind).is_dir() and not (home / kind / CONFIG).is_file():
            remarks.note(f"{kind}/", f"no drafter: it holds no {CONFIG}")
    if (home / TOKENIZER_CONFIG).is_file():
        report_tokenizer(read_json(home, TOKENIZER_CONFIG), TOKENIZER_CONFIG, remarks)


def with_head(target: TargetFolder, folder: Path) -> TargetFolder:
    """Return the target with its multi-token-prediction head, after checking its tensors."""
    facts = target.facts
    with _problems_of(target.folder, folder) as problems:
        problems.extend(facts.mtp_problems)
        if facts.mtp is None:
            return target
        head = mtp_layout(facts.mtp)
        stored = {n: t for n, t in target.tensors.items() if n.startswith(MTP)}
        stored = _without_copies(stored, target, True, problems, prefix=MTP)
        check_tensors(head, stored, weights_file(target.folder), (), problems, facts.quantized)
    return dataclasses.replace(target, head=head)


def find_drafters(folder: Path, target: TargetFolder) -> dict[DrafterKind, Path]:
    """Return the drafters that are present and their folders, in order of preference."""
    home = target.folder
    beside = home.resolve().name == TARGET or is_gguf(home)
    bases = [folder, home, *([home.parent] if beside else [])]
    found: dict[DrafterKind, Path] = {}
    for kind in folders():
        for base in bases:
            if (base / kind / CONFIG).is_file():
                found.setdefault(kind, base / kind)
    described = target.facts.mtp is not None or target.facts.mtp_problems
    if described and any(name.startswith(MTP) for name in target.tensors):
        found["mtp"] = home
    return found


def choose_drafter(
    drafter: str | Path | None,
    folder: Path,
    found: Mapping[DrafterKind, Path],
    target: TargetFolder,
) -> Path | DrafterKind | None:
    """Return the folder of a drafter, the kind of one in the target's files, or None."""
    if drafter is None:
        drafter = next(iter(found), "none")
    if isinstance(drafter, str):
        if drafter == "none":
            return None
        if drafter in found:
            kind = next(kind for kind in found if kind == drafter)
            return kind if KINDS[kind].inside else found[kind]
        drafter = SHIPPED.get(drafter, drafter)
    if (Path(drafter) / CONFIG).is_file():
        return Path(drafter)
    names = ", ".join([*found, "none", *SHIPPED])
    if drafter == "mtp":
        described = target.facts.mtp is not None or target.facts.mtp_problems
        raise ValueError(
            f"drafter is 'mtp': {folder} has no head for multi-token prediction. "
            + (
                f"{CONFIG} describes one, but there is no tensor {MTP}*"
                if described
                else f"{CONFIG} describes none (mtp_num_hidden_layers)"
            )
            + f"; expected {names}, or a folder"
        )
    raise ValueError(
        f"drafter is {str(drafter)!r}: there is no such drafter at {folder}, and no {CONFIG} in a "
        f"folder of that name; expected {names}, or a folder"
    )


def open_block(
    path: Path,
    folder: Path,
    target: TargetFolder,
    files: DataFiles,
    numbers: bool,
    remarks: Remarks,
) -> BlockFolder:
    with _problems_of(path, folder) as problems, _remarks_of(path, folder, remarks) as own:
        body, tensors = read_json(path, CONFIG), read_tensors(path, files, own)
        if is_eagle3(body, tensors):
            return _open_eagle3(path, body, tensors, target, problems, own)
        kind = _block_kind(body, tensors, weights_file(path))
        facts = read_block(body, kind, target.facts.config, problems, own, tensors)
        config = facts.config
        layout = block_layout(config)
        tensors = _without_copies(tensors, target, numbers, problems, own_head=config.own_head)
        aside = () if config.confidence else (TRUST,)
        if config.draft_vocab_size is not None:
            aside = (*aside, MEMBERS)
        check_tensors(layout, tensors, weights_file(path), aside, problems, facts.quantized, own)
        if config.draft_vocab_size is not None and not problems:
            _check_vocabulary(tensors, config.vocab_size, problems)
        used = {CONFIG, INDEX, SINGLE, *(t.place.location for t in tensors.values() if t.place)}
        report_files([each.name for each in path.iterdir()], used, path.name, own)
    return BlockFolder(path, layout, tensors, facts)


def _open_eagle3(
    path: Path,
    body: Mapping[str, Any],
    tensors: Tensors,
    target: TargetFolder,
    problems: Problems,
    remarks: Remarks,
) -> BlockFolder:
    facts = read_eagle3(body, tensors, target.facts.config, problems, remarks)
    layout, config = eagle3_layout(facts.config), facts.config
    aside = () if config.draft_vocab_size is None else (MEMBERS,)
    file = weights_file(path)
    check_tensors(layout, tensors, file, aside, problems, facts.quantized, remarks)
    if config.draft_vocab_size is not None and not problems:
        _check_vocabulary(tensors, config.vocab_size, problems)
    used = {CONFIG, INDEX, SINGLE, *(t.place.location for t in tensors.values() if t.place)}
    report_files([each.name for each in path.iterdir()], used, path.name, remarks)
    return BlockFolder(path, layout, tensors, facts)


def _block_kind(body: Mapping[str, Any], tensors: Tensors, file: str) -> DrafterKind:
    """Return the kind of a block drafter.

    Its pair scores show it. A drafter without pair scores is one whose architecture has none.

    Raises:
      ArtifactError: it is none.
    """
    kinds = [k for k, head in _HEADS.items() if head and any(n.startswith(head) for n in tensors)]
    if len(kinds) == 1:
        return kinds[0]
    architectures = body.get("architectures")
    plain = [k for k, head in _HEADS.items() if head is None]
    for kind in plain if not kinds and "hidden_norm.weight" in tensors else []:
        if isinstance(architectures, list) and block_of(kind).architecture in architectures:
            return kind
    wanted = [f"{head}* of {kind}" for kind, head in _HEADS.items() if head]
    wanted += [f"architectures {block_of(kind).architecture} of {kind}" for kind in plain]
    found = f"tensors of {' and '.join(kinds) or 'no drafter'}"
    raise ArtifactError(file, "tensors", found, " or ".join(wanted))


def _check_vocabulary(tensors: Tensors, vocab_size: int, problems: Problems) -> None:
    """Check ``d2t``, and that ``t2d``, if it is there, is true at the same tokens."""
    tensor = tensors["d2t"]
    ids = decode(tensor.read(), Form.OFFSETS, np.dtype(np.int64))
    before = np.concatenate([[-1], ids[:-1]])
    wrong = np.flatnonzero((ids <= before) | (ids >= vocab_size))
    if wrong.size:
        first = wrong[0]
        found = f"draft id {first} for token {ids[first]}"
        found += f", after token {before[first]}" if first else ""
        expected = f"tokens in 0..{vocab_size - 1}, each greater than the one before"
        problems.report(tensor.file, "tensor d2t", found, expected)
        return
    members = tensors.get(MEMBERS)
    if members is None:
        return
    where, wanted = f"tensor {MEMBERS}", f"BOOL, shape [{vocab_size}]"
    if members.data_type != BOOL or members.shape != (vocab_size,):
        found = f"{type_name(members.data_type)}, shape {list(members.shape)}"
        problems.report(members.file, where, found, wanted)
    elif not np.array_equal(np.flatnonzero(members.read()), ids):
        found = f"{np.count_nonzero(members.read())} tokens"
        problems.report(members.file, where, found, f"the {len(ids)} tokens of d2t")


def _without_copies(
    tensors: Tensors,
    target: TargetFolder,
    numbers: bool,
    problems: Problems,
    prefix: str = "",
    own_head: bool = False,
) -> Tensors:
    """Return the tensors without copies of the target's embedding and head, which must be equal.

    Copies are not loaded: the drafter uses the target's own arrays. Without ``numbers`` only the
    shapes are compared. ``prefix`` begins the names of the drafter's tensors. A drafter with a head
    of its own keeps it.
    """
    config = target.facts.config
    table = f"{target.facts.family.prefix}embed_tokens.weight"
    head = table if config.tied else HEAD
    copies = {f"{prefix}embed_tokens.weight": table}
    if not own_head:
        copies[f"{prefix}{HEAD}"] = head
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
    """Raise the problems of a folder together, its name before those of its files."""
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
    """Collect the remarks about a folder, its name before those of its files."""
    own = Remarks()
    yield own
    label = "" if part == folder else f"{part.name}/"
    remarks.notes += [label + text for text in own.notes]
    remarks.warnings += [label + text for text in own.warnings]


def weights_file(folder: Path) -> str:
    """Return the file name that messages about tensors contain."""
    if is_gguf(folder):
        return folder.name
    return INDEX if (folder / INDEX).exists() else SINGLE


def _stop_ids(folder: Path, target: TargetFacts, remarks: Remarks) -> tuple[int, ...]:
    """Return the stop ids of ``generation_config.json``, else those of ``config.json``."""
    if not (folder / GENERATION).is_file():
        return target.stop_ids
    body = read_json(folder, GENERATION)
    report_generation(body, GENERATION, remarks, known=("eos_token_id",))
    vocab = target.config.vocab_size
    found = stop_ids(body.get("eos_token_id"), "eos_token_id", GENERATION, vocab, remarks)
    return found or target.stop_ids
