"""Losses, gradients, steps, data and checkpoints of training, on tiny models."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxdraft
from jaxdraft import testing
from jaxdraft.config import MlpConfig
from jaxdraft.nn.linear import Frozen
from jaxdraft.train import initialize
from jaxdraft.train.blocks import block_features
from jaxdraft.train.data import DraftBatches, FeatureCache, TokenWindows, continue_prompts
from jaxdraft.train.loop import fit
from jaxdraft.train.losses import Continuations, DraftLoss, acceptance, language_loss
from jaxdraft.train.optimize import labels, make_step, optimizer, start, trapezoid
from jaxdraft.train.rounding import round_to_bfloat16, round_to_int4
from jaxdraft.train.sequence import decoder_rows
from tests.train.helpers import STEPS, continuations


@pytest.fixture(scope="module")
def target():
    return testing.tiny_target(layers=("delta_net", "attention"), taps=(0, 1))


@pytest.fixture(scope="module")
def batch(target) -> Continuations:
    return continuations(target)


def draft_loss(target, **changes) -> DraftLoss:
    params = target.decoder.params
    return DraftLoss(
        embedding=params["embed"]["weight"],
        head=params["head"]["weight"],
        **{**dict(variation_weight=0.7, temperature=0.8, soft=0.6), **changes},
    )


def drafter(target, kind: str) -> Frozen:
    if kind == "mtp":
        return testing.tiny_mtp(target).mtp
    if kind == "eagle3":
        return testing.tiny_eagle3(target, draft_vocab_size=None).eagle3
    return testing.tiny_drafter(target, kind, layers=1).backbone


def run(loss, frozen: Frozen, batch):
    """Loss and metrics, as one program."""
    return jax.jit(lambda f, b: loss(f(), b))(frozen, batch)


# --------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("kind", ["target", "dflash2", "dspark", "eagle3", "mtp"])
def test_gradients_of_every_array(kind, target, batch) -> None:
    """Central differences along each array's own gradient."""
    if kind == "target":
        frozen, data, loss = target.decoder, batch.tokens, language_loss
    else:
        frozen, data, loss = drafter(target, kind), batch, draft_loss(target)

    @jax.jit
    @jax.value_and_grad
    def value(params):
        return loss(Frozen(params, frozen.structure)(), data)[0]

    kinds = jax.tree.leaves(labels(frozen))
    leaves, structure = jax.tree.flatten(frozen.params)
    gradient = jax.tree.leaves(value(frozen.params)[1])
    step = 2e-3
    checked = 0
    for place, (leaf, slope) in enumerate(zip(leaves, gradient, strict=True)):
        norm = float(jnp.linalg.norm(slope))
        if kinds[place] == "fixed" or norm < 1e-2:  # lost in float32's rounding
            continue
        ends = []
        for side in (step, -step):
            moved = list(leaves)
            moved[place] = leaf + slope * (side / norm)
            ends.append(float(value(jax.tree.unflatten(structure, moved))[0]))
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(norm, rel=0.05, abs=2e-3), place
        checked += 1
    assert checked > 0.7 * sum(k != "fixed" for k in kinds)


# --------------------------------------------------------------------------- losses


def features_of(made, batch: Continuations) -> jax.Array:
    return jax.jit(lambda frozen, *rest: block_features(frozen(), *rest))(
        made.backbone, made.embedding, batch.aux, batch.tokens, batch.anchors
    )


