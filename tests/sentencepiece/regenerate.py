"""Make ``pieces.json``: a small SentencePiece vocabulary, and what SentencePiece makes of texts.

Usage: ``pip install sentencepiece==0.2.3 && python regenerate.py``
"""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import sentencepiece

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

TEXTS = [
    "Hello world",
    " Hello",
    "  two  blanks ",
    "",
    " ",
    "don't stop: 1234.56",
    "naïve café, Ελλάδα, 日本語 🙂",
    "tabs\tand\nlines\n\n",
    "the theme of these theories",
    "aaaaaaaaaaaaa bbbbbbb",
]


def main() -> None:
    """Train on this project's documents, and encode the texts above and random ones."""
    documents = [(ROOT / name).read_text(encoding="utf-8") for name in ("LICENSE", "BUILD.md")]
    lines = [line for text in documents for line in text.splitlines() if line.strip()]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        user_defined_symbols=["<tool>"],
        num_threads=1,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    count = processor.get_piece_size()
    draw = random.Random(0)
    words = [word for line in lines for word in line.split()]
    texts = TEXTS + [" ".join(draw.choices(words, k=6)) for _ in range(40)]
    body = {
        "tokens": [processor.id_to_piece(i) for i in range(count)],
        "scores": [processor.get_score(i) for i in range(count)],
        "token_type": [kind(processor, i) for i in range(count)],
        "texts": [[text, processor.encode(text)] for text in texts],
    }
    (HERE / "pieces.json").write_text(json.dumps(body, ensure_ascii=False) + "\n", encoding="utf-8")


def kind(processor: sentencepiece.SentencePieceProcessor, token: int) -> int:
    """Return the number that GGUF files have for the kind of a piece."""
    if processor.is_unknown(token):
        return 2
    if processor.is_control(token):
        return 3
    if processor.is_byte(token):
        return 6
    return 4 if processor.id_to_piece(token) == "<tool>" else 1


if __name__ == "__main__":
    main()
