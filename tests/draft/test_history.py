"""Lookup in other texts against a plain Python search."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdraft import Engine, FallbackDrafter, Feed, HistoryDrafter, Model, NoDraft, generate
from jaxdraft.compiling import CompileClock
from jaxdraft.testing import TableTarget, assert_lossless
from tests.draft.test_ngram import feed
from tests.examples import first

ROWS, CAPACITY, K, LOW, HIGH = 3, 32, 4, 1, 3
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=24)
DOCUMENTS = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=4)


def lookup(
    documents: list[list[int]], text: list[int], drafts: int, low: int = LOW, high: int = HIGH
) -> list[int]:
    """What follows the last occurrence of the longest suffix, within its document."""
    for size in range(min(high, len(text)), low - 1, -1):
        for document in reversed(documents):
            for end in range(len(document) - 1, size - 1, -1):
                if document[end - size : end] == text[-size:]:
                    return document[end : end + drafts]
    return []


def held(documents: list[list[int]]) -> list[list[int]]:
    """The newest documents that fit, each with a token that ends it."""
    kept: list[list[int]] = []
    room = CAPACITY
    for document in reversed(documents):
        room -= len(document) + 1
        if room < 0:
            break
        kept.insert(0, document)
    return kept


def drafter_of(documents: list[list[int]]) -> HistoryDrafter:
    sizes: dict[str, Any] = dict(min_ngram=LOW, max_ngram=HIGH, draft_tokens=K, capacity=CAPACITY)
    return HistoryDrafter.of(documents, **sizes)


def search(
    drafter: HistoryDrafter, texts: list[list[int]], cuts: list[int], limits: list[int]
) -> tuple[Any, Any]:
    """Proposals and reasons for texts that come in two parts, as rounds bring them."""
    none = [0] * len(texts)
    early = [text[: at + 1] for text, at in zip(texts, cuts, strict=True)]
    state, _, _ = drafter.step(drafter.init(len(texts), 24), feed(early, none, none))
    state, proposal, info = drafter.step(state, feed(texts, cuts, limits))
    return jax.device_get(proposal), np.asarray(info.reason)


@given(
    documents=DOCUMENTS,
    texts=st.lists(TOKENS, min_size=ROWS, max_size=ROWS),
    limits=st.lists(st.integers(0, 5), min_size=ROWS, max_size=ROWS),
    cut=st.floats(0, 1),
)
def test_the_longest_suffix_and_its_last_occurrence(
    documents: list[list[int]], texts: list[list[int]], limits: list[int], cut: float
) -> None:
    """Three letters, so that matches abound, end with documents, and would pass their bounds."""
    cuts = [int(cut * (len(text) - 1)) for text in texts]
    proposal, reasons = search(drafter_of(documents), texts, cuts, limits)
    for row, text in enumerate(texts):
        expected = lookup(held(documents), text, min(K, limits[row]))
        assert proposal.length[row] == len(expected)
        assert proposal.tokens[row].tolist() == expected + [-1] * (K - len(expected))
        found = bool(lookup(held(documents), text, 1))
        reason = NoDraft.DRAFTED if found else NoDraft.NO_MATCH
        assert reasons[row] == (reason if limits[row] else NoDraft.UNWANTED)


@given(seed=st.integers(0, 2**31 - 1), low=st.integers(1, 3), more=st.integers(0, 9))
def test_many_tokens_and_long_suffixes(seed: int, low: int, more: int) -> None:
    """The index alone, over many words: it finds each run of a text, and the last one."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, 7, rng.integers(0, 40)).tolist() for _ in range(20)]
    drafter = HistoryDrafter.of(documents, min_ngram=low, max_ngram=low + more)
    padded = np.asarray(drafter.text)
    text = padded[low + more :]
    ends, latest = np.asarray(drafter.ends), np.asarray(drafter.latest)
    groups = int(drafter.groups)

    def run(end: int, size: int) -> tuple[int, ...]:
        """Tokens that end there, the newest first."""
        return tuple(padded[low + more + end - size + 1 : low + more + end + 1][::-1].tolist())

    runs = [run(end, low + more) for end in ends[:groups]]
    assert runs == sorted(set(runs)), "distinct, and in order"
    places = [p for p in range(text.size - 1) if text[p] >= 0 and text[p + 1] >= 0]
    assert {run(p, low + more) for p in places} == set(runs)
    last = {run(p, n): p for p in places for n in range(low, low + more + 1)}
    for row, n in enumerate(range(low, low + more + 1)):
        for group, end in enumerate(ends[:groups]):
            assert latest[row, group] == last[run(end, n)]


def test_documents_are_dropped_from_the_oldest() -> None:
    drafter = HistoryDrafter.of([[1, 2], [3, 4, 5]], capacity=8)
    assert [d.tolist() for d in drafter.documents()] == [[1, 2], [3, 4, 5]]
    more = drafter.with_text([[6, 7, 8]])
    assert [d.tolist() for d in more.documents()] == [[3, 4, 5], [6, 7, 8]]
    long = more.with_text([np.arange(20)])
    assert [d.tolist() for d in long.documents()] == [list(range(13, 20))]
    assert HistoryDrafter.of([]).ends.shape == (1024,) and not HistoryDrafter.of([]).documents()
    assert HistoryDrafter.of([range(1024)]).ends.shape == (2048,)


