"""Rotary embedding as checkpoints describe it, and as tables.

Checkpoints name a base and a scheme; modules hold tables, as ONNX artifacts do. The tables made
here are those the model builder writes: equal for drafters, within one unit of float32's last place
for targets (whose angles are float32 products).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import ml_dtypes
import numpy as np

Array = np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Contents of ``rope_parameters``.

    Attributes:
      theta: base of the frequencies ``theta**(-2 i / rotary_dim)``.
      kind: "default", or "yarn": low frequencies are divided by ``factor``, high ones stay.
      factor: by how much YaRN lengthens the context.
      original_length: positions the model was trained on before.
      beta_fast, beta_slow: turns over ``original_length`` above which a frequency stays, and
        below which it is divided.
      attention_factor: multiplies both tables; None: ``0.1 log(factor) + 1``.
      truncate: round the bounds of the ramp to whole channels.

    Source: Peng et al., YaRN, arXiv:2309.00071, sections 3.2 to 3.4.
    """

    theta: float
    kind: Literal["default", "yarn"] = "default"
    factor: float = 1.0
    original_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def json(self) -> dict[str, Any]:
        """As ``rope_parameters``."""
        if self.kind == "default":
            return {"rope_type": "default", "rope_theta": self.theta}
        parameters = {
            "rope_type": "yarn",
            "rope_theta": self.theta,
            "factor": self.factor,
            "original_max_position_embeddings": self.original_length,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "truncate": self.truncate,
        }
        if self.attention_factor is not None:
            parameters["attention_factor"] = self.attention_factor
        return parameters

    @classmethod
    def of_json(cls, parameters: Mapping[str, Any]) -> Rope:
        """The inverse of :meth:`json`; the keys and their types have been checked."""
        if parameters.get("rope_type", "default") == "default":
            return cls(theta=float(parameters["rope_theta"]))
        factor, truncate = parameters.get("attention_factor"), parameters.get("truncate")
        return cls(
            theta=float(parameters["rope_theta"]),
            kind="yarn",
            factor=float(parameters["factor"]),
            original_length=int(parameters["original_max_position_embeddings"]),
            beta_fast=float(parameters.get("beta_fast") or 32),
            beta_slow=float(parameters.get("beta_slow") or 1),
            attention_factor=None if factor is None else float(factor),
            truncate=truncate is None or bool(truncate),
        )

    @property
    def scale(self) -> float:
        """What multiplies both tables."""
        if self.kind == "default":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0

    def frequencies(self, rotary_dim: int) -> Array:
        """Radians a position, [rotary_dim / 2] float64."""
        if self.kind == "default":
            return 1.0 / self.theta ** (np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
        # In float32, as transformers computes them and the builder after it.
        exponent = np.arange(0, rotary_dim, 2, dtype=np.float32) / rotary_dim
        plain = 1.0 / self.theta**exponent
        divided = 1.0 / (self.factor * self.theta**exponent)
        low, high = self._ramp(rotary_dim)
        rank = np.arange(rotary_dim // 2, dtype=np.float32)
        kept = 1.0 - np.clip((rank - low) / (high - low), 0.0, 1.0)
        return (divided * (1.0 - kept) + plain * kept).astype(np.float64)

    def _ramp(self, rotary_dim: int) -> tuple[float, float]:
        """Channels between which the frequencies go from kept to divided."""

        def channel(turns: float) -> float:
            wavelength = self.original_length / (turns * 2 * math.pi)
            return rotary_dim * math.log(wavelength) / (2 * math.log(self.theta))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = float(math.floor(low)), float(math.ceil(high))
        low, high = max(low, 0.0), min(high, rotary_dim - 1.0)
        return low, high + 0.001 if low == high else high

    def tables(self, positions: int, rotary_dim: int) -> tuple[Array, Array]:
        """cos and sin as a drafter has them, [positions, rotary_dim / 2] float32 each."""
        angles = np.arange(positions, dtype=np.float64)[:, None] * self.frequencies(rotary_dim)
        return _cos_sin(angles, self.scale)

    def target_tables(self, positions: int, rotary_dim: int) -> tuple[Array, Array]:
        """cos and sin as a target has them: of float32 angles, like all of transformers."""
        one, theta = np.float32(1.0), np.float32(self.theta)
        exponent = np.arange(0, rotary_dim, 2).astype(np.float32) / np.float32(rotary_dim)
        frequencies = one / theta**exponent
        angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
        return _cos_sin(angles.astype(np.float64), self.scale)


def _cos_sin(angles: Array, scale: float) -> tuple[Array, Array]:
    return (
        (np.cos(angles) * scale).astype(np.float32),
        (np.sin(angles) * scale).astype(np.float32),
    )


_EPS = {
    np.dtype(dtype): float(ml_dtypes.finfo(dtype).eps)
    for dtype in (ml_dtypes.bfloat16, np.float16, np.float32)
}
"""Resolution of the dtypes that tables come in, the coarsest first."""


def fits(rope: Rope, cos: Array, sin: Array) -> bool:
    """Whether tables [positions, rotary_dim / 2] are those of ``rope``, up to their rounding.

    Float32 angles are off by a rounding of their own size, so the tolerance grows with the
    position.
    """
    positions, half = cos.shape
    # A float16 artifact's tables are float32 in the module, with only float16 precision.
    eps = next(_EPS[t] for t in _EPS if all(np.array_equal(x, x.astype(t)) for x in (cos, sin)))
    tolerance = 2 * eps + np.arange(positions)[:, None] * 2.0**-22
    tables = rope.tables(positions, 2 * half)
    pairs = zip(tables, (cos, sin), strict=True)
    return all(
        bool(np.all(np.abs(wanted - found.astype(np.float64)) <= tolerance))
        for wanted, found in pairs
    )


def recover(cos: Array, sin: Array) -> Rope | None:
    """The plain :class:`Rope` that made the tables, or None if none did.

    One frequency gives theta, to the precision of the table. Of the decimals near it, the
    shortest that fits every entry is taken, since typical values are 10000 and 500000.
    """
    positions, half = cos.shape
    if half == 1 or positions == 1:  # the only frequency is 1, or only position 0 is known
        plain = Rope(theta=10000.0)
        return plain if fits(plain, cos, sin) else None
    channel = max(1, round(half / 12))  # theta**-x is most sensitive at x = 1 / log(theta)
    turn, position = 0.0, 1
    while position < positions:  # the last angle gives the whole turns of the next
        angle = math.atan2(float(sin[position, channel]), float(cos[position, channel]))
        turns = round((position * turn - angle) / (2 * math.pi))
        turn = (angle + 2 * math.pi * turns) / position
        position *= 2
    if turn < 1e-6:  # no base that anybody uses
        return None
    estimate = turn ** (-half / channel)
    for digits in range(1, 10):
        rope = Rope(theta=float(f"{estimate:.{digits - 1}e}"))
        if rope.theta > 0 and fits(rope, cos, sin):
            return rope
    return None
