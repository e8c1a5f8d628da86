"""A language model that drafts: its caches, which of its rows are committed, and its failures.

Its drafts are compared with those of whole forward passes over the text. A model that drafts for
itself is right in every draft, so that any wrong key, row or state shows as a rejected draft.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models

import jaxdraft
from jaxdraft import (
    Engine,
    Feed,
    Model,
    NoDraft,
)
from jaxdraft.draft.draft_model import DraftModel, DraftModelState
from jaxdraft.engine.programs import Buckets
from jaxdraft.target import DecoderTarget
from jaxdraft.testing import TableTarget, tiny_target, tiny_target_config
from jaxdraft.text import Text, shared_tokens

ROWS, SIZE, K, VOCAB = 3, 12, 3, 48


@functools.cache
def target() -> DecoderTarget:
    full = tiny_target_config().attention
    assert full is not None
    layers: Any = ("delta_net", "sliding", "attention")
    return tiny_target(3, layers=layers, sliding=replace(full, window=5), taps=())


@functools.cache
def small() -> DecoderTarget:
    return tiny_target(5, layers=("attention",), delta_net=None, taps=())


def test_in_an_engine() -> None:
    """Shared pages, prefixes that are reused, rows that start and end at different times."""
    model = Model.of(small(), DraftModel(small(), VOCAB, 4))
    prompts = [[*range(1, 20)], [*range(1, 20)], [3, 4]]
    plain = [drafts_of(small(), prompt, 10) for prompt in prompts]
    sizes = Buckets(rows=(2,), chunks=(8,), columns=(8,), plain=True)
    with Engine(model, max_batch=2, page_size=8, context=64, chunk=8, buckets=sizes) as engine:
        requests = engine.map(prompts, max_new_tokens=10)
        assert [request.tokens for request in requests] == plain
        again = engine.map([[*prompts[0], *plain[0][:5]]], max_new_tokens=5)[0]
        assert again.tokens == plain[0][5:]
        summary = engine.summary()
    assert summary.accepted == summary.evaluated > 20


def test_another_turn_in_an_engine() -> None:
    """The last token of a turn may wait for its pass, and is not in the pages that are kept."""
    model = Model.of(small(), DraftModel(small(), VOCAB, 3))
    sizes = Buckets(rows=(1,), chunks=(8,), columns=(8,), plain=True)
    with Engine(model, max_batch=1, page_size=8, context=64, chunk=8, buckets=sizes) as engine:
        for length in range(6, 10):  # rounds of four tokens end at, before and after the last
            first = engine.submit([*range(1, 8)], max_new_tokens=length)
            list(engine.run())
            text = [*range(1, 8), *first.tokens, 5, 6]
            engine.extend(first, [5, 6], max_new_tokens=9)
            list(engine.run())
            assert first.tokens[-9:] == drafts_of(small(), text, 9)
        summary = engine.summary()
    assert summary.accepted == summary.evaluated > 20


def test_the_last_token_of_kept_pages_may_be_missing() -> None:
    made = DraftModel(small(), VOCAB, K)
    tokens = jnp.asarray([[5, 9, 11, 30, 2, 8, 17, 40]], jnp.int32)
    state = made.ingest(made.init_pool(1, pages=4, page_size=8), feed(tokens, 7, 0))
    state = made.ingest(state, feed(tokens[:, 7:], 1, 7))
    assert state.waits.tolist() == [True], "position 7 has no keys yet"
    later = made.skip(made._restart(state, jnp.ones((1,), bool)), tokens, jnp.asarray([8]))
    assert later is not None
    asks = feed(tokens, 0, 8)
    (one, proposal, _), (two, same, _) = made.propose(state, asks), made.propose(later, asks)
    np.testing.assert_array_equal(proposal.tokens, same.tokens)
    np.testing.assert_array_equal(one.model.pool.keys[0], two.model.pool.keys[0])
    assert proposal.tokens[0].tolist() == drafts_of(small(), [*tokens[0].tolist(), 7], K)


def test_a_row_that_brings_nothing_runs_nothing() -> None:
    """In an engine such a row may not be bound to its pages, and what it writes is lost."""
    made = DraftModel(small(), VOCAB, K)
    tokens = jnp.arange(3 * SIZE, dtype=jnp.int32).reshape(3, SIZE)
    state = made.ingest(made.init(3, 64), feed(tokens, [0, 1, 0], 0))
    assert state.waits.tolist() == [False, True, False]
    state = made.ingest(state, feed(tokens, [4, 0, 0], [0, 1, 0]))
    assert state.waits.tolist() == [False, True, False]
    assert state.model.length.tolist() == [4, 0, 0]


def feed(tokens: Any, count: Any, first: Any, anchor: Any = 7, limit: Any = K) -> Feed:
    rows = len(tokens)

    def column(value: Any) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(value, jnp.int32), (rows,))

    limit = column(limit)
    return Feed(
        aux=None,
        tokens=jnp.asarray(tokens),
        count=column(count),
        first_position=column(first),
        anchor=column(anchor),
        wants_draft=limit > 0,
        limit=limit,
    )


def drafts_of(model: DecoderTarget, text: list[int], count: int) -> list[int]:
    """The greedy continuation, by whole forward passes."""
    found: list[int] = []
    for _ in range(count):
        ids = jnp.asarray([text + found])
        padded = jnp.pad(ids, ((0, 0), (0, 32 - ids.shape[1])))
        out = _logits(model, padded, jnp.asarray([ids.shape[1]], jnp.int32))
        found.append(int(out[0, ids.shape[1] - 1].argmax()))
    return found


_logits = jax.jit(lambda model, ids, count: model.forward(ids, count, model.init(1, 32)).logits)
step = jax.jit(lambda drafter, state, feed: drafter.step(state, feed))


def test_any_split_of_the_text_and_any_outcome() -> None:
    """Ragged feeds, some of which are the last proposal and some not: the drafts of the whole text.

    One program serves them all.
    """
    drafter = DraftModel(target(), VOCAB, K)
    rng = np.random.default_rng(0)
    state: DraftModelState = drafter.init(ROWS, 32)
    texts: list[list[int]] = [[] for _ in range(ROWS)]
    proposal = np.full((ROWS, K), -1)
    anchors = rng.integers(0, VOCAB, ROWS)
    for turn in range(8):
        part, count = np.full((ROWS, K + 1), 11), np.zeros(ROWS, int)
        first = np.asarray([len(text) for text in texts])
        for b in range(ROWS):
            if turn == 0:
                part[b], count[b] = rng.integers(0, VOCAB, K + 1), b + 1
            else:
                part[b, 0] = anchors[b]
                part[b, 1:] = proposal[b] if rng.random() < 0.7 else rng.integers(0, VOCAB, K)
                count[b] = rng.integers(0, K + 2) if b else K + 1
        part = np.maximum(part, 0)
        for b in range(ROWS):
            texts[b] += part[b, : count[b]].tolist()
        anchors = np.where(count > 0, rng.integers(0, VOCAB, ROWS), anchors)
        limits = rng.integers(0, K + 1, ROWS) if turn % 3 == 2 else np.full(ROWS, K)
        asks = feed(part, count, first, anchors, limits)
        state, found, _ = step(drafter, state, asks)
        assert found.length.tolist() == limits.tolist()
        assert state.length.tolist() == [len(text) for text in texts]
        proposal = np.asarray(found.tokens)
        for b in range(ROWS):
            expected = drafts_of(target(), [*texts[b], int(anchors[b])], int(limits[b]))
            assert proposal[b, : limits[b]].tolist() == expected, (turn, b)


def test_a_chain_ends_where_it_is_unsure() -> None:
    """Drafts while the product of their probabilities is large; fewer passes, and no draft."""
    tokens = np.asarray(jax.random.randint(jax.random.key(3), (ROWS, K + 1), 0, VOCAB))
    products = np.ones((ROWS, K))
    for b, row in enumerate(tokens):
        text = [*row.tolist(), 7]
        for k, draft in enumerate(drafts_of(small(), text, K)):
            ids = jnp.pad(jnp.asarray([text]), ((0, 0), (0, 32 - len(text))))
            out = _logits(small(), ids, jnp.asarray([len(text)], jnp.int32))[0, len(text) - 1]
            products[b, k:] *= float(jax.nn.softmax(out).max())
            text.append(draft)
    least = float(np.sqrt(products[:, 1].max() * products[:, 1].min()))
    wanted = (products >= least).sum(axis=1)
    assert len(set(wanted)) > 1
    drafter = DraftModel(small(), VOCAB, K).with_confidence(least)
    state = drafter.init(ROWS, 32)
    _, proposal, info = step(drafter, state, feed(tokens, K + 1, 0))
    assert proposal.length.tolist() == wanted.tolist()
    assert int(info.forwards) == min(max(wanted) + 1, K)
    _, proposal, info = step(replace(drafter, confidence=0.999), state, feed(tokens, K + 1, 0))
    assert info.reason.tolist() == [NoDraft.PAUSED] * ROWS and int(info.forwards) == 1
    with pytest.raises(ValueError, match="confidence is 2; expected in 0..1"):
        drafter.with_confidence(2)


def test_holes_and_new_texts() -> None:
    drafter = DraftModel(small(), VOCAB, K)
    tokens = np.asarray(jax.random.randint(jax.random.key(0), (ROWS, K + 1), 0, VOCAB))
    state, _, info = step(drafter, drafter.init(ROWS, 32), feed(tokens, 0, 0))
    assert info.reason.tolist() == [NoDraft.HOLE] * ROWS
    state, _, info = step(drafter, drafter.init(ROWS, 32), feed(tokens, 3, 0))
    assert info.reason.tolist() == [NoDraft.DRAFTED] * ROWS
    state, proposal, info = step(drafter, state, feed(tokens, 2, [3, 4, 0]))
    assert info.reason.tolist() == [NoDraft.DRAFTED, NoDraft.HOLE, NoDraft.DRAFTED]
    assert proposal.tokens[2].tolist() == drafts_of(small(), [*tokens[2, :2].tolist(), 7], K)
    state, _, info = step(drafter, state, feed(tokens, 2, [5, 3, 2]))
    assert info.reason.tolist() == [NoDraft.DRAFTED, NoDraft.HOLE, NoDraft.DRAFTED]


def test_a_row_without_pages_is_denied_until_released() -> None:
    """Six pages of two slots: enough for two of three rows."""
    drafter = DraftModel(small(), VOCAB, K)
    tokens = np.asarray(jax.random.randint(jax.random.key(1), (ROWS, K + 1), 0, VOCAB))
    state = drafter.init_pool(ROWS, pages=6, page_size=2)
    state, proposal, info = step(drafter, state, feed(tokens, [1, 4, 1], 0))
    assert info.reason.tolist() == [NoDraft.DRAFTED, NoDraft.DENIED, NoDraft.DRAFTED]
    assert int(drafter.misses(state)) == 1
    for b in (0, 2):
        assert proposal.tokens[b].tolist() == drafts_of(small(), [int(tokens[b, 0]), 7], K)
    state = drafter.release(state, jnp.asarray([True, True, False]))
    state, proposal, info = step(drafter, state, feed(tokens, [0, 1, 0], [0, 0, 1]))
    assert info.reason.tolist() == [NoDraft.HOLE, NoDraft.DRAFTED, NoDraft.DRAFTED]
    assert proposal.tokens[1].tolist() == drafts_of(small(), [int(tokens[1, 0]), 7], K)


def test_past_its_context_it_is_silent() -> None:
    """Drafts end with the model's positions; rows past them are counted, and never run."""
    short = tiny_target(5, layers=("attention",), delta_net=None, taps=(), context_length=8)
    drafter = DraftModel(short, VOCAB, K)
    tokens = np.asarray(jax.random.randint(jax.random.key(2), (ROWS, K + 1), 0, VOCAB))
    state, proposal, info = step(drafter, drafter.init(ROWS, 32), feed(tokens, [4, 4, 2], 0))
    assert info.reason.tolist() == [NoDraft.DRAFTED] * ROWS
    state, proposal, info = step(drafter, state, feed(tokens, [4, 2, 4], [4, 4, 2]))
    assert info.reason.tolist() == [NoDraft.CONTEXT, NoDraft.DRAFTED, NoDraft.DRAFTED]
    assert proposal.length.tolist() == [0, 2, 2]
    state, proposal, info = step(drafter, state, feed(tokens, [4, 4, 1], [8, 6, 6]))
    assert info.reason.tolist() == [NoDraft.CONTEXT, NoDraft.CONTEXT, NoDraft.DRAFTED]
    state, proposal, info = step(drafter, state, feed(tokens, [1, 1, 1], [12, 10, 7]))
    assert info.reason.tolist() == [NoDraft.CONTEXT] * ROWS
    assert state.length.tolist() == [13, 11, 8]


