"""Greedy speculative decoding emits the target's own greedy tokens, whatever the drafter does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdraft import AdaptiveDrafter, Model, generate, score, stream
from jaxdraft.base import Status
from jaxdraft.target import DecoderTarget
from jaxdraft.testing import (
    ScriptedDrafter,
    TableDrafter,
    TableTarget,
    assert_lossless,
    check_stats,
    experts_target_config,
    random_target,
    tiny_drafter,
    tiny_model,
    tiny_mtp,
    tiny_target_config,
)
from tests.examples import first

VOCAB = 12
NEW = 24
K = 4
SEEDS = st.integers(0, 2**31 - 1)


def table_model(seed: int) -> Model:
    return Model.of(TableTarget.random(jax.random.key(seed), VOCAB))


def ragged(draw: st.DataObject, batch: int) -> list[list[int]]:
    token = st.integers(0, VOCAB - 1)
    return [draw.draw(st.lists(token, min_size=1, max_size=9)) for _ in range(batch)]


def greedy_in_python(
    model: Model, prompt: list[int], new: int, stops: tuple[int, ...]
) -> list[int]:
    """The target's greedy continuation, one token at a time, in numpy."""
    table = np.asarray(model.target.table)
    sequence = list(prompt)
    for _ in range(new):
        previous = sequence[-2] if len(sequence) > 1 else 0
        logits = table[(31 * previous + sequence[-1]) % len(table)]
        sequence.append(int(logits.argmax()))
        if sequence[-1] in stops:
            break
    return sequence[len(prompt) :]


def script(model: Model, prompts: list[list[int]], right: np.ndarray) -> ScriptedDrafter:
    """A drafter that knows the truth and tells it where ``right``."""
    truth = np.zeros(right.shape, np.int32)
    for row, prompt in enumerate(prompts):
        sequence = prompt + greedy_in_python(model, prompt, NEW + K + 1, ())
        truth[row, : len(sequence)] = sequence
    return ScriptedDrafter(jnp.asarray(truth), jnp.asarray(right), VOCAB, K)


@pytest.mark.parametrize("batch", first(2, [5, 1, 2]))
@given(data=st.data(), seed=SEEDS)
def test_random_tables(batch: int, data: st.DataObject, seed: int) -> None:
    model, prompts = table_model(seed), ragged(data, batch)
    drafter = TableDrafter.random(jax.random.key(seed + 1), VOCAB, K)
    out = generate(model, prompts, max_new_tokens=NEW, drafter=drafter)
    assert out.ids() == [greedy_in_python(model, p, NEW, ()) for p in prompts]
    check_stats(out.stats)


@pytest.mark.parametrize("batch", first(2, [5, 1, 2]))
@given(data=st.data(), seed=SEEDS)
def test_scripted_mixture_with_stops_and_limits(batch: int, data: st.DataObject, seed: int) -> None:
    """Right and wrong in chosen places, stops anywhere, a limit of its own for every row."""
    model, prompts = table_model(seed), ragged(data, batch)
    right = np.random.default_rng(seed).random((batch, 48)) < data.draw(st.floats(0, 1))
    stops = tuple(data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=2)))
    limits = data.draw(st.lists(st.integers(0, K), min_size=batch, max_size=batch))
    budgets = data.draw(st.lists(st.integers(1, NEW), min_size=batch, max_size=batch))
    out = generate(
        model,
        prompts,
        max_new_tokens=[*budgets[:-1], NEW],
        drafter=script(model, prompts, right),
        stop_ids=stops,
        draft_limit=limits,
        trace=True,
    )
    for row, prompt in enumerate(prompts):
        budget = NEW if row == batch - 1 else budgets[row]
        expected = greedy_in_python(model, prompt, budget, stops)
        assert out.ids()[row] == expected
        assert out.finish_reasons[row] == ("stop" if expected[-1] in stops else "length")
        accepted = np.asarray(out.trace.accepted)[row]
        assert accepted.max(initial=0) <= limits[row]
        assert (accepted >= 0).sum() == int(out.stats.rounds[row])
    check_stats(out.stats)


