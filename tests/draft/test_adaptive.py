"""The rule that drafts only as far as it pays: what it learns and what it may look at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdraft import AdaptiveDrafter, Feed, Model, NgramDrafter, NoDraft, generate
from jaxdraft.testing import (
    ScriptedDrafter,
    TableDrafter,
    TableTarget,
    check_stats,
    tiny_model,
)
from tests.examples import examples
from tests.properties.test_lossless import greedy_in_python
from tests.test_generate import compilations

VOCAB, K, NEW = 12, 4, 60
SEEDS = st.integers(0, 2**31 - 1)


def scripted(model: Model, prompts: list[list[int]], right: np.ndarray) -> ScriptedDrafter:
    truth = np.zeros(right.shape, np.int32)
    for row, prompt in enumerate(prompts):
        text = prompt + greedy_in_python(model, prompt, NEW + K + 1, ())
        truth[row, : len(text)] = text
    return ScriptedDrafter(jnp.asarray(truth), jnp.asarray(right), VOCAB, K)


def table_model(seed: int = 0) -> Model:
    return Model.of(TableTarget.random(jax.random.key(seed), VOCAB))


class Rule:
    """The rule in plain Python, for one row."""

    def __init__(self, drafter: AdaptiveDrafter):
        self.drafter, self.rate, self.cut, self.proposed = drafter, [float(drafter.start)] * K, 0, 0

    def learn(self, accepted: int) -> None:
        for place in range(self.proposed):
            if place <= accepted:
                stood = 1.0 if place < accepted else 0.0
                self.rate[place] += float(self.drafter.gain) * (stood - self.rate[place])
        self.proposed = 0

    def width(self, limit: int) -> int:
        if limit == 0:
            return 0
        best, best_value = 0, 1.0
        tokens, accept_prob = 1.0, 1.0
        for n in range(1, K + 1):
            accept_prob *= self.rate[n - 1]
            tokens += accept_prob
            d = self.drafter
            value = tokens / (1.0 + float(d.round_cost) + n * float(d.draft_cost))
            if value > best_value + 1e-6:
                best, best_value = n, value
        full = self.cut + 1 >= self.drafter.probe_every
        width = limit if full else min(best, limit)
        self.cut = self.cut + 1 if width < limit else 0
        self.proposed = width
        return width


@settings(max_examples=examples(20))
@given(
    seed=SEEDS,
    share=st.floats(0, 1),
    costs=st.sampled_from([(0.25, 0.1), (0.0, 0.0), (0.0, 0.4), (3.0, 1.0)]),
    probe=st.sampled_from([2, 5, 16]),
)
def test_against_the_rule_in_python(
    seed: int, share: float, costs: tuple[float, float], probe: int
) -> None:
    """Rounds, proposed and accepted drafts of every row; the tokens are the target's own."""
    model, prompts = table_model(seed % 50), [[1, 2, 3], [4]]
    right = np.random.default_rng(seed).random((2, 96)) < share
    drafter = AdaptiveDrafter(scripted(model, prompts, right), *costs, probe_every=probe)
    out = generate(model, prompts, max_new_tokens=NEW, drafter=drafter, trace=True)
    assert out.ids() == [greedy_in_python(model, p, NEW, ()) for p in prompts]
    check_stats(out.stats)
    for row, prompt in enumerate(prompts):
        rule, position, proposed, paused, accepts = Rule(drafter), len(prompt) + 1, 0, 0, []
        while (left := len(prompt) + NEW - position) > 0:
            limit = min(K, left - 1)
            width = rule.width(limit)
            proposed += width
            paused += int(limit > 0 and width == 0)
            run = 0
            while run < width and right[row, position + run]:
                run += 1
            rule.learn(run)
            accepts.append(run)
            position += run + 1
        assert out.trace is not None
        found = np.asarray(out.trace.accepted)[row]
        assert found[found >= 0].tolist() == accepts
        assert int(out.stats.proposed[row]) == proposed
        assert int(out.stats.undrafted[row, NoDraft.PAUSED]) == paused


def test_useless_drafts_are_given_up_and_probed_for() -> None:
    model, prompt = table_model(), [1, 2, 3]
    wrong = scripted(model, [prompt], np.zeros((1, 96), bool))
    drafter = AdaptiveDrafter(wrong, probe_every=8)
    out = generate(model, [prompt], max_new_tokens=NEW, drafter=drafter)
    always = generate(model, [prompt], max_new_tokens=NEW, drafter=wrong)
    assert int(always.stats.proposed[0]) == 4 * (NEW - 5) + 3 + 2 + 1
    assert int(out.stats.proposed[0]) < 60
    assert 5 <= int(out.stats.drafter_forwards) < 16, "it keeps looking, seldom"