def test_block_loss_against_a_loop(target, batch) -> None:
    """DFlash2's two cross entropies and its recall, block by block and candidate by candidate."""
    made = testing.tiny_drafter(target, "dflash2", layers=1, candidates=24)
    loss = draft_loss(target, variation_weight=0.0, soft=0.0)
    _, metrics = run(loss, made.backbone, batch)
    features = features_of(made, batch)
    logits = np.asarray(features, np.float64) @ np.asarray(made.head).T
    arrays = jax.tree.map(np.asarray, made.backbone.params)
    tokens, anchors = np.asarray(batch.tokens), np.asarray(batch.anchors)
    width, drafts = made.config.candidates, made.draft_tokens
    weight = np.exp(-np.arange(drafts) / loss.decay)
    weight /= weight.sum()
    nats = np.zeros((2, 2, drafts))
    pair_nats, found = np.zeros_like(nats), np.zeros_like(nats)
    for b, n, k in np.ndindex(*nats.shape):
        row, at = logits[b, n, k], anchors[b, n] + k
        label = tokens[b, at + 1]
        nats[b, n, k] = np.log(np.exp(row).sum()) - row[label]
        best = list(np.argsort(-row, kind="stable")[:width])
        found[b, n, k] = label in best
        if label not in best:
            best[-1] = label
        middle = np.asarray(features[b, n, k]) @ arrays["hidden_projection"]["weight"].T
        pairs = (arrays["predecessor"][tokens[b, at]] * middle) @ arrays["successor"][best].T
        scores = row[best] + pairs
        pair_nats[b, n, k] = np.log(np.exp(scores).sum()) - scores[best.index(label)]
    assert 0 < found.mean() < 1, "both branches should be met"
    np.testing.assert_allclose(metrics["nats"], (nats.mean((0, 1)) * weight).sum(), rtol=1e-4)
    np.testing.assert_allclose(
        metrics["pair_nats"], (pair_nats.mean((0, 1)) * weight).sum(), rtol=1e-4
    )
    np.testing.assert_allclose(metrics["recall"], found.mean((0, 1)), atol=1e-6)


def test_markov_head_learns_over_the_whole_vocabulary(target, batch) -> None:
    """DSpark's second term is the cross entropy of logits and bias, no candidates involved."""
    made = testing.tiny_drafter(target, "dspark", layers=1)
    loss = draft_loss(target, variation_weight=0.0, soft=0.0, head_weight=0.0)
    total, _ = run(loss, made.backbone, batch)
    features = features_of(made, batch)
    at = batch.anchors[..., None] + jnp.arange(made.draft_tokens).reshape(1, 1, -1)
    row = jnp.arange(2)[:, None, None]
    bias = jnp.take(made.backbone().markov_w1[...], batch.tokens[row, at], axis=0)
    scores = features @ made.head.T + bias @ made.backbone().markov_w2[...].T
    wanted = jax.nn.one_hot(batch.tokens[row, at + 1], 48)
    nats = -jnp.sum(jax.nn.log_softmax(scores) * wanted, axis=-1).mean((0, 1))
    weight = jnp.exp(-jnp.arange(made.draft_tokens, dtype=jnp.float32) / loss.decay)
    np.testing.assert_allclose(total, jnp.sum(nats * weight) / weight.sum(), rtol=1e-4)


@pytest.mark.parametrize("kind", ["dspark"])
def test_soft_labels_and_variation_leave_greedy_sequences_alone(kind, target, batch) -> None:
    greedy = replace(batch, greedy=jnp.asarray([True, True]))
    frozen = drafter(target, kind)
    program = jax.jit(lambda f, b: draft_loss(target)(f(), b)[0])
    without, _ = run(draft_loss(target, soft=0.0, variation_weight=0.0), frozen, greedy)
    np.testing.assert_allclose(program(frozen, greedy), without, rtol=1e-6)
    sampled = program(frozen, replace(batch, greedy=jnp.asarray([False, False])))
    assert abs(float(sampled) - float(without)) > 1e-3


def test_overlap_is_the_chance_that_a_draft_stands() -> None:
    """Against the definition of rejection sampling, over a vocabulary of six and three drafts."""
    loss = DraftLoss(embedding=jnp.zeros((6, 2)), head=jnp.zeros((6, 2)), temperature=0.7)
    teacher = jax.random.normal(jax.random.key(1), (1, 1, 1, 6)) * 2
    picked = jnp.asarray([4, 0, 3])
    scores = jax.random.normal(jax.random.key(2), (1, 1, 1, 3))
    found = loss._overlap(scores, teacher[..., picked], teacher)[0, 0, 0]
    p = np.exp(np.asarray(teacher[0, 0, 0], np.float64) / 0.7)
    p /= p.sum()
    q = np.exp(np.asarray(scores[0, 0, 0], np.float64) / 0.7)
    q /= q.sum()
    accept_prob = sum(q[i] * min(1.0, p[t] / q[i]) for i, t in enumerate(picked.tolist()))
    np.testing.assert_allclose(found, accept_prob, rtol=1e-5)


