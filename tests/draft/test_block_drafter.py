"""The block drafters' mathematics: layout, convolution, lattice, windows, positions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdraft import Model, generate
from jaxdraft.base import Feed, Lattice
from jaxdraft.config import ConvConfig
from jaxdraft.draft.block import BlockDrafter
from jaxdraft.draft.lattice import greedy, path_tokens, walk
from jaxdraft.nn.block_drafter import BlockConv
from jaxdraft.nn.dflash2 import DFlash2
from jaxdraft.nn.linear import Frozen
from jaxdraft.testing import assert_lossless, tiny_drafter, tiny_target


def feed(aux: jax.Array, first: int = 0, anchor: int = 7) -> Feed:
    batch, count, _ = aux.shape
    return Feed(
        aux=aux,
        count=jnp.full((batch,), count, jnp.int32),
        first_position=jnp.full((batch,), first, jnp.int32),
        anchor=jnp.full((batch,), anchor, jnp.int32),
        wants_draft=jnp.ones((batch,), bool),
        limit=jnp.full((batch,), 99, jnp.int32),
    )


def rows(drafter: BlockDrafter, count: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (1, count, drafter.config.aux_width))


# ------------------------------------------------------------------ convolution


def conv(taps: int, group: int, width: int) -> BlockConv:
    config = ConvConfig(taps=taps, group=group)
    return BlockConv(width, config, dtype=jnp.float32, rngs=nnx.Rngs(0))


def test_convolution_stays_in_its_block() -> None:
    """Kernels (1, 10) over [1 2 3] and [4 5 6]: [1 12 23] and [4 45 56], in either order."""
    module = conv(taps=2, group=1, width=1)
    module.base.set_value(jnp.asarray([[[1.0], [10.0]], [[1.0], [10.0]]]))
    x = jnp.asarray([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])[..., None]
    for order in ([0, 1], [1, 0]):
        y = module(x[jnp.asarray(order)], module.kernels(x), 0)[..., 0]
        expected = np.asarray([[1, 12, 23], [4, 45, 56]])[order]
        np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(module(x[1:], module.kernels(x[1:]), 1)[0, :, 0], [4, 45, 56])


def test_a_fresh_convolution_is_the_identity_and_a_predicted_one_is_not() -> None:
    module = conv(taps=2, group=4, width=8)
    x = jax.random.normal(jax.random.key(0), (2, 5, 8))
    np.testing.assert_array_equal(module(x, module.kernels(x), 0), x)
    module.projection.weight.set_value(jnp.ones_like(module.projection.weight[...]))
    assert float(jnp.abs(module(x, module.kernels(x), 0) - x).max()) > 0.1


def test_predicted_kernels_are_laid_out_as_side_tap_group() -> None:
    """One entry of the projection moves one side, one tap, one group of channels."""
    module = conv(taps=2, group=4, width=8)
    x = jnp.ones((1, 3, 8))
    for side in range(2):
        for tap in range(2):
            for group in range(2):
                weight = np.zeros((8, 8), np.float32)
                weight[side * 4 + tap * 2 + group, 0] = 1.0
                module.projection.weight.set_value(jnp.asarray(weight))
                kernels = module.kernels(x)
                changed = np.asarray(module(x, kernels, side) - x)[0]
                assert (changed[tap:, 4 * group : 4 * group + 4] == 1).all()
                assert np.abs(changed).sum() == 4 * (3 - tap)
                np.testing.assert_array_equal(module(x, kernels, 1 - side), x)


# ------------------------------------------------------------------ lattice


def test_walk_follows_the_row_of_its_predecessor() -> None:
    scores = np.zeros((1, 3, 2, 2), np.float32)
    scores[0, 0] = [[0, 1], [0, 1]]  # the anchor prefers candidate 1
    scores[0, 1] = [[9, 0], [2, 3]]  # after 1: candidate 1, although after 0 candidate 0 is best
    scores[0, 2] = [[5, 0], [4, 4]]  # after 1: a tie, to the lowest
    candidates = np.asarray([[[10, 11], [20, 21], [30, 31]]], np.int32)
    lattice = Lattice(jnp.asarray(candidates), jnp.asarray(scores))
    indices = walk(lattice, greedy)
    assert indices.tolist() == [[1, 1, 0]]
    assert path_tokens(lattice, indices).tolist() == [[11, 21, 30]]


@pytest.mark.parametrize(("steps", "width"), [(1, 1), (1, 4), (5, 1), (6, 3)])
def test_greedy_walk_equals_a_loop(steps: int, width: int) -> None:
    rng = np.random.default_rng(steps)
    scores = rng.integers(0, 4, (20, steps, width, width)).astype(np.float32)  # many ties
    candidates = rng.integers(0, 99, (20, steps, width)).astype(np.int32)
    found = walk(Lattice(jnp.asarray(candidates), jnp.asarray(scores)), greedy)
    for b in range(20):
        previous = 0
        for k in range(steps):
            previous = int(scores[b, k, previous].argmax())
            assert int(found[b, k]) == previous


def test_all_candidates_and_all_ranks_count() -> None:
    """Candidate 9 of 16 is found, and so is a pair term that only rank component 200 carries."""
    target = tiny_target()
    drafter = tiny_drafter(target, candidates=16, rank=256)
    module = drafter.backbone()
    assert isinstance(module, DFlash2)
    features = jnp.ones((1, 1, 32))
    previous = jnp.full((1, 1, 16), 7, jnp.int32)
    candidates = jnp.arange(16, dtype=jnp.int32)[None, None]
    projection = jnp.zeros((256, 32)).at[200, 0].set(1.0)
    module.hidden_projection.weight.set_value(projection)
    module.predecessor.set_value(jnp.zeros((48, 256)).at[7, 200].set(5.0))
    module.successor.set_value(jnp.zeros((48, 256)).at[9, 200].set(1.0))
    pair = module.pair_scores(features, previous, candidates)
    assert pair[0, 0, 0].tolist() == [5.0 if c == 9 else 0.0 for c in range(16)]
    lattice = Lattice(candidates, pair)
    assert path_tokens(lattice, walk(lattice, greedy)).tolist() == [[9]]


def test_candidates_are_ordered_by_value_then_id() -> None:
    """Equal head rows give equal logits: the lower id comes first."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    tied = dataclasses.replace(drafter, head=jnp.ones_like(drafter.head))
    _, proposal, _ = tied.step(tied.init(1, 64), feed(rows(tied, 3)))
    assert (np.asarray(proposal.lattice.candidates)[0] == [0, 1, 2]).all()


