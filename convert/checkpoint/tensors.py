"""The tensors of a checkpoint: what they have to be, and what each parameter is made of."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from convert.build import Shell, abstract, check, split
from convert.checkpoint.section import Quantized
from convert.errors import Problems
from convert.paths import CONFIG
from convert.recipes import Decoded, Dense, Made, Piece, Plain, Recipe, Recipes, convert_into
from convert.tensors import FLOATS, INT8, INT32, INT64, Array, Tensor, type_name
from convert.unused import Remarks, unused_tensor
from jaxdraft.checkpoint.forms import Form, from_int4, from_int8, unpack_int4
from jaxdraft.checkpoint.layout import (
    ROTARY,
    Entry,
    StoredTensor,
    is_matrix,
    packed_of,
    scales_of,
    shape_of,
)
from jaxdraft.config import DrafterConfig, TargetConfig

HEAD = "lm_head.weight"

INTEGERS: Mapping[Form, tuple[int, ...]] = {Form.OFFSETS: (INT64,)}
"""Forms that are no floats, and what they are stored in."""

_NAMED = 20
"""Number of problems that are reported one by one."""

Tensors = Mapping[str, Tensor]

Tables = Callable[[], tuple[Array, Array]]


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
    """Return the tensors that a layout requires, by name.

    A matrix is quantized if some of its quantized tensors are present.
    """
    found: dict[str, Expected] = {}
    for entry in layout:
        bits = quantized.bits if quantized is not None and is_matrix(entry) else None
        for part in entry.tensors:
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
    for part in (part for entry in layout for part in entry.tensors):
        sizes = shape_of(part.name)
        if sizes in expected and sizes in tensors and tensors[sizes].shape == (2,):
            stated = tuple(tensors[sizes].read().tolist())
            if stated != part.shape:
                where = f"tensor {sizes}"
                found.report(tensors[sizes].file, where, f"{list(stated)}", f"{list(part.shape)}")
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
    """Note unused tensors that are constants or zeros, and report all others."""
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
    """Return whether a tensor is an all-zero bias of one of the expected matrices."""
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


def _piece(part: StoredTensor, form: Form, tensors: Tensors) -> Piece:
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
) -> Shell:
    """Return the module without numbers, and the recipe of each parameter.

    ``tables`` makes the cosines and sines of each module that
    :data:`~jaxdraft.checkpoint.layout.ROTARY` names.
    """
    structure, wanted = split(abstract(module, config, dtype))
    recipes: Recipes = {}
    for entry in layout:
        shape = wanted[entry.path].shape
        if entry.form is Form.ZERO:
            zeros = functools.partial(np.zeros, shape, np.float32)
            recipes[entry.path] = Recipe.of(Made(shape, zeros))
        else:
            pieces = [_piece(part, entry.form, tensors) for part in entry.tensors]
            recipes[entry.path] = Recipe.stack(shape, pieces)
    for path in wanted:
        if path[0] in ROTARY:
            table = functools.partial(_table, tables[str(path[0])], ("cos", "sin").index(path[1]))
            recipes[path] = Recipe.of(Made(wanted[path].shape, table))
    check(file, wanted, recipes)
    return Shell(structure, wanted, recipes)
