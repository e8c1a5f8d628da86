"""The text of an output: after its prompt and before its stop string, in every driver."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import struct
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

import jaxdraft
from jaxdraft import Engine, Model, Sampling, generate, stream
from jaxdraft.stop_strings import StopText, run
from jaxdraft.text import OutputText, Text
from tests.tiny_tokenizers import SPECIALS, TEXTS, byte_level, sentencepiece, words_with

GREEDY = Sampling(temperature=0.0)


# ------------------------------------------------------------------------- one token at a time


def reference(text: Text, ids: list[int], strings: list[str], least: int) -> tuple[int, str | None]:
    """Tokens up to the stop, and the text by the bytes alone; the text is None without a stop."""
    named = {
        i: s.encode() for i, s in enumerate(SPECIALS) if any(s in string for string in strings)
    }
    searched = [named.get(i, text.token_bytes[i]) for i in ids]
    patterns = [s.encode() for s in strings]
    for n in range(1, len(ids) + 1):
        whole, before = b"".join(searched[:n]), len(b"".join(searched[: n - 1]))
        ends = [
            (at + len(p), at)
            for p in patterns
            for at in range(len(whole) - len(p) + 1)
            if whole.startswith(p, at) and at + len(p) > before
        ]
        if ends and n > least:
            at, shown = min(ends)[1], b""
            for token, part in zip(ids, searched, strict=True):
                visible = text.token_bytes[token]
                shown += visible[: max(0, at)] if part else b""
                at -= len(part)
                if at <= 0:
                    break
            return n, shown.decode("utf-8", "replace")
    return len(ids), None


def stopped_at(text: Text, ids: list[int], strings: list[str], least: int) -> int | None:
    """Where the automaton ends these tokens."""
    table = text.stop_table(strings, len(text.token_bytes))
    stop = StopText(jnp.asarray(table[None]), jnp.asarray([0], jnp.int32))
    _, found = run(stop, jnp.zeros((1,), jnp.int32), jnp.asarray([ids], jnp.int32))
    return next((n + 1 for n, f in enumerate(found[0].tolist()) if f and n + 1 > least), None)


def shown_in_parts(
    text: Text, prompt: list[int], ids: list[int], strings: list[str], cuts: list[int], ended: bool
) -> str:
    output = OutputText(text, prompt=prompt, stop=strings)
    places = sorted({c for c in cuts if c < len(ids)})
    parts = [ids[a:b] for a, b in zip([0, *places], [*places, len(ids)], strict=True)]
    shown = "".join(output.push(part) for part in parts[:-1])
    return shown + output.push(parts[-1], done=True, stopped=ended)


WORDS = ["a", "b", "ab", "ba", "aab", "é", "bé", " a", "<eos>", "a<eos>", "<eos>b", "eos", "€"]


@pytest.mark.parametrize("name", ["byte level", "sentencepiece", "word piece"])
@given(data=st.data())
def test_the_text_ends_where_the_automaton_did(name: str, data: st.DataObject) -> None:
    text = ENDING[name]
    size = len(text.token_bytes)
    often = [i for i in range(size) if text.token_bytes[i] in (b"a", b"b", b" a", b"ab", b"\xc3")]
    ids = st.sampled_from([*often, 1, 2]) | st.integers(0, size - 1)
    tokens = data.draw(st.lists(ids, min_size=1, max_size=12))
    prompt = data.draw(st.lists(st.integers(3, size - 1), max_size=4))
    strings = data.draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3))
    least, cuts = data.draw(st.integers(0, 6)), data.draw(st.lists(st.integers(1, 11), max_size=5))
    count, expected = reference(text, tokens, strings, least)
    assert stopped_at(text, tokens, strings, least) == (None if expected is None else count)
    tokens = tokens[:count]
    ended = expected is not None
    shown = shown_in_parts(text, prompt, tokens, strings, cuts, ended)
    assert shown == shown_in_parts(text, prompt, tokens, strings, [], ended)
    if not ended:
        assert shown == text.decode(tokens, prompt=prompt)
    elif name == "byte level" and not prompt:
        assert shown == expected
    elif name != "sentencepiece" and prompt:
        assert shown == expected


ENDING = {
    "byte level": Text(tokenizer=byte_level(" a", "ab", "aé", "éb", "€")),
    "sentencepiece": Text(tokenizer=sentencepiece()),
    "word piece": TEXTS["word piece"],
}


@given(data=st.data())
def test_sentencepiece_text_before_a_stop(data: st.DataObject) -> None:
    """Of whole characters: what stands before the string, less a blank at the beginning."""
    text = ENDING["sentencepiece"]
    word = st.sampled_from(["a", "b", "ab", " a", "é", "漢", " ", "🙂"])
    parts = data.draw(st.lists(word, min_size=1, max_size=8))
    ids = text.encode("x" + "".join(parts), add_special_tokens=False)[2:]
    strings = data.draw(st.lists(st.sampled_from(["b", "ab", "é", "漢", " a"]), min_size=1))
    count, expected = reference(text, ids, strings, 0)
    if expected is not None:
        behind = [text.tokenizer.token_to_id("b")]
        cuts = data.draw(st.lists(st.integers(1, 9), max_size=3))
        assert shown_in_parts(text, behind, ids[:count], strings, cuts, True) == expected
        assert shown_in_parts(text, [], ids[:count], strings, cuts, True) == expected.removeprefix(
            " "
        )


# ------------------------------------------------------------------------------ after a prompt


@pytest.mark.parametrize("name", [n for n in TEXTS if n not in ("word ends",)])
@given(data=st.data())
def test_a_prompt_and_its_output_are_the_whole_text(name: str, data: st.DataObject) -> None:
    """Decoded after its prompt, an output is what it adds to the prompt's text."""
    text = TEXTS[name]
    size = text.tokenizer.get_vocab_size() + 2
    prompt = data.draw(st.lists(st.integers(0, size - 1), max_size=90 if size < 40 else 12))
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=12))
    before = text.decode(prompt) if prompt else ""
    whole = text.decode([*prompt, *ids]) if prompt or ids else ""
    added = text.decode(ids, prompt=prompt)
    assert whole.endswith(added)
    kept = whole[: len(whole) - len(added)]
    assert before.startswith(kept)
    if kept != before:  # only a character, or a run of byte tokens, that the output changed
        assert not whole.startswith(before)
    decoder = text.stream(prompt=prompt)
    assert "".join(decoder.push([i]) for i in ids) + decoder.finish() == added


