"""Quantized checkpoints kept packed: the numbers of other programs, and saving.

``test_targets`` reads the same folders as floats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import jaxdraft
from jaxdraft.checkpoint import save
from jaxdraft.nn.packed import PackedLinear, PackedRows
from tests.hub import helpers

FOLDERS = {
    "llama_w4a16_asym": {("zeros",)},
    "qwen25_awq": {("zeros",)},
    "qwen25_gptq_act_order": {("zeros", "order")},
    "qwen3_fp8_ragged": {()},
}
"""Folders, and what their matrices have beside values and scales."""


def matrices(model: jaxdraft.Model) -> dict[Any, Any]:
    """Packed matrices of the target, by their path."""
    decoder = model.target.decoder()  # type: ignore[attr-defined]
    kinds = (PackedLinear, PackedRows)
    return {p: m for p, m in nnx.iter_modules(decoder) if isinstance(m, kinds)}


@pytest.mark.parametrize("name", FOLDERS)
def test_packed_matrices_have_the_same_numbers(name: str) -> None:
    wide = dict(nnx.iter_modules(helpers.load(name, drafter="none").target.decoder()))  # type: ignore[attr-defined]
    found = matrices(helpers.load(name, drafter="none", packed=True))
    layers = sum(hasattr(each, "mixer") for each in wide.values())
    assert len([path for path in found if "below" not in path]) == 4 * layers
    for path, matrix in found.items():
        if "below" not in path:
            expected: Any = wide[path]
            np.testing.assert_array_equal(matrix.dequantized(), expected.weight[...])
    kinds = [m for m in found.values() if isinstance(m, PackedLinear)]
    assert {matrix.form.parts[2:] for matrix in kinds} == FOLDERS[name]


def test_a_packed_target_gives_the_logits_and_tokens_of_another_program() -> None:
    """The one with most arrays; the products of the other forms are tests of their own."""
    name = "qwen25_gptq_act_order"
    model, arrays = helpers.load(name, drafter="none", packed=True), helpers.golden(name)
    (prompt,) = helpers.prompts(arrays)
    helpers.assert_logits(model, arrays, prompt)
    helpers.assert_tokens(model, arrays, prompt)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_packed_target_is_saved_and_read_back_equal(name: str, tmp_path: Path) -> None:
    model = helpers.load(name, drafter="none", packed=True)
    assert not save(model, tmp_path / "out").rounded
    again = jaxdraft.load(tmp_path / "out", packed=True, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, again.target, model.target)
    wide = jaxdraft.load(tmp_path / "out", dtype="float32")
    expected = helpers.load(name, drafter="none")
    jax.tree.map(np.testing.assert_array_equal, wide.target, expected.target)
    with pytest.raises(ValueError, match="int4 is True, and target: parameter layers.0.mixe"):
        save(model, tmp_path / "other", int4=True)
