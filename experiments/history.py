"""What do drafts from history gain when prompts come again?

    python experiments/history.py

Rollouts visit the same prompts in every epoch. The first epoch is decoded and its outputs become
the history. The second epoch is decoded with the drafter of the variant and with history before it,
in turn, in pairs. Greedy outputs are the same again; sampled ones differ. The model is the embedded
one.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
from common import interleave, ratios, table, write_result

import jaxdraft
from jaxdraft import EMBEDDED, FallbackDrafter, HistoryDrafter, Sampling
from jaxdraft.demo import embedded_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--capacity", type=int, default=1 << 14)
    args = parser.parse_args()
    model = jaxdraft.load(EMBEDDED)
    prompts: list[list[int]] = [p["prompt_ids"] for p in embedded_prompts()]
    rows: list[list[object]] = []
    for temperature in (0.0, 0.6, 1.0):
        rules: dict[str, Any] = dict(max_new_tokens=args.tokens, stop_ids=())
        if temperature:
            rules["sampling"] = Sampling(temperature=temperature)
        first = jaxdraft.generate(model, prompts, key=0, **rules)
        texts = [p + o for p, o in zip(prompts, first.ids(), strict=True)]
        history = HistoryDrafter.of(texts, capacity=args.capacity)
        for name in ("none", "auto"):
            own = model.choose(name)
            both = history if name == "none" else FallbackDrafter(history, own)
            runs = {
                label: partial(jaxdraft.generate, model, prompts, key=1, drafter=d, **rules)
                for label, d in (("without", own), ("with", both))
            }
            seconds = interleave(
                {label: partial(_wait, run) for label, run in runs.items()}, repeats=args.repeats
            )
            least, middle, most = ratios(seconds["without"], seconds["with"])
            outs = {label: run() for label, run in runs.items()}
            per_round = [
                f"{float(o.stats.emitted.sum() / o.stats.rounds.sum()):.2f}" for o in outs.values()
            ]
            same = "equal" if outs["with"].ids() == outs["without"].ids() else "differ"
            kept = same if not temperature else "sampled"
            speed = f"{middle:.2f} ({least:.2f}..{most:.2f})"
            rows.append([temperature, name, *per_round, speed, kept])
    head = [
        "temperature", "drafter", "tokens per round without history", "with", "speed-up", "tokens",
    ]  # fmt: skip
    body = table(head, rows) + (
        f"\n\n{len(prompts)} prompts as one batch, {args.tokens} new tokens; whole calls, medians "
        f"of {args.repeats} pairs after one warm-up, the speed-up pair by pair (least..largest). "
        f"The history has {sum(map(len, texts))} tokens. Other processes ran on the machine."
    )
    write_result(__file__, "A second epoch with history", body)


def _wait(run: Any) -> None:
    jax.block_until_ready(run().tokens)


if __name__ == "__main__":
    main()