def test_holes_skips_and_new_beginnings() -> None:
    drafter, text = drafter_of([[0, 1, 2, 3]]), [9, 0, 1]
    state = drafter.init(2, 24)
    state, _, _ = drafter.step(state, feed([text, text], [0, 0], [3, 3]))
    state, _, info = drafter.step(state, feed([[*text, 2], [*text, 8, 2]], [2, 3], [3, 3]))
    assert info.reason.tolist() == [NoDraft.DRAFTED, NoDraft.HOLE]
    state, _, info = drafter.step(state, feed([[2], text], [0, 0], [3, 3]))
    assert info.reason.tolist() == [NoDraft.DRAFTED] * 2
    # Rows that begin behind tokens that another request computed, or with none of them.
    tokens = jnp.asarray([[0, 1, 2, 7], [5, 6, 7, 8]], jnp.int32)
    state = drafter.skip(drafter.init(2, 24), tokens, jnp.asarray([2, 0], jnp.int32))
    assert state.recent.tolist() == [[-2, 0, 1], [-2, -2, -2]] and state.length.tolist() == [2, 0]
    anchors = Feed(
        aux=None, tokens=jnp.zeros((2, 1), jnp.int32), count=jnp.asarray([0, 0], jnp.int32),
        first_position=state.length, anchor=jnp.asarray([2, 0], jnp.int32),
        wants_draft=jnp.ones((2,), bool), limit=jnp.asarray([4, 4], jnp.int32),
    )  # fmt: skip
    _, proposal, _ = drafter.step(state, anchors)
    assert proposal.tokens.tolist() == [[3, -1, -1, -1], [1, 2, 3, -1]]


@pytest.mark.parametrize("seed", first(1, range(4)))
def test_a_second_time_needs_few_rounds(seed: int) -> None:
    """Greedy text that is held already is accepted whole; new text of the size compiles nothing."""
    target = TableTarget.random(jax.random.key(seed), 12)
    model = Model.of(target)
    prompts = [[1, 2], [3], [5, 5, 5]]
    plain = generate(model, prompts, max_new_tokens=24, drafter="none")
    texts = [prompt + ids for prompt, ids in zip(prompts, plain.ids(), strict=True)]
    empty = HistoryDrafter.of(capacity=128, draft_tokens=5)
    one = generate(model, prompts, max_new_tokens=24, drafter=empty, trace=True)
    traces = generate.__globals__["_generate"]._cache_size()
    again = empty.with_text(texts)
    two = generate(model, prompts, max_new_tokens=24, drafter=again, trace=True)
    assert generate.__globals__["_generate"]._cache_size() == traces
    assert one.ids() == two.ids() == plain.ids()
    assert int(one.stats.accepted.sum()) == 0
    assert int(two.stats.rounds.max()) < int(one.stats.rounds.min()) / 2 and two.trace is not None
    for row, text in enumerate(texts):  # round by round, against the search in Python
        end = len(prompts[row]) + 1
        for accepted in np.asarray(two.trace.accepted)[row]:
            if accepted < 0:
                break
            width = min(5, len(text) - end - 1)
            drafts = lookup(texts, text[:end], width, 2, 8) if width else []
            right = next((i for i, d in enumerate(drafts) if d != text[end + i]), len(drafts))
            assert accepted == right
            end += right + 1
        assert end == len(text)
    both = FallbackDrafter(empty.with_text(texts[:1]), model.choose("ngram", 5))
    assert_lossless(model, both, prompts, max_new_tokens=24)
    compiled = []
    more = empty.with_text([[11] * 9]).with_text(texts[:1])  # the same drafts, so the same steps
    for drafter in (both, FallbackDrafter(more, both.second)):
        with Engine(model, drafter=drafter, max_batch=2, page_size=8, context=64) as engine:
            with CompileClock() as clock:
                assert [r.tokens for r in engine.map(prompts, max_new_tokens=24)] == plain.ids()
            compiled.append(clock.seconds)
            engine.check()
    assert compiled[0] > 0 and compiled[1] == 0, "another engine with more text compiles nothing"


@pytest.mark.parametrize(
    ("documents", "options", "words"),
    [
        ([[1], [[2]]], {}, r"document 1 is int64 of shape \(1, 1\)"),
        ([[1.5]], {}, "document 0 is float64"),
        (["text"], {}, "document 0 is <U4"),
        ([[1, -1]], {}, "document 0 has ids -1..1"),
        ([[2**31]], {}, "document 0 has ids"),
        ([[1]], dict(min_ngram=3, max_ngram=2), "n-grams of 3..2"),
        ([[1]], dict(min_ngram=0), "n-grams of 0..8"),
        ([[1]], dict(draft_tokens=0), "draft_tokens is 0"),
        ([[1]], dict(capacity=1), "capacity is 1; expected at least 2"),
    ],
)
def test_wrong_documents_and_numbers(documents: Any, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        HistoryDrafter.of(documents, **options)


def test_ids_that_the_target_lacks_are_not_proposed() -> None:
    target = TableTarget.random(jax.random.key(0), 12)
    text = [1, 2, 3, 40]
    drafter = HistoryDrafter.of([text], min_ngram=1, capacity=32)
    assert_lossless(Model.of(target), drafter, [[1], [2, 3]], max_new_tokens=9)


def test_the_search_takes_as_many_steps_as_the_capacity_needs() -> None:
    """A power of two and one more: every place is found."""
    for capacity in (8, 9):
        drafter = HistoryDrafter.of([range(capacity - 1)], min_ngram=1, capacity=capacity)
        query = jnp.asarray([[i] + [-2] * 7 for i in range(capacity - 2)], jnp.int32)
        end, matched = drafter._find(query)
        assert end.tolist() == list(range(capacity - 2)) and set(matched.tolist()) == {1}
