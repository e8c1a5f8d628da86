"""Structures as automata over tokens: the same masks as the library's own matcher."""

from __future__ import annotations

import json
import random
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdraft import Structure, TokenAutomaton
from jaxdraft.base import MASKED, NO_TOKEN
from jaxdraft.data import EMBEDDED
from jaxdraft.structure import automaton as device
from jaxdraft.structure.automaton import REFUSED, Structures
from jaxdraft.text import Text
from tests.structure.cases import PATTERNS, SCHEMAS, TREE, index_of

VOCAB = 384


@pytest.fixture(scope="module")
def text() -> Text:
    return Text.from_folder(EMBEDDED / "target")


def test_the_example_of_the_module() -> None:
    steps = np.full((2, 256), REFUSED, np.int32)
    steps[0, ord("a")], steps[1, ord("b")] = 1, 1
    found = TokenAutomaton.over_bytes(
        steps, np.array([False, True]), [b"a", b"b", b"bb", b"c"], vocab_size=4
    )
    assert found.classes.tolist() == [3, 2, 2, 0]
    assert found.table.tolist() == [[-1, -1, -1, 1], [-1, 1, 1, -1]]
    assert found.run([0, 2, 1]) == 1 and found.complete(1) and found.run([0, 0]) == REFUSED


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_mask_is_that_of_the_library(pattern: str, text: Text) -> None:
    """All pairs of states that texts reach, and all tokens of the vocabulary."""
    ours, theirs = Structure.regex(pattern).automaton(text, VOCAB), index_of(pattern, text)
    pairs = [(0, theirs.get_initial_state())]
    seen = set(pairs)
    for mine, other in pairs:  # grows
        assert ours.complete(mine) == theirs.is_final_state(other)
        wanted = {t for t in theirs.get_allowed_tokens(other) or [] if t < len(text.token_bytes)}
        assert set(np.flatnonzero(ours.allowed(mine)).tolist()) == wanted
        for token in wanted:
            after = ours.run_from(mine, [token]), theirs.get_next_state(other, token)
            if after not in seen:
                seen.add(after)
                pairs.append(after)
    assert len({mine for mine, _ in pairs}) == ours.shape[0], "every state is reached"


def test_states_without_an_end_are_left_out() -> None:
    """``a(bc)*a``: without a token ``c``, the token ``b`` would lead nowhere."""
    steps = np.full((4, 256), REFUSED, np.int32)
    steps[0, ord("a")], steps[1, ord("a")], steps[1, ord("b")], steps[2, ord("c")] = 1, 3, 2, 1
    ends = np.array([False, False, False, True])
    for tokens, allowed in (
        ([b"a", b"bc", b"b"], [True, True, False]),
        ([b"a", b"bc", b"b", b"c"], [True, True, True, False]),
    ):
        found = TokenAutomaton.over_bytes(steps, ends, tokens, len(tokens))
        assert found.allowed(found.run([0])).tolist() == allowed
    with pytest.raises(ValueError, match="no text that the structure allows"):
        TokenAutomaton.over_bytes(steps, ends, [b"b", b"bc"], 2)


def test_the_device_computes_the_same_masks_and_states(text: Text) -> None:
    """Rows with different structures, a free row, refused tokens, and stop ids that are text."""
    automata = [Structure.regex(p).automaton(text, VOCAB) for p in PATTERNS[:3]]
    rng = np.random.default_rng(0)
    which = np.array([0, 1, 2, -1], np.int32)
    stops = np.full((4, 2), NO_TOKEN, np.int32)
    stops[0], stops[1, 0], stops[2, 0] = (0, 1), text.encode("1")[0], 5
    tokens = np.full((4, 6), NO_TOKEN, np.int32)
    for row in range(4):
        state = 0
        for place in range(6 if row != 1 else 4):
            kinds = np.ones(VOCAB, bool)
            if row < 3:
                kinds = automata[row].allowed(state, [t for t in stops[row] if t >= 0])
            if place == 3 and row == 0:
                kinds = ~kinds  # from here on nothing may follow
            if not kinds.any():
                break
            tokens[row, place] = rng.choice(np.flatnonzero(kinds))
            if row < 3:
                state = automata[row].run_from(state, [tokens[row, place]], stops[row])
    table = Structures(*map(jnp.asarray, (*device.stack(automata, (4, 256, 256), VOCAB), which)))
    start, logits = jnp.zeros(4, jnp.int32), jnp.zeros((4, 7, VOCAB), jnp.float32)
    states = device.window(table, jnp.asarray(stops), start, jnp.asarray(tokens))
    masked = device.masked(table, jnp.asarray(stops), states, logits)
    ends = device.complete(table, states)
    for row in range(4):
        state = 0
        for place in range(7):
            free, one = row == 3, automata[min(row, 2)]
            known = [t for t in stops[row] if t >= 0]
            wanted = np.ones(VOCAB, bool) if free else one.allowed(state, known)
            assert (np.asarray(masked[row, place]) > MASKED / 2).tolist() == wanted.tolist()
            assert int(states[row, place]) == state
            assert bool(ends[row, place]) == (not free and one.complete(state))
            if place < 6 and not free:
                state = one.run_from(state, [tokens[row, place]], known)


