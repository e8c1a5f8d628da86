"""Memory of a model, and the tokens that fit, in several forms of its weights.

Host code. A folder with ``config.json`` alone is enough; nothing is allocated.

| form | numbers in matrices | other weights | keys and values |
|---|---|---|---|
| float32 | 4 bytes | 4 bytes | 4 bytes |
| bfloat16, float16 | 2 bytes | 2 bytes | 2 bytes |
| int8 | 1 byte, and 2 bytes per row for its scale | 2 bytes | 2 bytes |
| int4 | half a byte, and 2 bytes per 64 inputs for their scale | 2 bytes | 2 bytes |

Embedding, head, norms and routers are not matrices here. Rotary tables, which are computed, are
part of every form. The arithmetic of caches is that of :mod:`jaxdraft.budget`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdraft.budget import Costs, divide
from jaxdraft.checks import parse_memory
from jaxdraft.config import TargetConfig
from jaxdraft.load import inspect
from jaxdraft.plan import PAGE_SIZE, part_cost, target_costs

FORMS = ("float32", "bfloat16", "int8", "int4")
"""Forms of weights that are compared; float16 takes what bfloat16 takes."""

MEMORIES = ("16GB", "24GB", "80GB", "141GB")
"""Memories of common accelerators, in powers of 1000."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """A model in one form.

    Attributes:
      form: a member of :data:`FORMS`.
      weights: bytes of target and drafter.
      cache: bytes of keys and values per 1000 positions, the layers with a window and windowed
        drafters not counted.
      row: bytes per row that do not depend on its length: windows, recurrent states, and the
        drafter's ring.
      rows: rows of the whole context that fit beside the weights, by memory.
      tokens: positions of a single row that fit, by memory; 0: not even the weights.
    """

    form: str
    weights: int
    cache: int
    row: int
    rows: dict[str, int]
    tokens: dict[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overview:
    """A model in all forms.

    Attributes:
      parameters: numbers of the target, as the field counts.
      active: those that one token needs.
      drafter: kind of the drafter, or None.
      drafter_parameters: numbers of the drafter alone.
      context: positions of the longest sequence.
      fits: the forms.
    """

    parameters: int
    active: int
    drafter: str | None
    drafter_parameters: int
    context: int
    fits: tuple[Fit, ...]

    def facts(self) -> dict[str, Any]:
        """Return the overview as plain values, for JSON."""
        return dataclasses.asdict(self)


def overview(
    folder: str | Path,
    *,
    memories: Sequence[str] = MEMORIES,
    drafter: str | Path | None = None,
    revision: str | None = None,
) -> Overview:
    """Compute the memory of a model in several forms, and how many tokens fit.

    Example: ``jaxdraft.overview("Qwen/Qwen3-4B").fits[1].tokens["24GB"]``, in bfloat16.

    Args:
      folder: a folder or a repository, as in :func:`jaxdraft.load`; weights are not needed.
      memories: memories for weights and state together, like ``"24GB"``.
      drafter: as in :func:`jaxdraft.load`.
      revision: as in :func:`jaxdraft.load`.

    Raises:
      ValueError: the folder would not load, apart from missing weights; or an invalid size.
      FileNotFoundError: there is no such folder.
    """
    report = inspect(folder, drafter, revision=revision)
    target, own = report.target, report.drafter
    if report.problems or target is None or not isinstance(target.config, TargetConfig):
        listed = "; ".join(str(problem) for problem in report.problems)
        raise ValueError(f"{folder} cannot be loaded, so nothing can be planned: {listed}")
    assert target.counts is not None and report.context_length is not None
    parts = [part for part in (target, own) if part is not None]
    fits = []
    for form in FORMS:
        dtype = "float32" if form == "float32" else "bfloat16"
        cost = None if own is None else part_cost(own.config, dtype)
        weights = sum(_bytes(part.counts, form) for part in parts if part.counts is not None)
        costs = target_costs(target.config, dtype, weights=weights, drafter=cost)
        fits.append(_fit(form, costs, memories, report.context_length))
    return Overview(
        parameters=target.counts.parameters,
        active=target.counts.active,
        drafter=None if own is None else own.kind,
        drafter_parameters=0 if own is None or own.counts is None else own.counts.parameters,
        context=report.context_length,
        fits=tuple(fits),
    )


def _bytes(counts: Any, form: str) -> int:
    """Return the bytes of numbers in a form.

    Example, int4: a matrix of 2 rows and 128 columns has 128 bytes and 2 * 2 scales of 2 bytes.
    """
    if form in ("float32", "bfloat16"):
        return counts.parameters * (4 if form == "float32" else 2) + counts.computed_bytes
    from jaxdraft.checkpoint.forms import INT4_GROUP

    rest = 2 * (counts.parameters - counts.matrices) + counts.computed_bytes
    if form == "int8":
        return rest + counts.matrices + 2 * counts.rows
    return rest + math.ceil(counts.matrices / 2) + 2 * math.ceil(counts.matrices / INT4_GROUP)


def _fit(form: str, costs: Costs, memories: Sequence[str], context: int) -> Fit:
    options: dict[str, Any] = dict(pages=1, max_batch=1, context=context)
    one = divide(costs, **options, page_size=PAGE_SIZE)
    row = sum(term.bytes for term in one.fixed[1:])
    left = {memory: max(0, parse_memory(memory) - costs.weights) for memory in memories}
    whole = row + one.row_pages * one.page_bytes
    # A model without attention layers keeps nothing per token.
    pages = {m: max(0, b - row) // one.page_bytes if one.page_bytes else 0 for m, b in left.items()}
    tokens = {m: min(context, count * PAGE_SIZE) for m, count in pages.items()}
    rows = {memory: given // whole if whole else 0 for memory, given in left.items()}
    return Fit(
        form=form,
        weights=costs.weights,
        cache=divide(costs, **options, page_size=1000).page_bytes,
        row=row,
        rows=rows,
        tokens={memory: context if rows[memory] else tokens[memory] for memory in memories},
    )
