"""Modules -> checkpoint folders."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxdraft import kinds, templates
from jaxdraft.base import Drafter
from jaxdraft.checkpoint import config as config_json
from jaxdraft.checkpoint.block_config import block_json
from jaxdraft.checkpoint.eagle3_config import eagle3_json
from jaxdraft.checkpoint.files import Tensor, appearing, check_free, write_json, write_tensors
from jaxdraft.checkpoint.forms import (
    INT4_GROUP,
    LAID_OUT,
    Form,
    difference,
    encode,
    float_dtype,
    from_int4,
    from_int8,
    pack_int4,
    to_int4,
    to_int8,
)
from jaxdraft.checkpoint.layout import (
    MEMBERS,
    ROTARY,
    TARGET,
    Entry,
    StoredTensor,
    block_layout,
    eagle3_layout,
    is_matrix,
    mtp_layout,
    packed_of,
    scales_of,
    shape_of,
    target_layout,
)
from jaxdraft.checkpoint.layout import Path as ParameterPath
from jaxdraft.checkpoint.packed import (
    Scheme,
    experts_in_mxfp4,
    in_mxfp4,
    parameters_of,
    quantization_json,
    rows_of,
    same_table,
)
from jaxdraft.checkpoint.rotary import check_tables, fits, recover, tables_of
from jaxdraft.config import DRAFT_MODEL, BlockDrafterConfig, DrafterKind, MoeConfig
from jaxdraft.draft.block import BlockDrafter, draft_head
from jaxdraft.draft.chain import ChainDrafter
from jaxdraft.draft.draft_model import DraftModel
from jaxdraft.draft.eagle3 import Eagle3Drafter
from jaxdraft.draft.mtp import MtpDrafter
from jaxdraft.draft.ngram import NgramDrafter
from jaxdraft.draft.none import NoDrafter
from jaxdraft.kinds import KINDS, kind_of
from jaxdraft.model import Model
from jaxdraft.nn.linear import BlockedLinear
from jaxdraft.nn.packed import PackedMatrix
from jaxdraft.rope import Rope
from jaxdraft.sharding.place import on_host
from jaxdraft.target import DecoderTarget

MAX_SHARD_BYTES = 4 << 30
"""Bytes of tensors per file, which is also the host memory that saving needs."""

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    *templates.FILES,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)

SLIDING = "sliding"
"""Name for the rotary embedding of a target's layers with a window, if they have their own."""

Parameters = Mapping[ParameterPath, Any]

Schemes = dict[str, Scheme]
"""Storage of packed matrices, by the name of their module."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A record of the files written by :func:`save`.

    Attributes:
      folder: folder with ``target`` and a folder for each block drafter.
      parts: the folders in it.
      rounded: "folder/tensor" -> largest difference, for tensors that do not restore their
        parameter bit for bit in its own dtype: all of them with a narrower dtype; norm weights
        below 1/2 and decay scales that ``1 + w`` and ``-exp(A_log)`` cannot represent. Never a
        tensor that came from an artifact or a checkpoint in the same dtype.
    """

    folder: Path
    parts: tuple[str, ...]
    rounded: Mapping[str, float]


