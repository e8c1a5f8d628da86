"""Does the shipped drafter speed up SmolLM2-135M-Instruct?

    python experiments/smollm2.py FOLDER                 # the checkpoint of the target
    python experiments/smollm2.py FOLDER --drafter OTHER # another drafter's folder

``FOLDER`` is the output of ``prepare_smollm2.py``, or the model from the hub. The prompts in
``smollm2_prompts.json`` were not used for training, and were written before any measurement. Every
prompt is answered greedily, one at a time, until the model stops. The target has its matrices in
blocks too: plain decoding and prefill read the plain layout, short windows the blocks. Six settings
take turns, prompt by prompt: plain decoding; n-gram lookup; the drafter with all its drafts; with
fewer; with fewer in a :class:`jaxdraft.ConfidentDrafter`; and with fewer where the lookup finds
nothing (:class:`jaxdraft.FallbackDrafter`).
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import HERE, interleave, table, write_result

import jaxdraft
from jaxdraft import ConfidentDrafter, FallbackDrafter, NgramDrafter, Output, generate, summarize

DRAFTERS = ("none", "ngram", "dflash2", "fewer", "confident", "both")


@dataclass
class Answered:
    """A prompt, with the output of every drafter and its seconds."""

    kind: str
    prompt: str
    seconds: dict[str, list[float]]
    outputs: dict[str, Output]

    @property
    def tokens(self) -> int:
        """Number of new tokens in the answer."""
        return len(self.outputs["none"].ids()[0])

    def same(self, drafter: str) -> bool:
        """Return whether the drafter left the answer unchanged."""
        return self.outputs[drafter].ids() == self.outputs["none"].ids()

    def gain(self, drafter: str) -> float:
        """Return plain decoding's seconds over the drafter's: the median over the turns."""
        pairs = zip(self.seconds["none"], self.seconds[drafter], strict=True)
        return statistics.median(plain / drafted for plain, drafted in pairs)


@dataclass
class Answers:
    """The answers to several prompts."""

    of: list[Answered] = field(default_factory=list)

    def row(self, name: str, drafter: str) -> list[object]:
        """Return a row of the table."""
        summary = summarize([one.outputs[drafter].stats for one in self.of])
        spent = {d: sum(statistics.median(o.seconds[d]) for o in self.of) for d in DRAFTERS}
        tokens = sum(one.tokens for one in self.of)
        gains = [one.gain(drafter) for one in self.of]
        per_round, share = summary.tokens_per_round, summary.acceptance
        return [
            name,
            drafter,
            "-" if per_round is None or drafter == "none" else f"{per_round:.2f}",
            "-" if share is None else f"{share:.0%}",
            f"{tokens / spent[drafter]:.1f}",
            f"{spent['none'] / spent[drafter]:.2f}",
            f"{min(gains):.2f}..{max(gains):.2f}",
            f"{sum(one.same(drafter) for one in self.of)} of {len(self.of)}",
        ]


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the target's checkpoint")
    parser.add_argument("--drafter", default="smollm2", help="as in jaxdraft.load")
    parser.add_argument("--tokens", type=int, default=64, help="the most an answer has")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=3, help="of fewer drafts")
    parser.add_argument("--round-cost", type=float, default=0.5, help="of ConfidentDrafter")
    args = parser.parse_args()
    model = jaxdraft.load(args.folder, dtype="float32", drafter=args.drafter, blocked=True)
    assert model.text is not None
    lookup, fewer = NgramDrafter(draft_tokens=args.drafts), model.choose("dflash2", args.drafts)
    drafters: dict[str, Any] = {
        "none": "none",
        "ngram": lookup,
        "dflash2": "dflash2",
        "fewer": fewer,
        "confident": ConfidentDrafter(fewer, round_cost=args.round_cost),
        "both": FallbackDrafter(lookup, fewer),
    }
    kinds: dict[str, Answers] = {}
    whole = Answers()
    for entry in json.loads((HERE / "smollm2_prompts.json").read_text(encoding="utf-8")):
        ids = model.text.chat([{"role": "user", "content": entry["prompt"]}])
        outputs: dict[str, Output] = {}

        def run(name: str, ids: list[int] = ids, outputs: dict[str, Output] = outputs) -> None:
            out = generate(model, [ids], max_new_tokens=args.tokens, drafter=drafters[name])
            out.tokens.block_until_ready()
            outputs[name] = out

        seconds = interleave(
            {name: functools.partial(run, name) for name in DRAFTERS}, repeats=args.repeats
        )
        one = Answered(entry["kind"], entry["prompt"], seconds, outputs)
        kinds.setdefault(one.kind, Answers()).of.append(one)
        whole.of.append(one)
        print(one.kind, one.tokens, {name: round(one.gain(name), 2) for name in DRAFTERS[1:]})
    rows = [part.row(kind, name) for kind, part in kinds.items() for name in DRAFTERS]
    rows += [whole.row("**all**", name) for name in DRAFTERS]
    head = ["prompts", "drafter", "tokens per round", "accepted", "tokens/s", "against none"]
    head += ["single prompts", "same tokens"]
    body = table(head, rows) + "\n\n" + remarks(whole, model, args)
    write_result(__file__, "SmolLM2-135M-Instruct with a drafter of its own", body)


def remarks(whole: Answers, model: Any, args: argparse.Namespace) -> str:
    """Return a description of the measurement, and the prompts on which drafting does not pay."""
    summary = summarize([one.outputs["dflash2"].stats for one in whole.of])
    by_position = ", ".join(f"{share or 0:.0%}" for share in summary.acceptance_at)
    slower = {
        name: [f"“{one.prompt}” ({one.gain(name):.2f})" for one in whole.of if one.gain(name) < 1]
        for name in DRAFTERS[2:]
    }
    slowest = "\n".join(
        f"* *{name}* was slower than plain decoding on {len(slow)} of {len(whole.of)} prompts"
        + (f": {'; '.join(slow)}" if slow else "")
        + "."
        for name, slow in slower.items()
    )
    return (
        f"Float32, one request at a time, greedily, {args.tokens} new tokens at most, whole calls "
        f"with the prefill; medians of {args.repeats} turns after one warm-up. *Against none* is "
        "plain decoding's time over the drafter's, for all prompts of a kind together; the next "
        "column has the least and the largest for single prompts. K is "
        f"{model.drafter.draft_tokens} for DFlash2.\n\n"
        "Acceptance of DFlash2's drafts by position, given that all before were accepted: "
        f"{by_position}.\n\n"
        f"All rows use load(blocked=True). *fewer* uses the first {args.drafts} drafts of every "
        "block, for a shorter window of the target; *ngram* has as many. *confident* is *fewer* in "
        f"a ConfidentDrafter(round_cost={args.round_cost}): drafts are verified where their "
        "expected gain exceeds their cost. *both* is a FallbackDrafter: *fewer* where "
        "*ngram* finds nothing.\n\n" + slowest
    )


if __name__ == "__main__":
    main()
