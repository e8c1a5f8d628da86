"""A drafter or target that breaks its contract may raise or cost acceptance, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdraft import (
    AdaptiveDrafter,
    ConfidentDrafter,
    Engine,
    FallbackDrafter,
    Model,
    NgramDrafter,
    NoDraft,
    Sampling,
    generate,
    guard,
    score,
    stream,
    summarize,
)
from jaxdraft.base import NO_TOKEN, DraftInfo, Draw, Feed, Proposal, Support, TargetOutput
from jaxdraft.sampling import Truncation
from jaxdraft.testing import (
    LatticeDrafter,
    Stateless,
    TableDrafter,
    TableTarget,
    check_stats,
    tiny_drafter,
    tiny_model,
    tiny_mtp,
    tiny_target,
)
from tests.examples import first
from tests.oracle.sampling import chi_square, sequences, truncated

VOCAB, K, C, NEW = 6, 3, 4, 3
ROWS = 20_000
PROMPT = [3, 1]
LIMIT = 1e-4  # of a p-value, as in test_distribution.py
TARGET = TableTarget(1.5 * jax.random.normal(jax.random.key(5), (97, VOCAB), jnp.float32))
LATTICES = LatticeDrafter.random(jax.random.key(6), VOCAB, K, C)
MODEL = Model.of(TARGET)
SEEDS = st.integers(0, 2**31 - 1)

# ----------------------------------------------------------------- drafters that return anything


@struct.dataclass
class Anything(Stateless):
    """Returns what its tables hold, by the anchor: any integers, and any floats as support."""

    tokens: jax.Array  # [V, K] int32
    length: jax.Array  # [V] int32
    reason: jax.Array  # [V] int32
    among: jax.Array  # [V, K, C] int32
    probs: jax.Array  # [V, K, C] float32

    @property
    def draft_tokens(self) -> int:
        return self.tokens.shape[1]

    def propose(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        a = feed.anchor
        support = Support(self.among[a], self.probs[a])
        proposal = Proposal(self.tokens[a], self.length[a], support=support)
        return state, proposal, DraftInfo(self.reason[a], jnp.asarray(-7, jnp.int32))

    @classmethod
    def random(cls, seed: int) -> Anything:
        """Half of it is what a drafter may return, so that something is accepted."""
        rng = np.random.default_rng(seed)
        wild = np.asarray([-1, -2, VOCAB, VOCAB + 1, 2**31 - 1, -(2**31)])

        def ids(*shape: int) -> np.ndarray:
            mild = rng.integers(0, VOCAB, shape)
            return np.where(rng.random(shape) < 0.7, mild, rng.choice(wild, shape)).astype(np.int32)

        probs = rng.choice([0, 1, 0.5, -0.5, 2, np.nan, np.inf, -np.inf], (VOCAB, K, C))
        length = rng.choice([0, 1, 2, K, K + 1, -1, 2**31 - 1, -(2**31)], VOCAB)
        arrays = (
            ids(VOCAB, K), length.astype(np.int32), ids(VOCAB), ids(VOCAB, K, C),
            probs.astype(np.float32),
        )  # fmt: skip
        return cls(*map(jnp.asarray, arrays))


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda d: d,
    "adaptive": AdaptiveDrafter,
    "first": lambda d: FallbackDrafter(d, LATTICES),
    "second": lambda d: FallbackDrafter(NgramDrafter(1, 2, 2), d),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@given(
    seed=SEEDS, prompts=st.lists(st.lists(st.integers(0, 5), min_size=1), min_size=3, max_size=3)
)
def test_greedy_tokens_are_those_without_drafts(
    wrapper: str, seed: int, prompts: list[list[int]]
) -> None:
    prompts = [p[:9] for p in prompts]
    drafter = WRAPPERS[wrapper](Anything.random(seed))
    plain = generate(MODEL, prompts, max_new_tokens=12, drafter="none")
    drafted = generate(MODEL, prompts, max_new_tokens=12, drafter=drafter)
    assert drafted.ids() == plain.ids() and drafted.finish_reasons == plain.finish_reasons
    check_stats(drafted.stats)


@settings(max_examples=5)
@given(seed=SEEDS)
def test_streams_and_engines_give_the_tokens_of_generate(seed: int) -> None:
    """Greedy and sampled: they share a round, so they share what it does about broken drafts."""
    drafter, prompts = Anything.random(seed), [[1, 2], [5], [0, 4, 3]]
    for sampling in (None, Sampling(temperature=1.2)):
        rules: dict[str, Any] = dict(max_new_tokens=8, sampling=sampling, key=seed)
        expected = generate(MODEL, prompts, drafter=drafter, **rules).ids()
        events = list(stream(MODEL, prompts, drafter=drafter, **rules))
        for row, ids in enumerate(expected):
            assert [t for e in events if e.row == row for t in e.tokens] == ids
            assert all(0 <= t < VOCAB for t in ids)
        with Engine(MODEL, drafter=drafter, max_batch=4, pages=8, context=64) as engine:
            assert [r.tokens for r in engine.map(prompts, **rules)] == expected
            engine.check()


# -------------------------------------------------------------- drafters that break honest drafts

KINDS = (
    "honest", "negative id", "id past the vocabulary", "id outside the support", "length past K",
    "negative length", "short sum", "large sum", "negative probability", "nan", "infinity",
    "support past the vocabulary", "a token twice",
)  # fmt: skip


@struct.dataclass
class Breaking(LatticeDrafter):
    """Draws honestly, then breaks step k after anchor v in the way ``kinds[v, k]`` of ``KINDS``.

    Where ``coin``, only half of the draws are broken, at random.
    """

    kinds: jax.Array = struct.field(default=None)  # [V, K] int32
    coin: jax.Array = struct.field(default=None)  # [] bool

    def propose(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        state, proposal, info = super().propose(state, feed)
        if feed.draw is None:
            return state, proposal, info
        keys = jax.vmap(lambda key: jax.random.fold_in(key, 99))(feed.draw.keys)
        heads = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (K,)))(keys)
        kinds = jnp.where(heads | ~self.coin, self.kinds[feed.anchor], 0)

        def at(kind: str) -> jax.Array:
            return kinds == KINDS.index(kind)

        tokens, length, support = proposal.tokens, proposal.length, proposal.support
        assert support is not None
        among, probs = support.tokens, support.probs
        there = jax.nn.one_hot(among, VOCAB, dtype=jnp.int32).sum(axis=2)
        outside = jnp.argmin(there, axis=-1)
        for kind, value in (
            ("negative id", -1),
            ("id past the vocabulary", VOCAB),
            ("id outside the support", outside.astype(jnp.int32)),
        ):
            tokens = jnp.where(at(kind), value, tokens)
        length = jnp.where(jnp.any(at("length past K"), axis=1), K + 5, length)
        length = jnp.where(jnp.any(at("negative length"), axis=1), -2, length)
        for kind, value in (("short sum", 0.8), ("large sum", 1.2), ("infinity", jnp.inf)):
            probs = jnp.where(at(kind)[..., None], probs * value, probs)
        least = probs.at[..., 0].add(-1.0).at[..., 1].add(1.0)  # sums to one
        probs = jnp.where(at("negative probability")[..., None], least, probs)
        probs = jnp.where(at("nan")[..., None], probs.at[..., -1].set(jnp.nan), probs)
        past = among.at[..., 0].set(VOCAB)
        among = jnp.where(at("support past the vocabulary")[..., None], past, among)
        # The first half is there twice, with half of the probability each, and still sums to one.
        pairs = jnp.concatenate([among, among], -1), jnp.concatenate([probs, probs], -1) / 2
        single = jnp.pad(among, ((0, 0), (0, 0), (0, C)), constant_values=NO_TOKEN)
        twice = at("a token twice")[..., None]
        among = jnp.where(twice, pairs[0], single)
        probs = jnp.where(twice, pairs[1], jnp.pad(probs, ((0, 0), (0, 0), (0, C))))
        return (
            state,
            replace(proposal, tokens=tokens, length=length, support=Support(among, probs)),
            info,
        )


def breaking(kinds: Any, coin: bool = True, kind: Any = Breaking) -> Any:
    table = jnp.broadcast_to(jnp.asarray(kinds, jnp.int32), (VOCAB, K))
    return kind(LATTICES.candidates, LATTICES.scores, table, jnp.asarray(coin))


def misfit(drafter: Any) -> tuple[float, Any]:
    """The p-value of the outputs of ROWS rows under the target's distribution, and the counters."""
    out = generate(
        MODEL,
        np.tile(np.asarray(PROMPT, np.int32), (ROWS, 1)),
        max_new_tokens=NEW + K + 1,
        drafter=drafter,
        sampling=Sampling(temperature=1.3),
        key=1,
    )
    table = np.asarray(TARGET.table, np.float64)

    def step(output: list[int]) -> np.ndarray:
        before, last = (PROMPT + output)[-2:]
        return truncated(table[(31 * before + last) % len(table)], temperature=1.3)

    counts = Counter(map(tuple, np.asarray(out.tokens)[:, :NEW].tolist()))
    return chi_square(counts, sequences(step, VOCAB, NEW))[0], summarize(out.stats)