def test_acceptance_by_hand() -> None:
    """Two greedy blocks, of which 2 and 0 drafts stand, and one sampled block."""
    greedy = jnp.asarray([True, True, False])
    right = jnp.asarray([[[True, True, False]], [[False, True, True]], [[True, True, True]]])
    overlap = jnp.asarray([[[0.1, 0.1, 0.1]], [[0.1, 0.1, 0.1]], [[0.5, 0.5, 1.0]]])
    found = acceptance(greedy, right, overlap)
    np.testing.assert_allclose(found["greedy_survival"], [0.5, 0.5, 0.0])
    np.testing.assert_allclose(found["greedy_tokens"], 2.0)
    np.testing.assert_allclose(found["sampled_survival"], [0.5, 0.25, 0.25])
    np.testing.assert_allclose(found["sampled_tokens"], 2.0)


# --------------------------------------------------------------------------- steps


def test_what_learns_how(target) -> None:
    kinds = labels(target.decoder)
    mixer = kinds["layers"][0]["mixer"]
    assert mixer["qkvz"]["weight"] == "matrix" and mixer["conv_weight"] == "vector"
    assert mixer["conv_bias"] == "fixed" and mixer["decay_scale"] == "vector"
    assert kinds["embed"]["weight"] == kinds["head"]["weight"] == "vector"
    assert kinds["rotary"]["cos"] == "fixed"
    assert labels(drafter(target, "dflash2"))["predecessor"] == "vector"


def test_gradients_pass_rounding_as_if_it_were_not_there() -> None:
    """One step of plain descent: the gradient is taken where the loss looked, at the rounded."""
    mlp = MlpConfig(hidden=64)
    target = testing.tiny_target(width=64, layers=("attention",), taps=(), mlp=mlp)
    frozen, kinds = target.decoder, labels(target.decoder)
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
    transform = optax.sgd(1.0)
    rounding = functools.partial(round_to_int4, kinds=kinds)
    step = make_step(frozen, language_loss, transform, rounding=rounding)
    rounded = Frozen(rounding(frozen.params), frozen.structure)
    plain = make_step(rounded, language_loss, transform)
    one = jnp.ones((), jnp.float32)
    after, metrics = step(start(frozen, transform), tokens, one)
    there, same = plain(start(rounded, transform), tokens, one)
    assert float(metrics["loss"]) == pytest.approx(float(same["loss"]), rel=1e-6)

    def moved(a, b):
        return np.asarray(b) - np.asarray(a)

    ours = jax.tree.map(moved, frozen.params, after.params)
    theirs = jax.tree.map(moved, rounded.params, there.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), ours, theirs)
    assert np.abs(ours["layers"][0]["mixer"]["qkv"]["weight"]).max() > 1e-4
    before, seen = (
        np.asarray(each.params["layers"][0]["mixer"]["qkv"]["weight"]) for each in (frozen, rounded)
    )
    assert np.abs(seen - before).max() > 1e-3


def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path) -> None:
    """Same arrays in the end, bit for bit: parameters, optimizer and step; and the loss falls."""
    target = testing.tiny_target(layers=("attention",), taps=())
    frozen = initialize.decoder(target.decoder, jax.random.key(1))
    transform = optimizer(labels(frozen), matrix_rate=0.05, vector_rate=0.02)
    step = make_step(frozen, language_loss, transform)
    text = np.tile(np.arange(7), 60)
    windows = TokenWindows(text, STEPS + 1, 2, seed=2)

    def train(folder: str, *stops: int):
        for stop in stops:
            state = fit(
                step,
                start(frozen, transform),
                windows,
                steps=stop,
                schedule=lambda n: trapezoid(n, steps=12, warmup=2),
                folder=tmp_path / folder,
                save_every=2,
                log_every=3,
                progress=False,
            )
        return state

    whole, stopped = train("whole", 12), train("stopped", 5, 12)
    jax.tree.map(np.testing.assert_array_equal, whole, stopped)
    assert int(whole.step) == 12
    assert train("whole", 12).step == 12  # nothing is left to do
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [3, 6, 9, 12]
    assert lines[-1]["nats"] < 0.8 * lines[0]["nats"]
    fixed = jax.tree.map(
        lambda kind, a, b: kind != "fixed" or bool((a == b).all()),
        labels(frozen),
        whole.params,
        frozen.params,
    )
    assert all(jax.tree.leaves(fixed))


def test_schedule() -> None:
    at = [trapezoid(n, steps=100, warmup=10, decay=0.4) for n in (0, 9, 60, 80, 100)]
    assert at == pytest.approx([0.1, 1.0, 1.0, 0.5, 0.0])


