"""The tokenizer in the metadata of a GGUF file, as one of the package ``tokenizers``.

Two kinds of tokenizers are read, by ``tokenizer.ggml.model``:

* ``gpt2``: merges of bytes, after the text is split by a rule that ``tokenizer.ggml.pre`` names.
  The file holds no rule, so :data:`RULES` has them.
* ``llama``: SentencePiece with merges. The file holds a score per token instead of merges; of two
  neighbouring tokens, those are joined first whose joint token has the best score. Missing
  characters become bytes.

``tokenizer.ggml.token_type`` has the kind of each token: special ones never come from ordinary
pieces of a text, user-defined ones are found before a text is split, and unused ones (padding of
the vocabulary) are left out. Source: ggml's ``docs/gguf.md``, the vocabularies of llama.cpp, and
the ``tokenizer.json`` of the models that the rules are named after.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from convert.errors import ArtifactError
from convert.gguf.file import read_gguf
from convert.gguf.text import GgufText

_KEY = "tokenizer.ggml."

_BLANK = "▁"
"""The character that SentencePiece writes for a space."""


class Kind(IntEnum):
    """Kinds of tokens, as the file numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule for splitting a text before bytes are merged.

    Attributes:
      pattern: regular expression of the pieces; None: that of GPT-2.
      digits: whether every digit is split off before.
      nfc: whether the text is composed first (Unicode NFC).
      whole: whether a piece that is a token is taken without merges.
      bos: whether a token for the beginning comes first, unless the file states it.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole: bool = False
    bos: bool = False


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"

_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str, *, marks: str = "") -> str:
    """Return the pattern that follows GPT-4's: contractions, words, digits, signs, blanks.

    Args:
      digits: pattern of a piece of digits.
      marks: class of characters that belong to words beside letters.
    """
    letters = rf"[\p{{L}}{marks}]+" if marks else r"\p{L}+"
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{letters}"
    signs = rf" ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*"
    return "|".join((_CONTRACTIONS, word, digits, signs, _SPACES))


def _cased_words(digits: str, contractions: str = "") -> str:
    """Return the pattern that also splits where lower case turns into upper case.

    Args:
      digits: pattern of a piece of digits.
      contractions: pattern of the end of a word.
    """
    before = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = (f"{before}{upper}*{lower}+{contractions}", f"{before}{upper}+{lower}*{contractions}")
    return "|".join((*words, digits, r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES))


_GPT2 = Rule()
_SPLIT_DIGITS = Rule(digits=True)
_THREE_DIGITS = Rule(pattern=_words(r"\p{N}{1,3}"))
_LLAMA3 = dataclasses.replace(_THREE_DIGITS, whole=True, bos=True)
_QWEN2 = Rule(pattern=_words(r"\p{N}"), nfc=True)

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "exaone4"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _SPLIT_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _THREE_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "qwen35": Rule(pattern=_words(r"\p{N}", marks=r"\p{M}"), nfc=True),
    "tekken": Rule(pattern=_cased_words(r"\p{N}"), whole=True, bos=True),
    **dict.fromkeys(
        ("gpt-4o", "llama4"), Rule(pattern=_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"))
    ),
}
"""Rules by the names that ``tokenizer.ggml.pre`` has for them."""

_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # as the format spells it
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
"""Names of special tokens in templates, and their keys."""


def read_text(metadata: Mapping[str, Any], file: str) -> GgufText:
    """Read the tokenizer and the chat template.

    Args:
      metadata: the metadata of the file, by name.
      file: the file's name, for messages.

    Raises:
      ArtifactError: there is no tokenizer, or its kind is not supported.
    """
    vocabulary = _Vocabulary(metadata, file)
    make = _maker(vocabulary)
    tokenizer = make(vocabulary)
    for content, special in vocabulary.added():
        token = AddedToken(content, special=special, normalized=False)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
    _add_ends(tokenizer, vocabulary)
    return GgufText(
        tokenizer=tokenizer,
        chat_template=_templates(metadata),
        special_tokens={
            role: vocabulary.tokens[token]
            for role, key in _ROLES.items()
            if (token := vocabulary.token(key)) is not None
        },
    )


