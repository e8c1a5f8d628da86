"""Verification by hand-worked numbers: what stands, what replaces it, and how often."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdraft import verify
from jaxdraft.base import Draw, Lattice, Proposal, Support, Truncation
from jaxdraft.draft.sampled import sampled_walk
from jaxdraft.keys import draw_keys, row_streams
from jaxdraft.sampling import History, Penalties, SamplingRules, adjust
from jaxdraft.verify import Verdict

ROWS = 20_000


def rules(rows: int = ROWS, **how: Any) -> Truncation:
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **how}
    dtypes = {"top_k": jnp.int32}
    return Truncation(
        **{k: jnp.full((rows,), v, dtypes.get(k, jnp.float32)) for k, v in given.items()}
    )


def judge(
    p: list[list[float]],
    drafts: list[int] | jax.Array,
    support: Support | None = None,
    *,
    rows: int = ROWS,
    dtype: Any = jnp.float32,
    **how: Any,
) -> Verdict:
    """Many rows with the same distributions ``p`` [1 + K, V], and their drafts."""
    width = len(p) - 1
    logits = jnp.log(jnp.asarray(p, dtype)).astype(jnp.float32)
    tokens = jnp.broadcast_to(jnp.asarray(drafts, jnp.int32), (rows, width))
    proposal = Proposal(tokens, jnp.full((rows,), width, jnp.int32), support=support)
    streams = row_streams(0, rows)
    at = jnp.full((rows,), 5, jnp.int32)
    logits = jnp.broadcast_to(jnp.maximum(logits, -100.0), (rows, *logits.shape))
    return jax.jit(verify.sampled)(logits, proposal, rules(rows, **how), streams, at)


def shares(tokens: Any, vocab: int) -> np.ndarray:
    return np.bincount(np.asarray(tokens), minlength=vocab) / len(tokens)


def test_a_drawn_draft_and_what_replaces_it() -> None:
    """p = [.2 .3 .5], q = [. .75 .25]: token 1 stands with .4, token 2 always, .55 in all; what
    replaces it comes from (4/9, 0, 5/9), so what is emitted has p again."""
    draw = Draw(rules(), jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_streams(0, ROWS), 99))
    scores = jnp.log(jnp.asarray([0.75, 0.25], jnp.float32))
    lattice = Lattice(
        jnp.broadcast_to(jnp.asarray([1, 2], jnp.int32), (ROWS, 1, 2)),
        jnp.broadcast_to(scores, (ROWS, 1, 2, 2)),
    )
    tokens, support = sampled_walk(lattice, draw)
    np.testing.assert_allclose(shares(tokens[:, 0], 3), [0, 0.75, 0.25], atol=0.012)
    verdict = judge([[0.2, 0.3, 0.5], [1.0, 0, 0]], tokens, support)
    stood = np.asarray(verdict.accepted == 1)
    drafts = np.asarray(tokens[:, 0])
    np.testing.assert_allclose(stood.mean(), 0.55, atol=0.012)
    np.testing.assert_allclose(stood[drafts == 1].mean(), 0.4, atol=0.015)
    assert stood[drafts == 2].all()
    fell = np.asarray(verdict.next_token)[~stood]
    np.testing.assert_allclose(shares(fell, 3), [4 / 9, 0, 5 / 9], atol=0.02)
    emitted = np.where(stood, drafts, np.asarray(verdict.next_token))
    np.testing.assert_allclose(shares(emitted, 3), [0.2, 0.3, 0.5], atol=0.012)


@pytest.mark.parametrize(("draft", "stands"), [(2, 0.0), (0, 4 / 7)])
def test_what_the_target_cuts_off_is_never_accepted(draft: int, stands: float) -> None:
    """p = [.4 .3 .2 .1] with top-k 2: outputs 0 and 1 with 4/7 and 3/7, whatever is drafted."""
    p = [[0.4, 0.3, 0.2, 0.1], [1.0, 0, 0, 0]]
    verdict = judge(p, [draft], top_k=2)
    stood = np.asarray(verdict.accepted == 1)
    np.testing.assert_allclose(stood.mean(), stands, atol=0.012)
    emitted = np.where(stood, draft, np.asarray(verdict.next_token))
    np.testing.assert_allclose(shares(emitted, 4), [4 / 7, 3 / 7, 0, 0], atol=0.012)


def test_a_greedy_row_takes_the_lowest_of_ties_beside_sampled_ones() -> None:
    logits = jnp.broadcast_to(jnp.asarray([[1.0, 1.0, 0.0]]), (1000, 1, 3))
    warm = jnp.arange(1000) % 2 == 1
    how = rules(1000)
    how = Truncation(jnp.where(warm, 1.0, 0.0), how.top_k, how.top_p, how.min_p)
    none = Proposal(jnp.zeros((1000, 0), jnp.int32), jnp.zeros((1000,), jnp.int32))
    streams, at = row_streams(3, 1000), jnp.zeros((1000,), jnp.int32)
    mixed = verify.sampled(logits, none, how, streams, at)
    alone = verify.sampled(logits, none, rules(1000), streams, at)
    assert not np.asarray(mixed.next_token)[::2].any()
    np.testing.assert_array_equal(mixed.next_token[1::2], alone.next_token[1::2])
    assert len(set(np.asarray(alone.next_token).tolist())) == 3


def test_the_bonus_is_drawn_like_any_token() -> None:
    p = [[0, 1.0, 0], [0.5, 0.5, 0]]
    verdict = judge(p, [1], rows=5000)
    assert (np.asarray(verdict.accepted) == 1).all()
    np.testing.assert_allclose(shares(verdict.next_token, 3), [0.5, 0.5, 0], atol=0.025)
    best = judge([[0, 1.0, 0], [0.3, 0.5, 0.2]], [1], rows=5000, top_k=1)
    assert (np.asarray(best.next_token) == 1).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_certain_draft_always_stands(dtype: Any) -> None:
    """p and q are one at the same token: u < 1 accepts, and an empty residual makes no NaN."""
    verdict = judge([[0, 1.0, 0], [0, 0, 1.0]], [1], rows=100_000, dtype=dtype)
    assert (np.asarray(verdict.accepted) == 1).all()
    assert (np.asarray(verdict.next_token) == 2).all()


def test_rules_that_leave_only_one_token() -> None:
    """Top-k 1, a tiny top-p, a hot temperature, flat logits: the lowest rounding never empties."""
    flat = [[0.25] * 4, [0.25] * 4]
    verdict = judge(flat, [0], rows=500, top_p=1e-6, temperature=5.0)
    assert np.asarray(verdict.finite).all()  # ties stand together
    one = judge([[0.4, 0.3, 0.2, 0.1]] * 2, [0], rows=500, top_k=1, top_p=1e-6, temperature=5.0)
    assert (np.asarray(one.accepted) == 1).all() and (np.asarray(one.next_token) == 0).all()


def test_penalties_see_the_drafts_of_the_same_block() -> None:
    """Logits [2 1.9 0] in three rows, penalty 1.5, drafts [0 1]: row 1 has [1.333 1.9 0], row 2
    [1.333 1.267 0], so both drafts stand and 0 follows."""
    one = jnp.ones((1,), jnp.float32)
    how = SamplingRules(
        target=rules(1, temperature=0.0),
        drafts=rules(1, temperature=0.0),
        streams=None,
        min_new_tokens=jnp.zeros((1,), jnp.int32),
        penalties=Penalties(1.5 * one, 0 * one, 0 * one),
    )
    drafts = jnp.asarray([[0, 1]], jnp.int32)
    history = History(jnp.asarray([[2, 2]], jnp.int32), jnp.asarray([1]), jnp.asarray([0]), drafts)
    logits = jnp.broadcast_to(jnp.asarray([2.0, 1.9, 0.0]), (1, 3, 3))
    adjusted = adjust(logits, how, history, jnp.full((1, 1), -1, jnp.int32))
    expected = [[2, 1.9, 0], [2 / 1.5, 1.9, 0], [2 / 1.5, 1.9 / 1.5, 0]]
    np.testing.assert_allclose(adjusted[0], expected, rtol=1e-6)
    verdict = verify.greedy(adjusted, Proposal(drafts, jnp.asarray([2], jnp.int32)))
    assert int(verdict.accepted[0]) == 2 and int(verdict.next_token[0]) == 0


def test_drafts_and_residuals_have_keys_of_their_own() -> None:
    """Of one position, and of neighbouring ones: no two draws share a key."""

    stream = row_streams(0, 1)
    keys = [
        tuple(np.asarray(jax.random.key_data(draw_keys(stream, jnp.asarray([at]), purpose)))[0])
        for at in range(50)
        for purpose in range(3)
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [50, 4100])
def test_one_nan_among_the_logits_is_found(vocab: int, temperature: float) -> None:
    """XLA's CPU backend may drop a NaN from a maximum; then the row would say something."""
    logits = np.random.default_rng(0).normal(size=(4, 2, vocab)).astype(np.float32)
    drafts = logits[:, 0].argmax(axis=-1).astype(np.int32)[:, None]
    place = np.asarray([3, vocab // 2, vocab - 1])
    logits[np.arange(3), 0, place] = np.nan
    proposal = Proposal(jnp.asarray(drafts), jnp.ones((4,), jnp.int32))
    verdict = jax.jit(verify.sampled)(
        jnp.asarray(logits),
        proposal,
        rules(4, temperature=temperature),
        row_streams(0, 4),
        jnp.full((4,), 5, jnp.int32),
    )
    assert verdict.finite.tolist() == [False, False, False, True]
    assert verdict.accepted[:3].tolist() == [0, 0, 0]
