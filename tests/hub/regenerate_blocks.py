"""Compute the numbers of block drafters again: ``python -m tests.hub.regenerate_blocks``.

The prompts are those of the arrays that lie there. Arrays, for each prompt i and R rounds:

  ``prompt{i}_ids``               the prompt, int32
  ``prompt{i}_block_tokens``      what is emitted, int32
  ``prompt{i}_block_drafts``      [R, K] int32
  ``prompt{i}_block_accepted``    [R] int32
  ``prompt{i}_block_candidates``  [R, K, 4] int32, the best target ids of each draft
  ``prompt{i}_block_scores``      [R, K, 4] float32, theirs
  ``prompt{i}_block_trust``       [R, K] float32, logits of the confidence head, if there is one
"""

from __future__ import annotations

import numpy as np

from tests.hub.helpers import DATA, Golden, folders, golden, prompts
from tests.hub.reference_blocks import Drafter, Target, rounds

TARGET = "target_qwen3"
ROUNDS, BEST = 6, 4
SURE = 2e-3
"""Least difference between a best score and the next: float32 programs agree on all choices."""


def compute(name: str, texts: dict[str, list[int]]) -> Golden:
    """Return the arrays of a folder for some prompts."""
    drafter, arrays = Drafter(DATA / name, Target(DATA / TARGET)), {}
    for prompt, ids in texts.items():
        text, found = rounds(drafter, ids, ROUNDS, BEST)
        assert min(each.margin for each in found) > SURE, (name, prompt)
        columns = {
            "tokens": np.asarray(text[len(ids) :], np.int32),
            "drafts": np.asarray([each.drafts for each in found], np.int32),
            "accepted": np.asarray([each.accepted for each in found], np.int32),
            "candidates": np.asarray([each.candidates for each in found], np.int32),
            "scores": np.asarray([each.scores for each in found], np.float32),
        }
        if found[0].trust is not None:
            columns["trust"] = np.asarray([each.trust for each in found], np.float32)
        arrays[f"{prompt}_ids"] = np.asarray(ids, np.int32)
        arrays |= {f"{prompt}_block_{key}": value for key, value in columns.items()}
    return arrays


def main() -> None:
    """Write ``golden.npz`` of every block drafter."""
    for name in folders("block_drafts"):
        old = golden(name)
        texts = {prompt: old[f"{prompt}_ids"].tolist() for prompt in prompts(old)}
        np.savez_compressed(DATA / name / "golden.npz", **compute(name, texts))


if __name__ == "__main__":
    main()
