"""Packed matrices of a module -> tensors in the layouts of compressed-tensors, number for number.

Nothing is rounded and nothing becomes floats: a matrix whose form no layout has is refused. The
other direction is :mod:`convert.checkpoint.packings`, whose table names the tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from jaxdraft.checkpoint.files import Tensor
from jaxdraft.checkpoint.forms import LAID_OUT, Form, alternate
from jaxdraft.checkpoint.layout import (
    Entry,
    Path,
    StoredTensor,
    blocks_of,
    packed_of,
    scales_of,
    shape_of,
)
from jaxdraft.nn.linear import Frozen
from jaxdraft.nn.packed import PackedLinear, PackedMatrix, PackedRows

Array = np.ndarray

_SQUARE = 128
"""Outputs that share their scales in published fp8 checkpoints."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The storage of a matrix.

    Attributes:
      floats: whether values are float8 e4m3; otherwise integers.
      bits: bits per value.
      group: number of inputs that share a scale; None: all.
      rows: number of outputs that share their scales.
      zeros: whether there are zero points.
      reordered: whether the group of each input is stored.
    """

    floats: bool
    bits: int
    group: int | None
    rows: int = 1
    zeros: bool = False
    reordered: bool = False

    @property
    def layout(self) -> str:
        """The format of compressed-tensors."""
        if self.floats:
            return "float-quantized"
        plain = self.bits == 8 and self.group is None and not self.zeros and not self.reordered
        return "int-quantized" if plain else "pack-quantized"

    def json(self, targets: Sequence[str]) -> dict[str, Any]:
        """Return a group of ``config_groups``."""
        weights: dict[str, Any] = {
            "num_bits": self.bits,
            "type": "float" if self.floats else "int",
            "symmetric": not self.zeros,
            "dynamic": False,
        }
        if self.rows > 1:
            weights |= {"strategy": "block", "block_structure": [self.rows, self.group]}
        elif self.group is None:
            weights["strategy"] = "channel"
        else:
            weights |= {"strategy": "group", "group_size": self.group}
        if self.reordered:
            weights["actorder"] = "group"
        return {
            "targets": list(targets),
            "format": self.layout,
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
        }


def quantization_json(schemes: Mapping[str, Scheme]) -> dict[str, Any]:
    """Return the entry of ``config.json`` for the schemes of modules, by name, if there are any."""
    if not schemes:
        return {}
    groups: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        groups.setdefault(scheme, []).append(name)
    layouts = sorted({scheme.layout for scheme in groups})
    described = {
        "quant_method": "compressed-tensors",
        "format": layouts[0] if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": scheme.json(targets) for i, (scheme, targets) in enumerate(groups.items())
        },
        "ignore": [],
    }
    return {"quantization_config": described}


def packed_parts(module: nnx.Module) -> dict[Path, list[PackedMatrix]]:
    """Return the packed matrices of a module, by their path; several lie one below the other.

    Experts are not included: their matrices are one array.
    """
    found: dict[Path, list[PackedMatrix]] = {}
    modules: Any = nnx.iter_modules(module)
    for path, part in modules:
        if isinstance(part, PackedRows):
            found[path] = [each.table for each in part.below]
        elif isinstance(part, PackedLinear) and "below" not in path:
            found[path] = [part.table]
    return found


def parameters_of(frozen: Frozen) -> dict[Path, Any]:
    """Return the parameters by path, the rotary tables with them; packed ones as lists."""
    found = dict(nnx.traversals.flatten_mapping(frozen.params))
    for path, matrices in packed_parts(frozen()).items():
        found = {each: leaf for each, leaf in found.items() if each[: len(path)] != path}
        found[(*path, "weight")] = matrices
    return found


@dataclasses.dataclass(frozen=True)
class Packed:
    """Some rows of a packed matrix that are a tensor of their own in a checkpoint.

    Attributes:
      stored: name and shape of the tensor, as if it were floats.
      matrix: the matrix that holds its rows.
      start: the first of them.
    """

    stored: StoredTensor
    matrix: PackedMatrix
    start: int

    @property
    def form(self) -> Any:
        """Form of the matrix."""
        return self.matrix.form

    def array(self, name: str) -> Array:
        """Return these rows of an array."""
        rows = 1 if name == "weight_q" else self.form.rows
        stop = self.start + self.stored.shape[0]
        return np.asarray(self.matrix.arrays[name][self.start // rows : -(-stop // rows)])

    def values(self) -> Array:
        """Return the values as bytes, [rows, bytes], in the order of the inputs."""
        raw = self.array("weight_q").reshape(self.stored.shape[0], -1)
        if "order" not in self.form.parts:
            return raw
        places = np.arange(0, 8, self.form.bits, dtype=np.uint8)
        each = raw[..., None] >> places & np.uint8((1 << self.form.bits) - 1)
        each = each.reshape(len(raw), -1)
        order = np.asarray(self.matrix.arrays["order"])
        each[:, order] = each[:, : len(order)].copy()
        return np.bitwise_or.reduce(each.reshape(*raw.shape, -1) << places, axis=2)

    def scales(self) -> Array:
        """Return one number per group of outputs and block."""
        found = self.array("scales")
        if "coarse" not in self.form.parts:
            return found
        coarse = np.repeat(self.array("coarse").astype(np.float32), self.form.fine, axis=1)
        return found.astype(np.float32) * coarse[:, : found.shape[1]]

    def scheme(self, label: str) -> Scheme:
        """Return how these rows are stored.

        Args:
          label: the folder, for messages.

        Raises:
          ValueError: compressed-tensors has no such form.
        """
        form, where = self.form, f"{label}: tensor {self.stored.name}"
        without = "load without packed=True, and it is saved as floats"
        if "minima" in form.parts:
            raise ValueError(
                f"{where} has a minimum per block, as in GGUF files; compressed-tensors has zero "
                f"points alone: {without}"
            )
        if form.values not in ("integer", "e4m3"):
            raise ValueError(f"{where} has values of the kind {form.values!r}: {without}")
        group = None if form.block >= form.inputs else form.block
        if group and form.rows == 1 and form.inputs % group:
            raise ValueError(
                f"{where} has {form.inputs} inputs in blocks of {group}; compressed-tensors has "
                f"whole blocks: {without}"
            )
        if "zeros" in form.parts and self.array("zeros").max(initial=0) >= 1 << form.bits:
            raise ValueError(f"{where} has zero points past {form.bits} bits: {without}")
        rows = form.rows
        if rows > 1 and group is None:
            group = form.inputs
        if 1 < rows < _SQUARE and self.merged(_SQUARE) is not None:
            rows = _SQUARE
        zeros, reordered = "zeros" in form.parts, "order" in form.parts
        return Scheme(form.values == "e4m3", form.bits, group, rows, zeros, reordered)

    def merged(self, rows: int) -> Array | None:
        """Return the scales for groups of ``rows`` outputs, if they are equal in each of these."""
        each, scales = self.form.rows, self.scales()
        if rows % each:
            return None
        chosen = scales[:: rows // each]
        again = np.repeat(chosen, rows // each, axis=0)[: len(scales)]
        return chosen if np.array_equal(again, scales) else None

    def tensors(self, scheme: Scheme) -> Iterator[Tensor]:
        """Return the tensors of these rows."""
        name, (rows, columns) = self.stored.name, self.stored.shape
        types = {each: self.matrix.arrays[each].dtype for each in self.form.parts}
        scale_type = np.dtype(np.float32 if "coarse" in types else types["scales"])
        blocks = -(-columns // (scheme.group or columns))
        high = -(-rows // scheme.rows)
        if scheme.layout == "pack-quantized":
            each = 32 // scheme.bits
            words = -(-columns // each)
            yield _tensor(packed_of(name), (rows, words), np.int32, lambda: self._words(words))
            sizes = np.asarray(self.stored.shape, np.int64)
            yield _tensor(shape_of(name), (2,), np.int64, lambda: sizes)
        else:
            kind = ml_dtypes.float8_e4m3fn if scheme.floats else np.int8
            flip = np.uint8(0 if scheme.floats else 0x80)
            bytes_ = lambda: (self.values()[:, :columns] ^ flip).view(kind)  # noqa: E731
            yield _tensor(name, (rows, columns), kind, bytes_)
        yield _tensor(
            scales_of(name), (high, blocks), scale_type, lambda: self._scales(scheme, scale_type)
        )
        if scheme.zeros:
            each = 32 // scheme.bits
            shape = (-(-rows // each), blocks)
            yield _tensor(f"{name}_zero_point", shape, np.int32, lambda: self._zeros(scheme.bits))
        if scheme.reordered:
            yield _tensor(f"{name}_g_idx", (columns,), np.int32, self._groups)

    def _words(self, words: int) -> Array:
        values = self.values()[:, : 4 * words]
        values = np.pad(values, ((0, 0), (0, 4 * words - values.shape[1])))
        return np.ascontiguousarray(values).view(np.int32)

    def _scales(self, scheme: Scheme, dtype: np.dtype) -> Array:
        found = self.scales() if scheme.rows == self.form.rows else self.merged(scheme.rows)
        assert found is not None
        return np.ascontiguousarray(found.astype(dtype))

    def _zeros(self, bits: int) -> Array:
        """Zero points packed along the rows, low bits first."""
        each, zeros = 32 // bits, self.array("zeros").astype(np.uint32)
        zeros = np.pad(zeros, ((0, -len(zeros) % each), (0, 0)))
        places = np.arange(0, 32, bits, dtype=np.uint32).reshape(1, -1, 1)
        grouped = zeros.reshape(-1, each, zeros.shape[1]) << places
        return np.bitwise_or.reduce(grouped, axis=1).view(np.int32)

    def _groups(self) -> Array:
        order = np.asarray(self.matrix.arrays["order"])
        groups = np.empty(order.shape, np.int32)
        groups[order] = np.arange(len(order)) // self.form.block
        return groups


def _tensor(name: str, shape: tuple[int, ...], dtype: Any, make: Any) -> Tensor:
    return Tensor(name, shape, np.dtype(dtype), make)


def rows_of(matrices: Sequence[PackedMatrix], stored: Sequence[StoredTensor]) -> list[Packed]:
    """Return the part of a packed parameter that is each of its stored tensors.

    Raises:
      ValueError: a tensor lies in two of the matrices, or the shapes differ.
    """
    found: list[Packed] = []
    left = [(matrix, matrix.shape[0]) for matrix in matrices]
    start = 0
    for each in stored:
        matrix, height = left[0] if left else (None, 0)
        fits = matrix is not None and each.shape == (each.shape[0], matrix.shape[1])
        if not fits or start + each.shape[0] > height or start % matrix.form.rows:
            shapes = [matrix.shape for matrix in matrices]
            raise ValueError(f"tensor {each.name} {each.shape} is not part of matrices {shapes}")
        found.append(Packed(each, matrix, start))
        start += each.shape[0]
        if start == height:
            left, start = left[1:], 0
    return found


def same_table(first: Any, second: Any) -> bool:
    """Return whether two tables, dense or packed, hold the same numbers."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=False)
    alike = jax.tree.structure(first) == jax.tree.structure(second)
    return alike and all(a is b or np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def in_mxfp4(entry: Entry, found: Mapping[Path, Any]) -> tuple[Path, ...]:
    """Return the parameters of experts that are packed in MXFP4; empty: they are not."""
    paths = (*entry.path, "weight_q"), (*entry.path, "scales")
    there = entry.form in LAID_OUT and all(path in found for path in paths)
    return paths if there and found[paths[1]].dtype == jnp.float8_e8m0fnu else ()


def experts_in_mxfp4(entry: Entry, values: Any, scales: Any) -> Iterator[Tensor]:
    """Return two tensors of bytes, numbers and scales, for any dtype."""
    for name, leaf in zip(blocks_of(entry.tensors[0].name), (values, scales), strict=True):

        def make(leaf: Any = leaf) -> np.ndarray:
            stored = np.asarray(leaf).view(np.uint8)
            return alternate(stored) if entry.form is Form.ALTERNATING else stored

        yield Tensor(name, leaf.shape, np.dtype(np.uint8), make)