def test_a_long_stream_keeps_few_ids() -> None:
    """So that a stream of n tokens costs n, and not n squared."""
    text = TEXTS["sentencepiece"]
    decoder, ids = text.stream(prompt=text.encode("ab " * 500)), text.encode("ab é" * 300)
    shown = "".join(decoder.push([i]) for i in ids)
    assert len(decoder._ids) < 100
    assert shown + decoder.finish() == text.decode(ids, prompt=text.encode("ab"))


def test_a_character_over_prompt_and_output() -> None:
    text = Text(tokenizer=byte_level())
    ids = text.encode("a€b")
    for n in range(1, 4):
        assert text.decode(ids[n:], prompt=ids[:n]) == "€b"
    assert text.decode(ids[4:], prompt=ids[:2]) == "b"  # never completed: it stays the prompt's


# ----------------------------------------------------------------------- added tokens and bytes


def test_the_bytes_of_added_tokens_are_what_the_decoder_writes() -> None:
    """Added tokens pass through the decoder as well."""
    for tokenizer in (byte_level(" the"), sentencepiece(), words_with(decoders.WordPiece())):
        tokenizer.add_tokens(["é", "Ġfoo", "日本", "▁bar", "x y", "<0x41>", "##é"])
        text = Text(tokenizer=tokenizer)
        first = tokenizer.token_to_id("a") or tokenizer.token_to_id("hello")
        before = tokenizer.decode([first])
        for number, known in enumerate(text.token_bytes):
            shown = tokenizer.decode([first, number])[len(before) :]
            assert known.decode("utf-8", "replace") == shown, (number, known, shown)


@pytest.mark.parametrize("name", ["ctc", "word ends", "replaced across tokens"])
def test_decoders_that_stop_strings_cannot_follow_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="stop strings cannot be used with this tokenizer"):
        TEXTS[name].stop_table(["x"], 16)


# ------------------------------------------------------------------------------ every driver


@struct.dataclass
class Script:
    """A target that follows a script: after token t comes ``following[t]``."""

    following: jax.Array  # [V] int32

    @property
    def vocab_size(self) -> int:
        return self.following.shape[0]

    @property
    def context_length(self) -> int:
        return 64

    def init(self, batch: int, capacity: int) -> jax.Array:
        del capacity
        return jnp.zeros((batch,), jnp.int32)

    def forward(self, tokens: Any, count: Any, state: Any, *, row: Any = None) -> Any:
        del count
        logits = 9 * jax.nn.one_hot(self.following[tokens], self.vocab_size)
        if row is not None:
            logits = jnp.take_along_axis(logits, row[:, None, None], axis=1)
        return jaxdraft.TargetOutput(logits, None, None, state)

    def commit(self, state: Any, count: Any) -> Any:
        del count
        return state


def llama() -> Tokenizer:
    """Hello world. with a blank before each word."""
    vocab = ["<unk>", "<|im_end|>", "▁Hello", "▁world", "."]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(vocab)}, merges=[], unk_token="<unk>",
            byte_fallback=True,
        )
    )  # fmt: skip
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<unk>", "<|im_end|>"])
    return tokenizer


CYCLE = jnp.asarray([0, 2, 3, 4, 1], jnp.int32)  # Hello -> world -> . -> <|im_end|> -> Hello


def cycle_model() -> Model:
    return Model.of(Script(CYCLE), text=Text(tokenizer=llama()))


