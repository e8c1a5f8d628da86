"""How often do speculative and plain greedy decoding differ, and by how little?

    python experiments/divergence.py             # the first family, in three dtypes
    python experiments/divergence.py FOLDER      # another artifact with a drafter

A window of rows and single steps round differently in the last bits, so a token may differ only
where the target's two best logits are closer than that. For every prompt whose tokens differ, one
forward pass over the plain tokens gives the margin at the first difference; the table compares it
with the margins of all positions.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from common import first_family, table, write_result
from paths import cuts

import jaxdraft
from jaxdraft import Model


def margins(model: Model, prompts: list[list[int]], outputs: list[list[int]]) -> list[np.ndarray]:
    """Return the best minus the second best logit at every emitted position of each prompt."""
    whole = [p + o for p, o in zip(prompts, outputs, strict=True)]
    found = []
    for row, prompt in zip(whole, prompts, strict=True):
        logits = np.asarray(jaxdraft.score(model, [row]).logits[0], np.float32)
        best = np.sort(logits, axis=-1)[:, -2:]
        found.append((best[:, 1] - best[:, 0])[len(prompt) - 1 : -1])
    return found


def measure(model: Model, prompts: list[list[int]], tokens: int) -> list[object]:
    """Compare both ways of decoding, and return a row of the table without the dtype's name."""
    options = dict(max_new_tokens=tokens, stop_ids=())
    plain = jaxdraft.generate(model, prompts, drafter="none", **options).ids()
    drafted = jaxdraft.generate(model, prompts, **options).ids()
    firsts = [
        next((i for i, (a, b) in enumerate(zip(p, d, strict=True)) if a != b), None)
        for p, d in zip(plain, drafted, strict=True)
    ]
    gaps = margins(model, prompts, plain)
    at = [float(gap[first]) for gap, first in zip(gaps, firsts, strict=True) if first is not None]
    same = sum(tokens if first is None else first for first in firsts)
    every = np.concatenate(gaps)
    differ = len(at)
    return [
        f"{differ} of {len(prompts)}",
        f"{differ / (same + differ):.1e}",
        "-" if not at else f"{max(at):.2g}",
        "-" if not at else f"{np.mean(every <= max(at)):.1%}",
        f"{np.median(every):.2g}",
    ]


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", nargs="?", type=Path, help="default: the first family")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--each", type=int, default=16, help="prompts of each held-out file")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    folder, rows = args.folder or first_family()[0], []
    for dtype in args.dtypes:
        model = jaxdraft.load(folder, dtype=dtype)
        rows.append([dtype, *measure(model, cuts(model, args.length, args.each), args.tokens)])
        print(rows[-1], flush=True)
    head = ["dtype", "prompts that differ", "chance per token", "largest margin there"]
    head += ["margins that small", "median margin"]
    body = table(head, rows) + (
        "\n\nGreedy decoding with the model's drafter against without. Third column: first "
        "differences per token decoded up to them. Fourth: best minus second best logit of the "
        "plain run at the first difference, the largest over the prompts. Fifth: share of all "
        "positions with so small a margin."
    )
    if args.dry:
        print(body)
        return
    write_result(__file__, "Where speculative and plain greedy decoding differ", body)


if __name__ == "__main__":
    main()
