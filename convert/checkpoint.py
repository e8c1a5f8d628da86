"""Checkpoint folders (``config.json`` and safetensors) -> Flax modules, without ONNX.

As strict as the reading of artifacts: every tensor is accounted for, and everything is checked
before the first array is allocated. The numbers are those that exporting the same checkpoint in
float32 and converting the artifact gives (rotary tables of targets to the last place of float32).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from convert.artifact import CONFIG as ARTIFACT
from convert.build import abstract, check, split
from convert.errors import ArtifactError, Problems
from convert.graph import FLOATS, DataFiles, Tensor
from convert.hub_config import CONFIG, BlockFacts, TargetFacts, read_block, read_target
from convert.load import Loaded, fill_shells
from convert.parts import Recipes
from convert.pieces import Dense, Piece, Plain, Recipe, convert_into
from convert.plan import Shell
from convert.shards import read_json, read_tensors
from jaxdraft.checkpoint.files import INDEX, SINGLE
from jaxdraft.checkpoint.forms import Form, decode, float_dtype
from jaxdraft.checkpoint.layout import (
    MTP,
    ROTARY,
    TARGET,
    VISION,
    Entry,
    Part,
    block_layout,
    mtp_layout,
    target_layout,
)
from jaxdraft.config import DrafterConfig, DrafterKind, TargetConfig
from jaxdraft.nn.decoder import Decoder
from jaxdraft.nn.dflash2 import DFlash2
from jaxdraft.nn.dspark import DSpark
from jaxdraft.nn.mtp import Mtp

GENERATION = "generation_config.json"

_MODULES: Mapping[str, type[nnx.Module]] = {"dflash2": DFlash2, "dspark": DSpark, "mtp": Mtp}
_HEADS = {"dflash2": "candidate_selector.", "dspark": "markov_head."}
"""What the names of the tensors begin with that only this kind of drafter has."""

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
      drafter: "dflash2", "dspark", "mtp" or "none"; or the folder of a block drafter. Default: the
        first of these that is there.
      dtype: float dtype of weights and activations. Default: what ``config.json`` says, else the
        stored one, for the target and for the drafter on its own.
      progress: called with (stored bytes read, stored bytes in all, the parameter just made).

    Raises:
      ArtifactError: with every problem found.
      ValueError: there is no such drafter, or ``dtype`` is not one that is supported.
    """
    if dtype is not None:
        dtype = float_dtype(dtype)
    folder = Path(folder)
    files = DataFiles(folder)
    try:
        return _load(folder, drafter, dtype, files, progress)
    finally:
        files.close()


def _load(
    folder: Path,
    drafter: str | Path | None,
    dtype: DTypeLike | None,
    files: DataFiles,
    progress: Callable[[int, int, str], None] | None,
) -> Loaded:
    target = _read_target(folder, files)
    facts, config = target.facts, target.facts.config
    chosen = _choose(drafter, target.folder, folder, facts)
    block = None
    if isinstance(chosen, Path):
        block = _read_block(chosen, folder, target, files)
        config = dataclasses.replace(config, taps=block.facts.taps)
    elif chosen == "mtp":
        config = dataclasses.replace(config, hidden_states=True)

    tables = functools.cache(
        lambda: facts.rope.target_tables(config.context_length, config.rotary_dim)
    )
    file, compute = _file(target.folder), target.dtype(dtype)
    shells = {
        "target": _shell(Decoder, config, target.layout, target.tensors, tables, compute, file)
    }
    kind: DrafterKind | None = None
    described: DrafterConfig | None = None
    if block is not None:
        described, rope = block.facts.config, block.facts.rope
        kind, wide = described.kind, described.attention.rotary_dim
        own = functools.cache(lambda: rope.tables(config.context_length, wide))
        file, compute = _file(block.folder), block.dtype(dtype)
        module = _MODULES[kind]
        shells["drafter"] = _shell(
            module, described, block.layout, block.tensors, own, compute, file
        )
    elif chosen == "mtp":
        kind, described = "mtp", facts.mtp
        assert described is not None
        shells["drafter"] = _shell(
            Mtp, described, target.head, target.tensors, tables, compute, file
        )
    frozen, stored, weights = fill_shells(shells, progress)
    return Loaded(
        target_config=config,
        target=frozen["target"],
        drafter_kind=kind,
        drafter_config=described,
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
    )


# ---------------------------------------------------------------------------------------- folders


@dataclasses.dataclass(frozen=True)
class _Part:
    """A folder, read and checked."""

    folder: Path
    layout: Sequence[Entry]
    tensors: Tensors

    def stored(self, requested: DTypeLike | None, said: str | None) -> jnp.dtype:
        """What was asked for, what the configuration says, or what the first matrix is."""
        first = self.tensors[self.layout[0].parts[0].name]
        return jnp.dtype(requested if requested is not None else said or FLOATS[first.data_type])


@dataclasses.dataclass(frozen=True)
class _Target(_Part):
    facts: TargetFacts
    head: Sequence[Entry]  # of a multi-token-prediction head; empty: there is none
    stop_ids: tuple[int, ...]

    def dtype(self, requested: DTypeLike | None) -> jnp.dtype:
        return self.stored(requested, self.facts.dtype)


@dataclasses.dataclass(frozen=True)
class _Block(_Part):
    facts: BlockFacts

    def dtype(self, requested: DTypeLike | None) -> jnp.dtype:
        return self.stored(requested, self.facts.dtype)


