"""What comes out of sampling has the target's distribution, whatever is proposed.

Small table models whose every output can be enumerated, tens of thousands of rows at once, and
planted mistakes that the same test must find.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdraft
from jaxdraft import (
    ConfidentDrafter,
    FallbackDrafter,
    HistoryDrafter,
    Model,
    NgramDrafter,
    Sampling,
    generate,
    guard,
    verify,
)
from jaxdraft.base import DraftInfo, Feed, Proposal, Support
from jaxdraft.config import AttentionConfig, Eagle3Config, MlpConfig
from jaxdraft.draft.draft_model import DraftModel
from jaxdraft.draft.eagle3 import Eagle3Drafter
from jaxdraft.nn.eagle3 import Eagle3
from jaxdraft.nn.linear import Frozen
from jaxdraft.sampling import PROPOSALS, distribution
from jaxdraft.testing import LatticeDrafter, TableTarget, tiny_model, tiny_target
from tests.oracle.sampling import adjusted, chi_square, same_source, sequences, truncated
from tests.paths import FIRST_FAMILY

VOCAB, ROWS, NEW = 6, 20_000, 4
PROMPT = [3, 1]
LIMIT = 1e-4  # of a p-value: one false alarm in ten thousand configurations, at fixed seeds none

TARGET = TableTarget(1.5 * jax.random.normal(jax.random.key(5), (97, VOCAB), jnp.float32))
DRAFTER = LatticeDrafter.random(jax.random.key(6), VOCAB, 3, 3)
MODEL = Model.of(TARGET, DRAFTER)


def outputs(
    drafter: Any,
    sampling: Sampling,
    key: int = 0,
    model: Model = MODEL,
    rows: int = ROWS,
    **options: Any,
) -> Counter:
    """How often each output came, by its first NEW tokens."""
    out = generate(
        model,
        np.tile(np.asarray(PROMPT, np.int32), (rows, 1)),
        max_new_tokens=NEW + 4,  # so that the drafts of a whole block are among the first NEW
        drafter=drafter,
        sampling=sampling,
        key=key,
        **options,
    )
    return Counter(map(tuple, np.asarray(out.tokens)[:, :NEW].tolist()))


@functools.cache
def table() -> np.ndarray:
    return np.asarray(TARGET.table, np.float64)


def exactly(how: dict[str, Any], changes: dict[str, Any] | None = None) -> dict[Any, float]:
    """The probability of every output."""

    def step(output: list[int]) -> np.ndarray:
        before, last = (PROMPT + output)[-2:]
        logits = table()[(31 * before + last) % len(table())]
        return truncated(adjusted(logits, PROMPT, output, **(changes or {})), **how)

    return sequences(step, VOCAB, NEW)


TRUNCATIONS = [
    {"temperature": 0.7},
    {"temperature": 1.4},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.25},
    {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
]


@pytest.mark.parametrize("proposals", PROPOSALS)
@pytest.mark.parametrize("how", TRUNCATIONS, ids=str)
def test_every_mode_and_truncation(proposals: Any, how: dict[str, Any]) -> None:
    counts = outputs("auto", Sampling(**how, proposals=proposals))
    p, distance = chi_square(counts, exactly(how))
    assert p > LIMIT and distance < 1.25, (p, distance)


def test_drafts_cut_by_confidence() -> None:
    """How many are verified depends on the lattice, never on the draw: else likely drafts win."""
    drafter = ConfidentDrafter(DRAFTER, round_cost=0.4, draft_cost=0.3)
    widths = drafter.width(DRAFTER.lattice(jnp.arange(VOCAB)))
    assert len(set(np.asarray(widths).tolist())) > 2, "some lattices are cut, and some are not"
    how = {"temperature": 1.2}
    p, distance = chi_square(outputs(drafter, Sampling(**how)), exactly(how))
    assert p > LIMIT and distance < 1.25, (p, distance)


def test_drafts_of_two_drafters() -> None:
    """A lookup's drafts are certain, those of the lattice are drawn: each is judged by its own."""
    drafter = FallbackDrafter(NgramDrafter(1, 2, 2), DRAFTER)
    how = {"temperature": 1.2}
    p, distance = chi_square(outputs(drafter, Sampling(**how)), exactly(how))
    assert p > LIMIT and distance < 1.25, (p, distance)


