"""Cutting drafts by a trained confidence head leaves the distribution of the output alone.

The real walk and the real cut of a block drafter, whose rows come from a table so that every output
can be enumerated; and two planted mistakes that the same test must find.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct

from jaxdraft import Sampling, generate
from jaxdraft.base import Feed
from jaxdraft.config import AttentionConfig, BlockDrafterConfig, KvShape
from jaxdraft.draft.block import BlockDrafter, BlockState
from jaxdraft.kinds import block_of
from jaxdraft.nn.linear import Frozen
from jaxdraft.state.paged import PagedPool
from tests.examples import first
from tests.oracle.sampling import chi_square
from tests.properties.test_distribution import LIMIT, MODEL, VOCAB, exactly, outputs

WIDTH, DRAFTS = 4, 3
HOW = {"temperature": 1.2}


@struct.dataclass
class TableBlock(BlockDrafter):
    """A DSpark drafter whose block's rows are a function of the anchor."""

    table: jax.Array | None = None  # [V, K, D]

    def init(self, batch: int, capacity: int) -> BlockState:
        del capacity
        shape = KvShape(layers=1, kv_heads=1, head_dim=1, dtype=jnp.float32)
        none = jnp.zeros((batch,), bool)
        pages = PagedPool.one_page_per_row(shape, batch=batch, capacity=1)
        return BlockState(None, pages, ~none, none, jnp.zeros((), jnp.int32))

    def ingest(self, state: BlockState, feed: Feed) -> BlockState:
        del feed
        return state

    def features(self, state: BlockState, anchor: jax.Array) -> jax.Array:
        del state
        assert self.table is not None
        return self.table[anchor, : self.draft_tokens]


class OwnToken(TableBlock):
    """A mistake: a draft's confidence reads the draft itself."""

    def _trusted(self, rows: jax.Array, anchor: jax.Array, tokens: jax.Array) -> jax.Array:
        backbone = self.backbone()
        trust = jax.nn.sigmoid(backbone.trust(rows, backbone.predecessors(tokens)))
        return jnp.sum(jnp.cumprod(trust, axis=1) >= self.confidence, axis=1, dtype=jnp.int32)


class AllAtOnce(TableBlock):
    """A mistake: all drafts or none, given the confidence of all of them."""

    def _trusted(self, rows: jax.Array, anchor: jax.Array, tokens: jax.Array) -> jax.Array:
        backbone = self.backbone()
        before = jnp.concatenate([anchor[:, None], tokens[:, :-1]], axis=1)
        trust = jax.nn.sigmoid(backbone.trust(rows, backbone.predecessors(before)))
        likely = jnp.prod(trust, axis=1) >= self.confidence
        return jnp.where(likely, DRAFTS, 0).astype(jnp.int32)


for mistake in (OwnToken, AllAtOnce):
    struct.dataclass(mistake)


def drafter(made_as: type[TableBlock], cut: float | None = 0.3, **changes: Any) -> TableBlock:
    config = BlockDrafterConfig(
        **{
            "kind": "dspark",
            "vocab_size": VOCAB,
            "width": WIDTH,
            "aux_width": WIDTH,
            "layers": 1,
            "attention": AttentionConfig(heads=1, kv_heads=1, head_dim=4, rotary_dim=4, scale=0.5),
            "mlp_hidden": 4,
            "norm_eps": 1e-6,
            "block_size": DRAFTS,
            "draft_tokens": DRAFTS,
            "candidates": 4,
            "rank": 3,
            "mask_token": 0,
            "context_length": 64,
            "confidence": "pair",
            **changes,
        }
    )
    module: Any = block_of(config.kind).module(config, dtype=jnp.float32, rngs=nnx.Rngs(3))
    if config.confidence is not None:
        rows, codes = module.trust_weight[..., :WIDTH], module.trust_weight[..., WIDTH:]
        # The token before decides more than the row: where it does not, no cut can do harm.
        module.trust_weight.set_value(jnp.concatenate([0.5 * rows, 8.0 * codes], axis=1))
        module.trust_bias.set_value(jnp.ones((1,)))
    table = jax.random.normal(jax.random.key(8), (VOCAB, DRAFTS, WIDTH), jnp.float32)
    head = jax.random.normal(jax.random.key(9), (VOCAB, WIDTH), jnp.float32)
    made = made_as(
        Frozen.of(module), jnp.zeros((VOCAB, WIDTH)), head, config, jnp.dtype("float32"),
        table=table,
    )  # fmt: skip
    return made.with_confidence(cut)  # type: ignore[return-value]


CHAIN = dict(markov="rnn", chained=True)


@pytest.mark.parametrize("changes", first(2, [CHAIN, {}, dict(markov="gated")]), ids=str)
def test_the_cut_changes_no_distribution(changes: dict[str, Any]) -> None:
    p, distance = chi_square(outputs(drafter(TableBlock, **changes), Sampling(**HOW)), exactly(HOW))
    assert p > LIMIT and distance < 1.25, (p, distance)


UNCUT = [
    CHAIN,
    dict(kind="dflash", rank=0, confidence=None),
    dict(chained=True, draft_vocab_size=5, own_head=True),  # token 5 is never drafted
]


@pytest.mark.parametrize("changes", UNCUT, ids=str)
def test_drafts_without_a_cut(changes: dict[str, Any]) -> None:
    made = drafter(TableBlock, None, **changes)
    p, distance = chi_square(outputs(made, Sampling(**HOW)), exactly(HOW))
    assert p > LIMIT and distance < 1.25, (p, distance)


@pytest.mark.parametrize("mistake", [OwnToken, AllAtOnce])
def test_mistakes_are_found(mistake: type[TableBlock]) -> None:
    p, _ = chi_square(outputs(drafter(mistake, **CHAIN), Sampling(**HOW)), exactly(HOW))
    assert p < LIMIT


def test_drafts_are_cut_in_some_rows_and_not_in_all() -> None:
    """Counters: fewer drafts than without a cut; a threshold of zero cuts nothing, one all."""
    prompts = np.tile(np.asarray([[3, 1], [2, 5], [4, 0]], np.int32), (8, 1))
    proposed = {}
    for confidence in (None, 0.0, 0.3, 1.0):
        made = drafter(TableBlock, confidence, **CHAIN)
        out = generate(
            MODEL,
            prompts,
            max_new_tokens=12,
            drafter=made,
            sampling=Sampling(**HOW),
            stop_ids=(),
            key=0,
        )
        proposed[confidence] = int(out.stats.proposed.sum())
        assert int(out.stats.emitted.sum()) == prompts.shape[0] * 12
    assert proposed[None] == proposed[0.0] > proposed[0.3] > proposed[1.0] == 0


def test_what_is_refused() -> None:
    plain = drafter(TableBlock, None, confidence=None)
    with pytest.raises(ValueError, match="this drafter has no confidence head"):
        plain.with_confidence(0.5)
    with pytest.raises(ValueError, match=r"confidence is 1.5; expected in 0\.\.1"):
        drafter(TableBlock, 1.5)