def test_before_the_first_step_stands_the_anchor() -> None:
    drafter = tiny_drafter(tiny_target())
    _, proposal, _ = drafter.step(drafter.init(1, 64), feed(rows(drafter, 3)))
    scores = np.asarray(proposal.lattice.scores)
    assert (scores[:, 0] == scores[:, 0, :1]).all()
    assert not (scores[:, 1] == scores[:, 1, :1]).all()


# ------------------------------------------------------------------ layout


def test_which_row_predicts_is_the_kind_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """DFlash2 reads rows 1.., DSpark rows 0..; the block is the anchor, then masks."""
    target = tiny_target()
    for kind, first in (("dflash2", 1), ("dspark", 0)):
        drafter = tiny_drafter(target, kind)
        config = drafter.config
        assert config.draft_tokens == config.block_size - first
        module = drafter.backbone()
        seen: dict[str, Any] = {}
        norm, original = module.norm, type(module.norm).__call__

        def spy(self: Any, x: jax.Array, seen=seen, norm=norm, original=original) -> jax.Array:
            if self is norm:
                seen["rows"] = x
            return original(self, x)

        with monkeypatch.context() as patch:
            patch.setattr(type(norm), "__call__", spy)
            embedded = jax.random.normal(jax.random.key(0), (1, config.block_size, 32))
            state = drafter.init(1, 64)
            module.block(embedded, state.length, drafter._context(state))
        assert seen["rows"].shape == (1, config.draft_tokens, 32)


def test_block_input_is_anchor_then_masks() -> None:
    drafter = tiny_drafter(tiny_target())
    table = jnp.zeros_like(drafter.embedding)
    state = drafter.ingest(drafter.init(1, 64), feed(rows(drafter, 3)))

    def scores(marked: int, anchor: int) -> jax.Array:
        embedding = table.at[marked].set(1.0)
        return (
            dataclasses.replace(drafter, embedding=embedding)
            .lattice(state, jnp.asarray([anchor], jnp.int32))
            .scores
        )

    blank = dataclasses.replace(drafter, embedding=table).lattice(
        state, jnp.asarray([7], jnp.int32)
    )
    moved = [t for t in range(48) if not jnp.array_equal(scores(t, 7), blank.scores)]
    assert moved == [drafter.config.mask_token, 7]


