"""The objects of a ``config.json``, read key by key."""

from __future__ import annotations

import dataclasses

from convert.json_reader import Section
from convert.unused import (
    QUANTIZATION_KEYS,
    shown,
)
from jaxdraft.checkpoint.forms import DTYPES
from jaxdraft.checkpoint.rotary import Rope

PLAIN_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}

MROPE = {"mrope_interleaved", "mrope_section"}

_YARN_ROPE = {
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "truncate",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized:
    """How matrices are stored in few bits.

    Attributes:
      bits: 8 or 4.
      group: inputs that share a scale; None: those of a row, or all.
    """

    bits: int
    group: int | None


class ModelSection(Section):
    """An object of a ``config.json``, with what the files of targets and drafters share."""

    def dtype(self) -> str | None:
        """Return the dtype that the file names; None: none, or that of the stored tensors."""
        key = next((k for k in ("dtype", "torch_dtype") if self.body.get(k) is not None), None)
        if key is None:
            return None
        self.inert("torch_dtype")  # the older name, beside the newer
        value = self.body[key]
        name = value.removeprefix("torch.") if isinstance(value, str) else value
        if name == "auto":
            return None
        if name not in DTYPES:
            raise self.fail(key, "one of " + ", ".join(DTYPES))
        return name

    def rope(self, keys: set[str], kinds: tuple[str, ...]) -> tuple[Rope, ModelSection]:
        """Return the rotary embedding, of the newer or the older spelling."""
        if self.body.get("rope_parameters") is not None:
            inner = self.section("rope_parameters")
            self.only("rope_scaling", {}, self.body["rope_parameters"])
        else:
            scaling = self.body.get("rope_scaling") or {}
            if not isinstance(scaling, dict):
                raise self.fail("rope_scaling", "an object")
            where = self.at("rope_scaling")
            inner = self.inner(scaling, where)
        theta = self.value("rope_theta")  # beside an object that may hold it, too
        inner.defaults = {} if theta is None else {"rope_theta": theta}
        kind = inner.value("rope_type") or inner.value("type") or "default"
        if kind not in kinds:
            raise inner.fail("rope_type", " or ".join(kinds), shown(kind))
        inner.known(keys | (_YARN_ROPE if kind == "yarn" else set()), nulls=True)
        if kind == "yarn":
            inner.number("factor")
            inner.integer("original_max_position_embeddings")
            for key in ("beta_fast", "beta_slow", "attention_factor"):
                inner.number(key, 1.0)
            inner.only("truncate", True, False)
        stated = {**inner.body, "rope_type": kind, "rope_theta": inner.number("rope_theta")}
        return Rope.of_json(stated), inner

    def quantized(self) -> Quantized | None:
        """How matrices are stored in few bits: of compressed-tensors' ways, two are implemented."""
        if self.body.get("quantization_config") is None:
            return None
        quantized = self.section("quantization_config")
        quantized.only("quant_method", "compressed-tensors")
        quantized.only("format", "int-quantized", "pack-quantized")
        for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            quantized.only(key, {} if key != "kv_cache_scheme" else None)
        bits = 4 if quantized.body.get("format") == "pack-quantized" else 8
        groups = quantized.section("config_groups")
        sizes: dict[int | None, None] = {}
        for name in groups.body:
            group = groups.section(name)
            group.only("input_activations", None)
            group.only("output_activations", None)
            weights = group.section("weights")
            weights.only("num_bits", bits)
            weights.only("type", "int")
            weights.only("symmetric", True)
            weights.only("dynamic", False)
            weights.only("actorder", None, "static", "weight")  # "group" permutes the inputs
            weights.only("strategy", "channel", "tensor" if bits == 8 else "group")
            weights.only("block_structure")
            grouped = weights.body.get("strategy") == "group"
            sizes[weights.integer("group_size") if grouped else None] = None
            weights.inert("group_size", "scale_dtype", "zp_dtype")  # the stored tensors decide
            group.only("format", quantized.body.get("format"))
            group.report_unread(QUANTIZATION_KEYS)
            weights.report_unread(QUANTIZATION_KEYS)
        quantized.report_unread(QUANTIZATION_KEYS)
        if len(sizes) > 1:
            raise groups.fail("group_size", f"the same everywhere, not {list(sizes)}")
        return Quantized(bits=bits, group=next(iter(sizes), None))
