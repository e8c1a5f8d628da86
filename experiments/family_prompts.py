"""Make the prompts that ship with the package, and the answers of its family.

    python experiments/family_prompts.py FOLDER --python PYTHON_WITH_TORCH [--out prompts.json]

``FOLDER`` is the output folder of ``train_family.py``. From each of six held-out files the first
cut is taken (``train_family.cuts``), or the next one if the target's two best logits come closer
than ``SURE`` anywhere. transformers computes the greedy tokens from the checkpoint, in float32, in
an interpreter that has it (``pip install torch==2.13.0 transformers==5.24.0 compressed-tensors``;
``.[full]`` has them). jaxdraft's greedy tokens must be the same with each drafter. The accepted
drafts of every round are jaxdraft's own.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from train_family import cuts

import jaxdraft
from jaxdraft import EMBEDDED

FILES = (
    "asyncio/locks.py",
    "bisect.py",
    "configparser.py",
    "csv.py",
    "difflib.py",
    "textwrap.py",
)
KINDS = ("dflash2", "dspark", "mtp")
NEW_TOKENS = 64
SURE = 1e-3  # logits; float32 sums in another order differ by less

# Run by another interpreter: nothing in it may need this project.
REFERENCE = """
import json, sys
import torch, transformers
folder, new_tokens = sys.argv[1], int(sys.argv[2])
made, info = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(
    folder, dtype=torch.float32, output_loading_info=True
)
for key in ("missing_keys", "mismatched_keys"):
    assert not info[key], (key, info[key])
made.eval()
found = []
for ids in json.load(sys.stdin):
    greedy, cache, rows = [], None, torch.tensor([ids])
    with torch.no_grad():
        for _ in range(new_tokens):
            out = made(rows, past_key_values=cache, use_cache=True)
            cache, rows = out.past_key_values, out.logits[:, -1:].argmax(-1)
            greedy.append(int(rows))
        # Without a cache to trust: every token is the best one after those before it.
        best = made(torch.tensor([ids + greedy]), use_cache=False).logits[0].topk(2)
    at = slice(len(ids) - 1, -1)
    assert best.indices[at, 0].tolist() == greedy
    margins = best.values[at, 0] - best.values[at, 1]
    found.append({"greedy": greedy, "min_margin": round(float(margins.min()), 4)})
versions = {"torch": torch.__version__, "transformers": transformers.__version__}
json.dump({"versions": versions, "prompts": found}, sys.stdout)
"""


def reference(python: str, target: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Return the greedy tokens of every prompt and their smallest margins, by transformers."""
    done = subprocess.run(
        [python, "-c", REFERENCE, str(target), str(NEW_TOKENS)],
        input=json.dumps(prompts),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(done.stdout)


def choose(folder: Path, python: str) -> dict[str, Any]:
    """Return one prompt per file with its greedy tokens."""
    candidates = cuts(folder)
    flat = [prompt for file in FILES for prompt in candidates[file]]
    answered = reference(python, folder / "checkpoint" / "target", flat)
    answers, prompts = iter(answered["prompts"]), []
    for file in FILES:
        pairs = [(ids, next(answers)) for ids in candidates[file]]
        sure = [pair for pair in pairs if pair[1]["min_margin"] >= SURE]
        if not sure:
            raise ValueError(f"{file}: the target hesitates after every cut")
        prompts.append({"file": file, "prompt_ids": sure[0][0], **sure[0][1]})
    about = {"new_tokens": NEW_TOKENS, "stop_ids": [], "versions": answered["versions"]}
    return {**about, "drafts_per_round": {}, "prompts": prompts}


def add_rounds(found: dict[str, Any], checkpoint: Path) -> None:
    """Add the texts, and the accepted drafts of every round with each drafter."""
    prompts = found["prompts"]
    for kind in KINDS:
        model = jaxdraft.load(checkpoint, drafter=kind)
        out = jaxdraft.generate(
            model,
            [prompt["prompt_ids"] for prompt in prompts],
            max_new_tokens=NEW_TOKENS,
            stop_ids=(),
            trace=True,
        )
        assert out.ids() == [prompt["greedy"] for prompt in prompts], kind
        assert out.trace is not None and model.text is not None
        for prompt, accepted in zip(prompts, np.asarray(out.trace.accepted), strict=True):
            prompt.setdefault("accepted", {})[kind] = accepted[accepted >= 0].tolist()
            prompt["text"] = model.text.decode(prompt["prompt_ids"], skip_special_tokens=False)
            prompt["greedy_text"] = model.text.decode(prompt["greedy"], skip_special_tokens=False)
        found["drafts_per_round"][kind] = model.drafter.draft_tokens
        print(kind, f"{jaxdraft.summarize(out.stats).tokens_per_round:.3f} tokens per round")


def write(found: dict[str, Any], path: Path) -> None:
    """Write JSON, with every list of numbers on one line."""
    text = json.dumps(found, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\n[\d\s,]+\]", lambda match: json.dumps(json.loads(match[0])), text)
    path.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Choose prompts, run both programs, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="of train_family.py")
    parser.add_argument("--python", default=sys.executable, help="has torch and transformers")
    parser.add_argument("--out", type=Path, default=EMBEDDED / "prompts.json")
    args = parser.parse_args()
    found = choose(args.folder, args.python)
    add_rounds(found, args.folder / "checkpoint")
    write(found, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