@given(seed=SEEDS)
def test_accepted_counts_follow_the_script(seed: int) -> None:
    """A round accepts exactly the run of right drafts, and adds one token of the target."""
    model, prompt = table_model(seed), [3, 1, 4]
    right = np.random.default_rng(seed).random((1, 48)) < 0.6
    drafter = script(model, [prompt], right)
    out = generate(model, [prompt], max_new_tokens=NEW, drafter=drafter, trace=True)
    position, expected = len(prompt) + 1, []
    while position < len(prompt) + NEW:
        width = min(K, len(prompt) + NEW - position - 1)
        run = 0
        while run < width and right[0, position + run]:
            run += 1
        expected.append(run)
        position += run + 1
    assert np.asarray(out.trace.accepted)[0].tolist() == expected
    assert int(out.stats.accepted[0]) == sum(expected)


def test_full_acceptance_gives_the_bonus_token() -> None:
    """K right drafts emit K + 1 tokens per round; one wrong at the end emits K."""
    model, prompt = table_model(0), [1, 2]
    right = np.ones((1, 48), bool)
    out = generate(model, [prompt], max_new_tokens=11, drafter=script(model, [prompt], right))
    assert int(out.stats.rounds[0]) == 2 and int(out.stats.accepted[0]) == 8
    right[0, len(prompt) + K] = False  # the last draft of the first round
    out = generate(
        model, [prompt], max_new_tokens=11, drafter=script(model, [prompt], right), trace=True
    )
    assert np.asarray(out.trace.accepted)[0, 0] == K - 1


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("budget", [1, 2, 3, 10])
def test_budget_is_exact(budget: int, right: bool) -> None:
    """Tokens delivered are tokens asked for, with no draft accepted and with all."""
    model, prompt = table_model(3), [1, 2]
    drafter = script(model, [prompt], np.full((1, 48), right))
    out = generate(model, [prompt], max_new_tokens=budget, drafter=drafter)
    assert out.tokens.shape == (1, budget) and out.lengths.tolist() == [budget]
    assert out.ids()[0] == greedy_in_python(model, prompt, budget, ())
    # The last token needs no draft, the one before it none but its own bonus.
    assert int(out.stats.proposed[0]) <= max(budget - 2, 0) * (1 if right else K)


@pytest.mark.parametrize("room", [1, 2, 3])
def test_context_is_never_passed(room: int) -> None:
    model = Model.of(TableTarget(table_model(4).target.table, context=16))
    prompt = list(range(VOCAB)) + [1] * (16 - room - VOCAB)
    drafter = script(model, [prompt], np.ones((1, 48), bool))
    out = generate(model, [prompt], max_new_tokens=8, drafter=drafter)
    assert out.lengths.tolist() == [room]
    assert out.finish_reasons == ["context" if room < 8 else "length"]
    assert int(out.stats.proposed[0]) <= max(room - 2, 0)


def test_a_draft_of_a_stop_token_that_the_target_rejects_stops_nothing() -> None:
    """Drafts [., STOP, .] against a target that says something else: the row goes on."""
    model, prompt = table_model(5), [1, 2]
    truth = greedy_in_python(model, prompt, NEW, ())
    wrong = next(t for t in range(VOCAB) if t not in truth)
    table = np.full((VOCAB, K), wrong, np.int32)
    out = generate(
        model,
        [prompt],
        max_new_tokens=NEW,
        drafter=TableDrafter(jnp.asarray(table)),
        stop_ids=[wrong],
    )
    assert out.ids()[0] == truth and out.finish_reasons == ["length"]
    assert int(out.stats.accepted[0]) == 0


def test_the_first_token_can_stop() -> None:
    model, prompt = table_model(6), [1, 2]
    first = greedy_in_python(model, prompt, 1, ())[0]
    out = generate(model, [prompt], max_new_tokens=8, stop_ids=[first])
    assert out.ids() == [[first]] and out.finish_reasons == ["stop"]
    assert int(out.stats.rounds[0]) == 0


def test_counting_loses_nothing_at_chunk_borders() -> None:
    """200 tokens in turns of 64 and in one go: the same numbers, none missing."""
    model = Model.of(TableTarget.counting(16))
    whole = generate(model, [[0]], max_new_tokens=200).ids()[0]
    assert whole == [(1 + i) % 16 for i in range(200)]
    turns, sequence = [], [0]
    for size in (64, 64, 64, 8):
        turns += generate(model, [sequence], max_new_tokens=size).ids()[0]
        sequence = [0, *turns]
    assert turns == whole


