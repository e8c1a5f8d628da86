"""Drafts from a part of the vocabulary: the same scores over fewer tokens, and the same output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdraft import Model, generate
from jaxdraft.base import Feed
from jaxdraft.draft.block import BlockDrafter
from jaxdraft.nn.linear import Frozen
from jaxdraft.testing import assert_lossless, tiny_drafter, tiny_target
from jaxdraft.train.blocks import block_features
from jaxdraft.train.losses import Continuations, DraftLoss
from jaxdraft.train.optimize import labels, make_step, optimizer, start
from tests.train.helpers import continuations

TABLES = ("predecessor", "successor", "markov_w1", "markov_w2")
SIZE = 20  # of 48: the tokens 0, 2, 4, 7, 9, 12, ...
KINDS = pytest.mark.parametrize("kind", ["dflash2", "dspark"])


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target(layers=("delta_net", "attention"), taps=(0, 1))


def small_drafter(target: Any, kind: str) -> BlockDrafter:
    return tiny_drafter(target, kind, draft_vocab_size=SIZE)


def vocabulary_of(drafter: BlockDrafter) -> np.ndarray:
    return np.asarray(drafter.backbone.params["vocabulary"])


def full_drafter(target: Any, kind: str, small: BlockDrafter) -> BlockDrafter:
    """The same drafter over all tokens, each a candidate: those outside have no pair scores."""
    full = tiny_drafter(target, kind, candidates=48)
    params = dict(small.backbone.params)
    ids = params.pop("vocabulary")
    for name in TABLES:
        if name in params:
            params[name] = jnp.zeros((48, params[name].shape[1])).at[ids].set(params[name])
    return replace(full, backbone=Frozen(params, full.backbone.structure))


@KINDS
def test_the_lattice_is_the_full_one_s_part(kind: str, target: Any) -> None:
    """Anchors inside and outside: best candidates of the part, edge scores of the whole."""
    small = small_drafter(target, kind)
    ids = vocabulary_of(small)
    full = full_drafter(target, kind, small)
    assert 7 in ids and 8 not in ids
    feed = Feed(
        aux=jax.random.normal(jax.random.key(0), (2, 5, small.config.aux_width)),
        count=jnp.full((2,), 5, jnp.int32),
        first_position=jnp.zeros((2,), jnp.int32),
        anchor=jnp.asarray([7, 8]),
        wants_draft=jnp.ones((2,), bool),
        limit=jnp.full((2,), 99, jnp.int32),
    )
    found, whole = (d.step(d.init(2, 64), feed)[1].lattice for d in (small, full))
    outside = np.setdiff1d(np.arange(48), ids)
    for b in range(2):
        for k in range(small.draft_tokens):
            order = np.asarray(whole.candidates)[b, k]  # of all tokens, the best first
            scores = np.zeros((48, 48), np.float32)  # by token
            before = order * 0 + int(feed.anchor[b]) if k == 0 else whole.candidates[b, k - 1]
            scores[np.asarray(before)[:, None], order[None]] = np.asarray(whole.scores)[b, k]
            expected = [t for t in order if t in ids][: small.config.candidates]
            got = np.asarray(found.candidates)[b, k]
            assert got.tolist() == expected
            if k == 0:
                rows = np.full(got.shape, int(feed.anchor[b]))
            else:
                rows = np.asarray(found.candidates)[b, k - 1]
                assert not np.array_equal(scores[rows[0]], scores[outside[0]])
            np.testing.assert_allclose(
                found.scores[b, k], scores[rows[:, None], got[None]], atol=1e-5
            )


@KINDS
def test_output_does_not_change(kind: str, target: Any) -> None:
    """Tokens outside the vocabulary come from the target alone."""
    model = Model.of(target, small_drafter(target, kind))
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]]
    assert_lossless(model, model.drafter, prompts, max_new_tokens=40)
    found = np.concatenate(generate(model, prompts, max_new_tokens=40).ids())
    ids = vocabulary_of(model.drafter)  # type: ignore[arg-type]
    assert not np.isin(found, ids).all()


def test_places_and_tokens_are_inverse(target: Any) -> None:
    module = small_drafter(target, "dflash2").backbone()
    ids = module.vocabulary[...]
    places = module.draft_ids(jnp.arange(48))
    np.testing.assert_array_equal(places[ids], np.arange(SIZE))
    np.testing.assert_array_equal(np.delete(places, ids), np.full(48 - SIZE, SIZE))
    np.testing.assert_array_equal(module.tokens(places[ids]), ids)


@pytest.mark.parametrize("size", [2, 49])
def test_a_size_that_cannot_be(size: int, target: Any) -> None:
    with pytest.raises(ValueError, match=f"draft_vocab_size is {size}; expected 3 .* to 48"):
        tiny_drafter(target, draft_vocab_size=size)


# --------------------------------------------------------------------------- training


@pytest.fixture(scope="module")
def batch(target: Any) -> Continuations:
    return continuations(target)


def loss_of(target: Any, **changes: Any) -> DraftLoss:
    params = target.decoder.params
    embedding, head = params["embed"]["weight"], params["head"]["weight"]
    return DraftLoss(embedding=embedding, head=head, **changes)


@KINDS
def test_the_whole_vocabulary_as_a_part_learns_the_same(
    kind: str, target: Any, batch: Continuations
) -> None:
    full = tiny_drafter(target, kind)
    part = tiny_drafter(target, kind, draft_vocab_size=48)
    loss = loss_of(target, variation_weight=0.7, soft=0.5)
    run = jax.jit(lambda frozen: loss(frozen(), batch))
    expected, found = run(full.backbone), run(part.backbone)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), expected, found)


def test_labels_outside_have_no_weight(target: Any, batch: Continuations) -> None:
    """The first term against a loop over the part's own softmax."""
    made = small_drafter(target, "dflash2")
    ids = vocabulary_of(made)
    loss = loss_of(target, pair_weight=0.0)
    total, metrics = jax.jit(lambda frozen: loss(frozen(), batch))(made.backbone)
    features = jax.jit(
        lambda frozen: block_features(
            frozen(), made.embedding, batch.aux, batch.tokens, batch.anchors
        )
    )(made.backbone)
    logits = np.asarray(features, np.float64) @ np.asarray(loss.head)[ids].T
    nats = np.zeros(logits.shape[:3])
    for b, n, k in np.ndindex(*nats.shape):
        label = int(batch.tokens[b, int(batch.anchors[b, n]) + k + 1])
        if label in ids:
            row = logits[b, n, k]
            nats[b, n, k] = np.log(np.exp(row).sum()) - row[list(ids).index(label)]
    assert 0 < (nats == 0).mean() < 1, "both kinds of label should be met"
    weight = np.exp(-np.arange(made.draft_tokens) / loss.decay)
    expected = (nats.mean((0, 1)) * weight).sum() / weight.sum()
    np.testing.assert_allclose(total, expected, rtol=1e-4)
    np.testing.assert_allclose(metrics["nats"], expected, rtol=1e-4)


def test_a_step_leaves_the_vocabulary_alone(target: Any, batch: Continuations) -> None:
    frozen = tiny_drafter(target, "dflash2", draft_vocab_size=40).backbone
    before = jax.tree.map(np.asarray, frozen.params)
    transform = optimizer(labels(frozen))
    step = make_step(frozen, loss_of(target), transform)
    state, metrics = step(start(frozen, transform), batch, jnp.ones((), jnp.float32))
    assert np.isfinite(metrics["gradient"]) and metrics["gradient"] > 0
    np.testing.assert_array_equal(state.params["vocabulary"], before["vocabulary"])
    assert state.params["vocabulary"].dtype == jnp.int32
    for name in ("predecessor", "successor"):
        assert not np.array_equal(state.params[name], before[name])