def test_rounded_weights_are_stored_exactly(target) -> None:
    rounded = round_to_bfloat16(target.decoder, shifted_norms=True)
    layer = rounded.params["layers"][0]

    def exact(values) -> bool:
        values = np.asarray(values, np.float32)
        return bool((values == values.astype(ml_dtypes.bfloat16).astype(np.float32)).all())

    assert exact(layer["mlp"]["down"]["weight"])
    assert exact(layer["input_norm"]["weight"] - 1) and exact(layer["mixer"]["norm_weight"])
    again = round_to_bfloat16(rounded, shifted_norms=True)
    jax.tree.map(np.testing.assert_array_equal, rounded.params, again.params)
    np.testing.assert_array_equal(
        rounded.params["rotary"]["cos"], target.decoder.params["rotary"]["cos"]
    )


# --------------------------------------------------------------------------- data


def test_windows_of_an_epoch_are_disjoint() -> None:
    windows = TokenWindows(np.arange(100), 9, 2, seed=4)
    epochs = [
        np.concatenate([windows(e * windows.batches_per_epoch + i) for i in range(5)])
        for e in (0, 1)
    ]
    for rows in epochs:
        assert len(np.unique(rows)) == rows.size and (np.diff(rows, axis=1) == 1).all()
    assert not np.array_equal(*epochs)
    np.testing.assert_array_equal(windows(3), TokenWindows(np.arange(100), 9, 2, seed=4)(3))
    with pytest.raises(ValueError, match="10 tokens are too few for a batch of 2 windows of 9"):
        TokenWindows(np.arange(10), 9, 2)


@pytest.fixture(scope="module")
def cache(target, tmp_path_factory) -> FeatureCache:
    """Four continuations, rows 0 and 2 sampled."""
    prompts = jax.random.randint(jax.random.key(5), (4, 6), 0, 48)
    heat = jnp.asarray([1.5, 0.0, 1.5, 0.0])
    rows = continue_prompts(target, prompts, heat, jax.random.key(6), new_tokens=10)
    same = continue_prompts(target, prompts, heat, jax.random.key(6), new_tokens=10)
    np.testing.assert_array_equal(rows, same)
    folder = tmp_path_factory.mktemp("features")
    return FeatureCache.write(
        folder, target.decoder, np.asarray(rows), np.asarray(heat == 0), np.full(4, 6),
        batch=3, progress=False,
    )  # fmt: skip


def test_continuations_are_the_targets_own(target, cache) -> None:
    plain = jaxdraft.generate(
        jaxdraft.Model.of(target), np.asarray(cache.tokens[:, :6]), max_new_tokens=10, stop_ids=()
    )
    for row, ids in enumerate(plain.ids()):
        assert (cache.tokens[row, 6:].tolist() == ids) == bool(cache.greedy[row])


def test_cached_features_are_those_of_the_target(target, cache) -> None:
    rows = jax.jit(lambda d, t: decoder_rows(d(), t))(target.decoder, jnp.asarray(cache.tokens))
    np.testing.assert_allclose(cache.aux, rows.aux, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(cache.hidden, rows.hidden, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="no taps"):
        FeatureCache.write(
            "nowhere",
            testing.tiny_target(taps=()).decoder,
            cache.tokens,
            cache.greedy,
            cache.prompt,
        )


def test_batches_of_continuations(cache) -> None:
    batches = DraftBatches(cache, batch=2, greedy=1, anchors=3, drafts=4, seed=7)
    seen = [batches(n) for n in range(8)]
    for batch in seen:
        assert batch.greedy.tolist() == [True, False]
        assert batch.anchors.shape == (2, 3) and batch.aux.shape == (2, 16, 64)
        assert (batch.anchors >= 5).all() and (batch.anchors + 4 < 16).all()
    jax.tree.map(np.testing.assert_array_equal, seen[3], batches(3))
    assert any(not np.array_equal(seen[0].anchors, other.anchors) for other in seen[1:])
    assert replace(batches, aux=False)(0).aux.shape == (2, 16, 0)
    with pytest.raises(ValueError, match="3 greedy sequences and 0 others"):
        replace(batches, batch=3, greedy=3)
    with pytest.raises(ValueError, match="20 anchors, each with 4 tokens"):
        replace(batches, anchors=20)


def test_the_language_loss_is_the_same_with_64_bit_types(target, batch) -> None:
    expected = language_loss(target.decoder(), batch.tokens)
    with jax.enable_x64(True):
        found = language_loss(target.decoder(), batch.tokens)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-5)
