"""Exported models with kernels, against the reference outputs that hold the XLA path.

Windows of a few rows run in the kernels, interpreted, and prompts on the XLA path. The artifacts
have paged and dense caches, a target's and a drafter's windows, delta nets, and every drafter.
"""

from __future__ import annotations

import numpy as np
import pytest

import jaxdraft
from tests.paths import artifact


def load(name: str, *, packed: bool = False) -> tuple[jaxdraft.Model, dict[str, np.ndarray]]:
    with np.load(artifact(name) / "golden.npz") as stored:
        golden = {key: stored[key] for key in stored.files}
    with pytest.warns(UserWarning, match="interpreted"):
        model = jaxdraft.load(artifact(name), dtype="float32", kernels="pallas", packed=packed)
    return model, golden


@pytest.mark.parametrize(
    "name",
    ["patched_fp32_paged_dflash2_sw", "patched_fp32_paged_dspark", "qwen35_fp32_cpu_mtp"],
)
def test_rounds_accept_what_the_reference_accepted(name: str) -> None:
    model, golden = load(name)
    prompt = golden[f"prompt{int(golden['e2e/prompt'])}/ids"].tolist()
    out = jaxdraft.generate(
        model, [prompt], max_new_tokens=40, stop_ids=(), draft_limit=7, trace=True
    )
    assert out.ids()[0] == golden["e2e/tokens"].tolist()
    assert np.asarray(out.trace.accepted)[0].tolist() == golden["e2e/accepted"].tolist()


@pytest.mark.parametrize(
    ("name", "packed"), [("sliding_qwen3_paged_fp16", False), ("qwen35_int4_cpu", True)]
)
def test_a_ragged_batch_of_steps_gives_the_reference_tokens(name: str, packed: bool) -> None:
    model, golden = load(name, packed=packed)
    prompts = [golden[f"prompt{i}/ids"].tolist() for i in range(4)]
    out = jaxdraft.generate(model, prompts, max_new_tokens=40, stop_ids=())
    for i, found in enumerate(out.ids()):
        assert (golden[f"greedy{i}/margins"] >= 1e-3).all()
        assert found == golden[f"greedy{i}/tokens"].tolist()
