"""Which drafter pays: none, n-gram, MTP, DFlash2, DSpark, side by side on one trained family?

    python experiments/drafters.py                      # the embedded family: all of its drafters
    python experiments/drafters.py FOLDER...            # a checkpoint, or exports of one target
    python experiments/drafters.py --adaptive --no-few --lengths 64 768 --prompts 3 \
        --round-cost 2.3 --draft-cost 0 --result adaptive

Held-out text (files of Python's standard library that nothing was trained on) cut to three prompt
lengths; one request at a time, K = 7 where it can be chosen; two warm-ups, then three runs, all
drafters in turn in one process. Tokens and counters of the runs must be identical, and the tokens
those of plain decoding. Time per token is decoding alone: a call for one token is timed too, and
taken off.

Block drafters run a second time with only the first ``FEW`` drafts of their blocks, on a target
with ``load(blocked=True)``: shorter windows of cheaper products.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
from common import HERE, drafters_of, interleave, table, write_result
from figures import shrink

import jaxdraft
from jaxdraft import EMBEDDED, AdaptiveDrafter, Drafter, Model, Summary
from jaxdraft.target import DecoderTarget

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402 - after the choice of a backend without a window

FILES = ("asyncio/locks.py", "bisect.py", "configparser.py", "csv.py", "difflib.py", "glob.py")
"""Files on which the family was not trained (see its MODEL_CARD.md)."""


FEW = 4
"""The kernels behind ``blocked=True`` take a window of one more row in one pass."""


def cuts(model: Model, length: int, count: int) -> list[list[int]]:
    """Return the first ``length`` tokens of each held-out file of the running Python."""
    assert model.text is not None
    library = Path(os.__file__).parent
    prompts = [model.text.encode((library / name).read_text())[:length] for name in FILES[:count]]
    if short := [name for name, p in zip(FILES, prompts, strict=False) if len(p) < length]:
        raise ValueError(f"{', '.join(short)}: fewer than {length} tokens")
    return prompts


class Variant:
    """A drafter, its export of the target, and the outcomes of its runs."""

    def __init__(self, model: Model, drafter: str | Drafter):
        self.model, self.drafter = model, model.choose(drafter)
        self.outcomes: list[tuple[str, Summary]] = []

    def run(self, prompts: list[list[int]], tokens: int) -> None:
        """Generate, and record a hash of the tokens and the counters."""
        outs = [
            jaxdraft.generate(
                self.model, [p], max_new_tokens=tokens, stop_ids=(), drafter=self.drafter
            )
            for p in prompts
        ]
        ids = repr([out.ids() for out in outs]).encode()
        digest = hashlib.sha256(ids).hexdigest()[:12]
        self.outcomes.append((digest, jaxdraft.summarize([out.stats for out in outs])))


def variants(folders: list[Path], args: argparse.Namespace) -> dict[str, Variant]:
    """Return every drafter to compare, by name, plain decoding first."""
    found: dict[str, Variant] = {}
    for folder in folders:
        for kind, (model, drafter) in drafters_of(folder, args.draft_tokens).items():
            found.setdefault("none", Variant(model, "none"))
            found.setdefault(kind, Variant(model, drafter))
    if args.few:
        for name in [n for n in ("dflash2", "dspark") if n in found]:
            model, drafter = found[name].model, found[name].drafter
            assert isinstance(model.target, DecoderTarget)
            model = replace(model, target=model.target.blocked())
            found[f"{name}, {FEW} in blocks"] = Variant(model, model.choose(drafter, FEW))
    if args.adaptive:
        costs = {"round_cost": args.round_cost, "draft_cost": args.draft_cost}
        for name, variant in list(found.items())[1:]:
            rule = replace(AdaptiveDrafter(variant.drafter), **costs)
            found[f"{name}, adaptive"] = Variant(variant.model, rule)
    return found


def measure(
    found: dict[str, Variant], prompts: list[list[int]], args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Return counters and seconds per token of every drafter, for prompts of one length."""
    for variant in found.values():
        variant.outcomes = []
    calls = {name: lambda v=v: v.run(prompts, args.tokens) for name, v in found.items()}
    firsts = {f"{name} 1": lambda v=v: v.run(prompts, 1) for name, v in found.items()}
    seconds = interleave({**calls, **firsts}, repeats=args.runs, warmups=args.warmups)
    facts = {}
    for name, variant in found.items():
        whole = variant.outcomes[
            ::2
        ]  # each turn runs the whole call and then one for the first token
        assert len(set(map(repr, whole))) == 1, f"{name}: runs differ: {whole}"
        digest, summary = whole[0]
        decoding = len(prompts) * (args.tokens - 1)
        each = [
            1e3 * (long - short) / decoding
            for long, short in zip(seconds[name], seconds[f"{name} 1"], strict=True)
        ]
        facts[name] = {"digest": digest, "summary": summary, "ms": each}
    plain = facts["none"]["digest"]
    assert all(f["digest"] == plain for f in facts.values()), "a drafter changed the tokens"
    return facts


