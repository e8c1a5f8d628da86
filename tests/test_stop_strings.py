"""Stop strings: exact in bytes, inside blocks, across tokens, and never shown."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxdraft
from jaxdraft import Model, Sampling, generate, stream
from jaxdraft.stop_strings import Holder, StopText, byte_automaton, cut, run, token_automaton
from jaxdraft.testing import tiny_model
from tests.paths import FIRST_FAMILY

WORDS = st.text("ab", min_size=1, max_size=4)


@pytest.fixture(scope="module")
def model() -> Model:
    return jaxdraft.load(FIRST_FAMILY)


@given(strings=st.lists(WORDS, min_size=1, max_size=4), text=st.text("abc", max_size=16))
def test_the_automaton_finds_the_first_that_is_complete(strings: list[str], text: str) -> None:
    table = byte_automaton(strings)
    found = len(table) - 1
    state, seen = 0, None
    for number, byte in enumerate(text.encode()):
        state = int(table[state, byte])
        if state == found and seen is None:
            seen = number + 1
    ends = [text.find(s) + len(s) for s in strings if s in text]
    assert seen == (min(ends) if ends else None)


@given(
    strings=st.lists(WORDS, min_size=1, max_size=3),
    tokens=st.lists(st.text("abc", max_size=3), min_size=1, max_size=8),
    data=st.data(),
)
def test_tokens_are_their_bytes(strings: list[str], tokens: list[str], data: st.DataObject) -> None:
    """Wherever the tokens are cut, the string is found in the token that completes it."""
    ids = data.draw(st.lists(st.integers(0, 7), min_size=6, max_size=6))
    known = [t.encode() for t in tokens]
    table = token_automaton(strings, known, 8)  # ids past the tokens read as nothing
    stop = StopText(jnp.asarray(table[None]), jnp.asarray([0], jnp.int32))
    states = run(stop, jnp.zeros((1,), jnp.int32), jnp.asarray([ids], jnp.int32))
    parts = [tokens[i] if i < len(tokens) else "" for i in ids]
    texts = ["".join(parts[: n + 1]) for n in range(len(parts))]
    first = next((n for n, text in enumerate(texts) if any(s in text for s in strings)), None)
    hits = np.flatnonzero(np.asarray(states)[0] == stop.found)
    assert (hits[0] if hits.size else None) == first


@given(strings=st.lists(WORDS, min_size=1, max_size=3), parts=st.lists(st.text("abc", max_size=4)))
def test_a_stream_shows_what_the_whole_text_shows(strings: list[str], parts: list[str]) -> None:
    holder = Holder(strings)
    shown = [holder.push(part) for part in parts]
    assert cut("".join(parts), strings).startswith("".join(shown))
    assert "".join(shown) + holder.finish() == cut("".join(parts), strings)


def test_cut_takes_the_longest_of_those_that_end_together() -> None:
    assert cut("xxabc", ["bc", "abc"]) == "xx"
    assert cut("abab", ["ba", "zz"]) == "a"
    assert cut("nothing", ["zz"]) == "nothing"


def test_the_bytes_of_the_tokens_are_the_text(model: Model) -> None:
    text = model.text
    assert text is not None
    said = 'def f(x):\n    return "é€" + str(x)  # 日本\n'
    ids = text.encode(said)
    assert b"".join(text.token_bytes[i] for i in ids) == said.encode()
    assert text.token_bytes[0] == b""  # special


@pytest.mark.parametrize("strings", [["return"], ["self.", "):\n"], ["\n\n"], ["f"]])
def test_rows_end_where_the_text_says(model: Model, strings: list[str]) -> None:
    """Against plain greedy text, token by token; with drafts and without, streamed and not."""
    assert model.text is not None
    prompts = [model.text.encode(p) for p in ("class Foo:\n    def ", "import os\n", "if x")]
    whole = generate(model, prompts, max_new_tokens=48, stop_ids=())
    for drafter in ("none", "auto"):
        out = generate(
            model, prompts, max_new_tokens=48, stop_ids=(), stop=strings, drafter=drafter
        )
        for row, ids in enumerate(whole.ids()):
            texts = [model.text.decode(ids[: n + 1]) for n in range(len(ids))]
            hits = [n + 1 for n, t in enumerate(texts) if any(s in t for s in strings)]
            expected = ids[: hits[0]] if hits else ids
            assert out.ids()[row] == expected
            assert out.finish_reasons[row] == ("stop_string" if hits else "length")
            shown = out.texts()[row]
            assert shown == cut(model.text.decode(expected), strings)
            assert not any(s in shown for s in strings)
    events = list(stream(model, prompts, max_new_tokens=48, stop_ids=(), stop=strings))
    for row in range(len(prompts)):
        assert "".join(e.text or "" for e in events if e.row == row) == out.texts()[row]


def test_the_shape_of_other_strings_is_the_same() -> None:
    """So other strings compile nothing."""
    tokens = [b"a", b"b"]
    one, two = token_automaton(["ab"], tokens, 8), token_automaton(["bbb", "aa"], tokens, 8)
    assert one.shape == two.shape and one.dtype == np.int16


def test_strings_before_min_new_tokens_do_not_count(model: Model) -> None:
    prompt = "class Foo:\n    def "
    early = generate(model, prompt, max_new_tokens=40, stop="e", stop_ids=())
    late = generate(
        model, prompt, max_new_tokens=40, stop="e", stop_ids=(),
        sampling=Sampling(temperature=0.0, min_new_tokens=20),
    )  # fmt: skip
    assert int(early.lengths[0]) < 20 < int(late.lengths[0])
    assert late.ids()[0][: int(early.lengths[0])] == early.ids()[0]


def test_what_cannot_be_found_is_refused(model: Model) -> None:
    with pytest.raises(ValueError, match="expected strings that are not empty"):
        generate(model, "x", stop=[""])
    with pytest.raises(ValueError, match="no tokenizer: stop strings need one"):
        generate(tiny_model(), [[1]], stop="x")
