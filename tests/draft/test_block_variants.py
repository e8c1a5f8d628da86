"""Properties of block drafters: mixed windows, chains, heads of their own, rows that predict."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdraft
from jaxdraft import Model, Sampling, generate, stream
from jaxdraft.base import Draw, Feed, NoDraft, Proposal, Truncation
from jaxdraft.budget import Mixed
from jaxdraft.checkpoint import save
from jaxdraft.config import AttentionConfig
from jaxdraft.draft.block import BlockDrafter
from jaxdraft.nn.linear import Frozen
from jaxdraft.testing import assert_lossless, check_stats, tiny_drafter, tiny_target
from jaxdraft.train.blocks import block_features
from jaxdraft.train.losses import DraftLoss
from jaxdraft.train.optimize import labels, make_step, optimizer, start
from tests.checkpoint.helpers import assert_same
from tests.train.helpers import continuations

NARROW = AttentionConfig(
    heads=4, kv_heads=2, head_dim=16, rotary_dim=16, qk_norm=True, scale=0.25, window=6
)
PRUNED = dict(draft_vocab_size=20, own_head=True, layout="speculators")
VARIANTS: dict[str, dict[str, Any]] = {
    # Of the layers one has a window and is causal, the other sees everything.
    "mixed": dict(
        kind="dflash", attention=NARROW, full_layers=(1,), causal_layers=(0,), rank=0,
        candidates=16, logit_softcap=2.0, logit_multiplier=0.5,
    ),
    "gated": dict(kind="dspark", markov="gated", confidence="row"),
    "rnn": dict(
        kind="dspark", markov="rnn", chained=True, confidence="pair", candidates=16, layout="flat"
    ),
    # Its anchor's row predicts nothing, unlike that of other DSpark drafters.
    "pruned": dict(kind="dspark", chained=True, draft_tokens=3, candidates=16, **PRUNED),
    # And here it does, unlike that of other DFlash drafters.
    "pruned plain": dict(kind="dflash", rank=0, draft_tokens=4, candidates=16, **PRUNED),
}  # fmt: skip
EACH = pytest.mark.parametrize("variant", VARIANTS)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]]


@pytest.fixture(scope="module")
def target() -> Any:
    """The first tap is the embedding."""
    return tiny_target(layers=("attention", "attention"), delta_net=None, taps=(0, 1))


def drafter(target: Any, variant: str, **changes: Any) -> BlockDrafter:
    return tiny_drafter(target, **{**VARIANTS[variant], **changes})


@EACH
def test_output_does_not_change(variant: str, target: Any) -> None:
    """Greedily, in one call and streamed."""
    model = Model.of(target, drafter(target, variant))
    assert_lossless(model, model.drafter, PROMPTS, max_new_tokens=16)
    if variant in ("mixed", "rnn"):
        found: list[list[int]] = [[], []]
        for event in stream(model, PROMPTS, max_new_tokens=16):
            found[event.row] += event.tokens
        assert found == generate(model, PROMPTS, max_new_tokens=16).ids()


def test_a_sampled_chain_that_is_cut(target: Any) -> None:
    """It runs, and its counters add up; ``test_trust.py`` checks the distribution."""
    made = drafter(target, "rnn").with_confidence(0.2)
    model = Model.of(target, made)
    out = generate(model, PROMPTS, max_new_tokens=16, sampling=Sampling(temperature=0.8), key=3)
    check_stats(out.stats)
    assert int(out.stats.emitted.sum()) == 32
    assert made.declines and not made.with_confidence(None).declines


def feed_of(made: BlockDrafter, count: int = 9, anchor: int = 7) -> Feed:
    batch = jnp.ones((1,), jnp.int32)
    return Feed(
        aux=jax.random.normal(jax.random.key(0), (1, count, made.config.aux_width)),
        count=count * batch,
        first_position=0 * batch,
        anchor=anchor * batch,
        wants_draft=batch.astype(bool),
        limit=99 * batch,
    )


@pytest.mark.parametrize("markov", ["vanilla", "gated"])
def test_a_chain_is_the_walk_of_a_lattice_of_all_tokens(markov: str, target: Any) -> None:
    whole = drafter(target, "gated", markov=markov, candidates=48)
    config = dataclasses.replace(whole.config, chained=True)
    chained = tiny_drafter(target, **{**VARIANTS["gated"], "markov": markov, "chained": True})
    chained = dataclasses.replace(
        chained, backbone=Frozen(whole.backbone.params, chained.backbone.structure)
    )
    assert chained.config == dataclasses.replace(config, candidates=3)
    found = [made.step(made.init(1, 64), feed_of(made))[1] for made in (whole, chained)]
    np.testing.assert_array_equal(found[0].tokens, found[1].tokens)
    assert found[0].lattice is not None and found[1].lattice is None


@pytest.mark.parametrize("variant", ["rnn", "pruned"])
def test_each_draft_is_the_best_after_its_path(variant: str, target: Any) -> None:
    """The steps of the walk, against the same heads over the whole path at once."""
    made = drafter(target, variant)
    state, proposal, _ = made.step(made.init(1, 64), feed_of(made))
    backbone, anchor = made.backbone(), jnp.asarray([7])
    features = made.features(state, anchor)
    before = jnp.concatenate([anchor[:, None], proposal.tokens[:, :-1]], axis=1)
    bias = backbone.pair_bias(features, backbone.predecessors(before))
    best = jnp.argmax(backbone.logits(features, made.head) + bias, axis=-1)
    np.testing.assert_array_equal(proposal.tokens, backbone.tokens(best))
    assert len(set(np.asarray(best)[0].tolist())) > 1


@pytest.mark.parametrize("variant", ["rnn", "pruned"])
def test_gradients_of_a_chain_are_those_of_its_path(variant: str, target: Any) -> None:
    """With respect to the drafter and the auxiliary rows, of probabilities that drafts have."""
    made = drafter(target, variant)
    one = jnp.ones((1,), jnp.float32)
    rules = Truncation(one, jnp.zeros((1,), jnp.int32), one, 0 * one)
    feed = dataclasses.replace(
        feed_of(made), draw=Draw(rules, jax.random.split(jax.random.key(1), 1))
    )
    shape = (1, made.draft_tokens, made.config.candidates)
    weights = jax.random.normal(jax.random.key(2), shape)

    def walked(made: BlockDrafter, aux: jax.Array) -> tuple[jax.Array, Proposal]:
        _, proposal, _ = made.step(made.init(1, 64), dataclasses.replace(feed, aux=aux))
        assert proposal.support is not None
        return jnp.sum(proposal.support.probs * weights), proposal

    def along(made: BlockDrafter, aux: jax.Array, proposal: Proposal) -> jax.Array:
        state = made.ingest(made.init(1, 64), dataclasses.replace(feed, aux=aux))
        backbone, features = made.backbone(), made.features(state, feed.anchor)
        before = jnp.concatenate([feed.anchor[:, None], proposal.tokens[:, :-1]], axis=1)
        bias = backbone.pair_bias(features, backbone.predecessors(before))
        assert bias is not None and proposal.support is not None
        ids = backbone.draft_ids(proposal.support.tokens)
        scores = jnp.take_along_axis(backbone.logits(features, made.head) + bias, ids, axis=-1)
        return jnp.sum(jax.nn.softmax(scores, axis=-1) * weights)

    gradient = jax.jit(jax.grad(walked, (0, 1), has_aux=True, allow_int=True))
    found, proposal = gradient(made, feed.aux)
    expected = jax.jit(jax.grad(along, (0, 1), allow_int=True))(made, feed.aux, proposal)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, atol=1e-5)
    assert float(jnp.abs(found[1]).max()) > 1e-3


def test_a_drafter_of_both_caches_is_billed_for_both(target: Any) -> None:
    """Rings and pages, the same drafts from a pool, and what is allocated is what is billed."""
    made = drafter(target, "mixed")
    model = Model.of(target, made)
    plan = jaxdraft.plan(model, pages=11, max_batch=3, context=64, page_size=8)
    assert isinstance(plan.costs.drafter, Mixed) and not made.windowed
    state = made.init_pool(3, pages=11, page_size=8, columns=8)
    assert state.ring is not None and state.pages is not None
    terms = {term.name: term.bytes for term in plan.terms}
    size = lambda cache: sum(x.nbytes for x in (*cache.keys, *cache.values))  # noqa: E731
    assert terms["drafter rings"] == size(state.ring)
    assert terms["drafter pages"] + terms["drafter spill"] == size(state.pages)
    assert plan.drafter_pages == state.ring.pages + state.pages.pages
    pooled = made.step(made.init_pool(1, pages=4, page_size=8, columns=4), feed_of(made))[1]
    dense = made.step(made.init(1, 64), feed_of(made))[1]
    np.testing.assert_array_equal(pooled.tokens, dense.tokens)


def test_a_row_that_finds_no_page_gives_its_ring_back(target: Any) -> None:
    made = drafter(target, "mixed")
    state = made.init_pool(1, pages=1, page_size=4, columns=4)  # one page, and one to spill
    free = int(state.ring.free_count)  # type: ignore[union-attr]
    state, proposal, _ = made.step(state, feed_of(made, count=9))
    assert bool(state.denied[0]) and int(proposal.length[0]) == 0
    assert int(state.ring.free_count) == free  # type: ignore[union-attr]
    assert made.skip(state, jnp.zeros((1, 4), jnp.int32), jnp.zeros((1,), jnp.int32)) is None


@EACH
def test_training_sees_what_drafting_sees(variant: str, target: Any) -> None:
    """The rows of a block, and a step in which every array learns."""
    made, batch = drafter(target, variant), continuations(target)
    feed = feed_of(made, count=9)
    anchor = jnp.asarray([[9]])
    tokens = jnp.zeros((1, 14), jnp.int32).at[0, 9].set(7)
    aux = jnp.pad(feed.aux, ((0, 0), (0, 5), (0, 0)))  # type: ignore[arg-type]
    state = made.ingest(made.init(1, 64), feed)
    drawn = made.features(state, jnp.asarray([7]))
    rows = block_features(made.backbone(), made.embedding, aux, tokens, anchor)[:, 0]
    np.testing.assert_allclose(rows, drawn, atol=2e-5)
    params = target.decoder.params
    loss = DraftLoss(
        embedding=params["embed"]["weight"], head=params["head"]["weight"], variation_weight=0.5
    )
    transform = optimizer(labels(made.backbone))
    step = make_step(made.backbone, loss, transform)
    before = jax.tree.map(np.asarray, made.backbone.params)
    state, metrics = step(start(made.backbone, transform), batch, jnp.ones((), jnp.float32))
    assert all(np.isfinite(value).all() for value in jax.tree.leaves(metrics))
    fixed = {"vocabulary", "rotary"}
    for path, value in jax.tree_util.tree_leaves_with_path(state.params):
        old = dict(jax.tree_util.tree_leaves_with_path(before))[path]
        learns = not fixed & {getattr(key, "key", None) for key in path}
        assert np.array_equal(value, old) != learns, jax.tree_util.keystr(path)


@EACH
def test_it_is_saved_and_loaded(variant: str, target: Any, tmp_path: Path) -> None:
    model = Model.of(target, drafter(target, variant))
    made = model.drafter
    assert isinstance(made, BlockDrafter)
    save(model, tmp_path / "saved")
    found = jaxdraft.load(tmp_path / "saved")
    assert found.info.drafter == made.config.kind
    assert_same(found, model, tables=2e-5)
    report = jaxdraft.inspect(tmp_path / "saved").summary()
    assert report["loads"], report["problems"]


UNSAYABLE = [
    ("rnn", dict(candidates=5), "candidates is 5; a dspark checkpoint without selector_top_k"),
    ("mixed", dict(causal_layers=(1,)), "causal_layers is"),
    ("mixed", dict(draft_tokens=4), "draft_tokens is 4; a dflash checkpoint can only"),
    ("gated", dict(logit_softcap=3.0), "logit_softcap is 3.0"),
    ("pruned", dict(own_head=False), "own_head is False"),
]


@pytest.mark.parametrize(("variant", "changes", "message"), UNSAYABLE)
def test_what_no_file_can_say(
    variant: str, changes: dict[str, Any], message: str, target: Any, tmp_path: Path
) -> None:
    model = Model.of(target, drafter(target, variant, **changes))
    with pytest.raises(ValueError) as caught:
        save(model, tmp_path / "saved")
    assert message in str(caught.value)


WRONG = [
    (dict(markov="rnn"), "a lattice has scores of pairs alone"),
    (dict(own_head=True), "own_head is True and draft_vocab_size is None"),
    (dict(draft_tokens=2), "a block of 4 rows has 4 drafts, or 3"),
    (dict(full_layers=(2,)), "full_layers is \\(2,\\); expected layers in 0..1"),
    (dict(causal_layers=(1, 0)), "causal_layers is \\(1, 0\\)"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_descriptions_that_cannot_be(changes: dict[str, Any], message: str, target: Any) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_drafter(target, "dspark", **changes)


def test_a_failing_step_leaves_the_drafts_before_it(target: Any) -> None:
    """Drawn drafts must not decide whether they are verified."""
    made = tiny_drafter(target, **{**VARIANTS["gated"], "chained": True})
    state, clean, _ = made.step(made.init(1, 64), feed_of(made))
    drafts = np.asarray(clean.tokens)[0].tolist()
    assert drafts[0] != 7, "the step after the anchor is to succeed"
    params = dict(made.backbone.params)
    params["markov_w1"] = params["markov_w1"].at[drafts[0]].set(jnp.nan)
    bad = dataclasses.replace(made, backbone=Frozen(params, made.backbone.structure))
    _, proposal, info = bad.propose(state, feed_of(made))
    assert proposal.length.tolist() == [1] and info.reason.tolist() == [NoDraft.DRAFTED]
    assert int(proposal.tokens[0, 0]) == drafts[0]


def test_a_chain_has_no_other_path(target: Any) -> None:
    with pytest.raises(ValueError, match="path is 'best'; this drafter chooses its drafts one"):
        dataclasses.replace(drafter(target, "rnn"), path="best")
