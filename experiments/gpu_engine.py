"""The programs of an engine that are compiled for GPUs: a round, a chunk of prompts, an admission.

Eight requests share pools with room for all of them; shapes alone, as in :mod:`gpu_models`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdraft import Drafter, rounds
from jaxdraft.engine import programs
from jaxdraft.engine.engine import PAGE_SIZE
from jaxdraft.engine.programs import BatchRows, PromptChunk, RowText
from jaxdraft.engine.runner import empty_states
from jaxdraft.rounds import Rules
from jaxdraft.sizes import PREFILL_CHUNK
from jaxdraft.state import rows
from jaxdraft.target import DecoderTarget

ROWS = 8
"""Requests that take part."""


def programs_of(
    target: DecoderTarget, drafter: Drafter, capacity: int, rules: Rules
) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return the functions by name, each with its arguments; the third is the state of all rows.

    Args:
      target: shapes of a target.
      drafter: shapes of its drafter.
      capacity: positions per request.
      rules: of ``ROWS`` requests.
    """
    columns = -(-capacity // PAGE_SIZE)

    def make(batch: int) -> rounds.RoundState:
        sizes = dict(pages=ROWS * columns, page_size=PAGE_SIZE, columns=columns)
        states = empty_states(target, drafter, batch, **sizes)
        drafts = drafter.draft_tokens
        return rounds.empty(*states, batch=batch, size=capacity, draft_tokens=drafts)

    def both(batch: int) -> tuple[Any, Any]:
        state = make(batch)
        return state.target, state.drafter

    where, parts = rows.layout(make, ROWS), rows.layout(both, ROWS)
    state = jax.eval_shape(lambda: make(ROWS))
    blank = jax.eval_shape(lambda: rows.own(make(1), where))
    numbers, flags = _integers(ROWS), jax.ShapeDtypeStruct((ROWS,), jnp.bool)
    batch = BatchRows(numbers, flags, _integers(ROWS, columns))  # type: ignore[bad-argument-type]

    def run_round(target: Any, drafter: Any, state: Any, rules: Any, batch: Any) -> Any:
        form = dict(all_rows=True, plain=False, logprobs=None)
        return programs.run_round(target, drafter, state, rules, batch, where=where, **form)

    def run_chunk(target: Any, drafter: Any, state: Any, rules: Any, batch: Any, chunk: Any) -> Any:
        found = (target, drafter, state, rules, batch, chunk)
        return programs.run_chunk(*found, where=where, logprobs=None)

    def admit(target: Any, drafter: Any, state: Any, text: Any) -> Any:
        return programs.admit(target, drafter, state, text, where=where, parts=parts, skips=False)

    tokens: Any = _integers(ROWS, PREFILL_CHUNK)
    chunk = PromptChunk(tokens, numbers, flags, flags)  # type: ignore[bad-argument-type]
    row, line, counts = (_integers(*shape) for shape in ((1,), (1, capacity), (4, 1)))
    text = RowText(row, line, counts, blank, None, ())  # type: ignore[bad-argument-type]
    return {
        "round": (run_round, (target, drafter, state, rules, batch)),
        "chunk": (run_chunk, (target, drafter, state, rules, batch, chunk)),
        "admit": (admit, (target, drafter, state, text)),
    }


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
