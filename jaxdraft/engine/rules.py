"""The rules of many requests as the arrays that a round reads: a row each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxdraft.base import NO_TOKEN, Truncation
from jaxdraft.engine.request import Request, RequestRules
from jaxdraft.generate import sampling_rules, stop_table
from jaxdraft.model import Model
from jaxdraft.round import Rules
from jaxdraft.sampling import Penalties, Sampling, SamplingRules, row_streams
from jaxdraft.state.budget import whole
from jaxdraft.stop_strings import NO_AUTOMATON, StopText

_AUTOMATA = 16
"""Sets of stop strings whose automata stay on the device when nobody uses them."""


class RulesTable:
    """The rules of every row, brought to the device when a row changes hands.

    Whether there is sampling, a penalty, a bias, a mask or a stop string at all is part of a
    program (:attr:`form`): a batch in which nobody has one runs without.

    Args:
      rows: B.
      vocab_size: V.
    """

    def __init__(self, rows: int, vocab_size: int) -> None:
        self._rows, self.vocab = rows, vocab_size
        self._now: tuple[Any, ...] | None = None
        self._tables: OrderedDict[tuple[Any, ...], jax.Array] = OrderedDict()
        self.update({})

    def update(self, active: Mapping[int, Request]) -> None:
        """Follow the rows: nothing happens while they are the same."""
        now = tuple(sorted((row, id(r.rules)) for row, r in active.items()))
        if now == self._now:
            return
        found: list[RequestRules | None] = [None] * self._rows
        for row, request in active.items():
            found[row] = request.rules
        self._set(found)
        self._now = now
        self._held = found  # an id stands for the same object as long as it is held

    def _set(self, found: list[RequestRules | None]) -> None:
        there = [r for r in found if r is not None]
        samplings = [r.sampling for r in there if r.sampling is not None]
        self.random = any(s.streams is not None for s in samplings)
        self.rules = self._build(found, bool(samplings), self.random)
        how, stop = self.rules.sampling, self.rules.stop_text
        self.form = (
            self.rules.stop_ids.shape[1],
            self.random,
            how is not None,
            how is not None and how.penalties is not None,
            how is not None and how.bias is not None,
            how is not None and how.allowed is not None,
            None if stop is None else stop.table.shape[:2],
        )

    def neutral(self, *, random: bool) -> Rules:
        """The rules of rows that nobody has."""
        return self._build([None] * self._rows, random, random)

    def _build(self, found: list[RequestRules | None], samples: bool, random: bool) -> Rules:
        longest = max((len(r.stop_ids) for r in found if r is not None), default=0)
        width = max(4, 1 << (longest - 1).bit_length())  # a few more or fewer compile nothing
        stop_ids = np.full((self._rows, width), NO_TOKEN, np.int32)
        numbers: Any = np.zeros((3, self._rows), np.int32)
        for row, r in enumerate(found):
            if r is not None:
                stop_ids[row, : len(r.stop_ids)] = r.stop_ids
                numbers[:, row] = r.max_new_tokens, r.max_length, r.draft_limit
        rules: Any = Rules(
            stop_ids,  # type: ignore[bad-argument-type]
            *numbers,
            sampling=self._sampling(found, random) if samples else None,
            stop_text=self._stop_text(found),
        )
        return jax.device_put(rules)

    def _sampling(self, found: list[RequestRules | None], random: bool) -> SamplingRules:
        rows: list[SamplingRules | None] = [None if r is None else r.sampling for r in found]

        def column(pick: Any, neutral: Any, dtype: Any) -> Any:  # [B, ...]
            return np.stack(
                [np.asarray(neutral if s is None or (v := pick(s)) is None else v[0]) for s in rows]
            ).astype(dtype)

        def truncation(pick: Any) -> Truncation:
            return Truncation(
                temperature=column(lambda s: pick(s).temperature, 0.0, np.float32),
                top_k=column(lambda s: pick(s).top_k, 0, np.int32),
                top_p=column(lambda s: pick(s).top_p, 1.0, np.float32),
                min_p=column(lambda s: pick(s).min_p, 0.0, np.float32),
            )

        def some(name: str) -> bool:
            return any(s is not None and getattr(s, name) is not None for s in rows)

        penalties = None
        if some("penalties"):
            penalties = Penalties(
                *(
                    column(
                        lambda s, name=name: s.penalties and getattr(s.penalties, name),
                        neutral,
                        np.float32,
                    )
                    for name, neutral in (("repetition", 1), ("presence", 0), ("frequency", 0))
                )
            )
        bias = allowed = streams = None
        if some("bias"):
            bias = column(lambda s: s.bias, np.zeros(self.vocab), np.float32)
        if some("allowed"):
            allowed = column(lambda s: s.allowed, np.ones(self.vocab), bool)
        if random:
            blank = np.zeros_like(jax.random.key_data(jax.random.key(0)))
            data = column(lambda s: s.streams, blank, blank.dtype)
            streams = jax.random.wrap_key_data(jax.device_put(data))
        return SamplingRules(
            target=truncation(lambda s: s.target),
            drafts=truncation(lambda s: s.drafts),
            streams=streams,
            min_new_tokens=column(lambda s: s.min_new_tokens, 0, np.int32),
            penalties=penalties,
            bias=bias,
            allowed=allowed,
        )

    def _stop_text(self, found: list[RequestRules | None]) -> StopText | None:
        automata = {r.stop: r.automaton for r in found if r is not None and r.automaton is not None}
        if not automata:
            return None
        names = tuple(sorted(automata))
        which = [
            NO_AUTOMATON if r is None or r.automaton is None else names.index(r.stop) for r in found
        ]
        if names not in self._tables:
            self._tables[names] = jax.device_put(_stack([automata[name] for name in names]))
            if len(self._tables) > _AUTOMATA:
                self._tables.popitem(last=False)
        self._tables.move_to_end(names)
        rows: Any = np.asarray(which, np.int32)
        return StopText(self._tables[names], rows)


def _stack(automata: list[np.ndarray]) -> np.ndarray:
    """Automata [states, V] of several sizes as one table [U, states, V].

    The last state means *found*, so it moves to the end of the largest.
    """
    size = max(a.shape[0] for a in automata)
    count = 1 << (len(automata) - 1).bit_length()
    table = np.full((count, size, automata[0].shape[1]), size - 1, np.int16)
    for number, automaton in enumerate(automata):
        last = automaton.shape[0] - 1
        table[number, :last] = np.where(automaton == last, size - 1, automaton)[:last]
    return table


def check_rules(
    model: Model, draft_tokens: int, context: int, length: int, options: Mapping[str, Any]
) -> RequestRules:
    """The rules of one request, everything about them checked.

    Args:
      model: the model.
      draft_tokens: K.
      context: the longest sequence.
      length: tokens before the output.
      options: as the arguments of :meth:`jaxdraft.Engine.submit`.

    Raises:
      ValueError: as there.
    """
    vocab = model.target.vocab_size
    limit = options["max_length"]
    limit = context if limit is None else whole("max_length", limit)
    if limit > context:
        raise ValueError(f"max_length is {limit}; the engine's context has {context} positions")
    if length >= limit:
        raise ValueError(
            f"the prompt has {length} tokens; with max_length {limit} the longest prompt that "
            f"leaves room for one token has {limit - 1}"
        )
    stops = options["stop_ids"]
    stops = model.info.stop_ids if stops is None else tuple(int(i) for i in stops)
    for i in stops:
        if not 0 <= i < vocab:
            raise ValueError(f"stop id {i} is not in the vocabulary of {vocab}")
    drafts = options["draft_limit"]
    drafts = draft_tokens if drafts is None else min(draft_tokens, whole("draft_limit", drafts, 0))
    logprobs = options["logprobs"]
    if logprobs is not None and not 0 <= logprobs <= vocab:
        raise ValueError(f"logprobs is {logprobs}; expected 0..{vocab} alternatives")
    strings = options["stop"]
    strings = (strings,) if isinstance(strings, str) else tuple(strings)
    sampling, how = options["sampling"], None
    if sampling is not None:
        how = _one_row(sampling, options["key"], options["row"], vocab)
        drafts = int(sampling.limit(np.asarray([drafts]), how)[0])
    return RequestRules(
        stop_ids=stops,
        max_new_tokens=min(whole("max_new_tokens", options["max_new_tokens"]), limit - length),
        max_length=limit,
        draft_limit=drafts,
        sampling=how,
        stop=strings,
        automaton=stop_table(model, strings) if strings else None,
        logprobs=logprobs,
    )


def _one_row(sampling: Sampling, key: Any, row: int, vocab: int) -> SamplingRules:
    """One row of rules in numpy, its stream as raw data: nothing waits on the device."""
    if sampling.mask is not None:
        raise ValueError(
            "sampling.mask is a function and belongs to a whole program: generate takes one; "
            "requests that share a batch take arrays (allowed, logit_bias)"
        )
    rules = sampling_rules(sampling, key, 1, vocab)
    assert rules is not None
    streams = rules.streams
    if streams is not None:
        kind, usual = jax.random.key_impl(streams), jax.random.key_impl(jax.random.key(0))
        if kind != usual:
            raise ValueError(
                f"the key is of kind {kind}; requests that share a batch need the default, {usual}"
            )
        streams = np.asarray(jax.random.key_data(row_streams(key, 1, first=row)))
    rules = replace(rules, streams=None)
    return replace(jax.tree.map(np.asarray, rules), streams=streams)


__all__ = ["RulesTable", "check_rules"]
