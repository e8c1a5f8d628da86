"""The tensors of a checkpoint: their checks, and the recipe of each parameter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from convert.build import Shell, abstract, check, split
from convert.checkpoint.adapter import Delta, Merged
from convert.checkpoint.packings import (
    Expected,
    companions,
    expected,
    experts_source,
    groups_of,
    is_quantized,
    optional,
    source,
)
from convert.checkpoint.quantization import Quantized, Scheme
from convert.errors import Problems
from convert.packed import Quantized as QuantizedPiece
from convert.packed import QuantizedTensor, pack
from convert.paths import CONFIG
from convert.recipes import Decoded, Dense, ExpertMatrices, Made, Piece, Plain, Recipe, Recipes
from convert.tensors import FLOATS, INT32, INT64, Array, Tensor, type_name
from convert.unused import Remarks, unused_tensor
from jaxdraft.checkpoint.forms import LAID_OUT, Form
from jaxdraft.checkpoint.layout import ROTARY, Entry, StoredTensor, shape_of
from jaxdraft.config import DrafterConfig, TargetConfig

HEAD = "lm_head.weight"

INTEGERS: Mapping[Form, tuple[int, ...]] = {Form.OFFSETS: (INT64,)}
"""Forms that are not floats, and their stored types."""

PACKED = ("e2m1",)
"""Kinds of values that stay packed unless the caller asks for floats: four times as many bytes."""

_NAMED = 20
"""Maximum number of problems reported one by one."""

Tensors = Mapping[str, Tensor]

Tables = Callable[[], tuple[Array, Array]]


def stores(
    name: str, shape: tuple[int, ...], tensors: Tensors, quantized: Quantized | None
) -> bool:
    """Return whether a matrix is there, as floats or quantized."""
    return name in tensors or _scheme(name, shape, tensors, quantized) is not None


def _scheme(
    name: str, shape: tuple[int, ...], tensors: Tensors, quantized: Quantized | None
) -> Scheme | None:
    """Return how a matrix is quantized: some of its quantized tensors are present."""
    if quantized is None:
        return None
    scheme = quantized.scheme(name)
    experts = scheme.layout == "mxfp4" and len(shape) == 3
    if not experts and (len(shape) != 2 or not name.endswith(".weight")):
        return None
    return scheme if is_quantized(scheme, name, tensors) else None


def _expected(
    layout: Sequence[Entry], tensors: Tensors, quantized: Quantized | None
) -> dict[str, Expected]:
    """Return the tensors that a layout requires, by name."""
    found: dict[str, Expected] = {}
    for entry in layout:
        for part in entry.tensors:
            scheme = _scheme(part.name, part.shape, tensors, quantized)
            if scheme is None:
                types = INTEGERS.get(entry.form, FLOATS)
                found[part.name] = Expected.of(*part.shape, types=types)
                continue
            found |= expected(scheme, part.name, part.shape)
            columns = part.shape[1]
            for name in optional(scheme, part.name) & tensors.keys():
                found[name] = Expected.of(columns, types=(INT32,))
    return found


def check_tensors(
    layout: Sequence[Entry],
    tensors: Tensors,
    file: str,
    aside: tuple[str, ...],
    problems: Problems,
    quantized: Quantized | None = None,
    remarks: Remarks | None = None,
) -> None:
    """Check that the layout's tensors are present and that no others are, except ``aside``.

    Args:
      layout: the folder's layout.
      tensors: the folder's tensors, by name.
      file: name of the file in messages.
      aside: prefixes of the names of tensors that are not checked.
      problems: destination of problems.
      quantized: allowed storage of matrices in few bits.
      remarks: destination of remarks, which do not prevent loading.
    """
    wanted = _expected(layout, tensors, quantized)
    found = Problems()
    for name, each in wanted.items():
        tensor = tensors.get(name)
        if tensor is None:
            hint = ", since tie_word_embeddings is not true" if name == HEAD else ""
            found.report(file, f"tensor {name}", "nothing", each.wanted + hint)
        elif tensor.shape not in each.shapes:
            shape = f"shape {list(tensor.shape)}"
            found.report(tensor.file, f"tensor {name}", shape, each.wanted)
        elif tensor.data_type not in each.types and not isinstance(tensor, QuantizedTensor):
            _report_type(found, tensor, each.types)
    if quantized is not None and not found:
        for part in (part for entry in layout for part in entry.tensors):
            _check_numbers(part, tensors, quantized, found)
    _check_others(layout, wanted, tensors, aside, found, remarks or Remarks())
    problems += found[:_NAMED]
    if len(found) > _NAMED:  # of another architecture, and one line a tensor tells no more
        problems.report(file, "tensors", f"{len(found) - _NAMED} more problems", "none")


def _check_numbers(
    part: StoredTensor, tensors: Tensors, quantized: Quantized, problems: Problems
) -> None:
    """Check the small tensors that describe a quantized matrix: its shape, and groups of inputs."""
    scheme = _scheme(part.name, part.shape, tensors, quantized)
    if scheme is None:
        return
    sizes = tensors.get(shape_of(part.name))
    if sizes is not None:
        found = sizes.read().tolist()
        if found != list(part.shape):
            problems.report(sizes.file, f"tensor {sizes.name}", f"{found}", f"{list(part.shape)}")
    groups = groups_of(scheme, part.name, tensors)
    count = -(-part.shape[1] // (scheme.group or part.shape[1]))
    if groups is not None and not (0 <= groups.min() and groups.max() < count):
        tensor = tensors[companions(scheme, part.name)["groups"]]
        found = f"groups {groups.min()}..{groups.max()}"
        problems.report(tensor.file, f"tensor {tensor.name}", found, f"0..{count - 1}")


def _check_others(
    layout: Sequence[Entry],
    expected: Mapping[str, Expected],
    tensors: Tensors,
    aside: tuple[str, ...],
    problems: Problems,
    remarks: Remarks,
) -> None:
    """Note unused tensors that are constants or zeros, and report all others."""
    heights = {
        part.name: part.shape[0]
        for entry in layout
        for part in entry.tensors
        if len(part.shape) == 2
    }
    hints = {HEAD: f" ({CONFIG} sets tie_word_embeddings)"}
    for name in sorted(tensors.keys() - expected.keys()):
        tensor = tensors[name]
        if name.startswith(aside):
            continue
        reason = unused_tensor(name, tensor.shape)
        if reason is None and _zero_bias(tensor, heights):
            reason = "a bias of zeros"
        if reason is not None:
            remarks.note(tensor.file, f"tensor {name} is not read: {reason}")
            continue
        shape = f"shape {list(tensor.shape)}"
        hint = hints.get(name, "")
        if f"{name.removesuffix('bias')}weight" in expected and name.endswith(".bias"):
            hint = f": the settings of {CONFIG} have no bias here"
        wanted = f"no such tensor{hint}"
        problems.report(tensor.file, f"tensor {name}", shape, wanted)


def _zero_bias(tensor: Tensor, heights: Mapping[str, int]) -> bool:
    """Return whether a tensor is an all-zero bias of a matrix, whose rows are given by name."""
    stem, dot, last = tensor.name.rpartition(".")
    if not dot or last != "bias" or tensor.data_type not in FLOATS:
        return False
    if tensor.shape != (heights.get(f"{stem}.weight"),):
        return False
    return not np.any(tensor.read())


def _report_type(problems: Problems, tensor: Tensor, types: Collection[int]) -> None:
    expected = " or ".join(type_name(each) for each in types)
    found = tensor.type_name
    problems.report(tensor.file, f"tensor {tensor.name}", found, expected)


def _piece(part: StoredTensor, form: Form, tensors: Tensors, quantized: Quantized | None) -> Piece:
    scheme = _scheme(part.name, part.shape, tensors, quantized)
    if scheme is not None and scheme.layout == "mxfp4":
        return QuantizedPiece(experts_source(scheme, part.name, part.shape, form, tensors))
    if scheme is not None:
        return QuantizedPiece(source(scheme, part.name, part.shape, tensors))
    tensor = tensors[part.name]
    if isinstance(tensor, QuantizedTensor):
        return QuantizedPiece(tensor.source())
    if form in LAID_OUT and len(tensor.shape) == 3:
        return ExpertMatrices(tensor, form)
    if form is not Form.PLAIN:
        return Decoded(tensor, form)
    # A matrix lets go of its pages while it is copied; see Dense.
    matrix = len(tensor.shape) > 1
    return Dense.of(tensor, transposed=False) if matrix else Plain(tensor, tensor.shape)


def _table(tables: Tables, index: int) -> Array:
    return tables()[index]


def make_shell(
    module: Callable[..., nnx.Module],
    config: TargetConfig | DrafterConfig,
    layout: Sequence[Entry],
    tensors: Tensors,
    tables: Mapping[str, Tables],
    dtype: DTypeLike,
    file: str,
    quantized: Quantized | None = None,
    packed: bool | None = None,
    deltas: Mapping[str, Delta] | None = None,
) -> Shell:
    """Return the module without numbers, and the recipe of each parameter.

    ``tables`` makes the cosines and sines of each module that
    :data:`~jaxdraft.checkpoint.layout.ROTARY` names. With ``packed``, quantized matrices stay
    packed; with None, those of :data:`PACKED` alone; see :func:`convert.packed.pack`. Matrices with
    changes of an adapter, ``deltas``, become floats.
    """
    made = abstract(module, config, dtype)
    structure, wanted = split(made)
    recipes: Recipes = {}
    for entry in layout:
        shape = wanted[entry.path].shape
        if entry.form is Form.ZERO:
            zeros = functools.partial(np.zeros, shape, np.float32)
            recipes[entry.path] = Recipe.of(Made(shape, zeros))
        else:
            pieces = [_piece(part, entry.form, tensors, quantized) for part in entry.tensors]
            pieces = [
                Merged(piece, deltas[part.name]) if deltas and part.name in deltas else piece
                for piece, part in zip(pieces, entry.tensors, strict=True)
            ]
            recipes[entry.path] = Recipe.stack(shape, pieces)
    for path in wanted:
        if path[0] in ROTARY:
            table = functools.partial(_table, tables[str(path[0])], ("cos", "sin").index(path[1]))
            recipes[path] = Recipe.of(Made(wanted[path].shape, table))
    check(file, wanted, recipes)
    if packed is not False:
        recipes = pack(made, recipes, dtype, PACKED if packed is None else None)
        structure, wanted = split(made)
        check(file, wanted, recipes)
    return Shell(structure, wanted, recipes)
