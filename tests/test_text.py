"""Strings to ids and back; ids that arrive a few at a time; chat templates."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from jaxdraft.text import Text
from tests.paths import FIRST_FAMILY, first_prompts
from tests.tiny_tokenizers import SPECIALS, TEXTS, byte_level, words_with

USER = {"role": "user", "content": "Hi"}


def write(
    folder: Path, tokenizer: Tokenizer, template: str | None = None, **config: object
) -> Path:
    """Writes the files that `Text.from_folder` reads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


# ----------------------------------------------------------------------------- encode and decode


def test_prompts_of_the_trained_model():
    text = Text.from_folder(FIRST_FAMILY)
    for prompt in first_prompts():
        assert text.encode(prompt["text"]) == prompt["prompt_ids"]
        assert text.decode(prompt["prompt_ids"]) == prompt["text"]
        assert text.decode(prompt["greedy"]) == prompt["greedy_text"]


@given(st.text())
def test_byte_level_round_trip(string: str):
    text = TEXTS["byte level, digits"]
    assert text.decode(text.encode(string), skip_special_tokens=False) == string


def test_digits_are_split_one_by_one():
    # A merge that crosses digits exists, and does not apply.
    text = Text(tokenizer=byte_level("12", digits=True))
    assert len(text.encode("12")) == 2
    assert len(Text(tokenizer=byte_level("12")).encode("12")) == 1
    assert text.decode(text.encode("a 12, 345.6")) == "a 12, 345.6"


def test_ids_may_be_arrays():
    text = Text.from_folder(FIRST_FAMILY)
    ids = text.encode("import os\n")
    expected = text.decode(ids)
    assert text.decode(np.asarray(ids, np.uint16)) == expected
    assert text.decode(jnp.asarray(ids, jnp.int32)) == expected
    assert text.decode([]) == text.decode(np.zeros(0, np.int32)) == ""


@pytest.mark.parametrize("ids", [[-1], [2**31], [1.0], [[1]], 1, [True], ["a"]], ids=repr)
def test_ids_that_are_none(ids: object):
    text = TEXTS["byte level"]
    with pytest.raises(ValueError, match="ids"):
        text.decode(ids)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match="ids"):
        text.stream().push(ids)  # pyrefly: ignore[bad-argument-type]


def test_special_and_unknown_ids_read_as_nothing():
    text = Text.from_folder(FIRST_FAMILY)
    ids = text.encode("x <|im_end|>")
    assert ids[-1] == 2
    assert text.decode([*ids, 511]) == "x "  # the model's vocabulary has 512 entries
    assert text.decode(ids, skip_special_tokens=False) == "x <|im_end|>"


@struct.dataclass
class Model:
    weight: jax.Array
    text: Text = struct.field(pytree_node=False)


def test_is_a_static_field():
    traces = 0

    @jax.jit
    def doubled(model: Model) -> Model:
        nonlocal traces
        traces += 1
        return dataclasses.replace(model, weight=model.weight * 2)

    text = Text.from_folder(FIRST_FAMILY)
    assert doubled(doubled(Model(jnp.ones(2), text))).text is text
    assert traces == 1
    doubled(Model(jnp.ones(2), Text.from_folder(FIRST_FAMILY)))  # equal files are another text
    assert traces == 2
    with pytest.raises(AttributeError):
        text.source = "elsewhere"  # pyrefly: ignore[read-only]


# --------------------------------------------------------------------------------------- streams


def stream(text: Text, parts: Sequence[Sequence[int]], *, skip: bool = True) -> list[str]:
    decoder = text.stream(skip_special_tokens=skip)
    return [*(decoder.push(part) for part in parts), decoder.finish()]


@st.composite
def parts_of_ids(draw: st.DrawFn, size: int) -> list[list[int]]:
    """Random ids below `size`, cut in random places; a part may be empty."""
    ids = draw(st.lists(st.integers(0, size - 1), max_size=24))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@pytest.mark.parametrize("name", TEXTS)
@given(data=st.data(), skip=st.booleans())
def test_stream_is_decode(name: str, data: st.DataObject, skip: bool):
    text = TEXTS[name]
    # Three ids more than there are tokens, as in a padded vocabulary.
    parts = data.draw(parts_of_ids(text.tokenizer.get_vocab_size() + 3))
    everything = text.decode([i for part in parts for i in part], skip_special_tokens=skip)
    assert "".join(stream(text, parts, skip=skip)) == everything


