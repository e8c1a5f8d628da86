"""The objects of a ``config.json``, read key by key."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from convert.errors import ArtifactError, Problems
from convert.paths import CONFIG
from convert.unused import (
    QUANTIZATION_KEYS,
    Remarks,
    Tracked,
    is_integer,
    report_unread,
    shown,
    stop_ids,
)
from jaxdraft.checkpoint.forms import DTYPES
from jaxdraft.checkpoint.rotary import Rope

_INT32 = 2**31 - 1

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


class ModelSection:
    """An object of the file, read key by key. Keys that are absent or null have ``defaults``."""

    def __init__(
        self,
        body: Mapping[str, Any],
        where: str,
        problems: Problems,
        remarks: Remarks,
        defaults: Mapping[str, Any] | None = None,
    ):
        self.body = Tracked(body)
        self.where, self.problems, self.remarks = where, problems, remarks
        self.defaults = defaults or {}

    def at(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def fail(self, key: str, expected: str) -> ArtifactError:
        found = json.dumps(self.body[key])[:80] if key in self.body else "nothing"
        return ArtifactError(CONFIG, self.at(key), found, expected)

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key, else ``default`` if it is null, else that of the family."""
        value = self.body.get(key)
        if value is not None:
            return value
        if default is not None and key in self.body:
            return default
        return self.defaults.get(key, default)

    def whole(self, key: str, low: int = 1, high: int = _INT32, default: int | None = None) -> int:
        value = self.value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(key, f"an integer in {low}..{high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key, default)
        if (
            not isinstance(value, (int, float))
            or isinstance(value, bool)
            or not math.isfinite(value)
            or value <= 0
        ):
            raise self.fail(key, "a positive number")
        return float(value)

    def only(self, key: str, *allowed: Any) -> None:
        """The key is absent, null, or has a value that is implemented."""
        value = self.body.get(key)
        if value is not None and value not in allowed:
            expected = " or ".join(json.dumps(a) for a in allowed)
            self.problems.append(self.fail(key, expected))

    def inert(self, *keys: str) -> None:
        """These keys have no effect beside others that have been read."""
        self.body.read.update(keys)

    def report_unread(self, harmless: Mapping[str, str]) -> None:
        """Remark on keys that nothing has read."""
        report_unread(self.body, self.where, CONFIG, harmless, self.remarks)

    def known(self, keys: Collection[str]) -> None:
        """Report every other key. One whose value is null asks for nothing and is noted."""
        for key in sorted(self.body.keys() - set(keys)):
            if self.body[key] is None:
                self.remarks.note(CONFIG, f"{self.at(key)} is null: not a setting that is known")
            else:
                expected = "one of " + ", ".join(sorted(keys))
                self.problems.report(CONFIG, self.at(key), "an unknown key", expected)

    def section(self, key: str, defaults: Mapping[str, Any] | None = None) -> ModelSection:
        value = self.body.get(key)
        if not isinstance(value, dict):
            raise self.fail(key, "an object")
        return ModelSection(value, self.at(key), self.problems, self.remarks, defaults)

    def token(self, key: str, vocab: int) -> int | None:
        """A token that nothing here acts on: what is no token is noted."""
        value = self.value(key)
        if value is None or (is_integer(value) and 0 <= value < vocab):
            return value
        text = f"{self.at(key)} is {shown(value)}, not a token in 0..{vocab - 1}: it is not used"
        self.remarks.note(CONFIG, text)
        return None

    def stop_ids(self, vocab: int) -> tuple[int, ...]:
        value = self.body.get("eos_token_id")
        if "eos_token_id" not in self.body:
            value = self.defaults.get("eos_token_id")
        return stop_ids(value, self.at("eos_token_id"), CONFIG, vocab, self.remarks)

    def dtype(self) -> str | None:
        """The dtype that the file names; None: none, or that of the stored tensors."""
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
        """The rotary embedding, of the newer or the older spelling."""
        if self.body.get("rope_parameters") is not None:
            inner = self.section("rope_parameters")
            self.only("rope_scaling", {}, self.body["rope_parameters"])
        else:
            scaling = self.body.get("rope_scaling") or {}
            if not isinstance(scaling, dict):
                raise self.fail("rope_scaling", "an object")
            where = self.at("rope_scaling")
            inner = ModelSection(dict(scaling), where, self.problems, self.remarks)
        theta = self.value("rope_theta")  # beside an object that may hold it, too
        inner.defaults = {} if theta is None else {"rope_theta": theta}
        kind = inner.value("rope_type") or inner.value("type") or "default"
        if kind not in kinds:
            raise ArtifactError(CONFIG, inner.at("rope_type"), json.dumps(kind), " or ".join(kinds))
        inner.known(keys | (_YARN_ROPE if kind == "yarn" else set()))
        if kind == "yarn":
            inner.number("factor")
            inner.whole("original_max_position_embeddings")
            for key in ("beta_fast", "beta_slow", "attention_factor"):
                inner.number(key, 1.0)
            inner.only("truncate", True, False)
        said = {**inner.body, "rope_type": kind, "rope_theta": inner.number("rope_theta")}
        return Rope.of_json(said), inner

    def quantized(self) -> Quantized | None:
        """How matrices are stored in few bits: of compressed-tensors' ways, two are implemented."""
        if self.body.get("quantization_config") is None:
            return None
        whole = self.section("quantization_config")
        whole.only("quant_method", "compressed-tensors")
        whole.only("format", "int-quantized", "pack-quantized")
        for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            whole.only(key, {} if key != "kv_cache_scheme" else None)
        bits = 4 if whole.body.get("format") == "pack-quantized" else 8
        groups = whole.section("config_groups")
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
            sizes[weights.whole("group_size") if grouped else None] = None
            weights.inert("group_size", "scale_dtype", "zp_dtype")  # the stored tensors decide
            group.only("format", whole.body.get("format"))
            group.report_unread(QUANTIZATION_KEYS)
            weights.report_unread(QUANTIZATION_KEYS)
        whole.report_unread(QUANTIZATION_KEYS)
        if len(sizes) > 1:
            raise groups.fail("group_size", f"the same everywhere, not {list(sizes)}")
        return Quantized(bits=bits, group=next(iter(sizes), None))
