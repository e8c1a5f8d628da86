"""Does prompt lookup speed up a real pretrained model?

    python experiments/lookup.py FOLDER

SmolLM2-135M-Instruct in float32 (`prepare_smollm2.py`), prompts of the kinds where text repeats
itself and where it does not, with and without n-gram drafts, in turn; the tokens are compared.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from common import interleave, ratios, table, write_result

import jaxdraft

PROMPTS = {
    "story": "Once upon a time, in a small village by the sea,",
    "history": "The history of the steam engine begins in",
    "list": "Numbers from one to forty: one, two, three, four,",
    "code": "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(",
    "quote": "Repeat the sentence. The quick brown fox jumps over the lazy dog. The quick brown",
}


def main() -> None:
    """Time every prompt both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    model = jaxdraft.load(args.folder)
    assert model.text is not None
    drafter = jaxdraft.NgramDrafter()
    found: dict[str, Any] = {}

    def run(name: str, ids: list[int]) -> None:
        chosen = drafter if name == "ngram" else "none"
        out = jaxdraft.generate(
            model, [ids], max_new_tokens=args.tokens, stop_ids=(), drafter=chosen
        )
        out.tokens.block_until_ready()
        found[name] = out

    rows = []
    for kind, prompt in PROMPTS.items():
        ids = model.text.encode(prompt)
        seconds = interleave(
            {name: lambda name=name, ids=ids: run(name, ids) for name in ("none", "ngram")},
            repeats=args.repeats,
        )
        low, middle, high = ratios(seconds["none"], seconds["ngram"])
        summary = jaxdraft.summarize(found["ngram"].stats)
        rows.append(
            [
                kind,
                f"{args.tokens / statistics.median(seconds['none']):.1f}",
                f"{args.tokens / statistics.median(seconds['ngram']):.1f}",
                f"{middle:.2f} ({low:.2f}..{high:.2f})",
                f"{summary.tokens_per_round or 0:.2f}",
                "equal" if found["none"].ids() == found["ngram"].ids() else "DIFFER",
            ]
        )
    head = [
        "prompt",
        "none, tokens/s",
        "n-gram, tokens/s",
        "speed-up",
        "tokens per round",
        "tokens",
    ]
    body = table(head, rows) + (
        f"\n\nGreedy, {args.tokens} new tokens, K = {drafter.draft_tokens}, whole calls; "
        f"medians of {args.repeats} after one warm-up, the speed-up pair by pair."
    )
    write_result(__file__, "Prompt lookup on SmolLM2-135M-Instruct, float32", body)


if __name__ == "__main__":
    main()
