"""``quantization_config`` of a checkpoint -> how its matrices are stored.

The tensors show which matrices are quantized. The settings give the layout of those
matrices: bits, groups, zero points, and the order of the inputs.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Mapping
from typing import Literal

from convert.json_reader import Section
from convert.unused import QUANTIZATION_KEYS

Layout = Literal[
    "pack-quantized", "int-quantized", "float-quantized", "fp8", "awq", "gptq", "mxfp4"
]

_FORMATS: Mapping[str, tuple[Layout, ...]] = {
    "pack-quantized": ("pack-quantized",),
    "int-quantized": ("int-quantized",),
    "float-quantized": ("float-quantized",),
    "naive-quantized": ("int-quantized", "float-quantized"),
}
"""Formats of compressed-tensors, and their layouts for integers and for floats."""

_BITS = (2, 4, 8)
"""Bits of packed integers."""

_NEEDED = {
    "aqlm": "codebooks of vectors",
    "bitsandbytes": "NF4 and LLM.int8 numbers with their own tables and outliers",
    "bitnet": "ternary weights with a scale of the activations",
    "eetq": "int8 weights in the order of its kernels",
    "exl2": "rows of several widths",
    "higgs": "codebooks of vectors",
    "hqq": "meta tensors with their own packing",
    "modelopt": "NVFP4: four-bit floats with a scale per block and one per tensor",
    "quanto": "its own classes of tensors",
    "quip": "incoherence transforms",
    "torchao": "its own classes of tensors",
}
"""Methods that are not implemented, and what a reader of each would need."""


_SPECIAL = {
    "nvfp4": "four-bit floats with a scale per block and one per tensor",
    "mxfp4": "four-bit floats with exponents as scales",
    "marlin": "sparse weights in the order of its kernels",
    "sparse": "masks of sparse weights",
}
"""Parts of the names of formats that are not implemented, and what a reader would need."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """A storage of quantized matrices.

    Attributes:
      layout: names and shapes of the tensors; see :mod:`convert.checkpoint.packings`.
      bits: bits per value.
      group: number of inputs that share a scale; None: all.
      rows: number of outputs that share a scale; None: all.
      zeros: whether there are zero points.
      lowered: whether zero points are stored minus 1.
      reordered: whether the file stores the group of each input.
      targets: names, classes or regular expressions (``re:...``) of the modules.
    """

    layout: Layout
    bits: int
    group: int | None
    rows: int | None = 1
    zeros: bool = False
    lowered: bool = False
    reordered: bool = False
    targets: tuple[str, ...] = ("Linear",)


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Allowed storage of the quantized matrices of a checkpoint."""

    schemes: tuple[Scheme, ...]

    def scheme(self, name: str) -> Scheme:
        """Return the scheme of a matrix, the first whose targets name it, or else their class."""
        module = name.removesuffix(".weight")
        for scheme in self.schemes:
            if any(_names(target, module) for target in scheme.targets):
                return scheme
        classes = ("Linear", "Embedding") if "embed" not in module else ("Embedding", "Linear")
        ranked = [s for each in classes for s in self.schemes if each in s.targets]
        return (ranked or list(self.schemes))[0]


def _names(target: str, module: str) -> bool:
    if target.startswith("re:"):
        try:
            return re.match(target[3:], module) is not None
        except re.error:
            return False
    return module == target or fnmatch.fnmatch(module, target)


def read_quantization(section: Section) -> Quantized:
    """Read ``quantization_config``.

    Args:
      section: its content.

    Raises:
      ArtifactError: a method, a format or a setting is not implemented.
    """
    method = section.body.get("quant_method")
    readers = {
        "compressed-tensors": _compressed,
        "fp8": _fp8,
        "awq": _awq,
        "gptq": _gptq,
        "mxfp4": _mxfp4,
    }
    if not isinstance(method, str) or method not in readers:
        needed = f" ({method} needs {_NEEDED[method]})" if method in _NEEDED else ""
        names = [f'"{name}"' for name in readers]
        raise section.fail("quant_method", " or ".join(names) + needed)
    found = readers[method](section)
    section.report_unread(QUANTIZATION_KEYS)
    return found