def test_useful_drafts_are_kept_and_come_back() -> None:
    """All right: full width always. Right from the middle on: found out again."""
    model, prompt = table_model(), [1, 2, 3]
    right = np.ones((1, 96), bool)
    plain = generate(model, [prompt], max_new_tokens=NEW, drafter=scripted(model, [prompt], right))
    drafter = AdaptiveDrafter(scripted(model, [prompt], right))
    out = generate(model, [prompt], max_new_tokens=NEW, drafter=drafter)
    assert int(out.stats.rounds[0]) == int(plain.stats.rounds[0])
    right[:, :24] = False
    drafter = AdaptiveDrafter(scripted(model, [prompt], right), probe_every=4, gain=0.5)
    out = generate(model, [prompt], max_new_tokens=NEW, drafter=drafter, trace=True)
    assert out.trace is not None
    # The last two rounds may be short of tokens to emit.
    assert np.asarray(out.trace.accepted)[0, -3] == K


def test_it_looks_at_the_past_only() -> None:
    """Neither the tokens that are about to be verified nor their scores change what it asks for."""
    tables = [TableDrafter.random(jax.random.key(i), VOCAB, K) for i in range(2)]
    widths = []
    for inner in tables:
        drafter = AdaptiveDrafter(inner, probe_every=5)
        state = drafter.init(2, 64)
        rng, found = np.random.default_rng(0), []
        for _ in range(40):
            # Mostly one row: nothing accepted.
            count = 1 + rng.integers(0, np.asarray(state.proposed) + 1) * (rng.random(2) < 0.3)
            feed = Feed(
                aux=None,
                count=jnp.asarray(count, jnp.int32),
                first_position=jnp.full((2,), 5, jnp.int32),
                anchor=jnp.asarray(np.random.default_rng().integers(0, VOCAB, 2), jnp.int32),
                wants_draft=jnp.ones((2,), bool),
                limit=jnp.asarray([K, 2], jnp.int32),
            )
            state, proposal, _ = drafter.step(state, feed)
            found.append(proposal.length.tolist())
        widths.append(found)
    assert widths[0] == widths[1]
    assert len({tuple(w) for w in widths[0]}) > 2, "it asked for the same all the time"


def test_a_row_learns_from_its_own_rounds_once() -> None:
    """A prompt in pieces teaches nothing; a finished row's silence teaches nothing."""
    drafter = AdaptiveDrafter(TableDrafter.random(jax.random.key(0), VOCAB, K))
    state = drafter.init(2, 64)

    def feed(count: list[int], wants: list[bool]) -> Feed:
        return Feed(
            aux=None,
            count=jnp.asarray(count, jnp.int32),
            first_position=jnp.full((2,), 5, jnp.int32),
            anchor=jnp.zeros((2,), jnp.int32),
            wants_draft=jnp.asarray(wants),
            limit=jnp.full((2,), K, jnp.int32),
        )

    for _ in range(3):
        state = drafter.ingest(state, feed([9, 9], [False, False]))
    start = np.full((2, K), 0.8, np.float32)
    np.testing.assert_array_equal(state.rate, start)
    state, _, _ = drafter.step(state, feed([1, 1], [True, False]))
    assert state.proposed.tolist() == [K, 0]
    state = drafter.ingest(state, feed([3, 0], [True, False]))
    expected = start.copy()
    expected[0, :3] = [0.84, 0.84, 0.64]  # two stood, the third did not, the fourth is unknown
    np.testing.assert_allclose(state.rate, expected, atol=1e-6)
    again = drafter.ingest(state, feed([5, 1], [True, False]))
    np.testing.assert_array_equal(again.rate, state.rate)
    first = replace(feed([2, 0], [True, False]), first_position=jnp.zeros((2,), jnp.int32))
    np.testing.assert_array_equal(drafter.ingest(state, first).rate, start)  # another text


@pytest.mark.parametrize("kind", ["dflash2", "dspark", "mtp"])
def test_around_every_drafter(kind: str) -> None:
    model, prompts = tiny_model(kind), [[1, 2, 3], [4]]
    plain = generate(model, prompts, max_new_tokens=40, drafter="none")
    out = generate(model, prompts, max_new_tokens=40, drafter=AdaptiveDrafter(model.drafter))
    assert out.ids() == plain.ids()
    most = int(out.stats.rounds.sum()) * model.drafter.draft_tokens
    assert int(out.stats.proposed.sum()) < most / 2, "random drafts"
    if kind == "mtp":
        out = generate(model, prompts, drafter=AdaptiveDrafter(NgramDrafter()), max_new_tokens=40)
        assert out.ids() == plain.ids()


def test_its_numbers_compile_nothing() -> None:
    model = tiny_model("mtp", context_length=198)
    prompts, options = [[1, 2, 3]], dict[str, Any](max_new_tokens=20)
    drafter = AdaptiveDrafter(model.drafter)
    assert compilations(lambda: generate(model, prompts, drafter=drafter, **options))
    for changed in (
        replace(drafter, draft_cost=0.9),
        replace(drafter, round_cost=0.0, gain=0.5),
        replace(drafter, probe_every=3),
    ):
        assert compilations(lambda d=changed: generate(model, prompts, drafter=d, **options)) == []


@pytest.mark.parametrize(
    "wrong", [{"draft_cost": -0.1}, {"gain": 1.5}, {"probe_every": 0}, {"start": -1}]
)
def test_bad_numbers(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AdaptiveDrafter(NgramDrafter(), **wrong)