HISTORY = HistoryDrafter.of(
    np.random.default_rng(0).integers(0, VOCAB, (8, 30)).tolist(), min_ngram=1, draft_tokens=3
)


def test_drafts_from_other_texts() -> None:
    """Alone, and before a drafter whose drafts are drawn."""
    for drafter in (HISTORY, FallbackDrafter(replace(HISTORY, min_ngram=2), DRAFTER)):
        how = {"temperature": 1.2}
        p, distance = chi_square(outputs(drafter, Sampling(**how)), exactly(how))
        assert p > LIMIT and distance < 1.25, (p, distance)


NARROW = AttentionConfig(heads=1, kv_heads=1, head_dim=4, rotary_dim=4, scale=0.5)


@jax.tree_util.register_pytree_node_class
class Tapped(TableTarget):
    """The same table, with the tokens themselves as auxiliary states."""

    def forward(self, tokens: Any, count: Any, state: Any, *, row: Any = None) -> Any:
        out = super().forward(tokens, count, state, row=row)
        return replace(out, aux=jax.nn.one_hot(tokens, VOCAB, dtype=jnp.float32))

    def tree_flatten(self) -> Any:
        return (self.table,), None

    @classmethod
    def tree_unflatten(cls, _: Any, leaves: Any) -> Any:
        return cls(*leaves)


def draft_model() -> DraftModel:
    small = tiny_target(
        3, vocab_size=VOCAB, width=8, layers=("attention",), attention=NARROW, delta_net=None,
        mlp=MlpConfig(hidden=8), taps=(), context_length=32,
    )  # fmt: skip
    return DraftModel(small, VOCAB, 3)


def eagle3() -> Eagle3Drafter:
    config = Eagle3Config(
        vocab_size=VOCAB, width=8, tap_width=VOCAB, taps=1, attention=NARROW,
        mlp=MlpConfig(hidden=8), norm_eps=1e-6, context_length=32, draft_tokens=3,
        draft_vocab_size=4, own_embedding=True,
    )  # fmt: skip
    module = Eagle3(config, dtype=jnp.float32, rngs=nnx.Rngs(4))
    module.vocabulary.set_value(jnp.asarray([0, 2, 3, 5], jnp.int32))
    none = jnp.zeros((VOCAB, VOCAB))
    made = Eagle3Drafter.of(Frozen.of(module), none, none, config, jnp.dtype(jnp.float32))
    return replace(made, confidence=0.4)  # most chains end early, some at once