TELLING = [0, 3, 4, 6, 9, 11]
"""Kinds that are tried one by one in an ordinary run; the mixtures below have all."""


@pytest.mark.parametrize(
    "number",
    first(6, [*TELLING, *sorted(set(range(len(KINDS))) - set(TELLING))]),
    ids=lambda n: KINDS[n],
)
def test_each_break_keeps_the_distribution_and_is_counted(number: int) -> None:
    for coin in (False, True):
        p, summary = misfit(breaking(number, coin))
        assert p > LIMIT, (p, coin)
        valid = KINDS[number] in ("honest", "a token twice")
        assert (summary.undrafted["invalid"] == 0) == valid
        assert summary.accepted > 0 or not (valid or coin), "some drafts are right"


@settings(max_examples=8)
@given(seed=SEEDS)
def test_mixtures_of_breaks_keep_the_distribution(seed: int) -> None:
    kinds = np.random.default_rng(seed).integers(0, len(KINDS), (VOCAB, K))
    p, summary = misfit(breaking(kinds, bool(seed % 2)))
    assert p > LIMIT and summary.undrafted["invalid"] > 0


@pytest.mark.parametrize("wrapper", first(2, ["adaptive", "second", "confident", "first"]))
def test_drafters_around_such_a_drafter(wrapper: str) -> None:
    kinds = np.random.default_rng(7).integers(0, len(KINDS), (VOCAB, K))
    around = {**WRAPPERS, "confident": lambda d: ConfidentDrafter(d, 0.4, 0.3)}[wrapper]
    p, summary = misfit(around(breaking(kinds)))
    assert p > LIMIT and summary.undrafted["invalid"] > 0 and summary.accepted > 0