def test_context_row_p_stands_at_position_p() -> None:
    """No shift by one: the key of slot p is made from row p alone."""
    drafter = tiny_drafter(tiny_target())
    aux = rows(drafter, 5)
    base = drafter.ingest(drafter.init(1, 64), feed(aux)).cache.keys[0]
    for p in range(5):
        other = drafter.ingest(drafter.init(1, 64), feed(aux.at[:, p].add(1.0))).cache.keys[0]
        changed = np.flatnonzero(np.asarray(other != base).any(axis=(0, 1, 3)))
        assert changed.tolist() == [p]


# ------------------------------------------------------------------ positions and windows


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_only_differences_of_positions_matter(kind: str) -> None:
    """The same rows 0 and 100 positions later, nothing before them in sight: the same drafts."""
    window = {"dflash2": 12, "dspark": 8}[kind]
    target = tiny_target()
    drafter = tiny_drafter(target, kind)
    attention = dataclasses.replace(drafter.config.attention, window=window)
    drafter = tiny_drafter(target, kind, attention=attention)
    tail = rows(drafter, 16, seed=1)
    near = drafter.step(drafter.init(1, 256), feed(tail))[1].lattice
    state = drafter.init(1, 256)
    for at in range(0, 96, 16):
        state = drafter.ingest(state, feed(rows(drafter, 16, seed=2 + at), first=at))
    far = drafter.step(state, feed(tail, first=96))[1].lattice
    np.testing.assert_array_equal(near.candidates, far.candidates)
    np.testing.assert_allclose(near.scores, far.scores, atol=2e-5)


def test_a_window_is_full_attention_until_the_context_outgrows_it() -> None:
    target = tiny_target()
    base = tiny_drafter(target)

    def scores(window: int, count: int) -> jax.Array:
        attention = dataclasses.replace(base.config.attention, window=window)
        config = dataclasses.replace(base.config, attention=attention)
        module = DFlash2(config, dtype=jnp.float32, rngs=nnx.Rngs(1))
        drafter = dataclasses.replace(base, backbone=Frozen.of(module), config=config)
        return drafter.step(drafter.init(1, 256), feed(rows(drafter, count)))[1].lattice.scores

    np.testing.assert_allclose(scores(64, 50), scores(-1, 50), atol=2e-6)
    assert float(jnp.abs(scores(64, 100) - scores(-1, 100)).max()) > 1e-4


def test_shared_arrays_are_the_target_s_own() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target)
    assert drafter.head is target.decoder.params["head"]["weight"]
    assert drafter.embedding is target.decoder.params["embed"]["weight"]


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_fewer_drafts_are_the_first_of_the_same_block(kind: str) -> None:
    """The block is as long as ever; the proposal, and the target's window, are shorter."""
    target = tiny_target()
    drafter = tiny_drafter(target, kind)
    fewer = drafter.with_draft_tokens(2)
    assert fewer.draft_tokens == 2
    _, whole, _ = drafter.step(drafter.init(1, 64), feed(rows(drafter, 3)))
    _, cut, _ = fewer.step(fewer.init(1, 64), feed(rows(drafter, 3)))
    assert cut.length.tolist() == [2] and cut.tokens.shape == (1, 2)
    np.testing.assert_array_equal(cut.tokens, whole.tokens[:, :2])
    np.testing.assert_allclose(cut.lattice.scores, whole.lattice.scores[:, :2], atol=1e-5)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    model = Model.of(target, drafter)
    assert_lossless(model, fewer, prompts, max_new_tokens=30)
    out = generate(model, prompts, max_new_tokens=30, draft_tokens=2)
    assert out.stats.accepted.shape[-1] == 2
    for bad in (0, 5):
        with pytest.raises(ValueError, match=f"draft_tokens is {bad}; this drafter's block has 1"):
            drafter.with_draft_tokens(bad)