def report(results: dict[int, dict[str, dict[str, Any]]]) -> str:
    """Return the tables in Markdown."""
    rows, places = [], []
    for length, facts in results.items():
        base = statistics.median(facts["none"]["ms"])
        for name, fact in facts.items():
            summary, middle = fact["summary"], statistics.median(fact["ms"])
            rate = summary.tokens_per_round or 0.0
            rows.append(
                [
                    length,
                    name,
                    f"{rate:.2f}",
                    "-" if summary.acceptance is None else f"{summary.acceptance:.0%}",
                    summary.drafter_forwards,
                    f"{middle:.3f} ({min(fact['ms']):.3f}..{max(fact['ms']):.3f})",
                    f"{base / middle:.2f}",
                    f"{middle * rate / base:.2f}",
                    fact["digest"],
                ]
            )
            if summary.evaluated:
                at = ["-" if a is None else f"{a:.0%}" for a in summary.acceptance_at]
                places.append([length, name, *at])
    width = max((len(row) for row in places), default=2)
    places = [row + [""] * (width - len(row)) for row in places]
    head = ["prompt", "drafter", "tokens per round", "accepted of evaluated", "drafter passes"]
    head += ["ms per token", "speed-up", "cost of a round, plain steps", "tokens' hash"]
    parts = [table(head, rows)]
    parts += ["Acceptance of a draft, given that all before it were accepted, by position:"]
    parts += [table(["prompt", "drafter", *map(str, range(1, width - 1))], places)]
    if all({"mtp", "dflash2"} <= set(facts) for facts in results.values()):
        ratios = {
            length: statistics.median(facts["mtp"]["ms"]) / statistics.median(f["ms"])
            for length, facts in results.items()
            for f in [facts["dflash2"]]
        }
        mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
        cells = [[*(f"{r:.2f}" for r in ratios.values()), f"{mean:.2f}"]]
        parts += ["DFlash2 against MTP, tokens per second, by prompt length and in geometric mean:"]
        parts += [table([*map(str, ratios), "mean"], cells)]
    return "\n\n".join(parts)


def plot(results: dict[int, dict[str, dict[str, Any]]], path: Path) -> None:
    """Plot tokens per round, ms per token, and acceptance by position (longest prompts)."""
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    names = list(next(iter(results.values())))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        at = [i + (number - (len(names) - 1) / 2) * width for i in range(len(results))]
        facts = [f[name] for f in results.values()]
        rates = [f["summary"].tokens_per_round or 0 for f in facts]
        left.bar(at, rates, width, label=name)
        medians = [statistics.median(f["ms"]) for f in facts]
        spread = [
            [m - min(f["ms"]) for m, f in zip(medians, facts, strict=True)],
            [max(f["ms"]) - m for m, f in zip(medians, facts, strict=True)],
        ]
        middle.bar(at, medians, width, yerr=spread, label=name)
        places = [a for a in facts[-1]["summary"].acceptance_at if a is not None]
        if places:
            right.plot(range(1, len(places) + 1), places, "o-", color=f"C{number}", label=name)
    for axes, label in ((left, "tokens per round"), (middle, "ms per token")):
        axes.set_xticks(range(len(results)), [str(length) for length in results])
        axes.set_xlabel("prompt length")
        axes.set_ylabel(label)
    right.set_xlabel("draft position")
    right.set_ylabel("acceptance given its predecessors")
    right.set_ylim(0, 1.02)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")
    figure.savefig(path, dpi=120)
    shrink(path)


def main() -> None:
    """Measure, check, and write the tables and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", nargs="*", type=Path, help="default: the embedded family")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 768])
    parser.add_argument("--prompts", type=int, default=len(FILES))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, default=7, help="K of n-gram and MTP")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--warmups", type=int, default=2)
    few = "no second run of block drafters, with few drafts"
    parser.add_argument("--no-few", dest="few", action="store_false", help=few)
    parser.add_argument(
        "--adaptive", action="store_true", help="also each drafter with adaptive length"
    )
    parser.add_argument("--round-cost", type=float, default=0.6, help="of the adaptive rule")
    parser.add_argument("--draft-cost", type=float, default=0.12, help="of the adaptive rule")
    parser.add_argument("--result", default="drafters", help="name of the files to write")
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    found = variants(args.folders or [EMBEDDED], args)
    results = {
        length: measure(found, cuts(found["none"].model, length, args.prompts), args)
        for length in args.lengths
    }
    body = report(results)
    if args.dry:
        print(body)
        return
    plot(results, HERE / f"{args.result}.png")
    title = "Drafters of one trained family, side by side"
    if args.adaptive:
        title += ", alone and with adaptive length"
        costs = f"{args.round_cost} plain steps per round and {args.draft_cost} per draft"
        body += f"\n\nThe adaptive rule assumed costs of {costs}."
    body += f"\n\n![tokens per round, time per token, acceptance by position]({args.result}.png)"
    write_result(__file__, title, body, args.result)


if __name__ == "__main__":
    main()
