"""How many tokens per second do the engine and static batches produce?

    python experiments/throughput.py                        # the first family
    python experiments/throughput.py NAME=FOLDER            # any artifact
    python experiments/throughput.py NAME=FOLDER --ort      # and onnxruntime-genai on the same one

All run the same requests: prompts of one length, outputs of many lengths. At each concurrency c the
engine has c rows and takes the next request when one is finished. `generate` and onnxruntime-genai
run batches of c, each until its longest row is finished; onnxruntime-genai batches prompts of one
length. Tokens past the end of a request are not counted. All run in one process, in turn, greedily,
without the engine's prefix cache, since every repeat has the same prompts. `--ort` needs
`pip install onnxruntime-genai==0.18.0`, and an artifact with a dense cache for the CPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import first_family, interleave, ratios, table, write_result

import jaxdraft
from jaxdraft import Engine, Model


class Workload:
    """Requests: prompts [n, size], and the number of new tokens of each.

    Args:
      model: model to run; prompts are pieces of held-out files for the first family, else random.
      requests: number of requests, n.
      size: tokens per prompt.
      tokens: largest number of new tokens per request; the least is a quarter of it.
    """

    def __init__(self, model: Model, requests: int, size: int, tokens: int) -> None:
        rng = np.random.default_rng(0)
        folder, held_out = first_family()
        if model.info.name == folder.name:
            ids = [i for p in held_out for i in p["prompt_ids"]]
            starts = rng.integers(0, max(1, len(ids) - size), requests)
            self.prompts = [(ids * (1 + size // len(ids)))[s : s + size] for s in starts]
        else:
            self.prompts = rng.integers(0, model.target.vocab_size, (requests, size)).tolist()
        self.wanted = rng.integers(max(1, tokens // 4), tokens + 1, requests).tolist()

    @property
    def total(self) -> int:
        """Number of new tokens of all requests together."""
        return sum(self.wanted)

    def batches(self, size: int) -> list[tuple[list[list[int]], list[int]]]:
        """Yield prompts and lengths of ``size`` requests at a time, the last batch filled up."""
        pairs = list(zip(self.prompts, self.wanted, strict=True))
        pairs += [(self.prompts[0], 1)] * (-len(pairs) % size)
        parts = (pairs[i : i + size] for i in range(0, len(pairs), size))
        return [tuple(map(list, zip(*part, strict=True))) for part in parts]  # type: ignore[misc]


def with_engine(
    model: Model, work: Workload, rows: int, drafter: str, found: dict[str, Any]
) -> Callable[[], None]:
    """Return a run of the engine with ``rows`` rows."""
    longest = max(len(p) + n for p, n in zip(work.prompts, work.wanted, strict=True))
    engine = Engine(model, max_batch=rows, drafter=drafter, context=longest, prefix_cache=False)

    def run() -> None:
        requests = [
            engine.submit(p, max_new_tokens=n, stop_ids=())
            for p, n in zip(work.prompts, work.wanted, strict=True)
        ]
        for _ in engine.run():
            pass
        found[f"engine {drafter}"] = [r.tokens for r in requests]
        found[f"summary {drafter}"] = engine.summary()

    return run


def with_generate(
    model: Model, work: Workload, rows: int, drafter: str, found: dict[str, Any]
) -> Callable[[], None]:
    """Return a run of static batches of ``rows``, each until its longest row is finished."""

    def run() -> None:
        outputs: list[list[int]] = []
        for prompts, wanted in work.batches(rows):
            outputs += jaxdraft.generate(
                model, prompts, max_new_tokens=wanted, stop_ids=(), drafter=drafter
            ).ids()
        found[f"generate {drafter}"] = outputs[: len(work.prompts)]

    return run


def with_ort(
    folder: Path, work: Workload, rows: int, threads: int, found: dict[str, Any]
) -> Callable[[], None]:
    """Return a run of onnxruntime-genai in static batches of ``rows``."""
    import onnxruntime_genai as og
    from ort_baseline import OrtBaseline

    model = OrtBaseline(folder, threads=threads)._model

    def run() -> None:
        outputs: list[list[int]] = []
        for prompts, wanted in work.batches(rows):
            ids = np.asarray(prompts, np.int32)
            params = og.GeneratorParams(model)
            params.set_search_options(
                max_length=ids.shape[1] + max(wanted),
                do_sample=False,
                batch_size=len(prompts),
                num_beams=1,
            )
            generator = og.Generator(model, params)
            generator.append_tokens(ids)
            while not generator.is_done():
                generator.generate_next_token()
            for row, count in enumerate(wanted):
                tokens = generator.get_sequence(row)[ids.shape[1] :]
                outputs.append([int(t) for t in tokens[:count]])
        found["onnxruntime-genai"] = outputs[: len(work.prompts)]

    return run


def compare(args: argparse.Namespace, name: str, folder: Path) -> str:
    """Measure one artifact, and return its table."""
    model = jaxdraft.load(folder)
    work = Workload(model, args.requests, args.prompt, args.tokens)
    drafters = ["none"] + ([model.info.drafter] if model.info.drafter != "none" else ["ngram"])
    rows: list[list[object]] = []
    for concurrency in args.concurrency:
        found: dict[str, Any] = {}
        runs: dict[str, Callable[[], None]] = {}
        for drafter in drafters:
            runs[f"engine {drafter}"] = with_engine(model, work, concurrency, drafter, found)
            runs[f"generate {drafter}"] = with_generate(model, work, concurrency, drafter, found)
        between: Callable[[], Any] = lambda: None  # noqa: E731
        if args.ort:
            from ort_baseline import settle

            between = settle
            runs["onnxruntime-genai"] = with_ort(folder, work, concurrency, args.threads, found)
        seconds = interleave(runs, repeats=args.repeats, between=between)
        truth = found["generate none"]
        for run, spent in seconds.items():
            low, middle, high = ratios(seconds["generate none"], spent)
            summary = found.get(f"summary {run.removeprefix('engine ')}")
            same = sum(a == b for a, b in zip(found[run], truth, strict=True))
            rows.append(
                [
                    concurrency,
                    run,
                    f"{work.total / statistics.median(spent):.0f}",
                    f"{middle:.2f} ({low:.2f}..{high:.2f})",
                    f"{summary.tokens_per_round:.2f}" if summary else "",
                    f"{same} of {len(truth)}",
                ]
            )
    head = [
        "at once",
        "runtime",
        "tokens/s",
        "against generate none",
        "tokens per round",
        "same outputs",
    ]
    shape = (
        f"{args.requests} requests of {args.prompt} prompt tokens and {min(work.wanted)} to "
        f"{max(work.wanted)} new ones, {work.total} in all"
    )
    return f"## {name}\n\n{shape}.\n\n" + table(head, rows)


def main() -> None:
    """Compare at every concurrency, for every artifact."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifacts", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ort", action="store_true", help="compare with onnxruntime-genai")
    parser.add_argument("--result", default="throughput", help="name of the file to write")
    args = parser.parse_args()
    entries = [tuple(entry.split("=", 1)) for entry in args.artifacts]
    parts = [compare(args, name, Path(folder)) for name, folder in entries]
    if not parts:
        parts = [compare(args, "The first family", first_family()[0])]
    body = "\n\n".join(parts) + (
        f"\n\nWhole calls, prefill included, host work included; medians of {args.repeats} after "
        "one warm-up, ratios pair by pair (least..largest)."
    )
    write_result(__file__, "Throughput of the engine", body, args.result)


if __name__ == "__main__":
    main()