@pytest.mark.parametrize("name", ["trained", "byte level", "sentencepiece"])
@given(data=st.data())
def test_stream_of_written_text(name: str, data: st.DataObject):
    """As above for ids that make sense: whole characters of one to four bytes, then a cut."""
    text = TEXTS[name]
    ids = text.encode(data.draw(st.text("a b1é€🙂\ufffd漢")))
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    parts = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join(stream(text, parts)) == text.decode(ids)


def split_emoji(tokens: int) -> tuple[Text, list[int]]:
    """A tokenizer that needs 2, 3 or 4 tokens for F0 9F 99 82, and those."""
    tokenizer = byte_level()
    letters = "".join(
        piece
        for piece, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str("🙂")
    )
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    merges = [(letters[0], letters[1]), (letters[2], letters[3])][: 4 - tokens]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    tokenizer.model = models.BPE(vocab=vocab, merges=merges)
    text = Text(tokenizer=tokenizer)
    ids = text.encode("🙂")
    assert len(ids) == tokens
    return text, ids


@pytest.mark.parametrize("tokens", [2, 3, 4])
def test_a_character_over_several_tokens(tokens: int):
    text, ids = split_emoji(tokens)
    a, b = text.encode("a"), text.encode("b")
    # One accepted block; token by token; and a step that ends inside.
    assert stream(text, [[*a, *ids, *b]]) == ["a🙂b", ""]
    assert stream(text, [a, *([i] for i in ids), b]) == ["a", *[""] * (tokens - 1), "🙂", "b", ""]
    assert stream(text, [[*a, *ids[:-1]], [ids[-1], *b]]) == ["a", "🙂b", ""]


@pytest.mark.parametrize("tokens", [2, 3, 4])
def test_a_truncated_character_does_not_raise(tokens: int):
    text, ids = split_emoji(tokens)
    for n in range(1, tokens):
        shown = stream(text, [text.encode("a"), ids[:n]])
        assert shown == ["a", "", "\ufffd"]
        assert "".join(shown) == text.decode([*text.encode("a"), *ids[:n]])


def test_bytes_that_never_make_a_character_do_not_block_the_stream():
    text, ids = split_emoji(4)
    broken = ids[2]  # a continuation byte with nothing before it
    assert stream(text, [[broken], [broken], text.encode("a")]) == ["", "\ufffd", "\ufffda", ""]


def test_a_run_of_byte_tokens_waits_for_its_end():
    # Byte fallback reads a run as UTF-8 or, when any of it is not, each byte as U+FFFD.
    text = TEXTS["sentencepiece"]
    first = text.tokenizer.get_vocab()["<0x00>"]
    euro, bad, a = [first + b for b in "€".encode()], [first + 0xFF], text.encode("a")
    assert stream(text, [a, euro, a]) == ["a", "", "€ a", ""]
    assert stream(text, [euro, bad, a]) == ["", "", "\ufffd" * 4 + " a", ""]
    eos = [SPECIALS.index("<eos>")]
    assert stream(text, [euro, eos, bad]) == ["", "", "", "\ufffd" * 4]
    assert stream(text, [euro, eos], skip=False) == ["", "€<eos>", ""]


def test_an_end_that_is_stripped_waits():
    strip = decoders.Sequence([decoders.Fuse(), decoders.Strip("o", 0, 1)])
    text = Text(tokenizer=words_with(strip))
    hello = text.encode("hello")
    assert stream(text, [hello, hello]) == ["", "", "hellohell"]


def test_a_finished_stream_begins_anew():
    text = TEXTS["sentencepiece"]
    decoder = text.stream()
    for _ in range(2):
        assert decoder.push(text.encode("ab")) + decoder.finish() == "ab"


def test_refused_ids_leave_a_stream_as_it_was():
    text, ids = split_emoji(2)
    decoder = text.stream()
    decoder.push(ids[:1])
    with pytest.raises(ValueError):
        decoder.push([-1])
    assert decoder.push(ids[1:]) == "🙂"


# ---------------------------------------------------------------------------------------- chats

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


def adds_bos() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 1)]
    )
    return tokenizer


