"""Drafters that are often silent: a round without drafts runs one row, and changes nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from hypothesis import given
from hypothesis import strategies as st

from jaxdraft import AdaptiveDrafter, Model, Sampling, generate
from jaxdraft.base import Status, TargetOutput
from jaxdraft.testing import Stateless, TableTarget, check_stats, propose_tokens, tiny_model

VOCAB, K = 12, 3


@struct.dataclass
class Sometimes(Stateless):
    """Drafts after even tokens only. ``declines`` says so, or keeps it to itself."""

    table: jax.Array  # [V] int32
    declines: bool = struct.field(pytree_node=False, default=True)
    draft_tokens: int = struct.field(pytree_node=False, default=K)

    def propose(self, state: Any, feed: Any) -> Any:
        token, tokens = feed.anchor, []
        for _ in range(self.draft_tokens):
            token = self.table[token]
            tokens.append(token)
        asks = replace(feed, wants_draft=feed.wants_draft & (feed.anchor % 2 == 0))
        return state, *propose_tokens(jnp.stack(tokens, axis=1), asks)


@struct.dataclass
class Narrow(TableTarget):
    """Has no answer to several rows of which nobody uses more than the first."""

    def forward(self, tokens: Any, count: Any, state: Any, **options: Any) -> TargetOutput:
        out = TableTarget.forward(self, tokens, count, state, **options)
        wasted = tokens.shape[1] > 1 and jnp.all(count <= 1)
        return replace(out, logits=jnp.where(wasted, jnp.nan, out.logits))


@given(seed=st.integers(0, 2**31 - 1), warm=st.booleans())
def test_it_says_the_same(seed: int, warm: bool) -> None:
    """Tokens, counters, traces and log-probabilities, of a ragged batch."""
    model = Model.of(TableTarget.random(jax.random.key(seed), VOCAB))
    rng = np.random.default_rng(seed)
    drafter = Sometimes(jnp.asarray(rng.integers(0, VOCAB, VOCAB), jnp.int32))
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 4, 2)]
    how = dict(sampling=Sampling(temperature=0.9), key=seed) if warm else {}
    both = [
        generate(
            model,
            prompts,
            max_new_tokens=20,
            drafter=d,
            trace=True,
            logprobs=2,
            stop_ids=[3],
            **how,
        )
        for d in (drafter, replace(drafter, declines=False))
    ]
    silent = np.asarray(both[0].stats.undrafted).sum()
    assert silent or max(both[0].lengths) < 6
    check_stats(both[0].stats)
    chex.assert_trees_all_close(*both, rtol=0, atol=1e-6)


def test_only_the_rows_that_are_needed_run() -> None:
    """Without drafts one row runs; behind a drafter that does not decline, all of the window."""
    target = TableTarget.random(jax.random.key(0), VOCAB)
    model, odd = Model.of(Narrow(target.table)), jnp.arange(VOCAB, dtype=jnp.int32) // 2 * 2 + 1
    drafter = Sometimes(odd)
    expected = generate(Model.of(target), [[3, 5]], max_new_tokens=12, drafter="none").ids()
    out = generate(model, [[3, 5]], max_new_tokens=12, drafter=drafter)
    assert out.ids() == expected
    quiet = Sometimes(odd, declines=False)
    out = generate(model, [[3, 5]], max_new_tokens=12, drafter=quiet, throw=False)
    assert out.status.tolist() == [Status.NONFINITE]


@pytest.mark.parametrize("kind", ["dflash2", "mtp"])
def test_a_decoder_feeds_its_drafter_from_one_row_too(kind: str) -> None:
    """Auxiliary and hidden states of short windows reach a drafter that remembers."""
    model = tiny_model(kind)
    costly = AdaptiveDrafter(model.drafter, round_cost=50.0, probe_every=3)
    prompts = [[1, 2, 3], [4, 5]]
    plain = generate(model, prompts, max_new_tokens=16, drafter="none")
    out = generate(model, prompts, max_new_tokens=16, drafter=costly)
    assert out.ids() == plain.ids()
    drafted = int(out.stats.proposed.sum())
    assert 0 < drafted < int(out.stats.rounds.sum()) * model.drafter.draft_tokens
