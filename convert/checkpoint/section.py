"""The objects of a ``config.json``, read key by key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from convert.checkpoint.quantization import Quantized, read_quantization
from convert.json_reader import Section
from convert.unused import shown
from jaxdraft.checkpoint.forms import DTYPES
from jaxdraft.config import BlockDrafterConfig, Eagle3Config
from jaxdraft.rope import Rope

C = TypeVar("C", bound=BlockDrafterConfig | Eagle3Config)

PLAIN_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}

MROPE = {"mrope_interleaved", "mrope_section"}

ORIGINAL = "original_max_position_embeddings"

_ROPE_KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor",),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": ((), ("factor", "attention_factor", "short_factor", "long_factor")),
}
"""Keys of each scheme of rotary embedding: those that it needs, all of them numbers, and others."""

_OLDER = {"su": "longrope", "yarn": "longrope"}
"""Older names that Phi-3 had for its scheme."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterFacts(Generic[C]):
    """The content of a drafter's ``config.json``.

    Attributes:
      config: the description.
      taps: layers of the target whose entering residual it reads; 0: the embedding.
      rope: its rotary embedding.
      dtype: the dtype of computation that the file names, or None.
      quantized: allowed storage of matrices in few bits, or None.
    """

    config: C
    taps: tuple[int, ...]
    rope: Rope
    dtype: str | None
    quantized: Quantized | None


class ModelSection(Section):
    """An object of a ``config.json``, with the readers that targets and drafters share."""

    def heads(self, width: int | None, *, even: bool = True) -> tuple[int, int, int]:
        """Return the numbers of query heads and of key heads, and the width of a head.

        Args:
          width: width of the model, of which every head has its share if ``head_dim`` is absent;
            None: ``head_dim`` must be present.
          even: whether the width of a head must be even.
        """
        heads = self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise self.fail("num_key_value_heads", f"a divisor of the {heads} query heads")
        if width is not None and self.value("head_dim") is None and width % heads:
            raise self.fail("head_dim", "an integer")
        share = None if width is None else width // heads
        head_dim = self.integer("head_dim", 2 if even else 1, default=share)
        if even and head_dim % 2:
            raise self.fail("head_dim", "an even number")
        return heads, kv_heads, head_dim

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

    def rope_section(self) -> ModelSection:
        """Return the object that describes the rotary embedding, newer or older."""
        if self.body.get("rope_parameters") is not None:
            inner = self.section("rope_parameters")
            self.only("rope_scaling", {}, self.body["rope_parameters"])
        else:
            scaling = self.value("rope_scaling") or {}
            if not isinstance(scaling, dict):
                raise self.fail("rope_scaling", "an object")
            where = self.at("rope_scaling")
            inner = self.inner(scaling, where)
        # These may occur both here and in the object.
        beside = {key: self.value(key) for key in ("rope_theta", ORIGINAL)}
        inner.defaults = {key: value for key, value in beside.items() if value is not None}
        return inner

    def rope(
        self, keys: set[str], kinds: tuple[str, ...], inner: ModelSection | None = None
    ) -> tuple[Rope, ModelSection]:
        """Return the rotary embedding, and the object that describes it.

        Args:
          keys: keys of the object that the caller reads or that have no effect.
          kinds: schemes that are implemented here.
          inner: the object. Default: the one of :meth:`rope_section`.
        """
        inner = self.rope_section() if inner is None else inner
        kind = inner.value("rope_type") or inner.value("type") or "default"
        if "longrope" in kinds and isinstance(kind, str):
            older = _OLDER.get(kind, kind)
            kind = kind if kind in kinds else older
        if kind not in kinds:
            raise inner.fail("rope_type", " or ".join(kinds), shown(kind))
        needed, others = _ROPE_KEYS[kind]
        scaled = kind in ("llama3", "yarn", "longrope")
        inner.known(keys | {*needed, *others} | ({ORIGINAL} if scaled else set()), nulls=True)
        stated: dict[str, Any] = {"rope_type": kind, "rope_theta": inner.number("rope_theta")}
        stated |= {key: inner.number(key) for key in needed}
        for key in others:
            if key.endswith("_factor") and key != "attention_factor":
                stated[key] = inner.numbers(key)
            elif key == "truncate":
                inner.only(key, True, False)
                stated[key] = inner.body.get(key)
            elif inner.body.get(key) not in (None, 0):  # zero: the weight of nothing
                stated[key] = inner.number(key)
        if scaled:
            stated[ORIGINAL] = inner.integer(ORIGINAL)
        if kind == "llama3" and stated["low_freq_factor"] >= stated["high_freq_factor"]:
            found = f"{stated['low_freq_factor']}"
            raise inner.fail("low_freq_factor", "less than high_freq_factor", found)
        if kind == "longrope" and stated.get("factor") is None:
            stated["factor"] = self.integer("max_position_embeddings") / stated[ORIGINAL]
        return Rope.of_json(stated), inner

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of positive numbers."""
        values = self.body.get(key)
        good = isinstance(values, list) and all(
            isinstance(value, int | float) and not isinstance(value, bool) and value > 0
            for value in values
        )
        if not good or not values:
            raise self.fail(key, "a list of positive numbers")
        return tuple(map(float, values))

    def quantized(self) -> Quantized | None:
        """Return the storage of matrices in few bits, or None."""
        if self.body.get("quantization_config") is None:
            return None
        return read_quantization(self.section("quantization_config"))