@pytest.mark.parametrize("kind", ["dflash2", "dspark", "mtp"])
@pytest.mark.parametrize("rows", [1, 5])
def test_random_drafters(kind: str, rows: int) -> None:
    """Random drafters around a hybrid target; acceptance near chance, tokens equal."""
    model = tiny_model(kind)
    prompts = [[(7 * row + i) % 48 for i in range(1, 3 + 8 * row)] for row in range(rows)]
    assert_lossless(model, model.drafter, prompts, max_new_tokens=40)
    out = generate(model, prompts, max_new_tokens=40)
    rate = int(out.stats.accepted.sum()) / int(out.stats.evaluated.sum())
    assert rate < 0.5, "a random drafter cannot be right: the comparison is broken"


@pytest.mark.parametrize("kind", ["dflash2", "dspark", "mtp"])
def test_limits_cut_the_proposal_not_the_block(kind: str) -> None:
    """Two drafts of a limited row are the first two of an unlimited one."""
    model = tiny_model(kind)
    outs = [
        generate(model, [[1, 2, 3, 4]], max_new_tokens=24, draft_limit=limit).ids()
        for limit in range(model.drafter.draft_tokens + 1)
    ]
    assert all(out == outs[0] for out in outs)


@pytest.mark.parametrize("kind", first(3, ["dflash2", "eagle3", None, "dspark", "mtp"]))
def test_streaming_is_the_same_round(kind: str | None) -> None:
    model = tiny_model(kind)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
    out = generate(model, prompts, max_new_tokens=20, stop_ids=[2])
    received: dict[int, list[int]] = {row: [] for row in range(3)}
    reasons = {}
    for event in stream(model, prompts, max_new_tokens=20, stop_ids=[2]):
        received[event.row] += event.tokens
        if event.finish_reason:
            reasons[event.row] = event.finish_reason
    assert list(received.values()) == out.ids()
    assert [reasons[row] for row in range(3)] == out.finish_reasons


def test_drafters_change_between_calls_on_one_target() -> None:
    """Every drafter in turn, over prompts that repeat: one target, the same tokens."""
    model = tiny_model("mtp")
    prompts = [[1, 2, 3, 4, 1, 2, 3], [9, 9, 9]]
    expected = generate(model, prompts, max_new_tokens=24, drafter="none").ids()
    assert isinstance(model.target, DecoderTarget)
    others = [tiny_drafter(model.target, kind) for kind in ("dflash2", "dspark")]
    drafters: list[Any] = ["auto", "ngram", *others, AdaptiveDrafter(model.drafter), "none", "auto"]
    for drafter in drafters:
        out = generate(model, prompts, max_new_tokens=24, drafter=drafter)
        assert out.ids() == expected, drafter
        check_stats(out.stats)


@pytest.mark.parametrize("kind", ["dflash2", "mtp"])
def test_a_target_with_a_sliding_window(kind: str) -> None:
    """Two layers that see five keys: what is nine tokens back plays no part."""
    full = tiny_target_config().attention
    assert full is not None
    layers: Any = ("sliding", "sliding")
    model = tiny_model(kind, layers=layers, taps=(1,), sliding=replace(full, window=5))
    one = list(range(1, 21))
    logits = score(model, [one, [40, *one[1:]], [*one[:11], 40, *one[12:]]]).logits
    np.testing.assert_array_equal(logits[0, 9:], logits[1, 9:])
    assert np.abs(logits[0, :9] - logits[1, :9]).max(axis=-1).min() > 0
    assert np.abs(logits[0, 11:] - logits[2, 11:]).max(axis=-1).min() > 0
    assert_lossless(model, model.drafter, [one, [3, 4]], max_new_tokens=24)


