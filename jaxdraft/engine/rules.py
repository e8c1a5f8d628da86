"""The rules of many requests as the arrays that a round reads, one row per request."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxdraft.base import NO_TOKEN, Truncation
from jaxdraft.checks import check_int
from jaxdraft.engine.sequence import RequestRules, Sequence
from jaxdraft.keys import STREAM_IMPL
from jaxdraft.model import Model
from jaxdraft.requests import Options, check
from jaxdraft.rounds import Rules
from jaxdraft.sampling import Mask, Penalties, SamplingRules
from jaxdraft.sizes import power_of_two
from jaxdraft.stop_strings import NO_AUTOMATON, StopText
from jaxdraft.structure import TokenAutomaton
from jaxdraft.structure.automaton import NO_STRUCTURE, Structures, sizes, stack

_AUTOMATA = 16
"""Number of sets of stop strings whose automata stay on the device when unused."""

_STRUCTURES = 4
"""The same for structures, whose automata are larger; also the least number in a table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """The kinds of rules in a batch. A program depends on these, but not on their values.

    Attributes:
      stops: number of stop ids per row, a power of two.
      samples: whether any row has a :class:`jaxdraft.Sampling`.
      random: whether any row draws.
      penalties, bias, allowed: whether any row has them.
      masks: the functions ``mask`` of :class:`jaxdraft.Sampling`.
      automata: number of sets of stop strings, and of states of the largest automaton; zeros if
        there is none.
      structures: U, S and C of a table of structures; zeros if there is none.
      logprobs: largest number of alternatives of a row, a power of two or 0; None means no
        log-probabilities.
    """

    stops: int = 4
    samples: bool = False
    random: bool = False
    penalties: bool = False
    bias: bool = False
    allowed: bool = False
    masks: tuple[Mask, ...] = ()
    automata: tuple[int, int] = (0, 0)
    structures: tuple[int, int, int] = (0, 0, 0)
    logprobs: int | None = None

    @classmethod
    def of(cls, rules: RequestRules) -> Form:
        """Return the form of one request."""
        how, n = rules.sampling, rules.logprobs
        return cls(
            stops=power_of_two(len(rules.stop_ids), least=4),
            samples=how is not None,
            random=how is not None and how.streams is not None,
            penalties=how is not None and how.penalties is not None,
            bias=how is not None and how.bias is not None,
            allowed=how is not None and how.allowed is not None,
            masks=() if how is None else how.masks,
            structures=_shape([] if rules.structure is None else [rules.structure]),
            automata=(0, 0) if rules.automaton is None else (1, rules.automaton.shape[0]),
            logprobs=power_of_two(n) if n else n,
        )

    def __or__(self, other: Form) -> Form:
        wanted = [n for n in (self.logprobs, other.logprobs) if n is not None]
        return Form(
            stops=max(self.stops, other.stops),
            samples=self.samples or other.samples,
            random=self.random or other.random,
            penalties=self.penalties or other.penalties,
            bias=self.bias or other.bias,
            allowed=self.allowed or other.allowed,
            masks=tuple(dict.fromkeys(self.masks + other.masks)),
            structures=_largest(self.structures, other.structures),
            automata=(
                max(self.automata[0], other.automata[0]),
                max(self.automata[1], other.automata[1]),
            ),
            logprobs=max(wanted) if wanted else None,
        )


