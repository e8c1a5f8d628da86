"""The options of requests, checked in one place: for programs of many rows and for engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxdraft.keys import row_streams
from jaxdraft.model import Model
from jaxdraft.prompts import per_row, stop_rows, traced
from jaxdraft.sampling import Sampling, SamplingRules
from jaxdraft.structure import TokenAutomaton
from jaxdraft.structure import per_row as per_row_structures


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """Options in the caller's form; see :func:`jaxdraft.generate`.

    Attributes:
      row: number of the first row, among the rows that draw from one key.
    """

    max_new_tokens: Any = 128
    stop_ids: Any = None
    draft_limit: Any = None
    max_length: int | None = None
    sampling: Sampling | None = None
    key: jax.Array | int | None = None
    stop: str | Sequence[str] = ()
    structure: Any = None
    logprobs: int | None = None
    row: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Checked:
    """Options of B rows, checked. Arrays are in NumPy unless they are traced."""

    stop_ids: Any  # [B, S] int32, filled up with NO_TOKEN
    max_new_tokens: Any  # [B] int32
    max_length: int
    draft_limit: Any  # [B] int32
    sampling: SamplingRules | None
    stop: tuple[str, ...]
    automaton: np.ndarray | None  # of ``stop``, [states, V] int16
    structures: tuple[list[TokenAutomaton], np.ndarray] | None
    """The automata of structures, and the index [B] int32 of each row's."""
    logprobs: int | None


def check(
    model: Model, options: Options, lengths: Any, *, draft_tokens: int, engine: int | None = None
) -> Checked:
    """Return the options in the form for a round.

    Args:
      model: the model.
      options: the options of all rows.
      lengths: [B] int32, tokens of each prompt; NumPy unless traced.
      draft_tokens: K.
      engine: the context of the engine that runs the one row. Default: the model's.

    Raises:
      ValueError: as for :func:`jaxdraft.generate`. Nothing was allocated.
    """
    batch, vocab = lengths.shape[0], model.target.vocab_size
    limit = _max_length(model, options.max_length, lengths, engine)
    wanted = per_row("max_new_tokens", options.max_new_tokens, batch, low=1)
    stops = model.info.stop_ids if options.stop_ids is None else options.stop_ids
    stops = stop_rows(stops, vocab, batch)
    drafts = draft_tokens if options.draft_limit is None else options.draft_limit
    drafts = per_row("draft_limit", drafts, batch, low=0)
    logprobs, stop = options.logprobs, options.stop
    if logprobs is not None and not 0 <= logprobs <= vocab:
        raise ValueError(f"logprobs is {logprobs}; expected 0..{vocab} alternatives")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    automaton = _stop_table(model, strings) if strings else None
    sampling = _sampling_rules(options, batch, vocab)
    if options.sampling is not None and sampling is not None:
        drafts = options.sampling.limit(drafts, sampling)
    return Checked(
        stop_ids=stops,
        max_new_tokens=wanted,
        max_length=limit,
        draft_limit=drafts,
        sampling=sampling,
        stop=strings,
        automaton=automaton,
        structures=per_row_structures(options.structure, batch, model.text, vocab),
        logprobs=logprobs,
    )


def _max_length(model: Model, wanted: int | None, lengths: Any, engine: int | None) -> int:
    """Return the longest sequence, into which every prompt and one token must fit."""
    owner, context = ("model", model.info.context_length) if engine is None else ("engine", engine)
    limit = context if wanted is None else wanted
    if not 1 <= limit <= context:
        raise ValueError(f"max_length is {limit}; the {owner}'s context has {context} positions")
    if not traced(lengths):
        for row, n in enumerate(lengths):
            if n >= limit:
                prompt = f"prompt {row}" if engine is None else "the prompt"
                raise ValueError(
                    f"{prompt} has {n} tokens; with max_length {limit} the longest prompt that "
                    f"leaves room for one token has {limit - 1}"
                )
    return limit


def _sampling_rules(options: Options, batch: int, vocab_size: int) -> SamplingRules | None:
    """Return the sampling rules of all rows, with a stream for each if anything is random."""
    sampling, key = options.sampling, options.key
    if sampling is None:
        return None
    if not sampling.random:
        return sampling.resolve(batch, vocab_size, None)
    if key is None:
        raise ValueError(
            f"temperature is {sampling.temperature!r} and key is None: sampling needs a key or a "
            "seed, such as key=jax.random.key(0)"
        )
    return sampling.resolve(batch, vocab_size, row_streams(key, batch, first=options.row))


def _stop_table(model: Model, strings: tuple[str, ...]) -> np.ndarray:
    """Return the automaton of stop strings over a model's tokens, [states, V] int16."""
    if model.text is None:
        raise ValueError("the model has no tokenizer: stop strings need one, stop_ids do not")
    return model.text.stop_table(strings, model.target.vocab_size)
