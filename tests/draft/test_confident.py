"""The rule that verifies drafts where the lattice is sure of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdraft import (
    AdaptiveDrafter,
    ConfidentDrafter,
    Lattice,
    Model,
    NgramDrafter,
    NoDraft,
    generate,
)
from jaxdraft.base import NO_TOKEN, Drafter
from jaxdraft.testing import LatticeDrafter, TableTarget, assert_lossless, check_stats, tiny_model
from tests.draft.test_block_drafter import feed, rows
from tests.engine.helpers import assert_engine_equals_generate
from tests.test_generate import compilations

VOCAB, K, C = 12, 4, 3
SEEDS = st.integers(0, 2**31 - 1)


def random_lattice(seed: int, batch: int = 3) -> Lattice:
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(batch, K, C, C), scale=rng.uniform(0.1, 6)).astype(np.float32)
    scores[:, 0] = scores[:, 0, :1]
    candidates = np.stack([rng.permutation(VOCAB)[:C] for _ in range(batch * K)])
    return Lattice(
        jnp.asarray(candidates.reshape(batch, K, C), jnp.int32), jnp.asarray(scores, jnp.float32)
    )


def width_in_python(scores: np.ndarray, round_cost: float, draft_cost: float) -> tuple[int, float]:
    """The best n of one row, and by how much it is better than the second best."""
    previous, accept_prob, tokens = 0, 1.0, 1.0
    worth = [1.0]
    for k in range(K):
        row = scores[k, previous].astype(np.float64)
        previous = int(row.argmax())
        accept_prob *= float(np.exp(row - row.max()).max() / np.exp(row - row.max()).sum())
        tokens += accept_prob
        worth.append(tokens / (1 + round_cost + (k + 1) * draft_cost))
    order = sorted(worth, reverse=True)
    return int(np.argmax(worth)), order[0] - order[1]


@given(seed=SEEDS, round_cost=st.floats(0, 3, width=16), draft_cost=st.floats(0, 1, width=16))
def test_the_rule(seed: int, round_cost: float, draft_cost: float) -> None:
    lattice = random_lattice(seed)
    drafter = ConfidentDrafter(NgramDrafter(), round_cost, draft_cost)
    found = drafter.width(lattice)
    for row, scores in enumerate(np.asarray(lattice.scores)):
        expected, lead = width_in_python(scores, round_cost, draft_cost)
        assert int(found[row]) == expected or lead < 1e-5


def test_the_example_of_the_docstring() -> None:
    def lattice(first: float, second: float) -> Lattice:
        rows = []
        for share in (first, second):  # three candidates: the best has the share, the others less
            rows.append(np.log([share, (1 - share) / 2, (1 - share) / 2]))
        scores = np.broadcast_to(np.asarray(rows, np.float32)[:, None], (2, 3, 3))
        return Lattice(jnp.zeros((1, 2, 3), jnp.int32), jnp.asarray(scores[None]))

    drafter = ConfidentDrafter(NgramDrafter(), round_cost=0.5)
    np.testing.assert_allclose(drafter.shares(lattice(0.4, 0.5)), [[0.4, 0.5]], rtol=1e-5)
    assert drafter.width(lattice(0.4, 0.5)).tolist() == [2]
    assert drafter.width(lattice(0.4, 0.5), jnp.asarray([1])).tolist() == [0]
    # The best of three has a third at least: 1.34 + 0.34 * 0.4 is less than 1.5.
    assert drafter.width(lattice(0.34, 0.4)).tolist() == [0]


def test_scores_that_are_not_finite_promise_nothing() -> None:
    lattice = random_lattice(0)
    broken = replace(lattice, scores=lattice.scores.at[1, 1].set(jnp.nan))
    drafter = ConfidentDrafter(NgramDrafter(), round_cost=0.0)
    shares = drafter.shares(broken)
    assert np.isfinite(shares).all() and (np.asarray(shares)[1, 1:] == 0).any()
    assert int(drafter.width(broken)[1]) <= 1


@pytest.mark.parametrize("cost", [0.0, 1.2, 50.0])
def test_tokens_stay_and_rounds_are_counted(cost: float) -> None:
    """Never, sometimes, always silent; a silent round has one row and a reason."""
    target = TableTarget.random(jax.random.key(0), VOCAB)
    inner = LatticeDrafter.random(jax.random.key(1), VOCAB, K, C)
    model = Model.of(target, ConfidentDrafter(inner, round_cost=cost))
    prompts = [[1, 2], [3, 4, 5], [6]]
    assert_lossless(model, model.drafter, prompts, max_new_tokens=40)
    out = generate(model, prompts, max_new_tokens=40)
    check_stats(out.stats)
    silent = int(np.asarray(out.stats.undrafted)[..., NoDraft.PAUSED].sum())
    rounds = int(np.asarray(out.stats.rounds).sum())
    assert {0.0: silent == 0, 1.2: 0 < silent < rounds, 50.0: silent > 0.9 * rounds}[cost]


def test_what_is_cut_is_no_token() -> None:
    model = tiny_model("dflash2")
    drafter = ConfidentDrafter(model.drafter, round_cost=100.0)
    assert isinstance(drafter, Drafter) and drafter.declines
    _, proposal, info = drafter.step(drafter.init(1, 64), feed(rows(model.drafter, 3)))  # type: ignore[arg-type]
    assert proposal.length.tolist() == [0] and (np.asarray(proposal.tokens) == NO_TOKEN).all()
    assert info.reason.tolist() == [NoDraft.PAUSED]


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_around_a_block_drafter_and_inside_an_adaptive_one(kind: str) -> None:
    model = tiny_model(kind)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    for drafter in (
        ConfidentDrafter(model.drafter, round_cost=0.3),
        AdaptiveDrafter(ConfidentDrafter(model.drafter, round_cost=0.3)),
    ):
        assert_lossless(model, drafter, prompts, max_new_tokens=30)


def test_the_engine_runs_it() -> None:
    model = tiny_model("dflash2")
    drafter = ConfidentDrafter(model.drafter, round_cost=0.3)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [7] * 9]
    assert_engine_equals_generate(model, drafter, prompts)


def test_numbers_compile_nothing() -> None:
    target = TableTarget.random(jax.random.key(0), VOCAB)
    inner = LatticeDrafter.random(jax.random.key(1), VOCAB, K, C)
    model = Model.of(target)

    def run(cost: float) -> None:
        generate(model, [[1, 2]], max_new_tokens=8, drafter=ConfidentDrafter(inner, cost))

    run(0.1)
    assert compilations(lambda: run(0.9)) == []


def test_a_drafter_without_a_lattice() -> None:
    model = Model.of(TableTarget.random(jax.random.key(0), VOCAB))
    with pytest.raises(
        ValueError, match="inner is a NgramDrafter, whose proposals have no lattice"
    ):
        generate(model, [[1, 2]], max_new_tokens=4, drafter=ConfidentDrafter(NgramDrafter()))


@pytest.mark.parametrize("name", ["round_cost", "draft_cost"])
def test_costs_that_make_no_sense(name: str) -> None:
    values: dict[str, Any] = {name: -0.1}
    with pytest.raises(ValueError, match=f"{name} is -0.1; expected at least 0"):
        ConfidentDrafter(NgramDrafter(), **values)
