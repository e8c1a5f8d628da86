"""Which path through the lattice does the target accept most of?

    python experiments/paths.py               # the first family's DFlash2
    python experiments/paths.py DSPARK_DIR    # and drafters of other exports of its target

Held-out text (files of Python's standard library that nothing was trained on), cut into prompts all
along each file, greedy decoding. The same drafter proposes the greedy walk, the best path, the most
probable path or the longest one (`jaxdraft.draft.lattice.PROPOSALS`); the tokens must be the same.
Nothing here depends on time.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from common import first_family, table, write_result
from drafters import FILES

import jaxdraft
from jaxdraft import Model
from jaxdraft.draft.block import BlockDrafter
from jaxdraft.draft.lattice import PROPOSALS

RESAMPLES = 10_000


def cuts(model: Model, length: int, each: int) -> list[list[int]]:
    """Return ``each`` prompts of ``length`` tokens from every file, evenly spaced."""
    assert model.text is not None
    library, prompts = Path(os.__file__).parent, []
    for name in FILES:
        ids = model.text.encode((library / name).read_text())
        starts = np.linspace(0, len(ids) - length, each).astype(int)
        prompts += [ids[start : start + length] for start in starts]
    return prompts


@dataclass
class Run:
    """The counts of one path, prompt by prompt."""

    emitted: np.ndarray  # [prompts], tokens of rounds
    rounds: np.ndarray  # [prompts]
    summary: jaxdraft.Summary

    def rate(self, chosen: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Return the tokens per round, over the prompts [..., n]."""
        return self.emitted[chosen].sum(axis=-1) / self.rounds[chosen].sum(axis=-1)


def measure(model: Model, prompts: list[list[int]], tokens: int) -> dict[str, Run]:
    """Run every path over every prompt, in one batch each."""
    assert isinstance(model.drafter, BlockDrafter), f"{model.info.drafter} has no lattice"
    runs, texts = {}, set()
    for path in PROPOSALS:
        drafter = replace(model.drafter, path=path)
        out = jaxdraft.generate(model, prompts, max_new_tokens=tokens, stop_ids=(), drafter=drafter)
        texts.add(repr(out.ids()))
        emitted = np.asarray(out.stats.emitted) - 1  # the prompt's own token belongs to no round
        runs[path] = Run(emitted, np.asarray(out.stats.rounds), jaxdraft.summarize(out.stats))
    assert len(texts) == 1, "a path changed the tokens"
    return runs


def interval(values: np.ndarray) -> str:
    low, high = np.quantile(values, [0.025, 0.975])
    return f"{low:+.3f}..{high:+.3f}"


def report(kind: str, runs: dict[str, Run], each: int) -> tuple[list[list[str]], list[list[str]]]:
    """Return the rows of both tables for one drafter: overall and by position, and by file."""
    prompts = len(runs["walk"].rounds)
    resampled = np.random.default_rng(0).integers(0, prompts, (RESAMPLES, prompts))
    rows, files = [], []
    for path, run in runs.items():
        low, high = np.quantile(run.rate(resampled), [0.025, 0.975])
        gain = run.rate(resampled) - runs["walk"].rate(resampled)
        places = ["-" if a is None else f"{a:.0%}" for a in run.summary.acceptance_at]
        rows.append(
            [
                kind,
                path,
                f"{run.rate():.3f} ({low:.2f}..{high:.2f})",
                "-" if path == "walk" else interval(gain),
                *places,
            ]
        )
        by_file = [slice(n * each, (n + 1) * each) for n in range(len(FILES))]
        files.append([kind, path, *(f"{run.rate(chosen):.2f}" for chosen in by_file)])
    return rows, files


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", nargs="*", type=Path, help="other exports of the target")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--each", type=int, default=16, help="prompts per file")
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    rows: list[list[str]] = []
    files: list[list[str]] = []
    width = 0
    for folder in [first_family()[0], *args.folders]:
        model = jaxdraft.load(folder)
        runs = measure(model, cuts(model, args.length, args.each), args.tokens)
        parts = report(model.info.drafter, runs, args.each)
        rows, files = rows + parts[0], files + parts[1]
        width = max(width, model.drafter.draft_tokens)
    rows = [row + [""] * (4 + width - len(row)) for row in rows]
    head = [
        "drafter",
        "path",
        "tokens per round",
        "more than the walk",
        *map(str, range(1, width + 1)),
    ]
    body = [
        table(head, rows),
        f"{len(FILES) * args.each} prompts of {args.length} tokens, {args.tokens} new tokens each, "
        "greedy, the same tokens from every path. Intervals: 95 %, bootstrap over prompts, the "
        "difference prompt by prompt. By position: acceptance of a draft, given that all before it "
        "were accepted.",
        "Tokens per round by file:",
        table(["drafter", "path", *FILES], files),
        "*walk*: greedy, step by step. *best*: the greatest sum of edge scores. *probable*: the "
        "same over rows of log-probabilities, the most probable walk. *longest*: the path with the "
        "greatest expected number of accepted drafts.",
    ]
    write_result(__file__, "Paths through the lattice", "\n\n".join(body))


if __name__ == "__main__":
    main()