def _read_target(folder: Path, files: DataFiles) -> _Target:
    home = folder if (folder / CONFIG).is_file() else folder / TARGET
    with _problems_of(home, folder) as problems:
        body, tensors = read_json(home, CONFIG), read_tensors(home, files)
        stored_head = "lm_head.weight" in tensors
        facts = read_target(body, head_stored=stored_head, problems=problems)
        stop_ids = _stop_ids(home, facts)
        layout = target_layout(facts.config, facts.family)
        head = [] if facts.mtp is None else mtp_layout(facts.mtp)
        aside = (VISION,) if facts.family.composite else ()
        _check_tensors([*layout, *head], tensors, _file(home), aside, problems)
    return _Target(home, layout, tensors, facts, head, stop_ids)


def _choose(
    drafter: str | Path | None, home: Path, folder: Path, target: TargetFacts
) -> Path | DrafterKind | None:
    """The folder of a block drafter, or "mtp", or None."""
    bases = [folder, home, *([home.parent] if home.resolve().name == TARGET else [])]
    found: dict[str, Path] = {}
    for kind in _HEADS:
        for base in bases:
            if (base / kind / CONFIG).is_file():
                found.setdefault(kind, base / kind)
    if drafter is None:
        return next(iter(found.values()), "mtp" if target.mtp is not None else None)
    if isinstance(drafter, str):
        if drafter == "none":
            return None
        if drafter in found:
            return found[drafter]
        if drafter == "mtp" and target.mtp is not None:
            return "mtp"
    if (Path(drafter) / CONFIG).is_file():
        return Path(drafter)
    names = [*found, *(["mtp"] if target.mtp is not None else []), "none"]
    raise ValueError(
        f"drafter is {str(drafter)!r}: there is no such drafter at {folder}, and no {CONFIG} in a "
        f"folder of that name; expected {', '.join(names)}, or a folder"
    )


def _read_block(path: Path, folder: Path, target: _Target, files: DataFiles) -> _Block:
    with _problems_of(path, folder) as problems:
        body, tensors = read_json(path, CONFIG), read_tensors(path, files)
        kinds = [k for k, head in _HEADS.items() if any(n.startswith(head) for n in tensors)]
        if len(kinds) != 1:
            raise ArtifactError(
                _file(path),
                "tensors",
                f"tensors of {' and '.join(kinds) or 'no drafter'}",
                " or ".join(f"{head}* of {kind}" for kind, head in _HEADS.items()),
            )
        facts = read_block(body, kinds[0], target.facts.config, problems)
        layout = block_layout(facts.config)
        tensors = _without_copies(tensors, target, problems)
        # A confidence head says how many drafts are worth verifying. We verify all.
        aside = ("confidence_head.",) if kinds[0] == "dspark" else ()
        _check_tensors(layout, tensors, _file(path), aside, problems)
    return _Block(path, layout, tensors, facts)


def _without_copies(tensors: Tensors, target: _Target, problems: Problems) -> Tensors:
    """Some drafters are stored with copies of the target's embedding and head: equal, or refused.

    They are not loaded. The drafter uses the target's own arrays.
    """
    config = target.facts.config
    table = f"{target.facts.family.prefix}embed_tokens.weight"
    copies = {"embed_tokens.weight": table, "lm_head.weight": "lm_head.weight"}
    if config.tied:
        copies["lm_head.weight"] = table
    for name, original in copies.items():
        if name not in tensors or original not in target.tensors:
            continue
        ours, theirs = tensors[name], target.tensors[original]
        if ours.shape != theirs.shape or not np.array_equal(ours.read(), theirs.read()):
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


def _file(folder: Path) -> str:
    """What messages about tensors name."""
    return INDEX if (folder / INDEX).exists() else SINGLE


def _stop_ids(folder: Path, target: TargetFacts) -> tuple[int, ...]:
    """Of ``generation_config.json``, which runtimes ask first, else of ``config.json``."""
    if not (folder / GENERATION).is_file():
        return target.stop_ids
    value: Any = read_json(folder, GENERATION).get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    vocab = target.config.vocab_size
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab for i in ids):
        raise ArtifactError(
            GENERATION, "eos_token_id", str(value)[:80], f"token ids in 0..{vocab - 1}"
        )
    return tuple(dict.fromkeys(int(i) for i in ids)) or target.stop_ids


# ---------------------------------------------------------------------------------------- tensors


def _check_tensors(
    layout: Sequence[Entry], tensors: Tensors, file: str, aside: tuple[str, ...], problems: Problems
) -> None:
    """The layout's tensors are there, in their shapes, and no others but those put ``aside``."""
    parts = {part.name: part for entry in layout for part in entry.parts}
    found = Problems()
    for name, part in parts.items():
        tensor = tensors.get(name)
        wanted = f"shape {list(part.shape)}"
        if tensor is None:
            found.report(file, f"tensor {name}", "nothing", wanted)
        elif tensor.shape != part.shape:
            found.report(tensor.file, f"tensor {name}", f"shape {list(tensor.shape)}", wanted)
    hints = {"lm_head.weight": f" ({CONFIG} says tie_word_embeddings)"}
    if not any(name.startswith(MTP) for name in parts):
        hints |= {
            n: f" ({CONFIG} says no mtp_num_hidden_layers)" for n in tensors if n.startswith(MTP)
        }
    for name in sorted(tensors.keys() - parts.keys()):
        if not name.startswith(aside):
            shape = f"shape {list(tensors[name].shape)}"
            wanted = f"no such tensor{hints.get(name, '')}"
            found.report(tensors[name].file, f"tensor {name}", shape, wanted)
    problems += found[:_NAMED]
    if len(found) > _NAMED:  # of another architecture, and one line a tensor tells no more
        problems.report(file, "tensors", f"{len(found) - _NAMED} more problems", "none")


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
    tensor = tensors[part.name]
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