# Each mistake below is planted in a type of its own, so that the patched function is traced anew.


@struct.dataclass
class Whole(Breaking):
    """For a round that drops all drafts of a row if one of them is broken."""

    def propose(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        """The second draft is broken whenever the first is token 0."""
        state, proposal, info = LatticeDrafter.propose(self, state, feed)
        tokens = proposal.tokens
        broken = (tokens[:, :1] == 0) & (jnp.arange(K) == 1)[None]
        return state, replace(proposal, tokens=jnp.where(broken, VOCAB + 3, tokens)), info


@struct.dataclass
class Dropped(Whole):
    pass


@struct.dataclass
class Clipped(Breaking):
    pass


@struct.dataclass
class Believed(Breaking):
    pass


def test_dropping_a_whole_row_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert misfit(breaking(0, kind=Whole))[0] > LIMIT
    sanitize = guard.sanitize

    def drop(*given: Any) -> tuple[Proposal, DraftInfo]:
        proposal, info = sanitize(*given)
        broken = info.reason == NoDraft.INVALID
        return replace(proposal, length=jnp.where(broken, 0, proposal.length)), info

    monkeypatch.setattr(guard, "sanitize", drop)
    assert misfit(breaking(0, kind=Dropped))[0] < LIMIT


def test_clipping_ids_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def clip(values: jax.Array, vocab_size: int) -> tuple[jax.Array, jax.Array]:
        return jnp.clip(values, 0, vocab_size - 1), jnp.ones(values.shape, bool)

    monkeypatch.setattr(guard, "_as_tokens", clip)
    monkeypatch.setattr(guard, "_drawn", lambda tokens, support, inside: inside.all(-1))
    kind = KINDS.index("id past the vocabulary")
    assert misfit(breaking(kind, kind=Clipped))[0] < LIMIT


@pytest.mark.parametrize(
    "kind", first(1, ["short sum", "large sum", "support past the vocabulary"])
)
def test_believing_a_broken_support_would_be_found(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_drawn", lambda tokens, support, inside: support.probs[..., 0] > -9)
    changed = type(kind, (Believed,), {})  # another type for each
    changed = struct.dataclass(changed)
    p, _ = misfit(breaking(KINDS.index(kind), False, kind=changed))
    assert p < LIMIT


# ------------------------------------------------------------------------------- by hand


def feed(batch: int, *, limit: int = K, draws: bool = False) -> Feed:
    row, real = jnp.zeros((batch,), jnp.int32), jnp.ones((batch,), jnp.float32)
    how = Draw(Truncation(real, row, real, 0 * real), jax.random.split(jax.random.key(0), batch))
    wants = jnp.ones((batch,), bool)
    return Feed(None, row, row, row, wants, row + limit, draw=how if draws else None)


def cleaned(tokens: Any, length: Any, support: Support | None = None, **options: Any) -> Any:
    tokens, length = jnp.asarray(tokens), jnp.asarray(length)
    reason, passes = jnp.zeros(length.shape, jnp.int32), jnp.zeros((), jnp.int32)
    asked = feed(len(length), draws=support is not None, **options)
    made = Proposal(tokens, length, support=support)
    return guard.sanitize(made, DraftInfo(reason, passes), asked, VOCAB)


def test_a_proposal_ends_before_its_first_broken_draft() -> None:
    tokens = [[4, 5, 0], [4, -1, 0], [6, 1, 2], [1, 2, 3], [1, 2, 3], [-1, -1, -1], [0, 1, 99]]
    length = [3, 3, 3, -1, 9, 0, 2]
    proposal, info = cleaned(tokens, length)
    assert proposal.length.tolist() == [3, 1, 0, 0, 3, 0, 2]
    kept = [[4, 5, 0], [4, -1, -1], [-1] * 3, [-1] * 3, [1, 2, 3], [-1] * 3, [0, 1, -1]]
    assert proposal.tokens.tolist() == kept
    invalid = [False, True, True, True, True, False, False]
    assert [r == NoDraft.INVALID for r in info.reason.tolist()] == invalid
    assert cleaned(tokens, length, limit=1)[0].length.tolist() == [1, 1, 0, 0, 1, 0, 1]


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_integers_may_have_any_width(kind: str) -> None:
    with jax.enable_x64(True):
        tokens, length = np.asarray([[5, 1, 2], [1, 2, 100]], kind), np.asarray([3, 100], kind)
        proposal, info = cleaned(tokens, length)
    assert proposal.tokens.dtype == proposal.length.dtype == info.reason.dtype == jnp.int32
    assert proposal.tokens.tolist() == [[5, 1, 2], [1, 2, -1]]
    assert proposal.length.tolist() == [3, 2]


def test_a_support_may_be_padded_and_may_round() -> None:
    among = jnp.asarray([[[0, 1, -1, 2**30]] * 3] * 2, jnp.int32)
    probs = jnp.asarray([[[0.25, 0.75 + 3e-5, 0, 0]] * 3, [[0.25, 0.76, 0, 0]] * 3], jnp.float32)
    proposal, _ = cleaned([[0, 1, 0], [0, 1, 0]], [3, 3], Support(among, probs))
    assert proposal.length.tolist() == [3, 0]


# ------------------------------------------------------------------ what is known when tracing


def returns(change: Callable[[Any, Proposal, DraftInfo], Any]) -> Any:
    """A drafter that returns what ``change`` makes of a state, a proposal and an info."""

    @jax.tree_util.register_static
    class Changed(Stateless):
        draft_tokens = K

        def propose(self, state: Any, feed: Feed) -> Any:
            batch = feed.anchor.shape[0]
            tokens, length = jnp.zeros((batch, K), jnp.int32), jnp.zeros((batch,), jnp.int32)
            info = DraftInfo(length, jnp.zeros((), jnp.int32))
            return change(state, Proposal(tokens, length), info)

    return Changed()


def support(tokens: int, probs: int, dtype: Any) -> Callable[..., Any]:
    """A support of so many tokens and probabilities per step."""

    def change(state: Any, proposal: Proposal, info: DraftInfo) -> Any:
        batch = proposal.length.shape[0]
        among = jnp.zeros((batch, K, tokens), jnp.int32)
        wrong = Support(among, jnp.zeros((batch, K, probs), dtype))
        return state, replace(proposal, support=wrong), info

    return change


WRONG_PROPOSALS: dict[str, tuple[Callable[..., Any], str]] = {
    "two": (lambda s, p, i: (s, p), r"returned a tuple of 2; expected state, proposal and info"),
    "type": (lambda s, p, i: (s, p.tokens, i), r"returned int32 \[2, 3\] and a DraftInfo"),
    "floats": (
        lambda s, p, i: (s, replace(p, tokens=p.tokens.astype(jnp.float32)), i),
        r"proposal.tokens of float32 \[2, 3\]; expected integers \[2, 3\]",
    ),
    "narrow": (
        lambda s, p, i: (s, replace(p, tokens=p.tokens[:, 1:]), i),
        r"proposal.tokens of int32 \[2, 2\]; expected integers \[2, 3\]",
    ),
    "length": (
        lambda s, p, i: (s, replace(p, length=jnp.zeros((), jnp.int32)), i),
        r"proposal.length of int32 \[\]; expected integers \[2\]",
    ),
    "flags": (
        lambda s, p, i: (s, replace(p, length=p.length > 0), i),
        r"proposal.length of bool \[2\]; expected integers \[2\]",
    ),
    "list": (
        lambda s, p, i: (s, replace(p, length=[0, 0]), i),
        r"proposal.length of a list; expected integers \[2\]",
    ),
    "reason": (
        lambda s, p, i: (s, p, replace(i, reason=i.forwards)),
        r"info.reason of int32 \[\]; expected integers \[2\]",
    ),
    "forwards": (
        lambda s, p, i: (s, p, replace(i, forwards=1)),
        r"info.forwards of a int; expected integers \[\]",
    ),
    "support": (
        support(4, 4, jnp.float16),
        r"proposal.support.probs of float16 \[2, 3, 4\]; expected float32 \[2, 3, 4\]",
    ),
    "supports": (
        support(4, 5, jnp.float32),
        r"proposal.support.probs of float32 \[2, 3, 5\]; expected float32 \[2, 3, 4\]",
    ),
    "state": (lambda s, p, i: (p.length, p, i), r"returned a state of structure"),
}


@pytest.mark.parametrize("name", WRONG_PROPOSALS)
@pytest.mark.parametrize("around", [False, True])
def test_a_proposal_of_the_wrong_form_is_refused(name: str, around: bool) -> None:
    change, words = WRONG_PROPOSALS[name]
    drafter = returns(change)
    drafter = AdaptiveDrafter(drafter) if around else drafter
    with pytest.raises(ValueError, match=f"^Changed.propose.*{words}"):
        generate(MODEL, [[1], [2]], drafter=drafter)
    words = words.replace(r"\[2", r"\[4")
    with pytest.raises(ValueError, match=f"^Changed.propose.*{words}"):
        Engine(MODEL, drafter=drafter, max_batch=4)


def test_a_state_that_changes_its_form_is_refused() -> None:
    class Growing(TableDrafter):
        def init(self, batch: int, capacity: int) -> Any:
            return jnp.zeros((batch, 1), jnp.int32)

        def ingest(self, state: Any, feed: Feed) -> Any:
            return state.astype(jnp.float32)

    growing = struct.dataclass(Growing)(jnp.zeros((VOCAB, K), jnp.int32))
    with pytest.raises(ValueError, match=r"ingest returned state of float32 \[1, 1\]; .* int32"):
        generate(MODEL, [[1]], drafter=growing)


def gives(change: Callable[[TargetOutput], Any]) -> Model:
    """A model whose target's forward pass returns what ``change`` makes of it."""

    class Other(TableTarget):
        def forward(self, *given: Any, **named: Any) -> Any:
            return change(TableTarget.forward(self, *given, **named))

    return Model.of(struct.dataclass(Other)(TARGET.table))


WRONG_OUTPUTS: dict[str, tuple[Callable[[TargetOutput], Any], str]] = {
    "type": (
        lambda out: (out.logits, out.state),
        r"a tuple of 2; expected a TargetOutput",
    ),
    "vocabulary": (
        lambda out: replace(out, logits=out.logits[..., 1:]),
        r"logits of float32 \[1, 1, 5\]; expected float32 \[1, 1, 6\]",
    ),
    "rows": (
        lambda out: replace(out, logits=out.logits[:, 0]),
        r"logits of float32 \[1, 6\]; expected float32 \[1, 1, 6\]",
    ),
    "half": (
        lambda out: replace(out, logits=out.logits.astype(jnp.bfloat16)),
        r"logits of bfloat16 \[1, 1, 6\]; expected float32 \[1, 1, 6\]",
    ),
    "aux": (
        lambda out: replace(out, aux=out.logits[:, :0]),
        r"aux of float32 \[1, 0, 6\]; expected floats \[1, 16, \*\]",
    ),
    "hidden": (
        lambda out: replace(out, hidden=jnp.zeros((1, 16, 8), jnp.int32)),
        r"hidden of int32 \[1, 16, 8\]; expected floats \[1, 16, \*\]",
    ),
}


@pytest.mark.parametrize("name", WRONG_OUTPUTS)
def test_a_target_output_of_the_wrong_form_is_refused(name: str) -> None:
    change, words = WRONG_OUTPUTS[name]
    with pytest.raises(ValueError, match=f"^Other.forward returned {words}"):
        generate(gives(change), [[1, 2]], drafter="none")
    with pytest.raises(ValueError, match="^Other.forward returned"):
        score(gives(change), [[1, 2]])
    with pytest.raises(ValueError, match="^Other.forward returned"):
        Engine(gives(change), max_batch=1)


def test_a_drafter_says_what_its_target_does_not_give() -> None:
    target = tiny_target()
    for drafter, name in ((tiny_drafter(target, "dflash2"), "aux"), (tiny_mtp(target), "hidden")):
        model = Model.of(TableTarget.random(jax.random.key(0), target.vocab_size), drafter)
        with pytest.raises(ValueError, match=rf"reads Feed.{name}, but the target's forward"):
            generate(model, [[1, 2]])
    other = tiny_model("dflash2", width=16)
    with pytest.raises(ValueError, match=r"reads Feed.aux of width 64; the target's has width 32"):
        generate(other, [[1, 2]], drafter=tiny_drafter(target, "dflash2"))


@pytest.mark.parametrize("name", ["vocab_size", "context_length", "init", "forward", "commit"])
def test_a_missing_member_of_a_target_is_named(name: str) -> None:
    members: dict[str, Any] = {}
    for other in ("vocab_size", "context_length", "init", "forward", "commit"):
        if other != name:
            members[other] = 8 if other in ("vocab_size", "context_length") else print
    with pytest.raises(ValueError, match=rf"without {name}; expected a jaxdraft.base.Target"):
        Model.of(type("Partial", (), members)())


def test_a_missing_member_of_a_drafter_is_named() -> None:
    partial = type("Partial", (), {"draft_tokens": 2, "init": print, "ingest": print})()
    words = "without propose, step; expected a jaxdraft.base.Drafter"
    with pytest.raises(ValueError, match=words):
        Model.of(TARGET, partial)
    with pytest.raises(ValueError, match=words):
        generate(MODEL, [[1]], drafter=partial)
    for tokens in (-1, 2.5, True, None):
        wrong = type("Wrong", (Stateless,), {"draft_tokens": tokens})()
        with pytest.raises(ValueError, match="drafter.draft_tokens is .*; expected an integer"):
            generate(MODEL, [[1]], drafter=wrong)
