"""Rotary position embeddings as files describe them: a base, a scheme, and the tables they make.

Modules hold tables, as ONNX artifacts do; checkpoints name a base and a scheme. The tables made
here are those of the model builder: equal for drafters, within one unit of float32's last place for
targets (whose angles are float32 products).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

Array = np.ndarray

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]

_ORIGINAL = "original_max_position_embeddings"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Contents of ``rope_parameters``.

    Attributes:
      theta: base of the frequencies ``f_i = theta**(-2 i / rotary_dim)``.
      kind: scheme for longer contexts. "default": none. "linear": every frequency is divided by
        ``factor``. "llama3": frequencies with few turns within ``original_length`` are divided by
        ``factor``, those with many stay, those between are mixed. "yarn": the same with another
        mixture, and a multiplier of the tables. "longrope": every frequency has its own divisor.
      factor: ratio of the longer context to the old one.
      original_length: context length before the extension.
      beta_fast, beta_slow: YaRN's bounds of the mixture, in turns over ``original_length``.
      low_freq_factor, high_freq_factor: the same for Llama 3.
      attention_factor: multiplier of both tables; None: the scheme's own, see :attr:`scale`.
      mscale, mscale_all_dim: weights of YaRN's own multiplier, in numerator and denominator.
      truncate: whether YaRN's bounds are rounded to whole channels.
      short_factors, long_factors: LongRoPE's divisors, rotary_dim / 2 each: for texts within
        ``original_length``, and for longer ones.
      long: whether LongRoPE's tables are those for long texts. They hold for every position.

    Source: Chen et al., arXiv:2306.15595 (linear); Peng et al., YaRN, arXiv:2309.00071, sections
    3.2 to 3.4; Ding et al., LongRoPE, arXiv:2402.13753; for "llama3" the published code of Llama
    3.1.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    long: bool = False

    def __str__(self) -> str:
        """Return the scheme and its numbers in words."""
        words = [self.kind, f"base {self.theta:,.15g}"]
        if self.kind not in ("default", "longrope"):
            words.append(f"factor {self.factor:g}")
        if self.original_length:
            words.append(f"{self.original_length} positions before")
        if self.kind == "longrope":
            words.append(f"factors for {'long' if self.long else 'short'} texts")
        if self.scale != 1:
            words.append(f"tables times {self.scale:.6g}")
        return ", ".join(words)

    def json(self) -> dict[str, Any]:
        """Return ``rope_parameters``."""
        parameters: dict[str, Any] = {"rope_type": self.kind, "rope_theta": self.theta}
        if self.kind == "default":
            return parameters
        parameters["factor"] = self.factor
        if self.kind == "linear":
            return parameters
        parameters[_ORIGINAL] = self.original_length
        if self.kind == "llama3":
            names: tuple[str, ...] = ("low_freq_factor", "high_freq_factor")
        elif self.kind == "yarn":
            names = ("beta_fast", "beta_slow", "truncate")
        else:
            names = ()
            parameters["short_factor"] = list(self.short_factors)
            parameters["long_factor"] = list(self.long_factors)
        parameters |= {name: getattr(self, name) for name in names}
        optional = ("attention_factor", "mscale", "mscale_all_dim")
        return parameters | {
            name: getattr(self, name) for name in optional if getattr(self, name) is not None
        }

    @classmethod
    def of_json(cls, parameters: Mapping[str, Any]) -> Rope:
        """Return the inverse of :meth:`json`; the keys and their types have been checked.

        Keys that are absent or null have the defaults of this class.
        """

        def number(key: str) -> float | None:
            value = parameters.get(key)
            return None if value is None else float(value)

        truncate = parameters.get("truncate")
        found: dict[str, Any] = {
            "kind": parameters.get("rope_type") or "default",
            "original_length": parameters.get(_ORIGINAL),
            "truncate": None if truncate is None else bool(truncate),
            "short_factors": _numbers(parameters.get("short_factor")),
            "long_factors": _numbers(parameters.get("long_factor")),
        }
        for key in (
            "factor",
            "beta_fast",
            "beta_slow",
            "low_freq_factor",
            "high_freq_factor",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
        ):
            found[key] = number(key)
        given = {key: value for key, value in found.items() if value is not None}
        return cls(theta=float(parameters["rope_theta"]), **given)

    @property
    def scale(self) -> float:
        """Multiplier of both tables."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        longer = math.log(self.factor)
        if self.kind == "longrope":
            return math.sqrt(1 + longer / math.log(self.original_length))
        if self.mscale and self.mscale_all_dim:
            return (0.1 * self.mscale * longer + 1) / (0.1 * self.mscale_all_dim * longer + 1)
        return 0.1 * longer + 1.0

    def frequencies(self, rotary_dim: int) -> Array:
        """Return radians per position, [rotary_dim / 2] float64."""
        if self.kind == "default":
            return 1.0 / self.theta ** (np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
        # In float32, as transformers computes them and the builder after it.
        turns = self.theta ** (np.arange(0, rotary_dim, 2, dtype=np.float32) / rotary_dim)
        if self.kind == "longrope":
            factors = self.long_factors if self.long else self.short_factors
            return (1.0 / (np.asarray(factors, np.float32) * turns)).astype(np.float64)
        plain, divided = 1.0 / turns, 1.0 / (self.factor * turns)
        if self.kind == "linear":
            kept = np.float32(0)
        elif self.kind == "llama3":
            count = self.original_length * plain / (2 * math.pi)
            width = self.high_freq_factor - self.low_freq_factor
            kept = np.clip((count - self.low_freq_factor) / width, 0.0, 1.0)
        else:
            low, high = self._ramp(rotary_dim)
            rank = np.arange(rotary_dim // 2, dtype=np.float32)
            kept = 1.0 - np.clip((rank - low) / (high - low), 0.0, 1.0)
        return (divided * (1.0 - kept) + plain * kept).astype(np.float64)

    def _ramp(self, rotary_dim: int) -> tuple[float, float]:
        """Return the channels between which YaRN's frequencies go from kept to divided."""

        def channel(turns: float) -> float:
            wavelength = self.original_length / (turns * 2 * math.pi)
            return rotary_dim * math.log(wavelength) / (2 * math.log(self.theta))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = float(math.floor(low)), float(math.ceil(high))
        low, high = max(low, 0.0), min(high, rotary_dim - 1.0)
        return low, high + 0.001 if low == high else high

    def tables(self, positions: int, rotary_dim: int) -> tuple[Array, Array]:
        """Return cos and sin of a drafter, [positions, rotary_dim / 2] float32 each."""
        angles = np.arange(positions, dtype=np.float64)[:, None] * self.frequencies(rotary_dim)
        return _cos_sin(angles, self.scale)

    def target_tables(self, positions: int, rotary_dim: int) -> tuple[Array, Array]:
        """Return cos and sin of a target, from float32 angles as in transformers."""
        if self.kind == "default":
            one, theta = np.float32(1.0), np.float32(self.theta)
            exponent = np.arange(0, rotary_dim, 2).astype(np.float32) / np.float32(rotary_dim)
            frequencies = one / theta**exponent
        else:
            frequencies = self.frequencies(rotary_dim).astype(np.float32)
        angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
        return _cos_sin(angles.astype(np.float64), self.scale)


def _numbers(values: Any) -> tuple[float, ...] | None:
    return None if values is None else tuple(map(float, values))


def _cos_sin(angles: Array, scale: float) -> tuple[Array, Array]:
    return (
        (np.cos(angles) * scale).astype(np.float32),
        (np.sin(angles) * scale).astype(np.float32),
    )