def _compressed(section: Section) -> Quantized:
    section.only("sparsity_config", {})
    section.only("transform_config", {})
    top = _format(section, *_FORMATS, "mixed-precision")
    mixed = top == "mixed-precision"
    groups = section.section("config_groups")
    schemes: list[Scheme] = []
    for name in groups.body:
        group = groups.section(name)
        form = _format(group, *_FORMATS) if mixed else top
        if not mixed:
            group.only("format", top)
        scheme = _weights(group.section("weights"), _FORMATS[form])
        targets = group.body.get("targets")
        if targets is not None:
            if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
                raise group.fail("targets", "a list of names")
            scheme = dataclasses.replace(scheme, targets=tuple(targets))
        schemes.append(scheme)
        group.report_unread(QUANTIZATION_KEYS)
    if not schemes:
        raise section.fail("config_groups", "at least one group")
    return Quantized(tuple(schemes))


def _format(section: Section, *known: str) -> str:
    """Return a format of compressed-tensors that is implemented."""
    found = section.body.get("format")
    if isinstance(found, str) and found in known:
        return found
    kind = next((kind for kind in _SPECIAL if isinstance(found, str) and kind in found), None)
    needed = f" ({found} needs {_SPECIAL[kind]})" if kind else ""
    raise section.fail("format", " or ".join(f'"{name}"' for name in known) + needed)


def _weights(weights: Section, layouts: tuple[Layout, ...]) -> Scheme:
    """Read the weights of a group of compressed-tensors."""
    packed = layouts == ("pack-quantized",)
    kinds = {"float" if layout == "float-quantized" else "int": layout for layout in layouts}
    weights.only("type", *kinds)
    kind = str(weights.body.get("type"))
    floats = kind == "float"
    layout = kinds.get(kind, "int-quantized")
    weights.only("num_bits", *(_BITS if packed else (8,)))
    weights.only("dynamic", False)
    weights.only("symmetric", True, *([] if floats else [False]))
    weights.only("actorder", None, "static", "weight", *(["group"] if packed else []))
    strategies = ("channel", "group") if packed else ("channel", "tensor", "group", "block")
    weights.only("strategy", *strategies)
    strategy = weights.body.get("strategy")
    group: int | None = None
    rows: int | None = 1
    if strategy == "group":
        group = weights.integer("group_size")
    elif strategy == "block":
        rows, group = _square(weights, "block_structure")
    elif strategy == "tensor":
        rows = None
    # The stored tensors decide about types; a strategy may leave a size without meaning.
    weights.inert("group_size", "block_structure", "scale_dtype", "zp_dtype")
    weights.report_unread(QUANTIZATION_KEYS)
    return Scheme(
        layout=layout,
        bits=bits if (bits := weights.body.get("num_bits")) in _BITS else 8,
        group=group,
        rows=rows,
        zeros=weights.body.get("symmetric") is False,
        reordered=weights.body.get("actorder") == "group",
    )


def _square(section: Section, key: str) -> tuple[int, int]:
    """Return the outputs and inputs that share a scale."""
    sides = section.integers(key, 1, 1 << 20)
    if len(sides) != 2:
        raise section.fail(key, "two sizes, of outputs and of inputs")
    return sides[0], sides[1]


def _fp8(section: Section) -> Quantized:
    section.only("fmt", "e4m3")
    section.only("scale_fmt", None, "float")
    rows, group = _square(section, "weight_block_size")
    return Quantized((Scheme(layout="fp8", bits=8, group=group, rows=rows),))


def _awq(section: Section) -> Quantized:
    section.only("bits", 4)
    section.only("version", "gemm", "GEMM")  # others lay out the words in other orders
    section.only("zero_point", True)
    return Quantized((Scheme(layout="awq", bits=4, group=_group(section), zeros=True),))


def _gptq(section: Section) -> Quantized:
    section.only("bits", 4, 8, 2)
    section.only("checkpoint_format", None, "gptq", "gptq_v2")
    section.only("pack_dtype", None, "int32")
    section.only("dynamic", {})  # other settings for some modules
    bits = section.integer("bits")
    scheme = Scheme(
        layout="gptq",
        bits=bits if bits in _BITS else 4,
        group=_group(section),
        zeros=True,
        lowered=section.body.get("checkpoint_format") != "gptq_v2",
        reordered=section.flag("desc_act"),
    )
    return Quantized((scheme,))


def _mxfp4(section: Section) -> Quantized:
    section.inert("modules_to_not_convert")  # the tensors show which experts are quantized
    section.only("dequantize", False)  # a choice of transformers when it loads
    return Quantized((Scheme(layout="mxfp4", bits=4, group=32),))


def _group(section: Section) -> int | None:
    """Return the inputs that share a scale; -1 is all of them."""
    size = section.body.get("group_size")
    return None if size == -1 else section.integer("group_size")
