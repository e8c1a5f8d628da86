"""How fast is plain decoding against onnxruntime-genai, on the same float32 artifact?

    python experiments/against_ort.py NAME=FOLDER [NAME=FOLDER ...]

One process, one request, the same greedy tokens, in turn. Both sides count decoding steps alone:
for onnxruntime-genai the time after the first token, for jaxdraft the time of the whole call less
that of a call for one token. Folders: `prepare_smollm2.py` and `prepare_hybrid.py` make them. Needs
`pip install onnxruntime-genai==0.18.0`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from common import interleave, ratios, table, write_result
from ort_baseline import OrtBaseline, settle

import jaxdraft


def compare(name: str, folder: Path, tokens: int, repeats: int, threads: int) -> list[object]:
    """Compare both runtimes on one artifact, and return its row of the table."""
    model, baseline = jaxdraft.load(folder), OrtBaseline(folder, threads=threads)
    prompt = [i % model.target.vocab_size for i in (504, 1463, 282, 260, 9403, 2327, 5634, 281)]
    theirs: list[float] = []
    found: dict[str, list[int]] = {}

    def ours(count: int) -> None:
        out = jaxdraft.generate(model, [prompt], max_new_tokens=count, stop_ids=(), drafter="none")
        out.tokens.block_until_ready()
        found["ours"] = out.ids()[0]

    def reference() -> None:
        run = baseline.generate(prompt, tokens)
        theirs.append(run.decode_seconds)
        found["theirs"] = run.tokens

    seconds = interleave(
        {"first": lambda: ours(1), "all": lambda: ours(tokens), "reference": reference},
        repeats=repeats,
        between=settle,
    )
    first = statistics.median(seconds["first"])
    ours_decode = [s - first for s in seconds["all"]]
    theirs = theirs[-repeats:]
    ours(tokens)
    same = found["ours"] == found["theirs"]
    low, middle, high = ratios(theirs, ours_decode)
    steps = tokens - 1
    return [
        name,
        f"{steps / statistics.median(ours_decode):.1f}",
        f"{steps / statistics.median(theirs):.1f}",
        f"{middle:.2f} ({low:.2f}..{high:.2f})",
        "equal" if same else "differ",
    ]


def main() -> None:
    """Compare every artifact named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifacts", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    rows = []
    for entry in args.artifacts:
        name, _, folder = entry.partition("=")
        rows.append(compare(name, Path(folder), args.tokens, args.repeats, args.threads))
    head = ["artifact", "jaxdraft, tokens/s", "onnxruntime-genai, tokens/s", "ratio", "tokens"]
    body = (
        table(head, rows)
        + f"\n\nFloat32, one request, 8 prompt tokens, {args.tokens} new ones, {args.threads} "
        f"threads, median of {args.repeats} after one warm-up; the ratio is taken pair by pair "
        "(least..largest). onnxruntime's threads are idle before each of our runs."
    )
    write_result(__file__, "Plain decoding against onnxruntime-genai", body)


if __name__ == "__main__":
    main()
