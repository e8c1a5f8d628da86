"""What training runs over whole sequences is what scoring and drafting run over caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdraft
from jaxdraft import testing
from jaxdraft.base import Feed
from jaxdraft.config import AttentionConfig
from jaxdraft.draft.block import BlockDrafter
from jaxdraft.draft.chain import ChainDrafter
from jaxdraft.nn.attention import attend
from jaxdraft.nn.linear import matmul
from jaxdraft.state.paged import Chunk, Source
from jaxdraft.train.blocks import block_features, following
from jaxdraft.train.sequence import causal_attention, chain_rows, decoder_rows, head_logits

STEPS = 70  # no multiple of the delta rule's chunk; the tiny ring has wrapped by then


@pytest.fixture(scope="module")
def target():
    return testing.tiny_target(layers=("delta_net", "attention"), taps=(0, 1))


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(3), (2, STEPS), 0, 48)


@pytest.fixture(scope="module")
def scored(target, tokens):
    return jaxdraft.score(jaxdraft.Model.of(target), np.asarray(tokens))


def test_decoder_rows_are_those_of_score(target, tokens, scored) -> None:
    rows = jax.jit(lambda d, t: decoder_rows(d(), t))(target.decoder, tokens)
    np.testing.assert_allclose(rows.aux, scored.aux_hidden, atol=1e-4)
    np.testing.assert_allclose(rows.hidden, scored.hidden, atol=1e-4)
    logits = head_logits(rows.hidden, target.decoder().head_weight)
    np.testing.assert_allclose(logits, scored.logits, atol=1e-4)


@pytest.mark.parametrize("window", [3, -1])
def test_attention_of_a_sequence_to_itself(window: int) -> None:
    """Window, softcap and grouped heads, against the attention that reads a cache."""
    config = AttentionConfig(
        heads=4, kv_heads=2, head_dim=8, rotary_dim=0, scale=0.4, window=window, softcap=2.0
    )
    q, k, v = (
        jax.random.normal(key, (2, 9, heads, 8))
        for key, heads in zip(jax.random.split(jax.random.key(4), 3), (4, 2, 2), strict=True)
    )
    positions = jnp.broadcast_to(jnp.arange(9)[None], (2, 9))
    rows = (jnp.swapaxes(x, 1, 2)[:, None] for x in (k, v))
    chunk = Chunk(*rows, positions[:, None])
    source = Source(lambda chunk, index, chunks: chunk, chunk, jnp.asarray(1), 1)
    expected = jax.jit(lambda: attend(q, positions, source, config, causal=True))()
    found = jax.jit(lambda: causal_attention(q, k, v, config))()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def drafted(drafter: BlockDrafter, scored, tokens, first: int):
    """Logits and lattice of the drafter itself, over its cache, with its anchor at ``first``."""
    state = drafter.init(2, STEPS)
    done = 0
    for count in (5, 16, 64):  # three calls of one shape each: the ring takes rows in pieces
        count = min(count, first - done)
        feed = Feed(
            aux=jnp.pad(
                scored.aux_hidden[:, done : done + count], ((0, 0), (0, 64 - count), (0, 0))
            ),
            count=jnp.full((2,), count, jnp.int32),
            first_position=jnp.full((2,), done, jnp.int32),
            anchor=tokens[:, first],
            wants_draft=jnp.ones((2,), bool),
            limit=jnp.full((2,), drafter.draft_tokens, jnp.int32),
        )
        state = _ingest(drafter, state, feed)
        done += count
    assert done == first
    return _propose(drafter, state, feed)


_ingest = jax.jit(lambda drafter, state, feed: drafter.ingest(state, feed))


@jax.jit
def _propose(drafter: BlockDrafter, state, feed):
    config = drafter.config
    block = jnp.full((2, config.block_size), config.mask_token).at[:, 0].set(feed.anchor)
    features = drafter.backbone().block(
        jnp.take(drafter.embedding, block, axis=0), state.length, drafter._context(state)
    )
    return matmul(features, drafter.head), drafter.propose(state, feed)[1]


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_blocks_of_training_are_blocks_of_drafting(kind, target, tokens, scored) -> None:
    """Logits, candidates and edge scores, before and after the ring has wrapped, window or none."""
    drafter = testing.tiny_drafter(target, kind)
    anchors = jnp.asarray([[1, 9, 40, 65], [65, 40, 9, 1]])
    features = jax.jit(lambda frozen, *rest: block_features(frozen(), *rest))(
        drafter.backbone, drafter.embedding, scored.aux_hidden, tokens, anchors
    )
    for column, first in enumerate((1, 9, 40, 65)):
        logits, proposal = drafted(drafter, scored, tokens, first)
        place = jnp.asarray([[column], [3 - column]])
        here = jnp.take_along_axis(features, place[..., None, None], axis=1)[:, 0]
        np.testing.assert_allclose(matmul(here, drafter.head), logits, atol=2e-4)
        lattice = proposal.lattice
        values, candidates = jax.lax.top_k(matmul(here, drafter.head), drafter.config.candidates)
        np.testing.assert_array_equal(candidates, lattice.candidates)
        start = jnp.broadcast_to(tokens[:, first][:, None, None], candidates[:, :1].shape)
        before = jnp.concatenate([start, candidates[:, :-1]], axis=1)
        scores = drafter.backbone().pair_scores(here, before, candidates) + values[:, :, None]
        np.testing.assert_allclose(scores, lattice.scores, atol=2e-4)


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_a_block_reads_nothing_from_its_anchor_on(kind, target, tokens, scored) -> None:
    """No auxiliary state at or past the anchor, no later token, no other block."""
    drafter = testing.tiny_drafter(target, kind)
    features = jax.jit(lambda frozen, *rest: block_features(frozen(), *rest))
    anchors = jnp.asarray([[20], [33]])
    alone = features(drafter.backbone, drafter.embedding, scored.aux_hidden, tokens, anchors)
    place = jnp.arange(STEPS)[None]
    aux = jnp.where((place >= anchors)[..., None], 7.0, scored.aux_hidden)
    other = jnp.where(place > anchors, 11, tokens)
    spoiled = features(drafter.backbone, drafter.embedding, aux, other, anchors)
    np.testing.assert_array_equal(alone, spoiled)
    beside = jnp.concatenate([anchors, anchors - 2, anchors + 3], axis=1)
    many = features(drafter.backbone, drafter.embedding, scored.aux_hidden, tokens, beside)
    np.testing.assert_allclose(many[:, :1], alone, atol=1e-5)


@pytest.mark.parametrize("kind", ["mtp", "mtp with sinks", "eagle3"])
def test_chained_links_are_chained_drafts(target, tokens, scored, kind: str) -> None:
    """The head fed its own drafts as if they were the text says those same drafts again."""
    shape = replace(testing.tiny_target_config().attention, sinks=kind == "mtp with sinks")
    drafter: ChainDrafter = testing.tiny_mtp(target, attention=shape)
    if kind == "eagle3":
        switches = dict(fc_norm=True, norm_output=True, norm_before_residual=True)
        drafter = testing.tiny_eagle3(target, own_embedding=True, **switches)

    @jax.jit
    def chain(drafter: Any, hidden: jax.Array, aux: jax.Array, text: jax.Array) -> Any:
        layer = drafter.layer()
        if kind != "eagle3":
            return chain_rows(layer, drafter.embedding, hidden, text, 3)
        return chain_rows(layer, layer.embed.table, layer.fuse(aux), text, 3)

    ids = drafter.vocabulary()
    ids = jnp.arange(48) if ids is None else ids
    for first in (2, 31):
        feed = Feed(
            aux=scored.aux_hidden,
            count=jnp.full((2,), first, jnp.int32),
            first_position=jnp.zeros((2,), jnp.int32),
            anchor=tokens[:, first],
            wants_draft=jnp.ones((2,), bool),
            limit=jnp.full((2,), 3, jnp.int32),
            hidden=scored.hidden,
            tokens=tokens,
        )
        _, proposal, _ = drafter.step(drafter.init(2, STEPS), feed)
        text = tokens.at[:, first + 1 : first + 4].set(proposal.tokens)
        for link, hidden in enumerate(chain(drafter, scored.hidden, scored.aux_hidden, text)):
            logits = drafter.logits(hidden[:, first - 1])
            two = jax.lax.top_k(logits, 2)[0]
            assert (two[:, 0] - two[:, 1] > 1e-4).all()  # the comparison below means something
            np.testing.assert_array_equal(
                ids[jnp.argmax(logits, axis=-1)], proposal.tokens[:, link]
            )


def test_following_gathers_what_comes_after_anchors() -> None:
    rows = jnp.arange(20).reshape(2, 10)
    found = following(rows, jnp.asarray([[0, 3], [5, 2]]), 3, offset=1)
    assert found.tolist() == [[[1, 2, 3], [4, 5, 6]], [[16, 17, 18], [13, 14, 15]]]
