"""Two drafters, the second where the first is silent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from hypothesis import given
from hypothesis import strategies as st

import jaxdraft
from jaxdraft import (
    AdaptiveDrafter,
    ConfidentDrafter,
    FallbackDrafter,
    Model,
    NgramDrafter,
    NoDraft,
    Sampling,
    generate,
)
from jaxdraft.base import NO_TOKEN, Drafter, DraftInfo, Feed, Proposal, Support
from jaxdraft.testing import LatticeDrafter, TableTarget, assert_lossless, check_stats, tiny_model
from tests.engine.helpers import assert_engine_equals_generate
from tests.test_generate import compilations

VOCAB = 12
BATCH = 4


@struct.dataclass
class Scripted:
    """Proposes what it is told, as far as a row wants; its state counts the committed rows."""

    tokens: jax.Array  # [B, K]
    length: jax.Array  # [B]
    support: Support | None = None

    @property
    def draft_tokens(self) -> int:
        return self.tokens.shape[1]

    def init(self, batch: int, capacity: int) -> jax.Array:
        del capacity
        return jnp.zeros((batch,), jnp.int32)

    def ingest(self, state: jax.Array, feed: Feed) -> jax.Array:
        return state + feed.count

    def propose(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        length = jnp.where(feed.wants_draft, jnp.minimum(self.length, feed.limit), 0)
        kept = jnp.arange(self.draft_tokens)[None] < length[:, None]
        silent = jnp.where(feed.wants_draft, NoDraft.NO_MATCH, NoDraft.UNWANTED)
        reason = jnp.where(length > 0, NoDraft.DRAFTED, silent)
        tokens = jnp.where(kept, self.tokens, NO_TOKEN)
        info = DraftInfo(reason.astype(jnp.int32), jnp.asarray(1, jnp.int32))
        return state, Proposal(tokens, length, support=self.support), info

    def step(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        return self.propose(self.ingest(state, feed), feed)


def scripted(rng: np.random.Generator, drafts: int, candidates: int | None) -> Scripted:
    """Random drafts, perhaps drawn from something."""
    tokens = rng.integers(0, VOCAB, (BATCH, drafts))
    support = None
    if candidates is not None:
        others = (tokens[..., None] + np.arange(candidates)) % VOCAB
        probs = rng.dirichlet(np.ones(candidates), (BATCH, drafts))
        support = Support(jnp.asarray(others, jnp.int32), jnp.asarray(probs, jnp.float32))
    length = jnp.asarray(rng.integers(0, drafts + 1, BATCH), jnp.int32)
    return Scripted(jnp.asarray(tokens, jnp.int32), length, support)


def asked(limits: list[int], wants: list[bool]) -> Feed:
    one = jnp.ones((BATCH,), jnp.int32)
    return Feed(
        aux=None,
        count=one,
        first_position=one,
        anchor=one,
        wants_draft=jnp.asarray(wants),
        limit=jnp.asarray(limits, jnp.int32),
    )


@given(
    seed=st.integers(0, 2**31 - 1),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    candidates=st.tuples(*[st.sampled_from([None, 1, 3])] * 2),
    limits=st.lists(st.integers(0, 3), min_size=BATCH, max_size=BATCH),
    wants=st.lists(st.booleans(), min_size=BATCH, max_size=BATCH),
)
def test_every_row_is_that_of_the_first_that_speaks(
    seed: int, sizes: Any, candidates: Any, limits: list[int], wants: list[bool]
) -> None:
    rng = np.random.default_rng(seed)
    first, second = (scripted(rng, *pair) for pair in zip(sizes, candidates, strict=True))
    drafter, feed = FallbackDrafter(first, second), asked(limits, wants)
    assert isinstance(drafter, Drafter) and drafter.draft_tokens == max(sizes)
    state, proposal, info = drafter.step(drafter.init(BATCH, 8), feed)
    assert [s.tolist() for s in state] == [[1] * BATCH] * 2, "both take everything in"
    assert int(info.forwards) == 2
    alone = [one.step(one.init(BATCH, 8), feed) for one in (first, second)]
    for row in range(BATCH):
        _, expected, said = alone[0] if int(alone[0][1].length[row]) else alone[1]
        length = int(expected.length[row])
        assert int(proposal.length[row]) == length
        assert proposal.tokens[row, :length].tolist() == expected.tokens[row, :length].tolist()
        assert (np.asarray(proposal.tokens[row, length:]) == NO_TOKEN).all()
        assert int(info.reason[row]) == int(said.reason[row])
        for k in range(length):
            assert chances(proposal, row, k) == pytest.approx(chances(expected, row, k))


def chances(proposal: Proposal, row: int, k: int) -> dict[int, float]:
    """What a draft was drawn from: all the mass on it where nothing is said."""
    if proposal.support is None:
        return {int(proposal.tokens[row, k]): 1.0}
    pairs = zip(
        proposal.support.tokens[row, k].tolist(),
        proposal.support.probs[row, k].tolist(),
        strict=True,
    )
    return {token: mass for token, mass in pairs if token != NO_TOKEN}


@pytest.mark.parametrize("kind", ["dflash2", "dspark", "mtp"])
def test_lossless_around_every_kind(kind: str) -> None:
    model = tiny_model(kind)
    prompts = [[3, 1, 4, 1, 5, 3, 1], [9, 2, 6, 9, 2], [7]]
    first = NgramDrafter(1, 3, 2)
    for drafter in (
        FallbackDrafter(first, model.drafter),
        AdaptiveDrafter(FallbackDrafter(first, model.drafter)),
        FallbackDrafter(AdaptiveDrafter(first), model.drafter),
        FallbackDrafter(model.drafter, first),
        FallbackDrafter(replace(first, draft_tokens=9), model.drafter),
    ):
        assert_lossless(model, drafter, prompts, max_new_tokens=30)


def test_around_a_confident_drafter() -> None:
    model = tiny_model("dflash2")
    second = ConfidentDrafter(model.drafter, round_cost=0.3)
    drafter = FallbackDrafter(NgramDrafter(1, 3, 3), second)
    assert drafter.declines and not FallbackDrafter(NgramDrafter(), model.drafter).declines
    assert_lossless(model, drafter, [[3, 1, 4, 1, 5], [9, 2, 6]], max_new_tokens=30)


def test_where_a_text_repeats_the_lookup_drafts_and_elsewhere_the_other() -> None:
    """A chain over few states repeats itself; the lattice knows it from the first token on."""
    target = TableTarget.random(jax.random.key(3), 6, rows=31)
    inner = LatticeDrafter.random(jax.random.key(1), 6, 4, 3)
    model = Model.of(target)
    rounds = {}
    for name, drafter in {
        "ngram": NgramDrafter(2, 4, 4),
        "lattice": inner,
        "both": FallbackDrafter(NgramDrafter(2, 4, 4), inner),
    }.items():
        out = generate(model, [[1, 2], [3, 4]], max_new_tokens=60, drafter=drafter)
        check_stats(out.stats)
        rounds[name] = int(out.stats.rounds.sum())
    assert rounds["both"] <= min(rounds["ngram"], rounds["lattice"])


def test_sampled_rows_and_greedy_rows_together() -> None:
    model = tiny_model("dflash2")
    drafter = FallbackDrafter(NgramDrafter(1, 3, 3), model.drafter)
    prompts = [[3, 1, 4, 1, 5, 3, 1], [3, 1, 4, 1, 5, 3, 1]]
    sampling = Sampling(temperature=[0.0, 1.0])
    out = generate(
        model, prompts, max_new_tokens=30, drafter=drafter, sampling=sampling, key=1, stop_ids=()
    )
    plain = generate(model, prompts[:1], max_new_tokens=30, drafter="none", stop_ids=())
    assert out.ids()[0] == plain.ids()[0]
    assert out.lengths.tolist() == [30, 30]


def test_by_name_and_with_another_number_of_drafts() -> None:
    model = tiny_model("dflash2")
    drafter = model.choose("ngram+auto")
    assert isinstance(drafter, FallbackDrafter)
    assert isinstance(drafter.first, NgramDrafter) and drafter.second is model.drafter
    fewer = model.choose("ngram+auto", 2)
    assert isinstance(fewer, FallbackDrafter) and fewer.draft_tokens == 2
    assert (fewer.first.draft_tokens, fewer.second.draft_tokens) == (2, 2)
    out = generate(model, [[1, 2, 1, 2]], max_new_tokens=12, drafter="ngram+auto", draft_tokens=2)
    assert out.stats.accepted_at.shape == (1, 2)
    with pytest.raises(ValueError, match=r"drafter 'dspark' is unknown.*joined by a plus"):
        model.choose("ngram+dspark")
    with pytest.raises(ValueError, match="the K of this Scripted is fixed at 3"):
        fixed = scripted(np.random.default_rng(0), 3, None)
        model.choose(FallbackDrafter(NgramDrafter(), fixed), 2)


@pytest.mark.parametrize("kind", ["dflash2", "mtp"])
def test_the_engine_runs_it(kind: str) -> None:
    model = tiny_model(kind)
    drafter = FallbackDrafter(NgramDrafter(1, 3, 2), model.drafter)
    prompts = [[3, 1, 4, 1, 5] * 3, [9, 2, 6], [7] * 9, [3, 1, 4, 1, 5] * 3]
    assert_engine_equals_generate(model, drafter, prompts)


def test_other_weights_compile_nothing() -> None:
    model = tiny_model("dflash2")

    def run(scale: float) -> None:
        params = jax.tree.map(lambda x: x * scale, model.drafter.backbone.params)  # type: ignore[attr-defined]
        backbone = replace(model.drafter.backbone, params=params)  # type: ignore[attr-defined]
        second = replace(model.drafter, backbone=backbone)  # type: ignore[type-var]
        drafter = FallbackDrafter(NgramDrafter(), second)  # type: ignore[arg-type]
        jaxdraft.generate(model, [[1, 2]], max_new_tokens=8, drafter=drafter)

    run(1.0)
    assert compilations(lambda: run(0.5)) == []
