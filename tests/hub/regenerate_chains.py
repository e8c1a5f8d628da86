"""Compute the numbers of chained drafters again: ``python -m tests.hub.regenerate_chains``.

The prompts are those of the arrays that lie there. Arrays, for each prompt i and R rounds:

  ``prompt{i}_ids``               the prompt, int32
  ``prompt{i}_chain_tokens``      what is emitted, int32
  ``prompt{i}_chain_drafts``      [R, K] int32
  ``prompt{i}_chain_accepted``    [R] int32
  ``prompt{i}_chain_candidates``  [R, K, 4] int32, the best target ids of each draft
  ``prompt{i}_chain_scores``      [R, K, 4] float32, theirs
"""

from __future__ import annotations

import functools

import numpy as np

from tests.hub.helpers import DATA, Golden, folders, golden, prompts
from tests.hub.reference_blocks import rounds
from tests.hub.reference_chains import DraftModel, Eagle3, LanguageModel, language_model

TARGETS = {
    "draft_model_llama32": "target_llama31",
    "eagle3_llama": "target_llama31",
    "eagle3_specforge": "target_qwen3",
    "speculators_eagle3_norms": "target_qwen3",
}
ROUNDS, BEST, DRAFTS = 6, 4, 4
SURE = 2e-3
"""Least difference between a best score and the next: float32 programs agree on all choices."""


@functools.cache
def target(name: str) -> LanguageModel:
    """Return a target."""
    return language_model(DATA / name)


def compute(name: str, texts: dict[str, list[int]]) -> Golden:
    """Return the arrays of a folder for some prompts."""
    make = DraftModel if name.startswith("draft_model") else Eagle3
    drafter, arrays = make(DATA / name, target(TARGETS[name]), DRAFTS), {}
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
        arrays[f"{prompt}_ids"] = np.asarray(ids, np.int32)
        arrays |= {f"{prompt}_chain_{key}": value for key, value in columns.items()}
    return arrays


def main() -> None:
    """Write ``golden.npz`` of every chained drafter."""
    for name in folders("chain_drafts"):
        old = golden(name)
        texts = {prompt: old[f"{prompt}_ids"].tolist() for prompt in prompts(old)}
        np.savez_compressed(DATA / name / "golden.npz", **compute(name, texts))


if __name__ == "__main__":
    main()
