"""Stop strings: exact in bytes, inside blocks, across tokens, and never shown."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxdraft
from jaxdraft import Model, Sampling, generate, stream
from jaxdraft.stop_strings import StopText, byte_automaton, match, overlap, run, token_automaton
from jaxdraft.testing import tiny_model
from tests.paths import FIRST_FAMILY

WORDS = st.text("ab", min_size=1, max_size=4)


@pytest.fixture(scope="module")
def model() -> Model:
    return jaxdraft.load(FIRST_FAMILY)


def ends_in(text: bytes, start: int, strings: list[str]) -> list[tuple[int, int]]:
    """(end, start) of every occurrence that ends past byte ``start``, by trying all places."""
    patterns = [s.encode() for s in strings]
    return sorted(
        (at + len(p), at)
        for p in patterns
        for at in range(len(text) - len(p) + 1)
        if text[at : at + len(p)] == p and at + len(p) > start
    )


@given(strings=st.lists(WORDS, min_size=1, max_size=4), text=st.text("abc", max_size=16))
def test_the_automaton_finds_every_end(strings: list[str], text: str) -> None:
    table, ends = byte_automaton(strings)
    state, seen = 0, []
    for number, byte in enumerate(text.encode()):
        state = int(table[state, byte])
        if ends[state]:
            seen.append(number + 1)
    assert seen == sorted({end for end, _ in ends_in(text.encode(), 0, strings)})


@given(
    strings=st.lists(WORDS, min_size=1, max_size=3),
    tokens=st.lists(st.text("abc", max_size=3), min_size=1, max_size=8),
    data=st.data(),
)
def test_tokens_are_their_bytes(strings: list[str], tokens: list[str], data: st.DataObject) -> None:
    """Wherever the tokens are cut, a string is found in the token that completes it, every time."""
    ids = data.draw(st.lists(st.integers(0, 7), min_size=6, max_size=6))
    known = [t.encode() for t in tokens]
    table = token_automaton(strings, known, 8)  # ids past the tokens read as nothing
    stop = StopText(jnp.asarray(table[None]), jnp.asarray([0], jnp.int32))
    _, found = run(stop, jnp.zeros((1,), jnp.int32), jnp.asarray([ids], jnp.int32))
    parts = [known[i] if i < len(known) else b"" for i in ids]
    ends = np.cumsum([len(p) for p in parts]).tolist()
    expected = [
        bool(ends_in(b"".join(parts[: n + 1]), end - len(parts[n]), strings))
        for n, end in enumerate(ends)
    ]
    assert np.asarray(found)[0].tolist() == expected


def test_a_worked_table() -> None:
    """The example of the module's docstring."""
    table = token_automaton(["ab"], [b"a", b"b", b"aba"], 3)
    assert table[:3].tolist() == [[1, 0, -2], [1, -3, -2], [1, 0, -2]]


@given(
    strings=st.lists(WORDS, min_size=1, max_size=4), text=st.text("abc"), start=st.integers(0, 9)
)
def test_match_takes_the_first_that_is_complete(strings: list[str], text: str, start: int) -> None:
    """Of strings that end together it is the longest: the one that starts first."""
    start = min(start, len(text))
    found = ends_in(text.encode(), start, strings)
    expected = (found[0][1], found[0][0]) if found else None
    assert match(text.encode(), start, [s.encode() for s in strings]) == expected


@given(strings=st.lists(WORDS, min_size=1, max_size=4), text=st.text("ab", max_size=8))
def test_overlap_is_what_may_become_a_string(strings: list[str], text: str) -> None:
    begins = {s[:n] for s in strings for n in range(1, len(s))}
    longest = max((n for n in range(1, len(text) + 1) if text[-n:] in begins), default=0)
    assert overlap(text.encode(), [s.encode() for s in strings]) == longest


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
            shown, text = out.texts()[row], model.text.decode(expected)
            cuts = [(text.find(s) + len(s), text.find(s)) for s in strings if s in text]
            assert shown == (text[: min(cuts)[1]] if cuts else text)
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
