"""Every converted target reproduces the reference outputs of its own graph in float32."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import Loaded, load_artifact
from jaxdraft.target import DecoderTarget
from tests.paths import artifact, artifact_names

TOLERANCE = 5e-4  # what two correct float32 runs differ by
ILL_CONDITIONED = 2e-3  # the reference of eight layers is 5e-4 away from a float64 run of its graph
CHUNK = 128


def run_prompts(
    loaded: Loaded, prompts: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """All rows of all prompts as one padded batch, fed in chunks and committed between them.

    Returns:
      logits [B, T, V], aux [B, T, A] or None, hidden [B, T, D].
    """
    target = DecoderTarget(loaded.target, loaded.target_config, jnp.dtype(jnp.float32))
    lengths = np.array([len(p) for p in prompts])
    chunk = min(CHUNK, 1 << int(lengths.max() - 1).bit_length())
    steps = -(-int(lengths.max()) // chunk)
    tokens = np.zeros((len(prompts), steps * chunk), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt

    @jax.jit
    def step(target, tokens, count, state):
        out = target.forward(tokens, count, state)
        return out.logits, out.aux, out.hidden, target.commit(out.state, count)

    state = target.init(len(prompts), steps * chunk)
    found = []
    for start in range(0, steps * chunk, chunk):
        count = np.clip(lengths - start, 0, chunk).astype(np.int32)
        *rows, state = step(target, jnp.asarray(tokens[:, start : start + chunk]), count, state)
        found.append([None if r is None else np.asarray(r) for r in rows])
    logits, aux, hidden = (
        None if part[0] is None else np.concatenate(part, axis=1)
        for part in zip(*found, strict=True)
    )
    return logits, aux, hidden


def golden(folder: Path) -> dict[str, np.ndarray]:
    """The reference outputs beside an artifact."""
    with np.load(folder / "golden.npz") as file:
        return {name: file[name] for name in file.files}


def prompt_ids(expected: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The prompts of the reference outputs, in order."""
    count = sum(name.startswith("prompt") and name.endswith("/ids") for name in expected)
    return [expected[f"prompt{i}/ids"] for i in range(count)]


@pytest.mark.parametrize("name", artifact_names())
def test_prompts_give_the_reference_logits_and_states(name: str) -> None:
    folder = artifact(name)
    expected = golden(folder)
    prompts = prompt_ids(expected)
    assert len(prompts) == 4
    tolerance = ILL_CONDITIONED if "_8l_" in name else TOLERANCE
    loaded = load_artifact(folder, dtype="float32")
    logits, aux, hidden = run_prompts(loaded, prompts)
    for i, ids in enumerate(prompts):
        start = int(expected.get(f"prompt{i}/logits_from", 0))
        found = {"logits": logits[i, start : len(ids)], "hidden": hidden[i, : len(ids)]}
        if aux is not None:
            found["aux"] = aux[i, : len(ids)]
        for what in ("logits", "aux", "hidden"):
            reference = expected.get(f"prompt{i}/{what}")
            if reference is None:
                continue
            np.testing.assert_allclose(
                found[what],
                reference,
                rtol=0,
                atol=tolerance,
                err_msg=f"{name}, prompt {i}, {what}",
            )