class RulesTable:
    """The rules of every row, sent to the device when a row gets another request.

    Programs are compiled for a :class:`Form`. The form grows as requests need it. It is reset only
    when the engine was idle, so that a busy engine does not switch between programs.

    Args:
      rows: B, number of rows.
      vocab_size: V.
    """

    def __init__(self, rows: int, vocab_size: int) -> None:
        self._rows, self.vocab = rows, vocab_size
        self._tables: OrderedDict[tuple[Any, ...], jax.Array] = OrderedDict()
        self._structures: OrderedDict[tuple[Any, ...], tuple[jax.Array, jax.Array]] = OrderedDict()
        self.start()

    def update(self, active: Mapping[int, Sequence]) -> None:
        """Update the rules to the active rows; do nothing while they are unchanged."""
        found: list[RequestRules | None] = [None] * self._rows
        for row, sequence in active.items():
            found[row] = sequence.rules
        if all(a is b for a, b in zip(found, self._held, strict=True)):
            return
        for rules in found:
            if rules is not None:
                self.form = self.form | Form.of(rules)
        names = {r.stop for r in found if r is not None and r.automaton is not None}
        if names:
            size = max(self.form.automata[0], power_of_two(len(names)))
            self.form = dataclasses.replace(self.form, automata=(size, self.form.automata[1]))
        several = _shape(_automata(found))
        self.form = dataclasses.replace(
            self.form, structures=_largest(self.form.structures, several)
        )
        self.rules, self._held = self._build(found), found

    def start(self) -> None:
        """Reset to no requests, so that the next request decides which programs are needed."""
        self.form = Form()
        self._held: list[RequestRules | None] = [None] * self._rows
        self.rules = self._build(self._held)

    def neutral(self, *, random: bool) -> Rules:
        """Return the rules of unused rows."""
        before, self.form = self.form, Form(samples=random, random=random)
        rules, self.form = self._build([None] * self._rows), before
        return rules

    def _build(self, found: list[RequestRules | None]) -> Rules:
        stop_ids = np.full((self._rows, self.form.stops), NO_TOKEN, np.int32)
        numbers: Any = np.zeros((3, self._rows), np.int32)
        for row, r in enumerate(found):
            if r is not None:
                stop_ids[row, : len(r.stop_ids)] = r.stop_ids
                numbers[:, row] = r.max_new_tokens, r.max_length, r.draft_limit
        rules: Any = Rules(
            stop_ids,  # type: ignore[bad-argument-type]
            *numbers,
            sampling=self._sampling(found) if self.form.samples else None,
            stop_text=self._stop_text(found) if self.form.automata[0] else None,
            structures=self._structured(found) if self.form.structures[0] else None,
        )
        return jax.device_put(rules)

    def _sampling(self, found: list[RequestRules | None]) -> SamplingRules:
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

        penalties = None
        if self.form.penalties:
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
        bias = allowed = streams = which = None
        if self.form.masks:
            places = {mask: [place] for place, mask in enumerate(self.form.masks)}
            which = column(lambda s: places[s.masks[0]] if s.masks else None, -1, np.int32)
        if self.form.bias:
            bias = column(lambda s: s.bias, np.zeros(self.vocab), np.float32)
        if self.form.allowed:
            allowed = column(lambda s: s.allowed, np.ones(self.vocab), bool)
        if self.form.random:
            data = column(lambda s: s.streams, np.zeros(2, np.uint32), np.uint32)
            streams = jax.random.wrap_key_data(jax.device_put(data), impl=STREAM_IMPL)
        return SamplingRules(
            target=truncation(lambda s: s.target),
            drafts=truncation(lambda s: s.drafts),
            streams=streams,
            min_new_tokens=column(lambda s: s.min_new_tokens, 0, np.int32),
            penalties=penalties,
            bias=bias,
            allowed=allowed,
            masks=self.form.masks,
            which_mask=which,
        )

    def _structured(self, found: list[RequestRules | None]) -> Structures:
        automata = _automata(found)
        which: Any = np.asarray(
            [
                NO_STRUCTURE if r is None or r.structure is None else automata.index(r.structure)
                for r in found
            ],
            np.int32,
        )
        key = (*automata, self.form.structures)
        if key not in self._structures:
            tables = stack(automata, self.form.structures, self.vocab)
            self._structures[key] = jax.device_put(tables)
            if len(self._structures) > _STRUCTURES:
                self._structures.popitem(last=False)
        self._structures.move_to_end(key)
        return Structures(*self._structures[key], which)

    def _stop_text(self, found: list[RequestRules | None]) -> StopText:
        automata = {r.stop: r.automaton for r in found if r is not None and r.automaton is not None}
        names = tuple(sorted(automata))
        which = [
            NO_AUTOMATON if r is None or r.automaton is None else names.index(r.stop) for r in found
        ]
        key = (*names, self.form.automata)
        if key not in self._tables:
            count, states = self.form.automata
            stacked = _stack([automata[name] for name in names], count, states, self.vocab)
            self._tables[key] = jax.device_put(stacked)
            if len(self._tables) > _AUTOMATA:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        rows: Any = np.asarray(which, np.int32)
        return StopText(self._tables[key], rows)


def _automata(found: list[RequestRules | None]) -> list[TokenAutomaton]:
    """Return the distinct automata of structures."""
    every = (None if rules is None else rules.structure for rules in found)
    return list(dict.fromkeys(one for one in every if one is not None))


def _shape(automata: list[TokenAutomaton]) -> tuple[int, int, int]:
    """Return U, S and C of a table of automata; zeros if there is none."""
    return _largest(sizes(automata), (_STRUCTURES, 0, 0)) if automata else (0, 0, 0)


def _largest(one: tuple[int, int, int], other: tuple[int, int, int]) -> tuple[int, int, int]:
    u, s, c = map(max, one, other)
    return u, s, c


def _stack(automata: list[np.ndarray], count: int, states: int, vocab: int) -> np.ndarray:
    """Put automata [s, V] of several sizes into one table [count, states, V]."""
    table = np.zeros((count, states, vocab), np.int16)
    for number, automaton in enumerate(automata):
        table[number, : automaton.shape[0]] = automaton
    return table


def check_rules(
    model: Model, draft_tokens: int, context: int, length: int, options: Options
) -> RequestRules:
    """Check the options of one request, and return its rules.

    Args:
      model: the model.
      draft_tokens: K, maximum number of drafts per round.
      context: maximum length of a sequence.
      length: number of tokens before the output.
      options: the arguments of :meth:`jaxdraft.Engine.submit`.

    Raises:
      ValueError: as in :meth:`jaxdraft.Engine.submit`.
    """
    integers = {"max_new_tokens": 1, "max_length": 1, "draft_limit": 0}  # with their minimum
    given = {name: (getattr(options, name), low) for name, low in integers.items()}
    one: dict[str, Any] = {
        name: check_int(name, v, low) for name, (v, low) in given.items() if v is not None
    }
    lengths = np.asarray([length], np.int32)
    found = check(
        model, replace(options, **one), lengths, draft_tokens=draft_tokens, engine=context
    )
    return RequestRules(
        stop_ids=tuple(i for i in found.stop_ids[0].tolist() if i != NO_TOKEN),
        max_new_tokens=min(int(found.max_new_tokens[0]), found.max_length - length),
        max_length=found.max_length,
        draft_limit=min(draft_tokens, int(found.draft_limit[0])),
        sampling=_on_host(found.sampling),
        stop=found.stop,
        automaton=found.automaton,
        structure=None if found.structures is None else found.structures[0][0],
        logprobs=found.logprobs,
    )


def _on_host(rules: SamplingRules | None) -> SamplingRules | None:
    """Return one row of rules in numpy, its stream as raw data, so nothing stays on the device."""
    if rules is None:
        return None
    streams = rules.streams
    if streams is not None:
        streams = np.asarray(jax.random.key_data(streams))
    rules = replace(rules, streams=None)
    return replace(jax.tree.map(np.asarray, rules), streams=streams)


__all__ = ["RulesTable", "check_rules"]