def save(
    model: Model | DecoderTarget,
    folder: str | Path,
    *,
    drafters: Sequence[Drafter] = (),
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
    tokenizer: str | Path | None = None,
    rope: Mapping[str, Rope] | None = None,
    stop_ids: tuple[int, ...] | None = None,
    int8: bool = False,
    int4: bool = False,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Saved:
    """Write a target and its drafters as checkpoints.

    ``folder/target`` holds the target, a multi-token-prediction head inside it; ``folder/dflash2``
    and ``folder/dspark`` hold block drafters. Each has a ``config.json`` and
    ``model.safetensors`` (or numbered shards with their index). :func:`jaxdraft.load` reads the
    folder, transformers and other runtimes read its parts, and the model builder of
    onnxruntime-genai exports it. Save in float32 for that: the builder adds 1 to norm weights in
    the stored type (``experiments/export_onnx.py``).

    Everything is checked first; then the files are written under another name, and the folder
    appears when they are complete.

    Args:
      model: the target, with its drafter. A model of a mesh is gathered on the host; on several
        hosts, call :func:`jaxdraft.unshard` in every process and save the result in one.
      folder: the folder to create.
      drafters: further drafters of the same target, one of each kind.
      dtype: type of the stored tensors. Default: that of each array; tensors stored shifted or as
        a logarithm (Qwen3.5's norms, ``A_log``) are then float32.
      compute_dtype: type named in ``config.json``. Runtimes, and :func:`jaxdraft.load` too, widen
        or round the stored tensors to it unless set otherwise. Default: the stored dtype.
      tokenizer: folder whose tokenizer files are copied. Default: that of the model's tokenizer; a
        tokenizer of another origin is written.
      rope: rotary embedding of a folder ("target", "dflash2", "dspark"), and "sliding" for layers
        with a window that have their own. Default: the loaded one, or else a plain one,
        whose base is inferred from the tables.
      stop_ids: tokens that end a sequence. Default: the model's.
      int8: whether to store the matrices of block drafters in eight bits, one scale per row, as
        compressed-tensors does (``int-quantized``). Only drafts change a little,
        because the target verifies them.
      int4: whether to store the matrices of the target, of its multi-token-prediction head and of
        block drafters in four bits, one scale per 64 inputs, as compressed-tensors does
        (``pack-quantized``). Lossy for the target, unless its weights already lie on the int4 grid
        (loaded from such a checkpoint, or trained with :func:`jaxdraft.train.round_to_int4`).
      overwrite: whether to replace ``folder`` if it is a saved checkpoint and nothing else.
      max_shard_bytes: bytes of tensors in one file.

    Returns:
      Record of the written folders and of the rounding.

    Raises:
      ValueError: if the layouts cannot express the model, a drafter belongs to another target, the
        arguments are inconsistent, or a matrix to be stored in few bits is not finite.
      FileExistsError: if ``folder`` exists and may not be replaced.
    """
    folder = Path(folder)
    stored = None if dtype is None else float_dtype(dtype)
    computed = None if compute_dtype is None else float_dtype(compute_dtype)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; expected at least 1")
    model, drafters = on_host(model, drafters)
    check_free(folder, (TARGET, *kinds.folders(), DRAFT_MODEL), overwrite=overwrite)
    if int8 and int4:
        raise ValueError("int8 and int4 are both True; expected at most one of them")
    bits = 4 if int4 else 8 if int8 else None
    rounded: dict[str, float] = {}
    folders = _Folders(model, drafters, stored, computed, dict(rope or {}), stop_ids, bits, rounded)
    files = _tokenizer_files(model, tokenizer)
    text = getattr(model, "text", None)
    with appearing(folder) as making:
        for name, content in folders.contents.items():
            (making / name).mkdir()
            for file, body in content.json.items():
                write_json(making / name / file, body)
            write_tensors(making / name, content.tensors, max_shard_bytes)
        for path in files:
            deeper = templates.FOLDER if path.parent.name == templates.FOLDER else ""
            (making / TARGET / deeper).mkdir(exist_ok=True)
            shutil.copyfile(path, making / TARGET / deeper / path.name)
        if not files and text is not None:  # no folder that it came from: it was in a GGUF file
            text.save(making / TARGET)
    return Saved(folder=folder, parts=tuple(folders.contents), rounded=rounded)


@dataclasses.dataclass(frozen=True)
class _Content:
    """A folder to be written."""

    json: Mapping[str, Mapping[str, Any]]
    tensors: tuple[Tensor, ...]


class _Folders:
    """All folders to be written. All checks are made here, before any number is read."""

    def __init__(
        self,
        model: Model | DecoderTarget,
        drafters: Sequence[Drafter],
        dtype: np.dtype | None,
        compute_dtype: np.dtype | None,
        ropes: Mapping[str, Rope],
        stop_ids: tuple[int, ...] | None,
        bits: int | None,
        rounded: dict[str, float],
        home: str = TARGET,
    ):
        self.home = home
        self.dtype, self.compute_dtype = dtype, compute_dtype
        self.ropes, self.bits, self.rounded = ropes, bits, rounded
        target = model
        if isinstance(model, Model):
            target, drafters = model.target, [model.drafter, *drafters]
            stop_ids = model.info.stop_ids if stop_ids is None else stop_ids
        if not isinstance(target, DecoderTarget):
            raise ValueError(f"the target is a {type(target).__name__}; expected a DecoderTarget")
        if any(isinstance(inner, BlockedLinear) for _, inner in nnx.iter_modules(target.decoder())):
            raise ValueError(
                "the target also holds its matrices in blocks: load it without blocked=True"
            )
        self.target = target
        chosen = self._choose(drafters)
        mtp, small = chosen.pop("mtp", None), chosen.pop(DRAFT_MODEL, None)
        own = {} if small is None else {k: v for k, v in ropes.items() if k == DRAFT_MODEL}
        ropes = {k: v for k, v in ropes.items() if k not in own}
        known = [home, *([SLIDING] if target.config.own_tables else []), *chosen]
        unknown = sorted(set(ropes) - {*known})
        if unknown:
            raise ValueError(f"rope is given for {unknown}; expected {known}")
        self.contents = {home: self._target(mtp, stop_ids or ())}
        for kind in kinds.folders():
            if kind in chosen:
                drafter = chosen[kind]
                write = self._eagle3 if isinstance(drafter, Eagle3Drafter) else self._block
                self.contents[kind] = write(drafter)
        if small is not None:
            inner = _Folders(
                small.model, (), dtype, compute_dtype, own, (), bits, rounded, DRAFT_MODEL
            )
            self.contents |= inner.contents

    def _choose(self, drafters: Sequence[Drafter]) -> dict[str, Any]:
        """Return the drafters that have weights, by kind."""
        chosen: dict[str, Any] = {}
        for drafter in drafters:
            if isinstance(drafter, (NoDrafter, NgramDrafter)):
                continue
            if isinstance(drafter, DraftModel):
                if chosen.setdefault(DRAFT_MODEL, drafter) is not drafter:
                    raise ValueError("there are two draft models; expected one")
                continue
            kind = kind_of(drafter)
            if kind is None:
                raise ValueError(
                    f"a drafter is a {type(drafter).__name__}; expected a BlockDrafter, an "
                    "Eagle3Drafter, an MtpDrafter, a DraftModel, or one without weights"
                )
            if chosen.setdefault(kind, drafter) is not drafter:
                raise ValueError(
                    f"there are two {kind} drafters; expected at most one of each kind"
                )
            self._check_shared(drafter, kind)
        return chosen

    def _check_shared(self, drafter: Any, kind: DrafterKind) -> None:
        """Check the parts that the drafter's checkpoint leaves to the target.

        These are the taps, and embedding and head unless the drafter has its own.
        """
        config, decoder = self.target.config, self.target.decoder()
        embedding, head = decoder.embed.table, decoder.head_weight
        for what, theirs, ours in (
            ("embedding", drafter.embedding, embedding),
            ("head", drafter.head, _rows_of(head, drafter)),
        ):
            if theirs is None:  # it has one of its own
                continue
            if not same_table(theirs, ours):
                raise ValueError(
                    f"{kind}: the {what} is not the target's, and the layout has no tensor for "
                    "another"
                )
        shared = ["vocab_size", "context_length"]
        if not isinstance(drafter, Eagle3Drafter):  # of any width with an embedding of its own
            shared.append("width")
        if KINDS[kind].reads == "aux":
            shared.append("aux_width")
        for field in shared:
            theirs, ours = getattr(drafter.config, field), getattr(config, field)
            if theirs != ours:
                raise ValueError(f"{kind}: {field} is {theirs}; expected {ours}, the target's")

    def _target(self, mtp: MtpDrafter | None, stop_ids: tuple[int, ...]) -> _Content:
        config, found = self.target.config, parameters_of(self.target.decoder)
        family = config_json.family_of(config)
        bits = 4 if self.bits == 4 else None  # of drafters alone, if there are eight
        if bits and isinstance(config.mlp, MoeConfig):
            raise ValueError("int4 is True, and the target has experts; expected a dense target")
        ropes = self._target_ropes(found)
        stored = self._stored(self.target.dtype)
        body = config_json.target_json(
            config,
            family,
            ropes,
            dtype=(self.compute_dtype or stored).name,
            mtp=None if mtp is None else mtp.config,
            stop_ids=stop_ids,
            int4=bits == 4,
        )
        schemes: Schemes = {}
        layout = target_layout(config, family)
        if any(in_mxfp4(entry, found) for entry in layout):
            body["quantization_config"] = config_json.MXFP4
        tensors = list(self._tensors(self.home, layout, found, bits, schemes))
        if mtp is not None:
            head = parameters_of(mtp.mtp)
            check_tables("mtp", head, ropes[0])
            tensors += self._tensors(self.home, mtp_layout(mtp.config), head, bits, schemes)
        if family.tower:
            for name, shape in config_json.vision_tower(config).items():
                zeros = lambda shape=shape: np.zeros(shape, stored)  # noqa: E731
                tensors.append(Tensor(name, shape, stored, zeros))
        generation = config_json.generation_json(stop_ids)
        body |= quantization_json(schemes)
        json = {"config.json": body, "generation_config.json": generation}
        return _Content(json, tuple(tensors))

    def _block(self, drafter: BlockDrafter) -> _Content:
        config, found = drafter.config, parameters_of(drafter.backbone)
        rope = self._rope(config.kind, found)
        stored = self._stored(drafter.dtype)
        body = block_json(
            config,
            self.target.config.taps,
            rope,
            dtype=(self.compute_dtype or stored).name,
            bits=self.bits,
        )
        schemes: Schemes = {}
        layout = block_layout(config)
        tensors = list(self._tensors(config.kind, layout, found, self.bits, schemes))
        if config.own_head:
            tensors.append(_members(found[("vocabulary",)], config.vocab_size))
        if config.layout == "flat":
            tensors += self._copies(config)
        return _Content({"config.json": body | quantization_json(schemes)}, tuple(tensors))

    def _eagle3(self, drafter: Eagle3Drafter) -> _Content:
        config, found = drafter.config, parameters_of(drafter.eagle3)
        rope = self._rope(config.kind, found, config.rope)
        body = eagle3_json(
            config,
            self.target.config.taps,
            rope,
            layers=len(self.target.config.layers),
            dtype=(self.compute_dtype or self._stored(drafter.dtype)).name,
            bits=self.bits,
        )
        schemes: Schemes = {}
        layout = eagle3_layout(config)
        tensors = list(self._tensors(config.kind, layout, found, self.bits, schemes))
        if config.draft_vocab_size is not None:
            tensors.append(_members(found[("vocabulary",)], config.vocab_size))
        return _Content({"config.json": body | quantization_json(schemes)}, tuple(tensors))

    def _copies(self, config: BlockDrafterConfig) -> Iterator[Tensor]:
        """Return the target's embedding and head, of which flat files have copies."""
        decoder = self.target.decoder()
        embedding, head = decoder.embed.table, decoder.head_weight
        arrays: dict[str, Any] = {"embed_tokens.weight": embedding}
        if not config.own_head:
            arrays["lm_head.weight"] = head
        for name, array in arrays.items():
            if isinstance(array, PackedMatrix):
                raise ValueError(f"{config.kind}: {name} is the target's, which is packed")
            part, stored = StoredTensor(name, array.shape), self._stored(array.dtype)
            make = self._maker(config.kind, array, Form.PLAIN, 0, part, stored)
            yield Tensor(name, array.shape, stored, make)

    def _stored(self, own: DTypeLike) -> np.dtype:
        """Return the requested dtype, or else the array's own."""
        return np.dtype(own) if self.dtype is None else self.dtype

    def _target_ropes(self, found: Parameters) -> list[Rope]:
        """Return the embeddings of the target: of all layers, or without and with a window."""
        config = self.target.config
        ropes = [self._rope(self.home, found, config.rope)]
        if config.own_tables:
            ropes.append(self._rope(SLIDING, found, config.sliding_rope, ROTARY[1]))
        return ropes

    def _rope(
        self, folder: str, found: Parameters, own: Rope | None = None, module: str = ROTARY[0]
    ) -> Rope:
        """Return the description of rotary tables: the caller's, their own, or a plain one."""
        given = self.ropes.get(folder)
        if given is not None:
            check_tables(folder, found, given, module)
            return given
        if own is not None and fits(own, *tables_of(folder, found, module)):
            return own
        rope = recover(*tables_of(folder, found, module))
        if rope is None:
            raise ValueError(
                f"{folder}: cannot infer rope_theta from the rotary tables; pass "
                f"rope={{{folder!r}: jaxdraft.checkpoint.Rope(...)}}"
            )
        return rope

    def _tensors(
        self,
        folder: str,
        layout: Sequence[Entry],
        found: Parameters,
        bits: int | None,
        schemes: Schemes,
    ) -> Iterator[Tensor]:
        """Yield the tensors of a layout, checked to use every parameter exactly once.

        Modules whose matrices are packed are added to ``schemes``.
        """
        stored = {path for path in found if path[0] not in ROTARY}
        packed = [in_mxfp4(entry, found) for entry in layout]
        known = {entry.path for entry in layout}.union(*packed)
        for path in sorted(stored - known, key=str):
            hint = "; load without packed=True" if path[-1] in ("weight_q", "scales") else ""
            raise ValueError(
                f"{folder}: parameter {_dotted(path)} has no place in the layout{hint}"
            )
        for entry, parts in zip(layout, packed, strict=True):
            if parts:
                yield from experts_in_mxfp4(entry, *(found[path] for path in parts))
                continue
            label = f"{folder}: parameter {_dotted(entry.path)}"
            leaf = found.get(entry.path)
            if leaf is None:
                raise ValueError(f"{label} is missing")
            if entry.form is Form.ZERO:
                if np.any(np.asarray(leaf) != 0):
                    raise ValueError(f"{label} is not zero; the layout has no tensor for it")
                continue
            if isinstance(leaf, list):
                if bits:
                    raise ValueError(f"int{bits} is True, and {label} is already packed")
                for part in rows_of(leaf, entry.tensors):
                    name = part.stored.name.removesuffix(".weight")
                    schemes[name] = part.scheme(folder)
                    yield from part.tensors(schemes[name])
                continue
            if leaf.shape != entry.shape:
                raise ValueError(f"{label} has shape {leaf.shape}; expected {entry.shape}")
            exact = entry.form is Form.PLAIN or entry.form in LAID_OUT
            own = leaf.dtype if exact else np.float32
            stored = self._stored(own)
            if entry.form is Form.OFFSETS:
                stored = np.dtype(np.int64)
            start = 0
            for tensor in entry.tensors:
                if bits and is_matrix(entry):
                    write = self._in_int8 if bits == 8 else self._in_int4
                    yield from write(folder, leaf, start, tensor, stored)
                else:
                    make = self._maker(folder, leaf, entry.form, start, tensor, stored)
                    yield Tensor(tensor.name, tensor.shape, stored, make)
                start += tensor.size

    def _in_int8(
        self, folder: str, leaf: Any, start: int, tensor: StoredTensor, dtype: np.dtype
    ) -> Iterator[Tensor]:
        """Return two tensors, computed together when the first one is written."""

        @functools.cache
        def both() -> tuple[np.ndarray, np.ndarray]:
            wide = _finite(folder, leaf, start, tensor)
            values, scale = to_int8(wide, dtype)
            moved = np.abs(from_int8(values, scale) - wide).max(initial=0)
            if moved:
                self.rounded[f"{folder}/{tensor.name}"] = float(moved)
            return values, scale

        rows = (tensor.shape[0], 1)
        yield Tensor(tensor.name, tensor.shape, np.dtype(np.int8), lambda: both()[0])
        yield Tensor(scales_of(tensor.name), rows, dtype, lambda: both()[1])

    def _in_int4(
        self, folder: str, leaf: Any, start: int, tensor: StoredTensor, dtype: np.dtype
    ) -> Iterator[Tensor]:
        """Return three tensors; scales are bfloat16 for any ``dtype``."""
        rows, columns = tensor.shape
        if columns % INT4_GROUP:
            raise ValueError(
                f"{folder}: tensor {tensor.name} has rows of {columns}; int4 needs a "
                f"multiple of {INT4_GROUP}"
            )

        @functools.cache
        def both() -> tuple[np.ndarray, np.ndarray]:
            wide = _finite(folder, leaf, start, tensor)
            values, scale = to_int4(wide)
            moved = np.abs(from_int4(values, scale) - wide).max(initial=0)
            if moved:
                self.rounded[f"{folder}/{tensor.name}"] = float(moved)
            return pack_int4(values), scale

        shapes = (rows, -(-columns // 8)), (rows, columns // INT4_GROUP), (2,)
        names = packed_of(tensor.name), scales_of(tensor.name), shape_of(tensor.name)
        types = np.dtype(np.int32), np.dtype(jnp.bfloat16), np.dtype(np.int64)
        makers = lambda: both()[0], lambda: both()[1], lambda: np.asarray(tensor.shape, np.int64)
        yield from map(Tensor, names, shapes, types, makers)

    def _maker(
        self, folder: str, leaf: Any, form: Form, start: int, tensor: StoredTensor, dtype: np.dtype
    ) -> Callable[[], np.ndarray]:
        def make() -> np.ndarray:
            values = np.asarray(leaf)
            if form not in LAID_OUT:  # those are one tensor
                values = values.reshape(-1)[start : start + tensor.size]
            stored = encode(values, form, dtype)
            moved = difference(values, stored, form)
            if moved:
                self.rounded[f"{folder}/{tensor.name}"] = moved
            return np.ascontiguousarray(stored.reshape(tensor.shape))

        return make


def _finite(folder: str, leaf: Any, start: int, tensor: StoredTensor) -> np.ndarray:
    """Return a matrix [out, in] in float32, after checking that it is finite."""
    wide = np.asarray(leaf).reshape(-1)[start : start + tensor.size].astype(np.float32)
    if not np.isfinite(wide).all():
        raise ValueError(
            f"{folder}: tensor {tensor.name} has numbers that are not finite; integers "
            "cannot represent them"
        )
    return wide.reshape(tensor.shape)


def _members(vocabulary: Any, vocab_size: int) -> Tensor:
    """Return the tensor [V] of whether each token is in the draft vocabulary."""

    def make() -> np.ndarray:
        return np.isin(np.arange(vocab_size), np.asarray(vocabulary))

    return Tensor(MEMBERS, (vocab_size,), np.dtype(np.bool_), make)


def _rows_of(head: Any, drafter: BlockDrafter | ChainDrafter) -> Any:
    """Return the rows of the target's head that the drafter should have."""
    if isinstance(drafter, ChainDrafter):
        return head
    return draft_head(drafter.backbone, head, drafter.config)


def _tokenizer_files(model: Any, tokenizer: str | Path | None) -> list[Path]:
    text = getattr(model, "text", None)
    source = tokenizer or getattr(text, "source", None)
    if not source:
        return []
    files = [Path(source, name) for name in _TOKENIZER if Path(source, name).is_file()]
    files += sorted(Path(source, templates.FOLDER).glob("*.jinja"))
    if tokenizer is not None and Path(tokenizer, "tokenizer.json") not in files:
        raise ValueError(f"there is no tokenizer.json in {tokenizer}")
    return files


def _dotted(path: ParameterPath) -> str:
    return ".".join(str(key) for key in path)