def everywhere(model: Model, prompt: list[int], **rules: Any) -> tuple[list[int], str, str]:
    """Tokens, reason and text, the same from all drivers, with drafts and without."""
    found = set()
    for drafter in ("none", "ngram"):
        out = generate(model, [prompt], drafter=drafter, **rules)
        found.add((tuple(out.ids()[0]), out.finish_reasons[0], out.texts()[0]))
        events = list(stream(model, [prompt], drafter=drafter, **rules))
        tokens = tuple(t for e in events for t in e.tokens)
        shown = "".join(e.text or "" for e in events)
        found.add((tokens, events[-1].finish_reason, shown))
        with Engine(model, max_batch=2, drafter=drafter) as engine:
            request = engine.submit(prompt, **rules)
            told = "".join(e.text or "" for e in engine.run())
            assert told == request.text
            found.add((tuple(request.tokens), request.finish_reason, request.text))
    assert len(found) == 1, found
    tokens, reason, text = found.pop()
    assert reason is not None and text is not None
    return list(tokens), reason, text


def test_a_special_token_is_a_stop_string() -> None:
    model = cycle_model()
    rules: dict[str, Any] = dict(max_new_tokens=9, stop_ids=())
    assert everywhere(model, [2], stop=["<|im_end|>"], **rules) == (
        [3, 4, 1], "stop_string", " world.",
    )  # fmt: skip
    # Part of a longer string, after and before ordinary text.
    tokens, _, text = everywhere(model, [2], stop=[".<|im_end|>"], **rules)
    assert (tokens, text) == ([3, 4, 1], " world")
    tokens, _, text = everywhere(model, [2], stop=["<|im_end|> Hello wor"], **rules)
    assert (tokens, text) == ([3, 4, 1, 2, 3], " world.")
    # Not named, it is not text: neither in the way nor found by a part of its name.
    tokens, _, text = everywhere(model, [2], stop=[". Hello"], **rules)
    assert (tokens, text) == ([3, 4, 1, 2], " world")
    assert everywhere(model, [2], stop=["im_end"], **rules)[1] == "length"


def test_no_blank_is_lost_after_a_prompt() -> None:
    rules: dict[str, Any] = dict(max_new_tokens=2, stop_ids=())
    assert everywhere(cycle_model(), [2], **rules)[2] == " world."
    assert everywhere(cycle_model(), [1], **rules)[2] == "Hello world"  # a prompt without a text
    assert everywhere(cycle_model(), [3, 4, 1], **rules)[2] == " Hello world"


def test_occurrences_before_min_new_tokens_are_text() -> None:
    model = cycle_model()
    rules: dict[str, Any] = dict(max_new_tokens=20, stop_ids=())
    for least, count in ((0, 1), (1, 5), (4, 5), (5, 9), (8, 9)):
        how = Sampling(temperature=0.0, min_new_tokens=least)
        tokens, reason, text = everywhere(model, [2], stop=["wor", "ld"], sampling=how, **rules)
        assert (len(tokens), reason) == (count, "stop_string")
        assert text == " world. Hello" * (count // 4) + " "


def test_an_occurrence_may_overlap_one_that_did_not_count() -> None:
    """aaaa: with two tokens at least, the string aa ends in the third, and begins in the second."""
    text = Text(tokenizer=byte_level())
    a = text.encode("a")[0]
    model = Model.of(Script(jnp.full((len(text.token_bytes),), a, jnp.int32)), text=text)
    how = Sampling(temperature=0.0, min_new_tokens=2)
    rules: dict[str, Any] = dict(max_new_tokens=9, stop_ids=(), sampling=how)
    assert everywhere(model, [a], stop=["aa"], **rules) == ([a] * 3, "stop_string", "a")
    assert everywhere(model, [a], stop=["aaa", "aa"], **rules) == ([a] * 3, "stop_string", "")


def test_a_string_does_not_begin_in_the_prompt() -> None:
    """Only what was generated ends a row."""
    model = cycle_model()
    tokens, reason, text = everywhere(
        model, [2], stop=["Hello world"], max_new_tokens=20, stop_ids=()
    )
    assert (len(tokens), reason, text) == (5, "stop_string", " world. ")


def test_turns_of_a_request_have_texts_of_their_own() -> None:
    """After extend and rewind, with what was emitted as the prompt, a string begins in the turn."""
    model = cycle_model()
    with Engine(model, max_batch=2, drafter="none") as engine:
        request = engine.submit([2], max_new_tokens=1, stop_ids=(), stop=["world. H"])
        request.result()
        assert request.text == " world"
        request.extend([4], max_new_tokens=9).result()
        assert request.text == " Hello " and request.finish_reason == "stop_string"
        request.rewind().extend([4, 1], max_new_tokens=2, stop=()).result()
        assert request.text == " Hello world"


def test_a_cancelled_request_shows_all_its_tokens() -> None:
    """Text that was held back as a possible stop string is text when the request is over."""
    model = cycle_model()
    with Engine(model, max_batch=2, drafter="none") as engine:
        request = engine.submit([2], max_new_tokens=9, stop_ids=(), stop=["world!"])
        shown = [e.text for e in engine.step()]
        assert request.tokens == [3] and shown == [""]
        request.cancel()
        assert request.text == " world" and [e.text for e in engine.step()] == [" world"]