def text_of(path: Path) -> GgufText | None:
    """Return the tokenizer of a GGUF file; None if it has none, or an unsupported one."""
    metadata = read_gguf(path).metadata
    if f"{_KEY}model" not in metadata or text_problem(metadata, path.name) is not None:
        return None
    return read_text(metadata, path.name)


def text_problem(metadata: Mapping[str, Any], file: str) -> ArtifactError | None:
    """Return why a tokenizer is not supported, as far as its metadata show."""
    try:
        _maker(_Vocabulary(metadata, file))
    except ArtifactError as error:
        return error
    return None


def _maker(vocabulary: _Vocabulary) -> Callable[[_Vocabulary], Tokenizer]:
    """Return the function that makes the tokenizer."""
    model = vocabulary.get("model", str)
    if model == "gpt2":
        _rule(vocabulary)
        return _byte_merges
    if model == "llama":
        return _sentence_pieces
    raise vocabulary.fail("model", repr(model), "'gpt2' or 'llama'")


class _Vocabulary:
    """The metadata of a tokenizer, checked."""

    def __init__(self, metadata: Mapping[str, Any], file: str):
        self.metadata, self.file = metadata, file
        self.tokens = self._strings("tokens")
        kinds = metadata.get(f"{_KEY}token_type")
        self.kinds = np.full(len(self.tokens), Kind.NORMAL) if kinds is None else np.asarray(kinds)
        if self.kinds.shape != (len(self.tokens),):
            wanted = f"[{len(self.tokens)}], one per token"
            raise self.fail("token_type", f"shape {list(self.kinds.shape)}", wanted)
        if not set(self.kinds.tolist()) <= set(Kind):
            strange = sorted(set(self.kinds.tolist()) - set(Kind))
            raise self.fail("token_type", f"{strange[0]}", f"1 to {max(Kind)}")
        if len(self.kept) != len({self.tokens[i] for i in self.kept}):
            raise self.fail("tokens", "a token that appears twice", "different tokens")

    def fail(self, key: str, found: str, expected: str) -> ArtifactError:
        return ArtifactError(self.file, f"{_KEY}{key}", found, expected)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a setting; one without a default is required."""
        found = self.metadata.get(f"{_KEY}{key}", default)
        if not isinstance(found, kind):
            raise self.fail(key, "nothing" if found is None else repr(found)[:80], kind.__name__)
        return found

    def _strings(self, key: str) -> Sequence[str]:
        found = self.get(key, list)
        if not found or not all(isinstance(each, str) for each in found):
            raise self.fail(key, f"a list of {len(found)}", "strings")
        return found

    @property
    def kept(self) -> list[int]:
        """Ids of the tokens that can occur."""
        return np.flatnonzero(self.kinds != Kind.UNUSED).tolist()

    @property
    def ids(self) -> dict[str, int]:
        """Ids by token."""
        return {self.tokens[i]: i for i in self.kept}

    def token(self, key: str) -> int | None:
        """Return the id of a special token, if the file names it.

        Raises:
          ArtifactError: it is not in the vocabulary.
        """
        found = self.metadata.get(f"{_KEY}{key}")
        if found is None:
            return None
        number = isinstance(found, int | np.integer) and not isinstance(found, bool)
        if not number or not 0 <= found < len(self.tokens):
            raise self.fail(key, repr(found)[:80], f"a token below {len(self.tokens)}")
        return int(found)

    def added(self) -> list[tuple[str, bool]]:
        """Return the tokens that are found before a text is split; whether each is special."""
        found = {Kind.CONTROL: True, Kind.UNKNOWN: True, Kind.USER_DEFINED: False}
        return [
            (self.tokens[i], found[Kind(kind)])
            for i, kind in enumerate(self.kinds.tolist())
            if kind in found
        ]

    def merges(self) -> list[tuple[str, str]]:
        """Return the merges in order. A space after the first character separates the two parts.

        Raises:
          ArtifactError: a merge does not have two parts, or does not make a token.
        """
        ids, merges = self.ids, []
        for line in self._strings("merges"):
            at = line.find(" ", 1)
            first, second = line[:at], line[at + 1 :]
            if at < 0 or not {first, second, first + second} <= ids.keys():
                raise self.fail("merges", repr(line)[:80], "two tokens that make a third")
            merges.append((first, second))
        return merges


def _rule(vocabulary: _Vocabulary) -> Rule:
    """Return the rule by which texts are split."""
    name = vocabulary.get("pre", str)
    if name not in RULES:
        known = ", ".join(RULES)
        raise vocabulary.fail("pre", repr(name), f"one of {known}; a rule is a line of a table")
    return RULES[name]


def _byte_merges(vocabulary: _Vocabulary) -> Tokenizer:
    """Return a tokenizer that merges bytes."""
    rule = _rule(vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges(), ignore_merges=rule.whole)
    )
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rule.digits else []
    if rule.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.pattern), "isolated"))
    own = rule.pattern is None
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(vocabulary: _Vocabulary) -> Tokenizer:
    """Return a tokenizer that joins pieces by their scores, as SentencePiece does."""
    scores = np.asarray(vocabulary.metadata.get(f"{_KEY}scores"))
    if scores.shape != (len(vocabulary.tokens),):
        wanted = f"[{len(vocabulary.tokens)}], one per token"
        raise vocabulary.fail("scores", f"shape {list(scores.shape)}", wanted)
    unknown = vocabulary.token("unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges_by_score(vocabulary, scores),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=bool((vocabulary.kinds == Kind.BYTE).any()),
        )
    )
    # A space is put before every text after a special token, even if it begins with one.
    prefix = vocabulary.get("add_space_prefix", bool, True)
    before = [normalizers.Prepend(_BLANK)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _BLANK)])
    steps = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefix)
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary, scores: np.ndarray) -> list[tuple[str, str]]:
    """Return every pair of tokens that makes a token, the best score of the joint token first.

    Example: ``abc`` can be ``a`` and ``bc``, or ``ab`` and ``c``, if these are tokens. Of the pairs
    of a token, those with the lower ids come first.
    """
    ids = {
        token: i
        for token, i in vocabulary.ids.items()
        if vocabulary.kinds[i] in (Kind.NORMAL, Kind.USER_DEFINED)
    }
    found: list[tuple[float, int, int, str, str]] = []
    for token, i in ids.items():
        for at in range(1, len(token)):
            first, second = token[:at], token[at:]
            if first in ids and second in ids:
                found.append((-float(scores[i]), ids[first], ids[second], first, second))
    return [(first, second) for *_, first, second in sorted(found)]


def _add_ends(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Make the tokenizer add tokens for the beginning and the end if the file sets that."""
    rule = RULES.get(str(vocabulary.metadata.get(f"{_KEY}pre")), Rule())
    pieces = vocabulary.metadata.get(f"{_KEY}model") == "llama"
    wanted = {
        "bos_token_id": vocabulary.get("add_bos_token", bool, rule.bos or pieces),
        "eos_token_id": vocabulary.get("add_eos_token", bool, False),
    }
    ends: dict[str, tuple[str, int]] = {}
    for key in (key for key, add in wanted.items() if add):
        token = vocabulary.token(key)
        if token is None:
            raise vocabulary.fail(key, "nothing", "a token, which is added to every text")
        ends[key] = (vocabulary.tokens[token], token)
    if not ends:
        return
    before = [ends["bos_token_id"][0]] if "bos_token_id" in ends else []
    after = [ends["eos_token_id"][0]] if "eos_token_id" in ends else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1"]
        + [f"{token}:1" for token in after],
        special_tokens=list(dict.fromkeys(ends.values())),
    )


def _templates(metadata: Mapping[str, Any]) -> str | Mapping[str, str] | None:
    """Return the chat template, or all of them by name if there are named ones."""
    key = "tokenizer.chat_template"
    main = metadata.get(key)
    named: Iterable[str] = metadata.get("tokenizer.chat_templates", ())
    others = {name: metadata[f"{key}.{name}"] for name in named if f"{key}.{name}" in metadata}
    if not others:
        return main
    return others if main is None else {"default": main, **others}