@pytest.mark.parametrize("make", [draft_model, eagle3])
def test_drafts_of_a_chain(make: Any) -> None:
    """Each draft is drawn after the one before; of EAGLE-3, from four tokens of six alone."""
    how = {"temperature": 1.0, "top_k": 4}
    model = Model.of(Tapped(TARGET.table), make())
    counts = outputs(model.drafter, Sampling(**how), model=model, rows=ROWS // 4)
    p, distance = chi_square(counts, exactly(how))
    assert p > LIMIT and distance < 1.25, (p, distance)


CHANGES = [
    {"repetition_penalty": 1.8},
    {"presence_penalty": 0.9, "frequency_penalty": 0.7},
    {"repetition_penalty": 0.6, "frequency_penalty": -0.8},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_penalties_count_the_drafts_before_a_row(change: dict[str, Any]) -> None:
    counts = outputs("auto", Sampling(**change))
    p, distance = chi_square(counts, exactly({}, change))
    assert p > LIMIT and distance < 1.25, (p, distance)


def test_bias_bans_and_early_stops() -> None:
    allowed = np.array([True, True, True, False, True, True])
    change = {"logit_bias": {0: 1.5, 4: -2.0}, "allowed": allowed, "min_new_tokens": 2}
    counts = outputs("auto", Sampling(**change), stop_ids=[2])
    expected: dict[Any, float] = {}
    for path, mass in exactly({}, {**change, "stop_ids": [2]}).items():
        cut = path[: path.index(2) + 1] if 2 in path else path
        cut = cut + (-1,) * (NEW - len(cut))
        expected[cut] = expected.get(cut, 0.0) + mass
    p, distance = chi_square(counts, expected)
    assert p > LIMIT and distance < 1.25, (p, distance)


def test_a_mask_of_your_own_sees_the_drafts() -> None:
    """A token may not follow itself: the rule needs the history of every row of the window."""

    def mask(tokens: jax.Array, length: jax.Array) -> jax.Array:
        return jnp.arange(VOCAB) != tokens[length - 1]

    def step(output: list[int]) -> np.ndarray:
        before, last = (PROMPT + output)[-2:]
        logits = table()[(31 * before + last) % len(table())].copy()
        logits[last] = -np.inf
        return truncated(logits)

    p, distance = chi_square(outputs("auto", Sampling(mask=mask)), sequences(step, VOCAB, NEW))
    assert p > LIMIT and distance < 1.25, (p, distance)


# ---------------------------------------------------------------------- planted mistakes


class _Mutant(LatticeDrafter):
    """Says something wrong about what its drafts were drawn from."""

    def propose(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        state, proposal, info = super().propose(state, feed)
        assert feed.draw is not None and proposal.lattice is not None
        # The rows that the walk went through: of each step, those of its predecessor.
        chosen = jnp.argmax(
            proposal.lattice.candidates[:, :-1] == proposal.tokens[:, :-1, None], axis=-1
        )
        before = jnp.pad(chosen, ((0, 0), (1, 0)))[..., None, None]
        rows = jnp.take_along_axis(proposal.lattice.scores, before, axis=2)[:, :, 0]
        probs = self.wrong(rows, feed)
        support = Support(proposal.lattice.candidates, probs)
        return state, replace(proposal, support=support), info

    def wrong(self, rows: jax.Array, feed: Feed) -> jax.Array:
        raise NotImplementedError


@jax.tree_util.register_pytree_node_class
class Untruncated(_Mutant):
    """Truncation on the drafting side only: q as if nothing had been cut off."""

    def wrong(self, rows: jax.Array, feed: Feed) -> jax.Array:
        return jax.nn.softmax(rows, axis=-1)

    def tree_flatten(self) -> Any:
        return (self.candidates, self.scores), None

    @classmethod
    def tree_unflatten(cls, _: Any, leaves: Any) -> Any:
        return cls(*leaves)


@jax.tree_util.register_pytree_node_class
class Unnormalised(Untruncated):
    """What is left of q after the cut does not sum to one."""

    def wrong(self, rows: jax.Array, feed: Feed) -> jax.Array:
        assert feed.draw is not None
        kept = distribution(rows, feed.draw.truncation).probs() > 0
        return jnp.where(kept, jax.nn.softmax(rows, axis=-1), 0.0)

    tree_flatten = Untruncated.tree_flatten


@jax.tree_util.register_pytree_node_class
class Rescaled(Unnormalised):
    """The same, verified as it is; another type, so that what is patched is traced anew."""

    tree_flatten = Untruncated.tree_flatten


@jax.tree_util.register_pytree_node_class
class Fresh(Untruncated):
    """Right; another type, so that what is patched below is traced anew."""

    def propose(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        return LatticeDrafter.propose(self, state, feed)

    tree_flatten = Untruncated.tree_flatten


TOP_2: dict[str, Any] = {"temperature": 1.0, "top_k": 2}


def test_a_wrong_q_is_found() -> None:
    drafter = Untruncated(DRAFTER.candidates, DRAFTER.scores)
    p, _ = chi_square(outputs(drafter, Sampling(**TOP_2)), exactly(TOP_2))
    assert p < LIMIT


def test_a_q_that_does_not_sum_to_one_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Unnormalised(DRAFTER.candidates, DRAFTER.scores)
    p, _ = chi_square(outputs(drafter, Sampling(**TOP_2)), exactly(TOP_2))
    assert p > LIMIT
    monkeypatch.setattr(guard, "_drawn", lambda tokens, support, inside: inside.any(axis=-1))
    drafter = Rescaled(DRAFTER.candidates, DRAFTER.scores)
    p, _ = chi_square(outputs(drafter, Sampling(**TOP_2)), exactly(TOP_2))
    assert p < LIMIT, "verified as it is, such a q changes the distribution"


def test_a_residual_of_the_wrong_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rejected_mass = verify._rejected_mass

    def one_late(proposal: Proposal, accepted: jax.Array, vocab: int) -> jax.Array:
        return rejected_mass(proposal, jnp.minimum(accepted + 1, proposal.length - 1), vocab)

    monkeypatch.setattr(verify, "_rejected_mass", one_late)
    drafter = Fresh(DRAFTER.candidates, DRAFTER.scores)
    p, _ = chi_square(outputs(drafter, Sampling()), exactly({}))
    assert p < LIMIT


def test_a_lookup_whose_drafts_count_as_drawn_is_found() -> None:
    """They are certain: a q of one half accepts them too often, and draws others too rarely."""

    @jax.tree_util.register_pytree_node_class
    class Drawn(HistoryDrafter):
        def propose(self, state: Any, feed: Feed) -> Any:
            state, proposal, info = super().propose(state, feed)
            tokens = jnp.stack([proposal.tokens, (proposal.tokens + 1) % VOCAB], axis=-1)
            half = jnp.full(tokens.shape, 0.5, jnp.float32)
            return state, replace(proposal, support=Support(tokens, half)), info

        def tree_flatten(self) -> Any:
            return (self.text, self.ends, self.latest, self.groups), None

        @classmethod
        def tree_unflatten(cls, _: Any, leaves: Any) -> Any:
            return cls(*leaves, min_ngram=1, draft_tokens=3)

    drafter = Drawn.tree_unflatten(
        None, (HISTORY.text, HISTORY.ends, HISTORY.latest, HISTORY.groups)
    )
    p, _ = chi_square(outputs(drafter, Sampling()), exactly({}))
    assert p < LIMIT


def test_the_same_without_the_patch_is_right() -> None:
    """So what the mutants are found by is their mistake and not their type."""

    @jax.tree_util.register_pytree_node_class
    class Right(Fresh):
        tree_flatten = Untruncated.tree_flatten

    p, _ = chi_square(outputs(Right(DRAFTER.candidates, DRAFTER.scores), Sampling()), exactly({}))
    assert p > LIMIT


# ------------------------------------------------------------------------- real drafters


def _sequences(model: Model, prompt: list[int], rows: int, drafter: Any, **options: Any) -> Any:
    out = generate(
        model,
        np.tile(np.asarray(prompt, np.int32), (rows, 1)),
        max_new_tokens=6,
        drafter=drafter,
        stop_ids=(),
        **options,
    )
    return np.asarray(out.tokens), jaxdraft.summarize(out.stats)


def test_the_trained_family_with_drafts_and_without() -> None:
    """First tokens, and sequences of three, of a thousand rows each."""
    model = jaxdraft.load(FIRST_FAMILY)
    assert model.text is not None
    prompt = model.text.encode("def __init__(self")
    how = Sampling(temperature=0.7, top_p=0.95)
    plain, _ = _sequences(model, prompt, 1024, "none", sampling=how, key=1)
    drafted, summary = _sequences(model, prompt, 1024, "auto", sampling=how, key=2)
    assert summary.accepted > 250  # otherwise the test would say nothing
    # The first token belongs to no round; the second is the first that drafts could spoil.
    assert same_source(Counter(plain[:, 1].tolist()), Counter(drafted[:, 1].tolist())) > LIMIT
    left, right = (Counter(map(tuple, x[:, :3].tolist())) for x in (plain, drafted))
    assert same_source(left, right) > LIMIT


def test_a_sampled_chain() -> None:
    """MTP draws from its best tokens, each fed on to the next pass."""
    model = tiny_model("mtp", vocab_size=40)
    how = Sampling(temperature=0.3, top_k=8)
    plain, _ = _sequences(model, [7, 8, 9], 2048, "none", sampling=how, key=1)
    drafted, summary = _sequences(model, [7, 8, 9], 2048, "auto", sampling=how, key=2)
    assert summary.accepted > 50
    left, right = (Counter(map(tuple, x[:, 1:3].tolist())) for x in (plain, drafted))
    assert same_source(left, right) > LIMIT


def test_certain_drafts() -> None:
    """A drafter that leaves nothing to chance proposes with probability one."""
    counts = outputs("ngram", Sampling(temperature=1.2))
    p, _ = chi_square(counts, exactly({"temperature": 1.2}))
    assert p > LIMIT
