"""The two laws of the middle of a round, and what must not leak through it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdraft.base import Feed
from jaxdraft.target import DecoderTarget
from jaxdraft.testing import run_rows_one_by_one, tiny_model, tiny_target
from tests.examples import examples

BATCH, ROWS = 3, 6
SEEDS = st.integers(0, 2**31 - 1)


@functools.cache
def target() -> DecoderTarget:
    return tiny_target()


forward = jax.jit(lambda target, *args: target.forward(*args))
commit = jax.jit(lambda target, *args: target.commit(*args))
one_by_one = jax.jit(run_rows_one_by_one)


def tokens(seed: int, rows: int) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (BATCH, rows), 0, 48)


def close(a: object, b: object, tolerance: float = 2e-5) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance)


@given(seed=SEEDS, counts=st.lists(st.integers(0, ROWS), min_size=BATCH, max_size=BATCH))
def test_verify_T_and_commit_n_equals_running_n_rows(seed: int, counts: list[int]) -> None:
    """Attention lengths and keys, delta-net states, convolution rows, and the next logits."""
    model, count = target(), jnp.asarray(counts, jnp.int32)
    context = tokens(seed, 5)
    out = forward(model, context, jnp.full((BATCH,), 5, jnp.int32), model.init(BATCH, 32))
    start = commit(model, out.state, jnp.full((BATCH,), 5, jnp.int32))
    window = tokens(seed + 1, ROWS)

    out = forward(model, window, jnp.full((BATCH,), ROWS, jnp.int32), start)
    committed = commit(model, out.state, count)
    logits, _ = one_by_one(model, window, start)
    close(out.logits, logits)

    alone = start
    for row in range(ROWS):  # rows past the count are fed with a count of zero
        feed = (row < count).astype(jnp.int32)
        alone = commit(model, forward(model, window[:, row : row + 1], feed, alone).state, feed)
    np.testing.assert_array_equal(committed.length, alone.length)
    close(committed.recurrent, alone.recurrent)

    probe = tokens(seed + 2, 1)
    one = jnp.ones((BATCH,), jnp.int32)
    close(forward(model, probe, one, committed).logits, forward(model, probe, one, alone).logits)
    # The state that was passed in is what it was: a verify pass that is dropped never happened.
    again = forward(model, window, jnp.full((BATCH,), ROWS, jnp.int32), start)
    np.testing.assert_array_equal(again.logits, out.logits)


def test_committing_nothing_keeps_the_state_bit_for_bit() -> None:
    model, zero = target(), jnp.zeros((BATCH,), jnp.int32)
    full = jnp.full((BATCH,), ROWS, jnp.int32)
    start = commit(model, forward(model, tokens(0, ROWS), full, model.init(BATCH, 32)).state, full)
    after = commit(model, forward(model, tokens(1, ROWS), full, start).state, zero)
    jax.tree.map(np.testing.assert_array_equal, after.recurrent, start.recurrent)
    np.testing.assert_array_equal(after.length, start.length)


def test_sixty_four_rejections_in_a_row_do_not_drift() -> None:
    """Each round runs a window of wrong drafts and commits its anchor alone."""
    model, full = target(), jnp.full((BATCH,), ROWS, jnp.int32)
    one = jnp.ones((BATCH,), jnp.int32)
    plain = rejecting = model.init(BATCH, 80)
    errors = []
    for step in range(64):
        anchor = tokens(step, 1)
        window = jnp.concatenate([anchor, tokens(1000 + step, ROWS - 1)], axis=1)
        rejecting = commit(model, forward(model, window, full, rejecting).state, one)
        plain = commit(model, forward(model, anchor, one, plain).state, one)
        pairs = zip(
            jax.tree.leaves(plain.recurrent), jax.tree.leaves(rejecting.recurrent), strict=True
        )
        errors.append(max(float(jnp.abs(a - b).max()) for a, b in pairs))
    assert max(errors) < 1e-4
    assert max(errors[48:]) < 10 * max(max(errors[:16]), 1e-6)  # it does not grow with the steps


@pytest.mark.parametrize("poison", [np.nan, 1e30])
def test_scratch_and_padding_never_reach_the_logits(poison: float) -> None:
    """Bit-identical logits when everything uncommitted holds NaN, and padded ids are anything."""
    model = target()
    counts = jnp.asarray([5, 2, 3], jnp.int32)
    context = tokens(0, 5)
    out = forward(model, context, counts, model.init(BATCH, 32))
    state = commit(model, out.state, counts)
    slots = jnp.arange(state.pool.page_size)[None, None, :, None]
    hidden = slots >= counts[:, None, None, None]
    spoiled = state.replace(
        pool=state.pool.replace(
            keys=tuple(jnp.where(hidden, poison, k) for k in state.pool.keys),
            values=tuple(jnp.where(hidden, poison, v) for v in state.pool.values),
        )
    )
    window, rows = tokens(1, ROWS), jnp.asarray([ROWS, 4, 2], jnp.int32)
    clean = forward(model, window, rows, state)
    dirty = forward(model, window, rows, spoiled)
    padded = jnp.where(jnp.arange(ROWS)[None] < rows[:, None], window, -1)
    wild = forward(model, jnp.where(padded < 0, 10**6, padded), rows, state)
    negative = forward(model, padded, rows, state)
    for row, n in enumerate(np.asarray(rows)):
        for other in (dirty, wild, negative):
            np.testing.assert_array_equal(other.logits[row, :n], clean.logits[row, :n])
    after = [commit(model, o.state, rows).recurrent for o in (clean, wild, negative)]
    jax.tree.map(np.testing.assert_array_equal, after[0], after[1])
    jax.tree.map(np.testing.assert_array_equal, after[0], after[2])


# ------------------------------------------------------------------ the drafter's side


def feed(aux: jax.Array, count: jax.Array, first: jax.Array, anchor: int = 7) -> Feed:
    batch = count.shape[0]
    return Feed(
        aux=aux,
        count=count,
        first_position=first,
        anchor=jnp.full((batch,), anchor, jnp.int32),
        wants_draft=jnp.ones((batch,), bool),
        limit=jnp.full((batch,), 99, jnp.int32),
    )


@settings(max_examples=examples(15))
@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
@given(data=st.data(), seed=SEEDS)
def test_any_split_of_the_rows_gives_the_same_drafts(
    kind: str, data: st.DataObject, seed: int
) -> None:
    """60 committed rows in calls of any size, across many wraps of a 12-row window."""
    drafter = tiny_model(kind).drafter
    total, most = 60, 16
    aux = jax.random.normal(jax.random.key(seed), (2, total + most, drafter.config.aux_width))

    def run(splits: list[list[int]]) -> tuple[jax.Array, jax.Array]:
        state, at = drafter.init(2, 128), np.zeros(2, np.int32)
        while (at < total).any():
            sizes = [row.pop(0) if row else 0 for row in splits]
            count = np.minimum(sizes, total - at).astype(np.int32)
            part = jnp.stack([aux[b, at[b] : at[b] + most] for b in range(2)])
            state, proposal, _ = drafter.step(
                state, feed(part, jnp.asarray(count), jnp.asarray(at))
            )
            at = at + count  # a new array: jnp.asarray may have borrowed the old one
            splits = [row or [total] * 9 if (at[b] < total) else [] for b, row in enumerate(splits)]
            splits = [[min(n, most) for n in row] for row in splits]
        return proposal.lattice.candidates, proposal.lattice.scores

    size = st.integers(0, most)
    random_splits = [data.draw(st.lists(size, min_size=4, max_size=20)) for _ in range(2)]
    candidates, scores = run([[most] * 9, [most] * 9])
    other_candidates, other_scores = run(random_splits)
    np.testing.assert_array_equal(candidates, other_candidates)
    np.testing.assert_allclose(scores, other_scores, atol=2e-5)


def test_a_window_hides_what_is_behind_it() -> None:
    """Beyond the window nothing matters; inside it everything does; a short prompt fits whole."""
    drafter = tiny_model("dflash2").drafter  # window 12
    aux = jax.random.normal(jax.random.key(0), (1, 40, drafter.config.aux_width))
    count, first = jnp.asarray([40], jnp.int32), jnp.zeros((1,), jnp.int32)

    def scores(rows: jax.Array) -> jax.Array:
        return drafter.step(drafter.init(1, 64), feed(rows, count, first))[1].lattice.scores

    base = scores(aux)
    # The first block row stands at position 40 and sees keys in (28, 40].
    np.testing.assert_array_equal(scores(aux.at[:, :29].add(1.0)), base)
    assert float(jnp.abs(scores(aux.at[:, 29].add(1.0)) - base).max()) > 1e-4


def test_a_hole_silences_a_row_until_it_starts_again() -> None:
    drafter = tiny_model("dflash2").drafter
    aux = jax.random.normal(jax.random.key(0), (2, 4, drafter.config.aux_width))
    four = jnp.full((2,), 4, jnp.int32)
    state, proposal, info = drafter.step(drafter.init(2, 64), feed(aux, four, 0 * four))
    assert proposal.length.tolist() == [3, 3] and info.reason.tolist() == [0, 0]
    # Row 1 skips a position.
    state, proposal, info = drafter.step(state, feed(aux, four, jnp.asarray([4, 5], jnp.int32)))
    assert proposal.length.tolist() == [3, 0] and info.reason.tolist() == [0, 2]
    assert state.length.tolist() == [8, 4]
    # It stays silent even when the rows fit again, and comes back from position 0.
    state, proposal, _ = drafter.step(state, feed(aux, four, jnp.asarray([8, 4], jnp.int32)))
    assert proposal.length.tolist() == [3, 0]
    state, proposal, _ = drafter.step(state, feed(aux, four, jnp.asarray([12, 0], jnp.int32)))
    assert proposal.length.tolist() == [3, 3]
    fresh = drafter.step(drafter.init(2, 64), feed(aux, four, 0 * four))[1]
    np.testing.assert_array_equal(proposal.tokens[1], fresh.tokens[1])


def test_the_anchor_is_in_the_block_and_reaches_every_row() -> None:
    drafter = tiny_model("dflash2").drafter
    aux = jax.random.normal(jax.random.key(0), (1, 4, drafter.config.aux_width))
    count, first = jnp.asarray([4], jnp.int32), jnp.zeros((1,), jnp.int32)
    runs = [
        drafter.step(drafter.init(1, 64), feed(aux, count, first, anchor))[1].lattice
        for anchor in (7, 8)
    ]
    for step in range(drafter.draft_tokens):
        assert float(jnp.abs(runs[0].scores[0, step] - runs[1].scores[0, step]).max()) > 0


def test_non_finite_scores_and_the_end_of_the_table_stop_the_drafts() -> None:
    drafter = tiny_model("dflash2").drafter
    width = drafter.config.aux_width
    aux = jnp.ones((2, 4, width)).at[1].set(jnp.nan)
    four = jnp.full((2,), 4, jnp.int32)
    _, proposal, info = drafter.step(drafter.init(2, 64), feed(aux, four, 0 * four))
    assert proposal.length.tolist() == [3, 0] and info.reason.tolist() == [0, 4]
    assert proposal.tokens[1].tolist() == [-1, -1, -1]

    state = drafter.init(1, 256)
    one = jnp.asarray([1], jnp.int32)
    rows = jnp.ones((1, 16, width))
    for at in range(0, 256, 16):
        state = drafter.ingest(state, feed(rows, 16 * one, at * one))
    _, proposal, info = drafter.propose(state, feed(rows, 0 * one, 256 * one))
    assert proposal.length.tolist() == [0] and info.reason.tolist() == [3]


def test_only_committed_rows_stay_in_the_drafter() -> None:
    """After drafting, the caches are bit-equal to those of a drafter that never drafted."""
    for kind in ("dflash2", "dspark"):
        drafter = tiny_model(kind).drafter
        aux = jax.random.normal(jax.random.key(0), (1, 8, drafter.config.aux_width))
        eight, zero = jnp.asarray([8], jnp.int32), jnp.zeros((1,), jnp.int32)
        ingested = drafter.ingest(drafter.init(1, 64), feed(aux, eight, zero))
        drafted, _, _ = drafter.propose(ingested, feed(aux, 0 * eight, eight))
        jax.tree.map(np.testing.assert_array_equal, ingested, drafted)
