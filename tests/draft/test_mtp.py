"""The chained multi-token-prediction head: its module, its state, and its failures."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdraft
from jaxdraft import DraftInfo, Feed, Model, NoDraft, Proposal, generate
from jaxdraft.draft.chain import ChainState
from jaxdraft.draft.mtp import MtpDrafter
from jaxdraft.nn.linear import Frozen
from jaxdraft.rounds import MAX_FAILURES
from jaxdraft.state import paged
from jaxdraft.testing import (
    TableTarget,
    check_pool,
    propose_tokens,
    tiny_model,
    tiny_mtp,
    tiny_target,
)
from tests.examples import examples
from tests.paths import artifact, artifact_names

HEADS = [n for n in artifact_names() if n.endswith("_mtp")]
ROWS, SIZE, K = 3, 12, 3
SEEDS = st.integers(0, 2**31 - 1)


@functools.cache
def head() -> MtpDrafter:
    return tiny_mtp(tiny_target(), draft_tokens=K)


def load(name: str) -> tuple[Model, dict[str, np.ndarray]]:
    with np.load(artifact(name) / "golden.npz") as stored:
        golden = {k: stored[k] for k in stored.files}
    return jaxdraft.load(artifact(name), dtype="float32"), golden


def material(seed: int) -> tuple[jax.Array, jax.Array]:
    """Tokens and hidden rows of three rows of twelve positions."""
    one, two = jax.random.split(jax.random.key(seed))
    tokens = jax.random.randint(one, (ROWS, SIZE), 0, 48)
    return tokens, jax.random.normal(two, (ROWS, SIZE, 32), jnp.float32)


def feed(tokens: Any, hidden: Any, count: Any, first: Any, anchor: Any = 7, limit: Any = K) -> Feed:
    rows = len(tokens)

    def column(value: Any) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(value, jnp.int32), (rows,))

    limit = column(limit)
    return Feed(
        aux=None,
        hidden=jnp.asarray(hidden),
        tokens=jnp.asarray(tokens),
        count=column(count),
        first_position=column(first),
        anchor=column(anchor),
        wants_draft=limit > 0,
        limit=limit,
    )


def committed(state: ChainState) -> list[np.ndarray]:
    """Keys and values of the cached pairs of each row, whatever scratch lies behind them."""
    pages = [np.asarray(x[0]) for x in (state.pool.keys, state.pool.values)]
    length = np.asarray(state.pool.length)
    return [page[b, :, : length[b]] for page in pages for b in range(len(length))]


def assert_same(one: ChainState, other: ChainState) -> None:
    np.testing.assert_array_equal(one.length, other.length)
    np.testing.assert_array_equal(one.pool.length, other.pool.length)
    np.testing.assert_array_equal(one.intact, other.intact)
    for a, b in zip(committed(one), committed(other), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    np.testing.assert_array_equal(one.pending, other.pending)


ingest = jax.jit(lambda drafter, state, feed: drafter.ingest(state, feed))


# ---------------------------------------------------------------------------- goldens


@jax.jit
def one_call(drafter: MtpDrafter, tokens: jax.Array, hidden: jax.Array) -> tuple[Any, Any]:
    """Logits and hidden rows of a whole prompt, as the graph gives them."""
    state = drafter.init(1, tokens.shape[1])
    count = jnp.full((1,), tokens.shape[1], jnp.int32)
    rows, _ = drafter.mtp()(drafter.embedding[tokens], hidden, count, state.pool)
    return drafter.logits(rows), rows


@pytest.mark.parametrize("name", HEADS)
def test_first_call(name: str) -> None:
    """Logits and hidden rows of every position; a norm weight that is off by one shows."""
    model, golden = load(name)
    tokens, hidden = (
        jnp.asarray(golden["mtp/tokens"])[None],
        jnp.asarray(golden["mtp/hidden"])[None],
    )
    assert isinstance(model.drafter, MtpDrafter)
    logits, rows = one_call(model.drafter, tokens, hidden)
    np.testing.assert_allclose(logits[0], golden["mtp/logits"], atol=1e-4, rtol=0)
    np.testing.assert_allclose(rows[0], golden["mtp/hidden_out"], atol=2e-5, rtol=0)
    params = model.drafter.mtp.params
    for norm in ("embedding_norm", "hidden_norm", "input_norm", "post_norm", "norm"):
        for shift in (1.0, -1.0):
            moved = {**params, norm: {"weight": params[norm]["weight"] + shift}}
            wrong = replace(model.drafter, mtp=Frozen(moved, model.drafter.mtp.structure))
            logits, _ = one_call(wrong, tokens, hidden)
            assert np.abs(np.asarray(logits)[0] - golden["mtp/logits"]).max() > 1e-2, norm


@pytest.mark.parametrize("chunks", [(23,), (1,) * 23, (10, 1, 12)])
@pytest.mark.parametrize("name", HEADS)
def test_chained_drafts(name: str, chunks: tuple[int, ...]) -> None:
    """Four drafts after the prompt, however the prompt arrives; the last hidden row waits."""
    model, golden = load(name)
    assert isinstance(model.drafter, MtpDrafter)
    drafter = model.drafter.with_draft_tokens(4)
    prompt, hidden = golden["prompt2/ids"], golden["mtp/hidden"]
    state, at = drafter.init(1, 32), 0
    width = max(chunks)
    for size in chunks:
        pad = width - size
        rows = np.pad(hidden[at : at + size], ((0, pad), (0, 0)), constant_values=np.nan)
        ids = np.pad(prompt[at : at + size], (0, pad), constant_values=383)
        state = ingest(drafter, state, feed(ids[None], rows[None], size, at))
        at += size
    np.testing.assert_array_equal(state.pending[0], hidden[-1])
    anchor = golden["greedy2/tokens"][0]
    ask = feed(prompt[None, :1], hidden[None, :1], 0, at, anchor=anchor, limit=4)
    state, proposal, info = drafter.propose(state, ask)
    assert proposal.tokens[0].tolist() == golden["mtp/chain_tokens"].tolist()
    assert proposal.length.tolist() == [4] and int(info.forwards) == 4
    assert state.pool.length.tolist() == [22] and state.length.tolist() == [23]


# ---------------------------------------------------------------------------- state


@given(
    seed=SEEDS,
    cuts=st.lists(st.lists(st.integers(0, 4), min_size=ROWS, max_size=ROWS), max_size=4),
)
def test_any_split_of_the_rows_is_one_call(seed: int, cuts: list[list[int]]) -> None:
    """Ragged calls of 0..4 rows leave what one call leaves; drafts in between leave no trace."""
    tokens, hidden = material(seed)
    state, at = head().init(ROWS, SIZE), np.zeros(ROWS, int)
    for counts in cuts:
        width = np.minimum(counts, SIZE - at)
        index = np.minimum(at[:, None] + np.arange(4), SIZE - 1)
        part = jnp.take_along_axis(tokens, index, axis=1)
        rows = jnp.take_along_axis(hidden, index[..., None], axis=1)
        rows = jnp.where(np.arange(4)[None, :, None] < width[:, None, None], rows, jnp.nan)
        state, _, _ = head().step(state, feed(part, rows, width, at, anchor=seed % 48))
        at = at + width
    whole = ingest(head(), head().init(ROWS, SIZE), feed(tokens, hidden, at, 0))
    assert_same(state, whole)
    assert state.length.tolist() == at.tolist()


def test_a_step_is_ingest_then_propose() -> None:
    tokens, hidden = material(0)
    asks = feed(tokens, hidden, [12, 5, 1], 0, limit=[3, 1, 2])
    state, proposal, info = head().step(head().init(ROWS, SIZE), asks)
    apart = ingest(head(), head().init(ROWS, SIZE), asks)
    apart, same, same_info = head().propose(apart, asks)
    np.testing.assert_array_equal(proposal.tokens, same.tokens)
    np.testing.assert_array_equal(info.reason, same_info.reason)
    assert_same(state, apart)


@given(seed=SEEDS, limits=st.lists(st.integers(0, K), min_size=ROWS, max_size=ROWS))
def test_a_limit_cuts_the_chain_and_its_passes(seed: int, limits: list[int]) -> None:
    """The first drafts of an unlimited row; as many passes as the widest row can use."""
    tokens, hidden = material(seed)
    counts = [12, 5, 1]
    full = head().step(head().init(ROWS, SIZE), feed(tokens, hidden, counts, 0))[1]
    cut = feed(tokens, hidden, counts, 0, limit=limits)
    _, proposal, info = head().step(head().init(ROWS, SIZE), cut)
    assert proposal.length.tolist() == limits and int(info.forwards) == max(limits)
    for b, limit in enumerate(limits):
        assert proposal.tokens[b, :limit].tolist() == full.tokens[b, :limit].tolist()
        assert (np.asarray(proposal.tokens)[b, limit:] == -1).all()


def test_rows_do_not_see_each_other() -> None:
    """Each row alone drafts what it drafts in a ragged batch."""
    tokens, hidden = material(1)
    together = head().step(head().init(ROWS, SIZE), feed(tokens, hidden, [12, 5, 1], 0))[1]
    for b, count in enumerate([12, 5, 1]):
        alone = feed(tokens[b : b + 1], hidden[b : b + 1], count, 0)
        proposal = head().step(head().init(1, SIZE), alone)[1]
        np.testing.assert_array_equal(proposal.tokens[0], together.tokens[b])


@settings(max_examples=examples(20))
@given(
    seed=SEEDS,
    cuts=st.lists(st.lists(st.integers(0, 4), min_size=ROWS, max_size=ROWS), max_size=4),
    over=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
)
def test_a_shared_pool_is_a_fixed_batch(seed: int, cuts: list[list[int]], over: list[bool]) -> None:
    """Pages of two slots, as many as a target needs for the same positions and its window: the
    same drafts as with a page a row, no row denied, and every page comes back."""
    tokens, hidden = material(seed)
    target_pages = -(-(SIZE + 1 + K) // 2)
    shared = head().init_pool(ROWS, pages=ROWS * target_pages, page_size=2, columns=target_pages)
    fixed, at = head().init(ROWS, SIZE), np.zeros(ROWS, int)
    for counts in cuts:
        width = np.minimum(counts, SIZE - at)
        index = np.minimum(at[:, None] + np.arange(4), SIZE - 1)
        part = jnp.take_along_axis(tokens, index, axis=1)
        rows = jnp.take_along_axis(hidden, index[..., None], axis=1)
        asks = feed(part, rows, width, at)
        shared, found, info = head().step(shared, asks)
        fixed, expected, same = head().step(fixed, asks)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(info.reason, same.reason)
        check_pool(shared.pool)
        at = at + width
        # Never more pages than the target holds: its committed rows, the anchor and the drafts.
        owned = np.asarray(paged.owned(shared.pool))
        assert (owned <= -(-(at + 1 + K) // 2)).all()
    assert int(shared.misses) == 0
    for _ in range(2):  # releasing a row twice is releasing it once
        shared = head().release(shared, jnp.asarray(over))
        check_pool(shared.pool)
    owned = np.asarray(paged.owned(shared.pool))
    assert (owned[np.asarray(over)] == 0).all()
    shared = head().release(shared, jnp.ones((ROWS,), bool))
    assert int(shared.pool.free_count) == ROWS * target_pages


def test_a_row_without_pages_is_denied_until_released() -> None:
    """Six pages of two slots; row 1 alone has eleven pairs. The others do not notice."""
    tokens, hidden = material(6)
    small = head().init_pool(ROWS, pages=6, page_size=2)
    counts = [4, 12, 2]  # slots of pairs and scratch: 3 + 3, 11 + 3, 1 + 3
    small, proposal, info = head().step(small, feed(tokens, hidden, counts, 0))
    assert info.reason.tolist() == [NoDraft.DRAFTED, NoDraft.DENIED, NoDraft.DRAFTED]
    assert proposal.length.tolist() == [K, 0, K] and int(small.misses) == 1
    assert np.asarray(paged.owned(small.pool)).tolist() == [3, 0, 2]
    check_pool(small.pool)
    full = head().step(head().init(ROWS, SIZE), feed(tokens, hidden, counts, 0))[1]
    np.testing.assert_array_equal(proposal.tokens[::2], full.tokens[::2])
    again = feed(tokens[:, 8:], hidden[:, 8:], [0, 1, 0], [4, 12, 2])
    small, _, info = head().step(small, again)
    assert info.reason.tolist() == [NoDraft.DRAFTED, NoDraft.DENIED, NoDraft.DRAFTED]
    small = head().release(small, jnp.asarray([True, True, False]))
    small, _, info = head().step(small, feed(tokens, hidden, [0, 3, 0], 0))
    assert info.reason.tolist() == [NoDraft.HOLE, NoDraft.DRAFTED, NoDraft.DRAFTED]


# ---------------------------------------------------------------------------- failure


def test_a_hole_stops_the_row_until_it_starts_again() -> None:
    tokens, hidden = material(2)
    state = ingest(head(), head().init(ROWS, SIZE), feed(tokens, hidden, 4, 0))
    later = feed(tokens[:, 4:8], hidden[:, 4:8], 2, [4, 5, 0])  # follows, skips, starts again
    state, proposal, info = head().step(state, later)
    assert info.reason.tolist() == [NoDraft.DRAFTED, NoDraft.HOLE, NoDraft.DRAFTED]
    assert proposal.length.tolist() == [K, 0, K]
    assert state.length.tolist() == [6, 4, 2]
    assert (np.asarray(proposal.tokens)[1] == -1).all(), "no token 0 in place of a draft"
    again = feed(tokens, hidden, 3, [6, 4, 2])  # row 1 goes on where it stopped: still a hole
    state, _, info = head().step(state, again)
    assert info.reason.tolist() == [NoDraft.DRAFTED, NoDraft.HOLE, NoDraft.DRAFTED]
    state, _, info = head().step(state, feed(tokens, hidden, 3, 0))
    assert info.reason.tolist() == [NoDraft.DRAFTED] * 3
    assert_same(state, ingest(head(), head().init(ROWS, SIZE), feed(tokens, hidden, 3, 0)))


def test_nothing_ingested_is_nothing_to_draft_from() -> None:
    tokens, hidden = material(3)
    _, proposal, info = head().step(head().init(ROWS, SIZE), feed(tokens, hidden, 0, 0))
    assert info.reason.tolist() == [NoDraft.HOLE] * 3 and int(info.forwards) == 0
    assert proposal.length.tolist() == [0] * 3


def test_a_non_finite_row_fails_alone() -> None:
    tokens, hidden = material(4)
    clean = head().step(head().init(ROWS, SIZE), feed(tokens, hidden, 12, 0))[1]
    hidden = hidden.at[1, 3].set(jnp.nan)
    _, proposal, info = head().step(head().init(ROWS, SIZE), feed(tokens, hidden, 12, 0))
    assert info.reason.tolist() == [NoDraft.DRAFTED, NoDraft.NONFINITE, NoDraft.DRAFTED]
    assert proposal.length.tolist() == [K, 0, K]
    np.testing.assert_array_equal(proposal.tokens[::2], clean.tokens[::2])


def test_a_failing_pass_leaves_the_drafts_before_it() -> None:
    """A pass fails because of the draft before it. If that draft were withdrawn, it would be
    emitted too rarely, or too often, where drafts are drawn."""
    tokens, hidden = material(4)
    text = feed(tokens, hidden, 12, 0)
    state = ingest(head(), head().init(ROWS, SIZE), text)
    clean = head().propose(state, text)[1]
    first = int(clean.tokens[1, 0])
    assert first != 7, "the anchor's pass is to succeed"
    bad = replace(head(), embedding=head().embedding.at[first].set(jnp.nan))
    _, proposal, info = bad.propose(state, text)
    assert info.reason.tolist() == [NoDraft.DRAFTED] * 3
    hits = np.asarray(clean.tokens) == first  # of a pass that is followed by one that fails
    expected = [int(row.argmax()) + 1 if row.any() else K for row in hits]
    assert expected[1] == 1 and proposal.length.tolist() == expected
    for row, length in enumerate(expected):
        np.testing.assert_array_equal(proposal.tokens[row, :length], clean.tokens[row, :length])


def test_the_rotary_table_ends_the_chain() -> None:
    """Ten positions: passes at 8 and 9 are the last; then no drafts, and nothing in their place."""
    short = tiny_mtp(tiny_target(), context_length=10)
    tokens, hidden = material(5)
    lengths = [8, 9, 11]  # pairs: 7, 8, 10
    state, proposal, info = short.step(short.init(ROWS, SIZE), feed(tokens, hidden, lengths, 0))
    assert proposal.length.tolist() == [3, 2, 0]
    assert info.reason.tolist() == [NoDraft.DRAFTED, NoDraft.DRAFTED, NoDraft.CONTEXT]
    assert int(info.forwards) == 3


def test_a_short_head_goes_quiet_and_the_target_goes_on() -> None:
    """Past the head's positions nothing is proposed and nothing accepted, though the target's
    tokens are all 0, what a drafter that cannot run might put into its place."""
    target = tiny_target()
    params = jax.tree.map(lambda x: x, target.decoder.params)
    params["head"]["weight"] = jnp.zeros_like(params["head"]["weight"])  # every logit is 0: token 0
    target = replace(target, decoder=Frozen(params, target.decoder.structure))
    model = Model.of(target, tiny_mtp(target, context_length=20))
    out = generate(model, [[1, 2, 3]], max_new_tokens=40, trace=True)
    assert out.ids() == [[0] * 40]
    assert out.trace is not None
    accepted = np.asarray(out.trace.accepted)[0]
    # The head shares the target's head, so it drafts 0 too, right until its table ends.
    quiet = int(np.flatnonzero(accepted == 0)[0])
    assert (accepted[:quiet] > 0).all() and (accepted[quiet:] == 0).all()
    summary = jaxdraft.summarize(out.stats)
    # Before the last round one token is left, for which no draft is asked.
    assert summary.undrafted["context"] == len(accepted) - quiet - 1
    assert summary.accepted == summary.proposed == accepted.sum() < 20
    assert summary.undrafted["off"] == 0, "the end of a table is no failure"


def test_a_broken_head_is_switched_off() -> None:
    """Every score is NaN: three failing rounds a row, then silence; the reason stays readable."""
    model = tiny_model("mtp")
    drafter = model.drafter
    assert isinstance(drafter, MtpDrafter)
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), drafter.mtp.params["fc"])
    params = {**drafter.mtp.params, "fc": broken}
    drafter = replace(drafter, mtp=Frozen(params, drafter.mtp.structure))
    prompts = [[1, 2, 3], [4, 5]]
    plain = generate(model, prompts, max_new_tokens=30, drafter="none")
    out = generate(model, prompts, max_new_tokens=30, drafter=drafter)
    assert out.ids() == plain.ids()
    summary = jaxdraft.summarize(out.stats)
    assert summary.proposed == summary.evaluated == summary.accepted == 0
    assert summary.acceptance is None and summary.rounds == 58
    assert summary.undrafted["nonfinite"] == 2 * MAX_FAILURES
    # Every later round but the two in which one token is left, and that after the last.
    assert summary.undrafted["off"] == 2 * (29 - 1 - MAX_FAILURES)
    assert summary.drafter_forwards == MAX_FAILURES * K, "it is not tried again"


@struct.dataclass
class Flaky:
    """Always right but where ``fails`` [B, S] names the reason of a failure after a position."""

    truth: jax.Array
    fails: jax.Array
    draft_tokens: int = struct.field(pytree_node=False, default=2)

    def init(self, batch: int, capacity: int) -> Any:
        return ()

    def ingest(self, state: Any, feed: Feed) -> Any:
        return state

    def propose(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        anchor = (feed.first_position + feed.count)[:, None]
        index = anchor + 1 + jnp.arange(self.draft_tokens)[None]
        tokens = jnp.take_along_axis(self.truth, index, axis=1, mode="clip")
        why = jnp.take_along_axis(self.fails, anchor, axis=1, mode="clip")[:, 0]
        why = jnp.where(feed.wants_draft, why, NoDraft.DRAFTED)
        limit = jnp.where(why == NoDraft.DRAFTED, feed.limit, 0)
        asks = replace(feed, limit=limit)
        proposal, info = propose_tokens(tokens, asks)
        reason = jnp.where(why == NoDraft.DRAFTED, info.reason, why).astype(jnp.int32)
        return state, proposal, replace(info, reason=reason)

    def step(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        return self.propose(state, feed)


@settings(max_examples=examples(20))
@given(seed=SEEDS, often=st.floats(0, 1))
def test_failures_in_a_row_are_counted_by_row(seed: int, often: float) -> None:
    """Any pattern of failures: the tokens stand, and a row is off after its third in a row."""
    model = Model.of(TableTarget.random(jax.random.key(seed), 12))
    prompts = [[1, 2, 3], [4], [7, 7]]
    plain = generate(model, prompts, max_new_tokens=24, drafter="none").ids()
    truth = np.zeros((3, 48), np.int32)
    for row, (prompt, tokens) in enumerate(zip(prompts, plain, strict=True)):
        truth[row, : len(prompt) + 24] = [*prompt, *tokens]
    rng = np.random.default_rng(seed)
    kinds = rng.choice([NoDraft.HOLE, NoDraft.NONFINITE], (3, 48))
    fails = np.where(rng.random((3, 48)) < often, kinds, NoDraft.DRAFTED).astype(np.int32)
    fails[2] = 0
    drafter = Flaky(jnp.asarray(truth), jnp.asarray(fails))
    out = generate(model, prompts, max_new_tokens=24, drafter=drafter)
    assert out.ids() == plain
    for row, prompt in enumerate(prompts):
        failures, position, expected, off = 0, len(prompt), {}, 0
        while (emitted := position - len(prompt) + 1) < 24:
            width = min(2, 24 - emitted - 1)
            if width and failures >= MAX_FAILURES:
                off, width = off + 1, 0
            elif width and (why := fails[row, position]):
                expected[why] = expected.get(why, 0) + 1
                failures, width = failures + 1, 0
            elif width:
                failures = 0
            position += width + 1
        found = np.asarray(out.stats.undrafted)[row]
        assert found[NoDraft.OFF] == off
        for why in (NoDraft.HOLE, NoDraft.NONFINITE):
            assert found[why] == expected.get(why, 0)
    assert int(out.stats.undrafted[2, NoDraft.OFF]) == 0, "its neighbours' failures are not its own"


# ---------------------------------------------------------------------------- the front door


def test_another_width_is_another_drafter() -> None:
    model = tiny_model("mtp")
    plain = generate(model, [[1, 2, 3]], max_new_tokens=12, drafter="none").ids()
    for width in (1, 2, 5):
        out = generate(model, [[1, 2, 3]], max_new_tokens=12, draft_tokens=width)
        assert out.ids() == plain and out.stats.accepted_at.shape == (1, width)
    for kind, width, words in (
        ("mtp", 0, "at least 1"),
        ("dflash2", 9, "block has 1 to 3"),
    ):
        with pytest.raises(ValueError, match=words):
            generate(tiny_model(kind), [[1]], draft_tokens=width)


def edited(tmp_path: Path, **changes: object) -> Path:
    """An artifact with a head whose section says something else."""
    folder = tmp_path / "edited"
    shutil.copytree(artifact("qwen35_fp32_cpu_mtp"), folder)
    path = folder / "genai_config.json"
    config = json.loads(path.read_text())
    config["model"]["mtp"] |= changes
    path.write_text(json.dumps(config))
    return folder


def test_disabled_is_none(tmp_path: Path) -> None:
    """``model.mtp.enabled: false``: plain decoding, zero drafts, the head's file is not read."""
    folder = edited(tmp_path, enabled=False)
    (folder / "mtp.onnx").unlink()
    model = jaxdraft.load(folder)
    assert model.info.drafter == "none" and model.drafter.draft_tokens == 0
    with pytest.raises(ValueError, match="'mtp' is unknown"):
        generate(model, [[1]], drafter="mtp")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enabled": "false"}, "enabled"),
        ({"enabled": 0}, "enabled"),
        ({"main_hidden_states": "no_such_output"}, "no_such_output"),
    ],
)
def test_what_is_no_boolean_is_refused(tmp_path: Path, changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        jaxdraft.load(edited(tmp_path, **changes))
