"""Is generation with the first family's DFlash2 drafter faster than without?

    python experiments/speed.py

Six held-out prompts (whole files of Python's standard library that nothing was trained on), one
request at a time and all six in one batch, in one process, in turn; the tokens are compared.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from common import first_family, interleave, ratios, table, write_result

import jaxdraft


def main() -> None:
    """Time both ways of decoding and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    folder, held_out = first_family()
    model = jaxdraft.load(folder)
    prompts = [p["prompt_ids"] for p in held_out]
    found: dict[str, Any] = {}

    def run(drafter: str, batches: list[list[list[int]]]) -> None:
        outs = [
            jaxdraft.generate(
                model, batch, max_new_tokens=args.tokens, stop_ids=(), drafter=drafter
            )
            for batch in batches
        ]
        for out in outs:
            out.tokens.block_until_ready()
        found[drafter] = outs

    rows = []
    for name, batches in (("one by one", [[p] for p in prompts]), ("six in a batch", [prompts])):
        seconds = interleave(
            {d: lambda d=d, batches=batches: run(d, batches) for d in ("none", "dflash2")},
            repeats=args.repeats,
        )
        plain, drafted = (sum((out.ids() for out in found[d]), []) for d in ("none", "dflash2"))
        summary = jaxdraft.summarize([out.stats for out in found["dflash2"]])
        low, middle, high = ratios(seconds["none"], seconds["dflash2"])
        tokens = sum(map(len, plain))
        rows.append(
            [
                name,
                f"{tokens / statistics.median(seconds['none']):.0f}",
                f"{tokens / statistics.median(seconds['dflash2']):.0f}",
                f"{middle:.2f} ({low:.2f}..{high:.2f})",
                f"{summary.tokens_per_round:.2f}",
                "equal" if plain == drafted else "DIFFER",
            ]
        )
    head = [
        "prompts",
        "none, tokens/s",
        "DFlash2, tokens/s",
        "speed-up",
        "tokens per round",
        "tokens",
    ]
    body = table(head, rows) + (
        f"\n\nGreedy, {args.tokens} new tokens per prompt, prefill included, whole calls of "
        f"`generate`; medians of {args.repeats} after one warm-up, the speed-up pair by pair "
        "(least..largest)."
    )
    write_result(__file__, "Generation with and without drafts", body)


if __name__ == "__main__":
    main()