def test_trained_chat():
    text = Text.from_folder(FIRST_FAMILY)
    shown = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text.render([USER]) == shown
    assert text.chat([USER]) == text.encode(shown)
    assert text.chat([USER])[0] == 1
    assert text.decode(text.chat([USER]), skip_special_tokens=False) == shown
    shorter = text.chat([USER], add_generation_prompt=False)
    assert text.decode(shorter, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize("bos", ["<bos>", {"content": "<bos>", "special": True}], ids=str)
def test_one_bos_and_not_two(tmp_path: Path, bos: object):
    text = Text.from_folder(write(tmp_path, adds_bos(), WITH_BOS, bos_token=bos))
    hi = Text(tokenizer=byte_level()).encode("Hi")
    assert text.encode("Hi") == [1, *hi]
    assert text.chat([USER]) == [1, *hi]


def test_no_bos_that_the_template_does_not_write(tmp_path: Path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    text = Text.from_folder(write(tmp_path, adds_bos(), template, bos_token="<bos>"))
    assert text.chat([USER]) == text.encode("Hi", add_special_tokens=False)


def test_a_special_token_of_the_vocabulary_keeps_its_id(tmp_path: Path):
    tokenizer = byte_level("end")
    plain = tokenizer.get_vocab()["end"]
    text = Text.from_folder(write(tmp_path, tokenizer, eos_token="end", sep_token="no such"))
    assert text.encode("a<eos>end")[-1] == plain
    assert text.decode([plain]) == ""
    assert text.tokenizer.token_to_id("no such") is None


def test_neither_cut_nor_padded(tmp_path: Path):
    tokenizer = byte_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    assert len(Text.from_folder(write(tmp_path, tokenizer)).encode("abcd")) == 4


@pytest.mark.parametrize(
    "template, shown",
    [
        (
            "{% for m in messages %}{{ m | tojson }}{% endfor %}",
            '{"role": "user", "content": "Hi"}',
        ),
        ("{{ 'é<' | tojson }}", '"é<"'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, indent=1) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% if true %}\n  {% set x = 1 %}\n{{ x }}\n{% endif %}\n", "1\n"),  # blocks trimmed
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a{% generation %}{% set x = 1 %}b{{ x }}{% endgeneration %}c{{ x }}", "ab1c"),
        ("{{ tools is none }} {{ documents is none }} {{ nothing is defined }}", "True True False"),
        ("{% if mood %}{{ mood }}{% endif %}", "glad"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ bos_token }}{{ tail }}", "<bos>!"),
    ],
)
def test_what_templates_use(tmp_path: Path, template: str, shown: str):
    config = {"bos_token": "<bos>", "extra_special_tokens": {"tail": "!"}}
    text = Text.from_folder(write(tmp_path, byte_level(), template, **config))
    assert text.render([USER], mood="glad") == shown


def test_template_in_the_configuration(tmp_path: Path):
    write(tmp_path, byte_level(), chat_template="one")
    assert Text.from_folder(tmp_path).render([USER]) == "one"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "two"}]
    write(tmp_path, byte_level(), chat_template=named)
    assert Text.from_folder(tmp_path).render([USER]) == "two"
    write(tmp_path, byte_level(), "three", chat_template=named)
    assert Text.from_folder(tmp_path).render([USER]) == "three"


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "chat template"),
        ("{{ messages[0].content + 1 }}", "chat template"),
        ("{{ nothing.at_all }}", "nothing"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "chat template"),
    ],
)
def test_templates_that_refuse(tmp_path: Path, template: str, message: str):
    text = Text.from_folder(write(tmp_path, byte_level(), template))
    with pytest.raises(ValueError, match=message):
        text.render([USER])


def test_messages_have_roles():
    text = Text(tokenizer=byte_level(), chat_template=CHATML)
    for messages in (["Hi"], [{"content": "Hi"}]):
        with pytest.raises(ValueError, match="role"):
            text.chat(messages)  # pyrefly: ignore[bad-argument-type]


# ---------------------------------------------------------------------------------------- files


def test_missing_files_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"tokenizer\.json.*nowhere"):
        Text.from_folder(tmp_path / "nowhere")
    byte_level().save(str(tmp_path / "tokenizer.json"))  # the only file that must be there
    assert Text.from_folder(tmp_path).encode("a") == Text(tokenizer=byte_level()).encode("a")
    with pytest.raises(ValueError, match=f"{tmp_path.name} has no chat template"):
        Text.from_folder(tmp_path).chat([USER])


@pytest.mark.parametrize("content", ["", "[]", "{", '"x"', "\xff"], ids=repr)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_files_are_named(tmp_path: Path, name: str, content: str):
    write(tmp_path, byte_level())
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        Text.from_folder(tmp_path)


def test_a_template_that_is_no_string(tmp_path: Path):
    write(tmp_path, byte_level(), chat_template=1)
    with pytest.raises(ValueError, match="chat_template"):
        Text.from_folder(tmp_path)
