"""Compute the goldens of ``test_harness.py`` with lm-eval's own model for transformers.

    python -m tests.evaluation.regenerate

Needs lm-eval, torch and transformers (the extras ``eval`` and ``full``).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from tests.hub.helpers import DATA

GOLDEN = Path(__file__).parent / "golden.json"
WINDOW = 48
WORDS = [" the", " of", "ing", "tion", " a", "er", " to", "\n\n", "st", "en"]
LONG = " ".join(f"the {n}th of many words to the end" for n in range(9))

PAIRS = [
    ["The capital of", " the state"],
    ["The capital of ", "the state"],  # the blank belongs to the continuation
    ["", "A text without a context"],
    ["", "<bos>A text that begins with its own token"],
    ["<bos>A context that does", ", too"],
    [LONG, " and more"],  # longer than the window
    ["x", "a"],
    ["Answer:", " " + "no " * 15],
    ["z", "Wl"],  # the greedy continuation
    ["moon ", "t-"],  # the same, with its blank in the context
    ["two", "oe"],  # greedy at first
]
TEXTS = ["One short text.", LONG, "", "<bos>begun", "a" * 47, "b" * 48, "c" * 49, "d" * 95]
GENERATE: list[list[Any]] = [
    ["The capital of", {"until": ["\n\n"], "max_gen_toks": 12}],
    ["Stop within a token:", {"until": ["th", "zz"], "max_gen_toks": 20}],
    ["Stop within a token:", {"until": ["zz", "}}}\n"], "max_gen_toks": 20}],  # ends inside a token
    ["Two stop strings", {"until": "e", "max_new_tokens": 16, "do_sample": False}],
    [LONG, {"until": [], "max_gen_toks": 9, "temperature": 0.0}],
    ["<bos>", {"max_gen_toks": 5}],
]


def tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer of at most 256 tokens, for ASCII, that adds a first token."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>"])}
    for letter in (splitter.pre_tokenize_str(chr(i))[0][0] for i in (10, *range(32, 127))):
        vocab[letter] = len(vocab)
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        letters = "".join(piece for piece, _ in splitter.pre_tokenize_str(word))
        for n in range(2, len(letters) + 1):
            merges.append((letters[: n - 1], letters[n - 1]))
            vocab.setdefault(letters[:n], len(vocab))
    found = Tokenizer(models.BPE(vocab=vocab, merges=list(dict.fromkeys(merges))))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    found.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 1)]
    )
    return found


def checkpoint(folder: Path) -> Path:
    """Write a tiny checkpoint with this tokenizer, and return its folder."""
    out = folder / "tiny"
    out.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(DATA / "llama32_tied" / name, out / name)
    tokenizer().save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config))
    return out


def requests(rows: list[Any]) -> list[Any]:
    """Return arguments as the requests of lm-eval that hold them."""
    return [SimpleNamespace(args=tuple(row) if isinstance(row, list) else (row,)) for row in rows]


def answers(model: Any) -> dict[str, Any]:
    """Return what a model of lm-eval answers to all requests."""
    return {
        "loglikelihood": [list(a) for a in model.loglikelihood(requests(PAIRS), True)],
        "rolling": model.loglikelihood_rolling(requests(TEXTS), True),
        "generate": [model.generate_until(requests([row]), True)[0] for row in GENERATE],
    }


def reference(folder: Path) -> dict[str, Any]:
    """Return the answers of lm-eval's own model for transformers, in float32."""
    from lm_eval.models.huggingface import HFLM

    model = HFLM(
        pretrained=str(folder), dtype="float32", device="cpu", batch_size=1, max_length=WINDOW
    )
    return answers(model)


def main() -> None:
    """Write the goldens."""
    with tempfile.TemporaryDirectory() as made:
        found = reference(checkpoint(Path(made)))
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
