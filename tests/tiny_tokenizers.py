"""Small tokenizers of every kind that decoders come in."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxdraft.text import Text
from tests.paths import FIRST_FAMILY

SPECIALS = ["<pad>", "<bos>", "<eos>"]


def byte_level(*words: str, digits: bool = False) -> Tokenizer:
    """Ids 0..2 are special, then the 256 bytes, then `words`, merged from left to right."""
    vocab = {token: i for i, token in enumerate(SPECIALS)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    merges: list[tuple[str, str]] = []
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in words:
        letters = "".join(piece for piece, _ in splitter.pre_tokenize_str(word))
        for n in range(2, len(letters) + 1):
            merges.append((letters[: n - 1], letters[n - 1]))
            vocab.setdefault(letters[:n], len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(dict.fromkeys(merges))))
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split])
        if digits
        else split
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def sentencepiece(*, strip: bool = True) -> Tokenizer:
    """Words with a blank before them, letters, and bytes for everything else."""
    words = ["<unk>", "▁", "a", "b", "▁ab", "ab", "▁b", "é"]
    vocab = [*SPECIALS, *words, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(vocab)},
            merges=[("a", "b"), ("▁", "ab"), ("▁", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def words_with(decoder: decoders.Decoder | None) -> Tokenizer:
    """A tokenizer whose decoder joins words in one way or another."""
    vocab = [*SPECIALS, "hello", "##s", ".", "n't", "do", "▁wor", "ld", "o", "o</w>", "|"]
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(vocab)}, unk_token="<pad>")
    )
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "trained": lambda: Tokenizer.from_file(str(FIRST_FAMILY / "tokenizer.json")),
    "byte level": lambda: byte_level("🙂", "é", " the"),
    "byte level, digits": lambda: byte_level("🙂", digits=True),
    "sentencepiece": sentencepiece,
    "sentencepiece, unstripped": lambda: sentencepiece(strip=False),
    "metaspace": lambda: words_with(decoders.Metaspace()),
    "word piece": lambda: words_with(decoders.WordPiece()),
    "word ends": lambda: words_with(decoders.BPEDecoder()),
    "ctc": lambda: words_with(decoders.CTC("<pad>", "|")),
    "each token stripped": lambda: words_with(decoders.Strip("o", 0, 1)),
    "replaced across tokens": lambda: words_with(
        decoders.Sequence([decoders.Fuse(), decoders.Replace("oo", "u")])
    ),
    "no decoder": lambda: words_with(None),
}
TEXTS = {name: Text(tokenizer=make()) for name, make in TOKENIZERS.items()}
