"""The static part of a product; it needs no kernel, and so no Pallas."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Form:
    """The static part of a product.

    Attributes:
      inputs: columns K of the matrix.
      outputs: rows of the matrix.
      dtype: dtype of the numbers that are multiplied, and of the result.
      bits: bits of a packed value; 0: the matrix holds numbers of ``dtype``.
      block: packed values that share a scale.
      gated: the matrix is gate rows, then as many up rows, and the result ``silu(gate) * up``.
      values: kind of the packed values; see :data:`jaxdraft.nn.packed.DECODERS`.
      rows: outputs that share their scales.
      fine: blocks that share a coarse scale; 0: there are no coarse scales.
      parts: names of the arrays of a packed matrix; see :mod:`jaxdraft.nn.packed`.
    """

    inputs: int
    outputs: int
    dtype: Any
    bits: int = 0
    block: int = 0
    gated: bool = False
    values: str = "integer"
    rows: int = 1
    fine: int = 0
    parts: tuple[str, ...] = ("weight_q", "scales")

    @property
    def served(self) -> bool:
        """Whether there are kernels for this form: dense, or integers or fp8 with scales alone."""
        return self.values in ("integer", "e4m3") and self.parts == ("weight_q", "scales")

    @property
    def results(self) -> int:
        """Columns of the result."""
        return self.outputs // 2 if self.gated else self.outputs
