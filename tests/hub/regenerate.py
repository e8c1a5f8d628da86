"""Compute the numbers of the targets in ``data`` again, with transformers in float32.

    python tests/hub/regenerate.py [--write] [FOLDER ...]

Prints the largest difference from the committed numbers; ``--write`` replaces them. Prompts are
those of the committed arrays. Quantized folders are left out: their numbers come from weights that
are dequantized first. Needs the ``full`` extra.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

DATA = Path(__file__).parent / "data"


def target_folders() -> list[str]:
    """Return the folders of targets that transformers reads as they are."""
    found = []
    for path in sorted(DATA.glob("*/golden.npz")):
        config = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
        logits = any(name.endswith("_logits") and "round" not in name for name in np.load(path))
        if logits and config.get("quantization_config") is None:
            found.append(path.parent.name)
    return found


def reference(folder: Path) -> Any:
    """Return the model, widened to float32, its attention written out."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = transformers.AutoModelForCausalLM
    if "vision_config" in config:
        kind = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.no_grad()
def numbers(model: Any, prompt: str, ids: np.ndarray, tokens: int) -> dict[str, np.ndarray]:
    """Return the arrays of a prompt: the whole text is run again for every token."""
    text, greedy, margins = ids.tolist(), [], []
    logits = model(torch.tensor([text])).logits[0].numpy()
    row = logits[-1]
    for _ in range(tokens):
        second, best = np.sort(row)[-2:]
        margins.append(best - second)
        greedy.append(int(row.argmax()))
        row = model(torch.tensor([text + greedy])).logits[0, -1].numpy()
    return {
        f"{prompt}_ids": ids,
        f"{prompt}_logits": logits,
        f"{prompt}_greedy": np.array(greedy, np.int32),
        f"{prompt}_margin": np.array(margins, np.float32),
    }


def again(model: Any, before: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of all prompts of the committed ones."""
    after: dict[str, np.ndarray] = {}
    for key in [key for key in before if key.endswith("_ids")]:
        prompt = key.removesuffix("_ids")
        after |= numbers(model, prompt, before[key], len(before[f"{prompt}_greedy"]))
    return after


def compare(
    name: str, before: dict[str, np.ndarray], after: dict[str, np.ndarray], *, write: bool
) -> None:
    """Print how the arrays of a folder differ from the committed ones, and replace these."""
    moved = max(np.abs(after[k] - before[k]).max() for k in after if k.endswith("_logits"))
    tokens = all(np.array_equal(after[k], before[k]) for k in after if k.endswith("_greedy"))
    print(f"{name}: logits differ by {moved:.1e}, tokens {'equal' if tokens else 'DIFFER'}")
    if write:
        np.savez_compressed(DATA / name / "golden.npz", allow_pickle=False, **before | after)


def main() -> None:
    """Compare, and write if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="*", default=target_folders())
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for name in options.folders:
        before = dict(np.load(DATA / name / "golden.npz"))
        after = again(reference(DATA / name), before)
        compare(name, before, after, write=options.write)


if __name__ == "__main__":
    main()
