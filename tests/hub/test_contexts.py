"""The length of a target's context, which in LongRoPE decides about the tables; its stop ids."""

from __future__ import annotations

import numpy as np
import pytest

import jaxdraft
from convert.checkpoint.config import read_target
from convert.errors import Problems
from convert.unused import Remarks
from tests.hub import helpers

PHI = "phi4_mini"


def test_longrope_has_tables_for_short_texts_by_default() -> None:
    config = helpers.load(PHI, drafter="none").target.config
    assert config.context_length == 128 and not config.rope.long
    (note,) = (text for text in jaxdraft.inspect(helpers.DATA / PHI).notes if "longrope" in text)
    assert "128 tokens" in note and "load(context_length=...)" in note and "4096" in note


def test_a_longer_context_takes_the_factors_for_long_texts() -> None:
    target = helpers.load(PHI, drafter="none", context_length=300).target
    assert target.config.context_length == 300 and target.config.rope.long
    cos = np.asarray(target.decoder.params["rotary"]["cos"])
    assert cos.shape == (300, 6)
    divisors = np.array([2.054, 11.493, 20.756, 23.43, 26.24, 26.601])
    turns = 1 / (divisors * 10000.0 ** (np.arange(6) / 6))
    scale = np.sqrt(1 + np.log(4096 / 128) / np.log(128))
    np.testing.assert_allclose(cos[200], scale * np.cos(200 * turns), atol=2e-5)


def test_any_target_can_have_a_shorter_context() -> None:
    target = helpers.load("qwen25_tied", drafter="none", context_length=77).target
    assert target.context_length == 77
    assert target.decoder.params["rotary"]["cos"].shape == (77, 8)


@pytest.mark.parametrize("wanted", [0, -1, 4097, True, 1.5])
def test_lengths_that_the_file_does_not_allow(wanted: object) -> None:
    with pytest.raises(ValueError, match="max_position_embeddings: found 4096, and context_length"):
        jaxdraft.load(helpers.DATA / PHI, context_length=wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inner", "outer", "stops"),
    [
        ({}, {}, (1,)),
        ({}, {"eos_token_id": [1, 6]}, (1, 6)),
        ({"eos_token_id": 3}, {"eos_token_id": 6}, (3,)),
    ],
)
def test_stop_ids_of_a_part_and_of_the_whole(
    inner: dict[str, object], outer: dict[str, object], stops: tuple[int, ...]
) -> None:
    """The text model's own come first, then those of the whole, then the default of the class."""
    body = {"model_type": "gemma3", "text_config": inner, **outer}
    problems, remarks = Problems(), Remarks()
    facts = read_target(body, head_stored=False, problems=problems, remarks=remarks)
    assert facts.stop_ids == stops and not problems and not remarks.warnings