# ---------------------------------------------------------------------------- the front door


def test_what_cannot_be_a_draft_model() -> None:
    model = Model.of(TableTarget.random(jax.random.key(0), VOCAB))
    with pytest.raises(ValueError, match="a TableTarget; expected a DecoderTarget, whose state"):
        model.choose(Model.of(TableTarget.random(jax.random.key(1), VOCAB)))
    with pytest.raises(ValueError, match="has 48 tokens and the draft model 32"):
        model.choose(Model.of(tiny_target(1, vocab_size=32)))
    with pytest.raises(ValueError, match="draft_tokens is 129; a draft model has 1 to 128"):
        model.choose(Model.of(small()), 129)
    chosen = model.choose(Model.of(small()), 2)
    assert isinstance(chosen, DraftModel) and (chosen.draftable, chosen.draft_tokens) == (48, 2)


def test_the_tokens_of_two_models_are_compared() -> None:
    """Padding may differ; a token may not, and none may lie past the smaller vocabulary."""

    def text(source: str, words: str) -> Text:
        vocab = {word: i for i, word in enumerate(words)}
        return Text(tokenizer=Tokenizer(models.WordLevel(vocab, unk_token="a")), source=source)

    one, same, other = text("one", "abc"), text("same", "abc"), text("other", "acb")
    longer = text("longer", "abcd")
    assert shared_tokens((8, one), (8, same)) == 8
    assert shared_tokens((16, one), (8, same)) == 8
    assert shared_tokens((8, None), (8, same)) == 8
    assert shared_tokens((8, longer), (16, one)) == 8
    with pytest.raises(ValueError, match="the target has 16 tokens and the draft model 8"):
        shared_tokens((16, None), (8, same))
    with pytest.raises(ValueError, match="token 1 is 'b' in one and 'c' in other"):
        shared_tokens((8, one), (8, other))
    with pytest.raises(ValueError, match="the tokenizers have the token 3; expected more"):
        shared_tokens((8, longer), (3, one))


def test_costs() -> None:
    """A model of all kinds of layers is billed in pages, rings and states; nothing is left out."""
    model = Model.of(target(), DraftModel(target(), VOCAB, 4))
    plan = jaxdraft.plan(model, pages=6, max_batch=2, context=64, page_size=8)
    terms = {term.name: term.bytes for term in plan.terms}
    state = jax.eval_shape(
        lambda: model.drafter.init_pool(2, pages=6, page_size=8, columns=8)  # type: ignore[attr-defined]
    )
    pool, sliding, model_state = state.model.pool, state.model.sliding, state.model
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    assert terms["drafter pages"] == size((pool.keys, pool.values))
    assert terms["drafter windowed layers"] == size((sliding.keys, sliding.values))
    assert terms["drafter recurrent state"] == size((model_state.recurrent, model_state.capsules))
