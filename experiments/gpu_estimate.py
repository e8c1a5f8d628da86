"""How fast could a round be on a GPU? Times from a model of three numbers, not measured.

The time of a round is taken to be its bytes over the rate at which the card copies, plus a cost per
launch, plus a cost per wait of the host. The three costs are assumptions, stated below; nothing of
this was run on a GPU. A table of such estimates shows which cause of lost time is the largest, and
how far a program of these counts could come.
"""

from __future__ import annotations

from collections.abc import Sequence

from common import table
from gpu_compile import Card
from gpu_count import Counts
from speed_table import ACCEPTANCE, DRAFTS, PUBLISHED

COPYING = 0.85
"""Share of a card's stated bandwidth at which it is assumed to copy. ``./run gpu`` measures it."""

LAUNCH = 2e-6
"""Seconds assumed per launch inside a CUDA graph, beside the bytes it moves."""

WAIT = 15e-6
"""Seconds assumed per wait of the host: one copy of a predicate and the start of what follows."""

SGLANG = 236.0
"""Tokens per second of SGLang, to compare with; its prompts are not known here."""


def seconds(counts: Counts, card: Card) -> float:
    """Return the time of a program by the model."""
    moving = counts.moved / (COPYING * card.bandwidth)
    return moving + LAUNCH * counts.launches + WAIT * counts.waits


def tokens_per_round(rate: float, drafts: int = DRAFTS) -> float:
    """Return the mean when every draft is accepted with one chance after those before it."""
    return sum(rate**k for k in range(drafts + 1))


def tokens_per_second(program: str, counts: Counts, card: Card) -> float:
    """Return the speed of decoding by the model: "step", or the round of a drafter."""
    drafter = program.partition(":")[2]
    tokens = tokens_per_round(ACCEPTANCE[drafter]) if drafter else 1.0
    return tokens / seconds(counts, card)


def comparison(rows: Sequence[tuple[str, str, int, Counts]], card: Card) -> str:
    """Return a table of estimates beside what is published.

    Args:
      rows: what the counts belong to ("before", "after"), a program, a length, and its counts.
      card: the card of all of them.
    """
    lines = []
    for state, program, length, counts in rows:
        drafter = program.partition(":")[2]
        pair = PUBLISHED.get(length)
        told = pair[drafter == "dflash2"] if pair and drafter else None
        speed = tokens_per_second(program, counts, card)
        lines.append(
            [
                state,
                program,
                f"{length:,}",
                f"{counts.moved / 1e9:.1f}",
                f"{counts.launches:,}",
                f"{counts.waits:,}",
                f"{seconds(counts, card) * 1e3:.1f}",
                f"{speed:.0f}",
                "" if told is None else f"{told:.2f}",
            ]
        )
    head = ["program of", "program", "positions", "GB moved", "launches", "host waits"]
    head += ["computed ms", "computed tokens/s", "published tokens/s"]
    return table(head, lines)


def assumptions(card: Card) -> str:
    """Return the model in words."""
    rates = ", ".join(f"{kind} {rate}" for kind, rate in ACCEPTANCE.items())
    rate = f"{COPYING} x {card.bandwidth / 1e12:.1f} TB/s"
    return (
        f"**Computed, not measured.** Time = bytes / ({rate}) + {LAUNCH * 1e6:.0f} us per launch "
        f"+ {WAIT * 1e6:.0f} us per wait of the host; the three costs are assumptions. Tokens per "
        f"round follow from the acceptance {rates} (see `speed_table.py`). Published: "
        "onnxruntime-genai on one H200, whole calls timed, prefill included; computed is decoding "
        f"alone. SGLang: {SGLANG:.0f} tokens/s, on prompts that are not known here."
    )