def random_text(structure: Structure, rng: random.Random) -> str:
    """A text that the structure allows, over single bytes."""
    one = TokenAutomaton.over_bytes(*_bytes(structure), [bytes([b]) for b in range(256)], 256)
    state, found = 0, bytearray()
    while not (one.complete(state) and (rng.random() < 0.3 or not one.allowed(state).any())):
        # Ends come soon: most tokens of a state lead on, and few lead out of a string.
        near = [b for b in b'"}],0:' if one.allowed(state)[b]]
        every = np.flatnonzero(one.allowed(state)).tolist()
        byte = rng.choice(near if near and rng.random() < 0.5 else every)
        found.append(byte)
        state = one.run_from(state, [byte])
    return found.decode("utf-8")


def _bytes(structure: Structure) -> Any:
    from jaxdraft.structure import _bytes_of

    return _bytes_of(structure.pattern, structure.source)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_text_satisfies_its_schema(name: str) -> None:
    schema, satisfies = SCHEMAS[name]
    rng, structure = random.Random(1), Structure.json_schema(schema)
    texts = {random_text(structure, rng) for _ in range(12)}
    for one in texts:
        assert satisfies(json.loads(one)), one


def test_recursion_ends_at_its_depth() -> None:
    """A chain of links is as deep as stated, and no deeper."""
    for depth in (0, 2):
        structure = Structure.json_schema(TREE, depth=depth)
        one = TokenAutomaton.over_bytes(*_bytes(structure), [bytes([b]) for b in range(256)], 256)
        for levels in range(5):
            chain = "null"
            for _ in range(levels):
                chain = f'{{"v":1,"next":{chain}}}'
            fits = 1 <= levels <= depth + 1
            assert one.complete(one.run(chain.encode())) == fits, (depth, levels)


REFUSALS: list[tuple[Any, str]] = [
    (lambda: Structure.regex("("), "regular expression '\\('"),
    (lambda: Structure.regex("^a$"), "leave anchors out"),
    (lambda: Structure.regex("a(?=b)"), "regular expression"),
    (lambda: Structure.regex(""), "not empty"),
    (lambda: Structure.choice([]), "choices are"),
    (lambda: Structure.json_schema("{"), "is not JSON"),
    (lambda: Structure.json_schema({"type": "number", "minimum": 3}), "# has minimum beside type"),
    (lambda: Structure.json_schema({"oneOf": [{}]}), "use anyOf|without a type"),
    (lambda: Structure.json_schema({"type": "set"}), "#/type is 'set'"),
    (lambda: Structure.json_schema({"type": "string", "format": "email"}), "#/format is 'email'"),
    (
        lambda: Structure.json_schema({"type": "string", "pattern": ".*"}),
        "#/pattern is '.*', which matches",
    ),
    (lambda: Structure.json_schema({"$ref": "#/$defs/x"}), "'#/\\$defs/x', which is not in"),
    (
        lambda: Structure.json_schema(
            {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}
        ),
        "no text satisfies the schema with at most 3",
    ),
    (
        lambda: Structure.json_schema({"properties": {}, "required": ["a"]}),
        "#/required has 'a', which is not in properties",
    ),
]


@pytest.mark.parametrize("make, message", REFUSALS)
def test_mistakes_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_too_many_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxdraft.structure.MAX_STATES", 100)
    with pytest.raises(ValueError, match="has 301 states; expected at most 100"):
        Structure.regex("a{300}")


def test_a_vocabulary_that_does_not_fit(text: Text) -> None:
    with pytest.raises(ValueError, match="cannot|can be written with the tokens"):
        Structure.regex("a").automaton(text, 3)  # the first ids are special
