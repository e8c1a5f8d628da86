"""Text to token ids and back. No other module handles strings.

A :class:`Text` wraps the tokenizer and the chat template in a model's folder. It is read once
and never changes, and it hashes by identity, so that it may be a static field of a pytree.
Everything here runs on the host; nothing is traced.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from tokenizers import Tokenizer

from jaxdraft import templates
from jaxdraft.stop_strings import match, overlap, token_automaton

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Output of a decoder for bytes that are not UTF-8."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Text:
    """Tokenizer and its chat template.

    Attributes:
      tokenizer: the tokenizer; neither truncates nor pads.
      chat_template: a Jinja template, several by name, or None for a model without one.
      special_tokens: strings available to the template by name, ``{"bos_token": "<s>", ...}``.
      source: origin of the files, for messages.
    """

    tokenizer: Tokenizer
    chat_template: templates.Templates | None = None
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    source: str = "this tokenizer"

    @classmethod
    def from_folder(cls, path: str | Path) -> Text:
        """Read the tokenizer in a model's folder.

        Args:
          path: a folder with ``tokenizer.json``. ``tokenizer_config.json`` beside it may name
            special tokens. Chat templates are searched in the same places as by transformers; see
            :func:`jaxdraft.templates.read_templates`.

        Raises:
          ValueError: if a file is missing or its content is invalid.
        """
        folder = Path(path)
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(f"no tokenizer.json in {folder}")
        config = templates.read_json(folder / "tokenizer_config.json")
        tokenizer = _read_tokenizer(folder / "tokenizer.json")
        special = templates.read_special_tokens(folder, config)
        # A special token may be an ordinary entry of the vocabulary; it keeps its id.
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        ordinary = [t for t in dict.fromkeys(special.values()) if t not in added]
        tokenizer.add_special_tokens([t for t in ordinary if tokenizer.token_to_id(t) is not None])
        return cls(
            tokenizer=tokenizer,
            chat_template=templates.read_templates(folder, config),
            special_tokens=special,
            source=str(folder),
        )

    def save(self, path: str | Path) -> None:
        """Write the tokenizer and the chat template as files that :meth:`from_folder` reads.

        Args:
          path: an existing folder.
        """
        folder = Path(path)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        templates.write_special_tokens(folder, self.special_tokens)
        templates.write_templates(folder, self.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`.

        Special tokens that are spelled out in `text` become their ids.

        Args:
          text: any string.
          add_special_tokens: whether the tokenizer adds special tokens around the text (many add
            none, some a token for the beginning). Disable it for the output of a chat template.
        """
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self, ids: ArrayLike, *, prompt: ArrayLike = (), skip_special_tokens: bool = True
    ) -> str:
        """Return the text of `ids`.

        Bytes that are not UTF-8 decode to U+FFFD. Ids outside the tokenizer's vocabulary (a model's
        vocabulary is often padded) decode to an empty string.

        Args:
          ids: integers, [T]; a sequence or an array.
          prompt: integers, [P], the ids before them. Many tokenizers write no blank before the
            first word of a text, but do write one after a prompt. A character that begins in the
            prompt and ends in `ids` belongs to `ids`.
          skip_special_tokens: whether special tokens decode to an empty string, too.

        Raises:
          ValueError: if `ids` or `prompt` is not a flat sequence of integers in [0, 2**31).
        """
        decoder = self.stream(prompt=prompt, skip_special_tokens=skip_special_tokens)
        return decoder.push(ids) + decoder.finish()

    def stream(self, *, prompt: ArrayLike = (), skip_special_tokens: bool = True) -> StreamDecoder:
        """Return a decoder for ids that arrive a few at a time; see :meth:`decode`."""
        return StreamDecoder(self, prompt=prompt, skip_special_tokens=skip_special_tokens)

    def render(
        self,
        messages: Sequence[Any],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation for the model, rendered as by transformers.

        Args:
          messages: ``{"role": ..., "content": ...}`` each, oldest first; mappings, dataclasses or
            pydantic models.
          add_generation_prompt: whether the text ends where the model's answer begins. Default:
            yes, unless ``continue_final_message``.
          continue_final_message: whether the text ends inside the last message, for the model to
            continue it; or the name of the message's field to continue, if not ``"content"``.
          tools: JSON schemas of functions. A template named ``tool_use`` is chosen with them.
          documents: mappings, for templates that cite.
          chat_template: the name of a template, or a template.
          **variables: further variables of the template, such as ``enable_thinking``.

        Raises:
          ValueError: if there is no such template, or it refuses the conversation.
        """
        return templates.render(
            self.chat_template,
            messages,
            source=self.source,
            special_tokens=self.special_tokens,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            chat_template=chat_template,
            variables=variables,
        )

    def chat(self, messages: Sequence[Any], **options: Any) -> list[int]:
        """Return the ids of a conversation; arguments and errors are those of :meth:`render`.

        The template writes the special tokens, the one for the beginning included, so the
        tokenizer adds none.
        """
        return self.encode(self.render(messages, **options), add_special_tokens=False)

    @functools.cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """Bytes that each token adds to a decoded text; none for special tokens.

        Raises:
          ValueError: the tokenizer's decoder combines several tokens.
        """
        read = _byte_reader(self.tokenizer, self.source)
        added = self.tokenizer.get_added_tokens_decoder()
        size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        size = max([size, *(i + 1 for i in added)])
        tokens = (self.tokenizer.id_to_token(number) for number in range(size))
        return tuple(
            b"" if token is None or number in self._special_ids else read(token)
            for number, token in enumerate(tokens)
        )

    def named_specials(self, strings: Sequence[str]) -> dict[int, bytes]:
        """Return the special tokens that occur in stop strings: their bytes by id.

        Stop strings are searched in the decoded text with these tokens written out.

        Args:
          strings: the stop strings.
        """
        added = self.tokenizer.get_added_tokens_decoder()
        named = {i: added[i].content for i in self._special_ids}
        return {i: t.encode("utf-8") for i, t in named.items() if any(t in s for s in strings)}

    def stop_table(self, strings: Sequence[str], vocab_size: int) -> np.ndarray:
        """Return the automaton of stop strings over tokens; see :mod:`jaxdraft.stop_strings`.

        Args:
          strings: the strings that end a text. A special token in them matches that token.
          vocab_size: V of the model.

        Returns:
          [states, V] int16.

        Raises:
          ValueError: an empty string, or as for :attr:`token_bytes`.
        """
        return _stop_table(self, tuple(strings), vocab_size)

    @functools.cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @functools.cached_property
    def _settling(self) -> _Settling:
        return _settling(json.loads(self.tokenizer.to_str())["decoder"])


class StreamDecoder:
    """Decodes ids as they arrive.

    The concatenated texts of all :meth:`push` calls and the final :meth:`finish` equal
    ``text.decode`` of all ids, for any split. So text is held back while later ids could still
    change it:

        # "€" is E2 82 AC, here in two tokens
        push([E2 82]) == ""
        push([AC])    == "€"

    With byte-level tokenizers only an unfinished character is held back. Where bytes represent
    missing characters (SentencePiece), a run of byte tokens is held back until the next token. With
    decoders that look further ahead, all text comes at the end.
    """

    def __init__(
        self, text: Text, *, prompt: ArrayLike = (), skip_special_tokens: bool = True
    ) -> None:
        self._text = text
        self._skip = skip_special_tokens
        ids = _as_ids(prompt)
        self._ids = ids[self._context(ids) :]  # ids that may still affect the text
        self._given = 0  # characters of the text already returned
        # Text of the prompt, until it is known how much of it the output leaves as it is.
        self._prompt: str | None = self._decode(self._ids)

    def push(self, ids: ArrayLike) -> str:
        """Add the next ids, [T] with T >= 0, and return the newly settled text.

        Raises:
          ValueError: as in :meth:`Text.decode`. The decoder is then unchanged.
        """
        self._ids += _as_ids(ids)
        if self._text._settling == "character":
            text = self._decode(self._ids)
            if not text.endswith(REPLACEMENT):  # whole characters: the next ids start afresh
                return self._reset(text)
            # The bytes behind the last one may be the start of a character. Those before it aren't.
            return self._give(text[: -len(REPLACEMENT)])
        if self._text._settling == "end":
            return ""
        end = len(self._ids)
        while end and self._in_byte_run(self._ids[end - 1]):
            end -= 1
        new = self._give(self._decode(self._ids[:end]))
        start = self._context(self._ids[:end]) if end > _FORGET and self._prompt is None else 0
        if start:
            self._given = len(self._decode(self._ids[start:end]))
            del self._ids[:start]
        return new

    def finish(self) -> str:
        """Return the text held back and reset the decoder, without a prompt."""
        return self._reset(self._decode(self._ids))

    def _give(self, text: str) -> str:
        """Return the new part of the settled text of the ids."""
        if self._prompt is not None:
            shared = len(os.path.commonprefix([text, self._prompt]))
            if shared == len(text) < len(self._prompt):
                return ""
            self._given, self._prompt = shared, None
        new = text[self._given :]
        self._given = len(text)
        return new

    def _reset(self, text: str) -> str:
        new = self._give(text)
        self._ids, self._given, self._prompt = [], 0, None
        return new

    def _decode(self, ids: list[int]) -> str:
        if not ids:  # some decoders cannot take an empty list
            return ""
        return self._text.tokenizer.decode(ids, skip_special_tokens=self._skip)

    def _context(self, ids: list[int]) -> int:
        """Return the start of a short suffix of `ids` that decodes as it does after the rest.

        Four characters suffice: they are more than one unfinished character, and rules for the
        first word of a text do not reach past them.
        """
        size, start = 4, len(ids) if self._text._settling != "end" else 0
        while start:
            start = max(0, len(ids) - size)
            while start and self._in_byte_run(ids[start]):
                start -= 1
            if len(self._decode(ids[start:])) >= 4:
                break
            size *= 2
        return start

    def _in_byte_run(self, token_id: int) -> bool:
        """Return whether this is a byte token or an invisible one, which ends no run of them."""
        token = self._text.tokenizer.id_to_token(token_id)
        if token is None or (self._skip and token_id in self._text._special_ids):
            return True
        return _BYTE_TOKEN.fullmatch(token) is not None


class OutputText:
    """Shows the text of one output as its tokens arrive, without any part of a stop string.

    Text that could be the beginning of a stop string is held back with the rest of its token. The
    texts of all calls of :meth:`push`, one after the other, equal the text of a single call.

    Args:
      text: the tokenizer.
      prompt: integers, [P], the ids before the output.
      stop: the stop strings.

    Raises:
      ValueError: as :attr:`Text.token_bytes`, with stop strings.
    """

    def __init__(self, text: Text, *, prompt: ArrayLike = (), stop: Sequence[str] = ()) -> None:
        self._decoder = text.stream(prompt=prompt)
        self._special = text._special_ids
        self._strings = [s.encode("utf-8") for s in stop]
        self._token_bytes = text.token_bytes if stop else ()
        self._named = text.named_specials(stop) if stop else {}
        self._ids: list[int] = []  # not decoded yet

    def push(self, ids: Sequence[int], *, done: bool = False, stopped: bool = False) -> str:
        """Add the next ids and return the text that may be shown.

        Args:
          ids: the tokens.
          done: whether they are the last.
          stopped: whether the very last one completes a stop string. An earlier occurrence, such
            as one before ``min_new_tokens``, is ordinary text.
        """
        self._ids += ids
        parts = [self._bytes_of(i) for i in self._ids] if self._strings else []
        whole = b"".join(parts)
        if stopped:
            found = match(whole, len(whole) - len(parts[-1]), self._strings)
            assert found is not None, "the automaton and the decoder read different bytes"
            return self._end(parts, found[0])
        if done or not self._strings:
            count = len(self._ids)
        else:
            settled = len(whole) - overlap(whole, self._strings)
            count = bisect.bisect_right(list(itertools.accumulate(map(len, parts))), settled)
        shown = self._decoder.push(self._ids[:count])
        del self._ids[:count]
        return shown + self._decoder.finish() if done else shown

    def _end(self, parts: list[bytes], at: int) -> str:
        """Return the text of the pending tokens up to byte ``at``."""
        ends = list(itertools.accumulate(map(len, parts)))
        count = bisect.bisect_right(ends, at)
        inside = at - (ends[count - 1] if count else 0)
        if not inside or self._ids[count] in self._special:
            return self._decoder.push(self._ids[:count]) + self._decoder.finish()
        # The string begins inside this token: remove the characters of the token's remaining bytes.
        shown = self._decoder.push(self._ids[: count + 1]) + self._decoder.finish()
        return shown[: max(0, len(shown) - len(parts[count][inside:].decode("utf-8", "replace")))]

    def _bytes_of(self, token_id: int) -> bytes:
        known = self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""
        return self._named.get(token_id, known)


_FORGET = 64
"""Number of ids that a stream keeps before it searches for ids it can drop."""

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")

_Settling = Literal["character", "run", "end"]
"""Point at which decoded text can no longer change: at the next character, after a run of byte
tokens, or only at the end."""


def _settling(decoder: Mapping[str, Any] | None) -> _Settling:
    """Return the rule for a decoder as described in ``tokenizer.json``."""
    if decoder is None:  # tokens with a blank between them
        return "run"
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "character"
    fused = False
    for step, kind in zip(steps, kinds, strict=True):
        # Most steps use one token, and perhaps earlier ones, until all are fused to one string.
        token_by_token = kind in ("Replace", "Metaspace", "WordPiece", "CTC", "Strip") and not fused
        left_end_only = kind == "Strip" and step["stop"] == 0
        if not (token_by_token or left_end_only or kind in ("ByteFallback", "Fuse")):
            return "end"
        fused |= kind == "Fuse"
    return "run"


@functools.lru_cache(maxsize=32)
def _stop_table(text: Text, strings: tuple[str, ...], vocab_size: int) -> np.ndarray:
    tokens = list(text.token_bytes)
    for number, content in text.named_specials(strings).items():
        tokens[number] = content
    return token_automaton(strings, tokens, vocab_size)


def _byte_reader(tokenizer: Tokenizer, source: str) -> Callable[[str], bytes]:
    """Return the function from a token to the bytes that it adds after other tokens."""
    description = json.loads(tokenizer.to_str())["decoder"]
    if description is None:
        return lambda token: b" " + token.encode("utf-8")
    steps = description["decoders"] if description["type"] == "Sequence" else [description]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        alphabet = _byte_alphabet()

        def letters(token: str) -> bytes:
            if all(c in alphabet for c in token):
                return bytes(alphabet[c] for c in token)
            return token.encode("utf-8")

        return letters
    if _settling(description) == "end" or "CTC" in kinds:
        raise ValueError(
            f"{source} decodes with {kinds}, where the text of a token depends on other "
            "tokens: stop strings cannot be used with this tokenizer"
        )
    before = tokenizer.decoder.decode(["x"])

    def read(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte and "ByteFallback" in kinds:
            return bytes([int(byte[1], 16)])
        return tokenizer.decoder.decode(["x", token])[len(before) :].encode("utf-8")

    return read


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of byte-level vocabularies.

    Printable bytes of Latin-1 are represented by themselves, the others by characters from U+0100
    on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (b for b in range(256) if b not in printable)
    alphabet = {chr(b): b for b in printable}
    return alphabet | {chr(0x100 + n): b for n, b in enumerate(others)}


def shared_tokens(target: tuple[int, Text | None], small: tuple[int, Text | None]) -> int:
    """Return the number of tokens that two models share: ids below it mean the same in both.

    Vocabularies of one family are often padded to different sizes. That is no difference where
    both tokenizers are known, and only the padding differs.

    Args:
      target: size of the target's vocabulary, and its tokenizer if there is one.
      small: the same for the draft model.

    Raises:
      ValueError: the vocabularies differ.
    """
    (size, ours), (small_size, theirs) = target, small
    both = min(size, small_size)
    if ours is None or theirs is None:
        if size != small_size:
            raise ValueError(
                f"the target has {size} tokens and the draft model {small_size}; expected as many, "
                "since the tokenizers of both are not there to compare"
            )
        return both
    words, small_words = (
        {i: word for word, i in text.tokenizer.get_vocab(with_added_tokens=True).items()}
        for text in (ours, theirs)
    )
    for i, word in sorted(words.items()):
        other = small_words.get(i, word)
        if other != word:
            raise ValueError(
                f"token {i} is {word!r} in {ours.source} and {other!r} in {theirs.source}, the "
                "draft model's tokenizer; expected the same tokens"
            )
    largest = max([*words, *small_words], default=0)
    if largest >= both:
        raise ValueError(
            f"the target has {size} tokens and the draft model {small_size}, and the tokenizers "
            f"have the token {largest}; expected more tokens than that in both"
        )
    return both


def _as_ids(ids: ArrayLike) -> list[int]:
    array = np.asarray(ids)
    if array.size == 0 and array.ndim == 1:
        return []
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"ids are a row of integers, not {array.dtype} of shape {array.shape}")
    if array.min() < 0 or array.max() >= 2**31:
        raise ValueError(f"ids lie in [0, 2**31), not from {array.min()} to {array.max()}")
    return array.tolist()


# -------------------------------------------------------------------------------------------- files


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
    # Both may be stored in the file; a prompt is neither cut nor filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
