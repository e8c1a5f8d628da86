"""Prompt lookup against a plain Python search."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxdraft
from jaxdraft import Feed, Model, NgramDrafter, NoDraft, generate
from jaxdraft.draft.ngram import NgramState
from jaxdraft.testing import TableTarget, assert_lossless, tiny_model

ROWS, SIZE = 3, 24
RANGES = [(1, 1), (1, 3), (2, 4), (3, 3)]
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=SIZE)


def lookup(text: list[int], shortest: int, longest: int, drafts: int) -> list[int]:
    """What follows the most recent earlier occurrence of the longest suffix."""
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        suffix = text[-size:]
        for end in range(len(text) - 1, size - 1, -1):  # exclusive end of the occurrence
            if text[end - size : end] == suffix:
                return text[end : end + drafts]
    return []


def feed(texts: list[list[int]], first: list[int], limit: list[int]) -> Feed:
    """Rows from ``first`` on; the last token of each text is the anchor."""
    counts = [len(text) - 1 - at for text, at in zip(texts, first, strict=True)]
    tokens = np.full((len(texts), SIZE), 99, np.int32)
    for row, (text, at) in enumerate(zip(texts, first, strict=True)):
        tokens[row, : counts[row]] = text[at:-1]
    return Feed(
        aux=None,
        tokens=jnp.asarray(tokens),
        count=jnp.asarray(counts, jnp.int32),
        first_position=jnp.asarray(first, jnp.int32),
        anchor=jnp.asarray([text[-1] for text in texts], jnp.int32),
        wants_draft=jnp.asarray(limit) > 0,
        limit=jnp.asarray(limit, jnp.int32),
    )


@pytest.mark.parametrize(("shortest", "longest"), RANGES)
@given(
    texts=st.lists(TOKENS, min_size=ROWS, max_size=ROWS),
    limits=st.lists(st.integers(0, 5), min_size=ROWS, max_size=ROWS),
    cut=st.floats(0, 1),
)
def test_the_longest_suffix_and_its_last_occurrence(
    shortest: int, longest: int, texts: list[list[int]], limits: list[int], cut: float
) -> None:
    """Three letters, so that matches abound; in two calls, as rounds bring them."""
    drafter = NgramDrafter(shortest, longest, 5)
    none = [0] * ROWS
    first = [int(cut * (len(text) - 1)) for text in texts]
    early = [text[: at + 1] for text, at in zip(texts, first, strict=True)]
    state, _, _ = drafter.step(drafter.init(ROWS, SIZE), feed(early, none, none))
    state, proposal, info = drafter.step(state, feed(texts, first, limits))
    assert int(info.forwards) == 0
    for row, text in enumerate(texts):
        expected = lookup(text, shortest, longest, limits[row])
        assert int(proposal.length[row]) == len(expected)
        assert proposal.tokens[row, : len(expected)].tolist() == expected
        assert (np.asarray(proposal.tokens)[row, len(expected) :] == -1).all()
        found = bool(lookup(text, shortest, longest, 1))
        reason = NoDraft.DRAFTED if found else NoDraft.NO_MATCH
        assert int(info.reason[row]) == (reason if limits[row] else NoDraft.UNWANTED)


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2]),
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2]),  # a tie: the most recent
        ([5, 1, 2, 7, 9, 1, 2, 8, 5, 1, 2], [7, 9, 1, 2, 8]),  # the longer one, though older
        ([4, 4, 4, 4], [4]),  # one token exists after the latest match
        ([0, 1, 0], []),  # one token is too short a suffix
        ([0, 0], []),
        ([3], []),
    ],
)
def test_by_hand(text: list[int], drafts: list[int]) -> None:
    drafter = NgramDrafter(2, 4, 5)
    _, proposal, _ = drafter.step(drafter.init(1, SIZE), feed([text], [0], [5]))
    assert proposal.tokens[0, : len(drafts)].tolist() == drafts
    assert proposal.length.tolist() == [len(drafts)]


def test_holes_and_full_histories() -> None:
    """A gap, or more tokens than the capacity: no drafts until the row starts again."""
    drafter, text = NgramDrafter(1, 2, 3), [1, 2, 1, 2, 1]
    state = drafter.init(2, 6)
    state, _, _ = drafter.step(state, feed([text, text], [0, 0], [3, 3]))
    longer = [*text, 2, 1]
    state, proposal, info = drafter.step(state, feed([longer, longer], [4, 5], [3, 3]))
    assert info.reason.tolist() == [NoDraft.DRAFTED, NoDraft.HOLE]
    assert proposal.length.tolist() == [2, 0]
    over = [*longer, 2]  # seven tokens before the anchor, room for six
    state, _, info = drafter.step(state, feed([over, over], [6, 5], [3, 3]))
    assert info.reason.tolist() == [NoDraft.HOLE] * 2
    state, _, info = drafter.step(state, feed([text, text], [0, 0], [3, 3]))
    assert info.reason.tolist() == [NoDraft.DRAFTED] * 2
    assert isinstance(state, NgramState) and state.length.tolist() == [4, 4]


def test_bad_ranges() -> None:
    for low, high in ((0, 2), (3, 2)):
        with pytest.raises(ValueError, match="min_ngram"):
            NgramDrafter(low, high)


@given(seed=st.integers(0, 2**31 - 1), data=st.data())
def test_lossless_and_right_where_the_text_repeats(seed: int, data: st.DataObject) -> None:
    """A chain over few states soon repeats itself; from then on every draft stands."""
    model = Model.of(TableTarget.random(jax.random.key(seed), 6, rows=31))
    token = st.integers(0, 5)
    prompts = [data.draw(st.lists(token, min_size=1, max_size=9)) for _ in range(2)]
    plain = generate(model, prompts, max_new_tokens=40, drafter="none")
    out = generate(model, prompts, max_new_tokens=40, drafter="ngram", draft_tokens=4, trace=True)
    assert out.ids() == plain.ids()
    assert out.stats.accepted_at.shape == (2, 4) and int(out.stats.drafter_forwards) == 0
    assert int(out.stats.accepted.sum()) > 0
    assert out.trace is not None
    for row, prompt in enumerate(prompts):  # round by round, against the search in Python
        text, end = prompt + plain.ids()[row], len(prompt) + 1
        for accepted in np.asarray(out.trace.accepted)[row]:
            if accepted < 0:
                break
            width = min(4, len(prompt) + 40 - end - 1)
            drafts = lookup(text[:end], 2, 4, width) if width else []
            right = next((i for i, d in enumerate(drafts) if d != text[end + i]), len(drafts))
            assert accepted == right
            end += right + 1


def test_it_needs_no_weights_of_the_model() -> None:
    """Beside any model and any drafter of its own, and without one."""
    prompts = [[1, 2, 3, 1, 2, 3, 1], [9, 8, 9]]
    for kind in (None, "dflash2", "mtp"):
        model = tiny_model(kind)
        assert_lossless(model, NgramDrafter(1, 3, 5), prompts, max_new_tokens=20)
        summary = jaxdraft.summarize(generate(model, prompts, drafter="ngram").stats)
        assert summary.drafter_forwards == 0