EXPERTS: dict[str, dict[str, Any]] = {
    "dflash2": dict(experts=5, active=3, limit=0.0, bias=False, router_bias=False),
    "mtp": dict(renormalized=True, shared_hidden=16),
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_targets_with_experts_and_sinks(kind: str) -> None:
    """Experts of several sorts; the head for several tokens has sinks and experts, too."""
    mlp: Any = replace(experts_target_config().mlp, **EXPERTS[kind])  # type: ignore[type-var]
    target = random_target(experts_target_config(mlp=mlp), seed=len(kind))
    if kind == "mtp":
        drafter: Any = tiny_mtp(target, attention=target.config.attention, mlp=mlp)
    else:
        drafter = tiny_drafter(target, kind)
    prompts = [list(range(1, 20)), [3, 4]]
    assert_lossless(Model.of(target, drafter), drafter, prompts, max_new_tokens=24)


@pytest.mark.parametrize("kind", ["dflash2", "mtp"])
def test_rows_do_not_depend_on_their_batch(kind: str) -> None:
    """Each row alone, in any order and beside any other: the same tokens and the same accepts."""
    model = tiny_model(kind)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [9] * 14]
    whole = generate(model, prompts, max_new_tokens=20, trace=True)
    for order in ([3, 1, 0, 2], [2, 3, 1, 0]):
        out = generate(model, [prompts[i] for i in order], max_new_tokens=20, trace=True)
        assert out.ids() == [whole.ids()[i] for i in order]
        np.testing.assert_array_equal(out.stats.accepted, np.asarray(whole.stats.accepted)[order])
    for i, prompt in enumerate(prompts):
        assert generate(model, [prompt], max_new_tokens=20).ids()[0] == whole.ids()[i]


def test_ties_go_to_the_lowest_id_everywhere() -> None:
    """Logits [0, 1, 1] in the prompt's row, in verify rows and in the bonus row."""
    table = jnp.tile(jnp.asarray([[0.0, 1.0, 1.0]]), (7, 1))
    model = Model.of(TableTarget(table))
    for drafts in (1, 2):
        drafter = TableDrafter(jnp.full((3, K), drafts, jnp.int32))
        out = generate(model, [[0], [2, 0]], max_new_tokens=9, drafter=drafter)
        assert out.ids() == [[1] * 9] * 2
        assert (int(out.stats.accepted.sum()) > 0) == (drafts == 1)


@pytest.mark.parametrize("poison", ["nan", "one nan", "-inf"])
def test_non_finite_logits_are_flagged(poison: str) -> None:
    """The row ends with a status, the other goes on; no token is invented."""
    table = np.asarray(table_model(8).target.table).copy()
    clean = Model.of(TableTarget(jnp.asarray(table)))
    prompts = [[1, 2, 3], [4, 5]]
    truth = [greedy_in_python(clean, p, NEW, ()) for p in prompts]
    sequence = prompts[0] + truth[0]
    row = (31 * sequence[7] + sequence[8]) % len(table)
    visits = {
        (31 * a + b) % len(table)
        for a, b in zip([0, 4, 5, *truth[1]], [4, 5, *truth[1]], strict=False)
    }
    if poison == "one nan":
        table[row, 3] = np.nan
    else:
        table[row] = float(poison)
    model = Model.of(TableTarget(jnp.asarray(table)))
    drafter = script(clean, prompts, np.ones((2, 48), bool))
    out = generate(model, prompts, max_new_tokens=NEW, drafter=drafter, throw=False)
    first = next(
        i
        for i in range(NEW)
        if (31 * (prompts[0] + truth[0])[i + 1] + (prompts[0] + truth[0])[i + 2]) % len(table)
        == row
    )
    assert out.ids()[0] == truth[0][:first]
    assert out.finish_reasons[0] == Status.NONFINITE.reason
    if row not in visits:
        assert out.ids()[1] == truth[1]
    with pytest.raises(FloatingPointError, match=r"rows \[0"):
        generate(model, prompts, max_new_tokens=NEW, drafter=drafter)


def test_a_drafter_that_proposes_too_much_is_cut_short() -> None:
    """It was asked for ``limit`` drafts; what is past them never reaches the target."""

    @jax.tree_util.register_pytree_node_class
    class Eager(TableDrafter):
        def propose(self, state: Any, feed: Any) -> Any:
            state, proposal, info = super().propose(state, feed)
            tokens = self.table[feed.anchor]
            length = jnp.full_like(proposal.length, tokens.shape[1])
            return state, replace(proposal, tokens=tokens, length=length), info

        def tree_flatten(self) -> Any:
            return (self.table,), None

        @classmethod
        def tree_unflatten(cls, _: Any, leaves: Any) -> Any:
            return cls(*leaves)

    model = Model.of(TableTarget.counting(VOCAB))
    following = (np.arange(VOCAB)[:, None] + 1 + np.arange(K)[None]) % VOCAB
    drafter = Eager(jnp.asarray(following, jnp.int32))
    assert_lossless(model, drafter, [[1, 2], [5]], max_new_tokens=[3, 7])
    assert_lossless(model, drafter, [[1, 2], [5]], max_new_tokens=9, draft_limit=[1, 0])
