"""Tokenizers in the metadata of GGUF files.

Rules are compared with the expressions in the ``tokenizer.json`` of the models that they are named
after, and merges by scores with SentencePiece (``tests/sentencepiece``). llama.cpp comes with
vocabularies of GPT-2, Llama 3, Llama 2, Phi-3, Qwen2, Refact, StarCoder, Command R and MPT; all of
its test texts give the ids that it lists. Those files are too large to be kept here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxdraft
from convert.errors import ArtifactError
from convert.gguf.tokenizer import RULES, Kind, read_text
from jaxdraft.checkpoint import save
from jaxdraft.text import Text
from tests.convert.test_gguf import numbers, write
from tests.tiny_tokenizers import SPECIALS, byte_level

PIECES = Path(__file__).resolve().parents[1] / "sentencepiece" / "pieces.json"

TEXTS = [
    "",
    " the theory\n\n  of\tthings ",
    "I'm HERE, they'RE not: 1234567 ½",
    "<bos>the<eos> end<pad>",
    "cafe\u0301 日本語 🙂 a\u00a0b\r\n",
    "camelCase HTTPServer's /path//\n",
]

WORDS = ("the", " the", "ing", " HERE", "'m", "'RE", "12", "234", "\n\n", " of", "é")


def metadata(*, pre: str = "gpt-2", **others: Any) -> dict[str, Any]:
    """Return the metadata of a small vocabulary of bytes and some words."""
    described = json.loads(byte_level(*WORDS).to_str())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].__getitem__)
    kinds = [Kind.CONTROL if token in SPECIALS else Kind.NORMAL for token in tokens]
    body = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": np.asarray(kinds, np.int32),
        "merges": [" ".join(pair) for pair in described["merges"]],
        "padding_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in {**body, **others}.items()}


@pytest.mark.parametrize(("pre", "digits"), [("gpt-2", False), ("smollm", True)])
def test_ids_and_texts_are_those_of_the_original(pre: str, digits: bool) -> None:
    original = byte_level(*WORDS, digits=digits)
    found = read_text(metadata(pre=pre), "x.gguf")
    for text in TEXTS:
        ids = original.encode(text).ids
        assert found.tokenizer.encode(text).ids == ids
        assert found.tokenizer.decode(ids) == original.decode(ids)
    assert found.special_tokens == dict(
        zip(("pad_token", "bos_token", "eos_token"), SPECIALS, strict=True)
    )
    assert found.chat_template is None


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+@"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*@"
)
REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (
            ["llama-bpe", "llama3", "dbrx", "smaug-bpe", "glm4"],
            CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + REST,
        ),
        (
            ["qwen2", "deepseek-r1-qwen"],
            CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + REST,
        ),
        (
            ["qwen35"],
            CONTRACTIONS
            + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
            + REST,
        ),
        (["tekken"], CASED.replace("@", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + REST),
        (
            ["gpt-4o"],
            CASED.replace("@", CONTRACTIONS + "?")
            + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
            + REST,
        ),
        (["gpt-2", "smollm"], None),
    ],
)
def test_rules_are_the_published_ones(names: list[str], pattern: str | None) -> None:
    for name in names:
        assert RULES[name].pattern == pattern


def pieces(pre: str, text: str) -> list[str]:
    """Return the pieces into which a text is split."""
    split = read_text(metadata(pre=pre), "x.gguf").tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in split]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["It", "'s", " 1234", ",", " HTTPServer", "\n", "\n", "x"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", ",", " HTTPServer", "\n", "\n", "x"]),
        ("llama-bpe", ["It", "'s", " ", "123", "4", ",", " HTTPServer", "\n\n", "x"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", ",", " HTTPServer", "\n\n", "x"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", ",", " HTTPServer", "\n\n", "x"]),
        ("gpt-4o", ["It's", " ", "123", "4", ",", " HTTPServer", "\n\n", "x"]),
    ],
)
def test_how_texts_are_split(pre: str, expected: list[str]) -> None:
    assert pieces(pre, "It's 1234, HTTPServer\n\nx") == expected


def test_composition_whole_pieces_and_beginnings() -> None:
    def ids(text: str, **options: Any) -> list[int]:
        return read_text(metadata(**options), "x.gguf").tokenizer.encode(text).ids

    assert ids("e\u0301", pre="qwen2") == ids("é", pre="qwen2")
    assert ids("e\u0301", pre="gpt-2") != ids("é", pre="gpt-2")
    # A token that no merge makes is found by rules that take whole pieces.
    described = metadata()
    tokens = [*described["tokenizer.ggml.tokens"], "zzz"]
    whole = dict(tokens=tokens, token_type=np.ones(len(tokens), np.int32))
    assert ids("zzz", pre="llama-bpe", **whole) == [1, len(tokens) - 1]
    assert len(ids("zzz", pre="gpt-2", **whole)) == 3
    assert ids("the", pre="llama-bpe", add_bos_token=False) == ids("the", pre="gpt-2")
    both = ids("the", add_bos_token=True, add_eos_token=True)
    assert both == [1, *ids("the"), 2]


def test_merges_by_score_are_those_of_sentencepiece() -> None:
    body = json.loads(PIECES.read_text(encoding="utf-8"))
    vocabulary = {key: body[key] for key in ("tokens", "scores", "token_type")}
    options = dict(model="llama", pre="default", unknown_token_id=0, padding_token_id=None)
    given = metadata(**vocabulary, **options)
    del given["tokenizer.ggml.merges"]
    tokenizer = read_text(given, "x.gguf").tokenizer
    for text, ids in body["texts"]:
        assert tokenizer.encode(text).ids == [1, *ids], text
        assert tokenizer.decode(ids) == text
    ids = [body["tokens"].index(token) for token in ("<s>", "▁the", "<tool>", "▁the")]
    assert tokenizer.encode("the<tool>the").ids == ids
    given["tokenizer.ggml.add_space_prefix"] = False
    bare = read_text(given, "x.gguf").tokenizer
    assert bare.decode(bare.encode("the").ids) == "the"
    assert bare.encode("the", add_special_tokens=False).ids[0] != ids[1]


def test_unused_tokens_and_templates() -> None:
    described = metadata()
    tokens = [*described["tokenizer.ggml.tokens"], "<think>", "[PAD1]", "[PAD1]"]
    kinds = [*described["tokenizer.ggml.token_type"], Kind.USER_DEFINED, Kind.UNUSED, Kind.UNUSED]
    given = metadata(tokens=tokens, token_type=np.asarray(kinds))
    given |= {"tokenizer.chat_template": "a", "tokenizer.chat_templates": ["rag"]}
    given |= {"tokenizer.chat_template.rag": "b"}
    found = read_text(given, "x.gguf")
    assert found.tokenizer.encode("<think>").ids == [len(tokens) - 3]
    assert found.tokenizer.decode([len(tokens) - 3]) == "<think>"  # no special token
    assert found.tokenizer.token_to_id("[PAD1]") is None
    assert found.chat_template == {"default": "a", "rag": "b"}
    del given["tokenizer.chat_templates"]
    assert read_text(given, "x.gguf").chat_template == "a"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "t5"}, "'t5'.*'gpt2' or 'llama'"),
        ({"model": None}, "model: found nothing"),
        ({"pre": "default"}, "pre: found 'default', expected one of gpt-2"),
        ({"tokens": []}, "tokens: found a list of 0"),
        ({"tokens": ["a", "a"], "token_type": np.ones(2, np.int32)}, "appears twice"),
        ({"token_type": np.ones(3, np.int32)}, r"shape \[3\], expected \[\d+\]"),
        ({"token_type": np.full(len(metadata()["tokenizer.ggml.tokens"]), 9)}, "found 9"),
        ({"merges": ["t q"]}, "merges: found 't q'"),
        ({"merges": ["the"]}, "merges: found 'the'"),
        ({"bos_token_id": 10**6}, "bos_token_id: found 1000000"),
        ({"bos_token_id": None, "add_bos_token": True}, "added to every text"),
        ({"add_bos_token": 1}, "add_bos_token: found 1, expected bool"),
        ({"model": "llama"}, "scores"),
    ],
)
def test_what_is_not_read_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ArtifactError, match=words):
        read_text(metadata(**change), "x.gguf")


# --------------------------------------------------------------------------- with a model

LETTERS: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*SPECIALS, *"abcdefgh", "ab"],
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * 9],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
}
"""A vocabulary of a few letters."""


def test_a_file_is_a_whole_model(tmp_path: Path) -> None:
    """Its texts, too; and what is saved of it has them in files of their own."""
    write(tmp_path / "tiny.gguf", "llama", numbers(True, False, False), text=LETTERS)
    model = jaxdraft.load(tmp_path / "tiny.gguf")
    assert model.text is not None and model.info.stop_ids == (2,)
    assert model.text.encode("abc") == [11, 5]
    assert model.text.chat([{"role": "user", "content": "ab"}]) == [1, 11]
    assert jaxdraft.inspect(tmp_path / "tiny.gguf").loads
    save(model, tmp_path / "saved")
    again = jaxdraft.load(tmp_path / "saved")
    assert again.text is not None and again.text.special_tokens == model.text.special_tokens
    assert again.text.chat_template == model.text.chat_template
    for text in ("abc", "<bos>cab<eos>"):
        assert again.text.encode(text) == model.text.encode(text)


def test_a_model_without_a_tokenizer_that_is_read(tmp_path: Path) -> None:
    body = {**LETTERS, "tokenizer.ggml.pre": "other"}
    write(tmp_path / "tiny.gguf", "llama", numbers(True, False, False), text=body)
    with pytest.warns(jaxdraft.LoadWarning, match="'other'.*loaded without a tokenizer"):
        model = jaxdraft.load(tmp_path / "tiny.gguf")
    assert model.text is None
    assert any("'other'" in note for note in jaxdraft.inspect(tmp_path / "tiny.gguf").notes)


def test_templates_and_tokens_are_written_as_they_are_read(tmp_path: Path) -> None:
    special = {"bos_token": "<bos>", "image_token": "<i>", "video": "<v>"}
    for number, template in enumerate(["a", {"default": "a", "rag": "b"}, {"rag": "b"}, None]):
        tokenizer = byte_level(*WORDS)
        text = Text(tokenizer=tokenizer, chat_template=template, special_tokens=special)
        folder = tmp_path / str(number)
        folder.mkdir()
        text.save(folder)
        again = Text.from_folder(folder)
        assert again.chat_template == template and again.special_tokens == special
        assert again.encode("the theory") == text.encode("the theory")
    bad = Text(tokenizer=byte_level(), chat_template={"../x": "a"})
    with pytest.raises(ValueError, match="../x"):
        bad.save(tmp_path)
