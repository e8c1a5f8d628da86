"""Pools of rings and of pages, against a plain Python model and drafters of a fixed batch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdraft import Model, generate
from jaxdraft.base import NO_PAGE, DraftInfo, Feed, NoDraft, Proposal
from jaxdraft.config import KvShape
from jaxdraft.draft.block import BlockDrafter, BlockState
from jaxdraft.nn.attention import attend
from jaxdraft.state import paged, recurrent, ring
from jaxdraft.state.decoder import DecoderState
from jaxdraft.state.paged import PagedPool
from jaxdraft.state.ring import Ring
from jaxdraft.target import DecoderTarget
from jaxdraft.testing import check_pool, tiny_model, tiny_target
from tests.examples import examples
from tests.state.test_paged import numpy_attention
from tests.state.test_ring import CONFIG, DIM, HEADS

BATCH, STEPS, SIZE, COLUMNS = 4, 8, 4, 6
RINGS, RING_PAGES = 2, 6  # window 12, block 4: ceil(20 / 4) + 1
PAGES = 6  # of the target; a spill page of 4 slots a row comes on top
KINDS = ["dflash2", "dspark"]
SEEDS = st.integers(0, 2**31 - 1)

admit = jax.jit(lambda drafter, state, rows: drafter.admit(state, rows))
release = jax.jit(lambda drafter, state, rows: drafter.release(state, rows))
propose = jax.jit(lambda drafter, state, feed: drafter.propose(state, feed))


@functools.cache
def model(kind: str) -> Model:
    return tiny_model(kind)


def drafter(kind: str) -> BlockDrafter:
    found = model(kind).drafter
    assert isinstance(found, BlockDrafter)
    return found


def pooled(kind: str, batch: int = BATCH, rings: int = RINGS, pages: int = PAGES) -> BlockState:
    if kind == "dflash2":
        return drafter(kind).init_pool(batch, rings=rings, page_size=SIZE)
    return drafter(kind).init_pool(batch, pages=pages, page_size=SIZE, columns=COLUMNS)


def feed(
    kind: str, first: Any, count: Any, *, seed: int = 0, wants: Any = True, aux: Any = None
) -> Feed:
    batch = len(first)
    shape = (batch, STEPS, drafter(kind).config.aux_width)
    return Feed(
        aux=jax.random.normal(jax.random.key(seed), shape) if aux is None else aux,
        count=jnp.asarray(count, jnp.int32),
        first_position=jnp.asarray(first, jnp.int32),
        anchor=jnp.arange(batch, dtype=jnp.int32) + 7,
        wants_draft=jnp.broadcast_to(jnp.asarray(wants), (batch,)),
        limit=jnp.full((batch,), 99, jnp.int32),
    )


def counts(state: BlockState) -> tuple[list[int], int]:
    """Pages each row owns, and free pages. Checks that they are all there are."""
    check_pool(state.cache)  # type: ignore[arg-type]
    return paged.owned(state.cache).tolist(), int(state.cache.free_count)


# ------------------------------------------------------------------ the laws, in plain Python


@dataclasses.dataclass
class Row:
    owned: int = 0
    length: int = 0
    intact: bool = True
    denied: bool = False


class PythonPool:
    """What a pooled drafter is supposed to do, row by row."""

    def __init__(self, kind: str) -> None:
        self.ring = kind == "dflash2"
        self.rows = [Row() for _ in range(BATCH)]
        self.free = RINGS * RING_PAGES if self.ring else PAGES + BATCH
        self.misses = 0

    def cover(self, positions: list[int]) -> None:
        missed = []
        for row, n in zip(self.rows, positions, strict=True):
            pages = RING_PAGES if self.ring else -(-n // SIZE)
            need = max(0, pages - row.owned) if n else 0
            if need <= self.free and (self.ring or pages <= COLUMNS):
                row.owned, self.free = row.owned + need, self.free - need
            else:
                missed.append(row)
        for row in missed:
            self.free += row.owned
            row.owned, row.length, row.denied = 0, 0, True
            self.misses += 1

    def ingest(self, first: list[int], count: list[int]) -> None:
        taken = []
        for row, at, n in zip(self.rows, first, count, strict=True):
            fresh = n > 0 and at == 0
            row.intact = fresh or (row.intact and (n == 0 or at == row.length))
            taken.append(n if row.intact and not row.denied else 0)
        self.cover([at + n if n else 0 for at, n in zip(first, taken, strict=True)])
        for row, at, n in zip(self.rows, first, taken, strict=True):
            if n and not row.denied:
                row.length = at + n

    def admit(self, rows: list[bool]) -> None:
        pairs = zip(self.rows, rows, strict=True)
        self.cover([row.length + 1 if asks and not row.denied else 0 for row, asks in pairs])

    def release(self, rows: list[bool]) -> None:
        for i, gone in enumerate(rows):
            if gone:
                self.free += self.rows[i].owned
                self.rows[i] = Row()

    def reasons(self) -> list[NoDraft]:
        return [
            NoDraft.DENIED if r.denied else NoDraft.DRAFTED if r.intact else NoDraft.HOLE
            for r in self.rows
        ]


flags = st.lists(st.booleans(), min_size=BATCH, max_size=BATCH)
move = st.tuples(st.sampled_from(["next", "next", "start", "hole"]), st.integers(0, STEPS))
step = st.one_of(
    st.tuples(st.just("feed"), st.lists(move, min_size=BATCH, max_size=BATCH)),
    st.tuples(st.just("feed"), st.lists(move, min_size=BATCH, max_size=BATCH)),
    st.tuples(st.just("release"), flags),
    st.tuples(st.just("admit"), flags),
)


@settings(max_examples=examples(25))
@pytest.mark.parametrize("kind", KINDS)
@given(steps=st.lists(step, max_size=14))
def test_pools_follow_the_python_model(kind: str, steps: list[tuple[str, Any]]) -> None:
    """Owned, free, lengths, denials and reasons after every step; and what a row drafts, if it
    does, is what it drafts in a fixed batch, whoever had its pages before.
    """
    block, python = drafter(kind), PythonPool(kind)
    state, fixed = pooled(kind), block.init(BATCH, 64)
    for number, (name, moves) in enumerate(steps):
        if name == "feed":
            first, count = [], []
            for row, (how, n) in zip(python.rows, moves, strict=True):
                first.append({"start": 0, "next": row.length, "hole": row.length + 1}[how])
                count.append(n)
            rows = feed(kind, first, count, seed=number)
            state, proposal, info = block.step(state, rows)
            fixed, expected, _ = block.step(fixed, rows)
            python.ingest(first, count)
            assert info.reason.tolist() == python.reasons()
            drafted = [r.length > 0 and r.intact and not r.denied for r in python.rows]
            assert proposal.lattice is not None and expected.lattice is not None
            for b in np.flatnonzero(drafted):
                np.testing.assert_array_equal(
                    proposal.lattice.candidates[b], expected.lattice.candidates[b]
                )
                np.testing.assert_allclose(
                    proposal.lattice.scores[b], expected.lattice.scores[b], atol=2e-5
                )
            assert (np.asarray(proposal.length)[[r.denied for r in python.rows]] == 0).all()
        else:
            call, said = {"admit": (admit, python.admit), "release": (release, python.release)}[
                name
            ]
            state = call(block, state, jnp.asarray(moves))
            said(moves)
        owned, free = counts(state)
        assert owned == [row.owned for row in python.rows] and free == python.free
        assert state.length.tolist() == [row.length for row in python.rows]
        assert state.denied.tolist() == [row.denied for row in python.rows]
        assert int(state.misses) == python.misses


# ------------------------------------------------------------------ reading through the table

take = jax.jit(ring.admit)
write = jax.jit(ring.write)
give_back = jax.jit(paged.release)


@jax.jit
def with_cache(state: BlockState, cache: Ring | PagedPool) -> BlockState:
    """The state with another cache: these drafters have one."""
    name = "ring" if isinstance(cache, Ring) else "pages"
    return dataclasses.replace(state, **{name: cache})


def read(cache: Ring, q: jax.Array, positions: jax.Array) -> jax.Array:
    return attend(q, positions, ring.source(cache, 0), CONFIG, causal=False)


@given(data=st.data(), seed=SEEDS)
def test_a_pooled_ring_reads_what_the_full_history_would(data: st.DataObject, seed: int) -> None:
    """Shuffled pages, rows that come and go and inherit each other's pages, many wraps."""
    rng = np.random.default_rng(seed)
    rows, rings, most, total = 3, 2, 10, 60
    cache = Ring.pool(
        KvShape(layers=1, kv_heads=HEADS, head_dim=DIM, dtype=jnp.float32),
        batch=rows,
        rings=rings,
        window=9,
        block=4,
        page_size=SIZE,
    )
    shuffled = jnp.asarray(rng.permutation(cache.pages), jnp.int32)
    cache = dataclasses.replace(cache, free=shuffled)
    length, has = np.zeros(rows, np.int32), np.zeros(rows, bool)
    keys, values = rng.standard_normal((2, rows, total + most, HEADS, DIM)).astype(np.float32)
    for _ in range(data.draw(st.integers(1, 12))):
        gone = np.asarray(data.draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))) == 0
        cache = give_back(cache, jnp.asarray(gone))
        length, has = np.where(gone, 0, length).astype(np.int32), has & ~gone
        keys[gone], values[gone] = rng.standard_normal((2, int(gone.sum()), *keys.shape[1:]))
        cache, granted = take(cache, jnp.ones((rows,), bool))
        assert granted.tolist() == (has | (np.cumsum(~has) <= rings - has.sum())).tolist()
        has = np.asarray(granted)
        sizes = data.draw(st.lists(st.integers(0, most), min_size=rows, max_size=rows))
        count = np.where(has, np.minimum(sizes, total - length), 0).astype(np.int32)
        part = [
            jnp.asarray(np.stack([x[b, length[b] : length[b] + most] for b in range(rows)]))
            for x in (keys, values)
        ]
        cache = write(cache, part[:1], part[1:], jnp.asarray(length), jnp.asarray(count))
        length = length + count  # a new array: jnp.asarray may have borrowed the old one
        check_pool(cache)  # type: ignore[arg-type]
    np.testing.assert_array_equal(cache.length, length)
    positions = length[:, None] + np.arange(4)[None]
    q = rng.standard_normal((rows, 4, 4, DIM)).astype(np.float32)
    found = read(cache, jnp.asarray(q), jnp.asarray(positions, jnp.int32))
    expected = numpy_attention(q, keys, values, positions, length, causal=False, window=9)
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_permuting_rows_and_pages_changes_nothing(kind: str) -> None:
    """Bit-equal drafts of every row, whatever its number and wherever its pages lie."""
    block = drafter(kind)
    aux = [
        jax.random.normal(jax.random.key(i), (BATCH, STEPS, block.config.aux_width))
        for i in range(3)
    ]
    amounts = np.asarray([[8, 3, 5, 8], [2, 8, 0, 7], [1, 4, 8, 2]])

    def run(order: np.ndarray, pages: int | None) -> list[Proposal]:
        state = pooled(kind, rings=BATCH, pages=4 * BATCH)
        if pages is not None:
            stack = jax.random.permutation(jax.random.key(pages), state.cache.free)
            state = with_cache(state, dataclasses.replace(state.cache, free=stack))
        said, at = [], np.zeros(BATCH, int)
        for rows, count in zip(aux, amounts, strict=True):
            given_ = feed(kind, at[order], count[order], aux=rows[order])
            given_ = dataclasses.replace(given_, anchor=jnp.asarray(order, jnp.int32) + 7)
            state, proposal, info = block.step(state, given_)
            assert info.reason.tolist() == [0] * BATCH
            said.append(proposal)
            at = at + count
        assert int(state.misses) == 0
        return said

    base = run(np.arange(BATCH), None)
    for order, pages in (([0, 1, 2, 3], 1), ([3, 1, 0, 2], None), ([2, 3, 1, 0], 2)):
        for proposal, expected in zip(run(np.asarray(order), pages), base, strict=True):
            moved = jax.tree.map(lambda x, order=order: np.asarray(x)[order], expected)
            jax.tree.map(np.testing.assert_array_equal, proposal, moved)


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_else_is_touched(kind: str) -> None:
    """Ten rounds of two rows leave every page they do not own as it was, and the idle rows too."""
    block = drafter(kind)
    state = pooled(kind, rings=3)
    # Row 3 leaves stale pages behind; row 2 is denied or has a page of its own.
    state = block.step(state, feed(kind, [0, 0, 0, 0], [0, 0, 0, 5]))[0]
    state = release(block, state, jnp.asarray([False, False, False, True]))
    nine = dataclasses.replace(
        state.cache, keys=tuple(jnp.full_like(k, 9.0) for k in state.cache.keys)
    )
    state = with_cache(state, nine)
    at = np.zeros(BATCH, int)
    for round_ in range(10):
        count = np.asarray([2, 1 + round_ % 2, 0, 0])
        state, _, _ = block.step(state, feed(kind, at, count, seed=round_))
        at = at + count
    owned, free = counts(state)
    assert owned[2:] == [0, 0] and free > 0
    mine = np.asarray(state.cache.table)
    rest = np.setdiff1d(np.arange(state.cache.pages), mine[mine != NO_PAGE])
    for keys in state.cache.keys:
        assert (np.asarray(keys)[rest] == 9.0).all()
        assert (np.asarray(keys)[mine[0, 0]] != 9.0).any()


# ------------------------------------------------------------------ coming and going


@pytest.mark.parametrize("kind", KINDS)
def test_release_twice_is_release_once(kind: str) -> None:
    """Cancel and then finish: every page comes back once, and goes out to one row at a time."""
    block, rows = drafter(kind), jnp.asarray([True, False, False, True])
    state, _, _ = block.step(pooled(kind), feed(kind, [0] * BATCH, [8, 7, 0, 0]))
    before, _ = counts(state)
    assert before[:2] == ([RING_PAGES] * 2 if kind == "dflash2" else [2, 2])
    once = release(block, state, rows)
    twice = release(block, once, rows)
    jax.tree.map(np.testing.assert_array_equal, once, twice)
    owned, free = counts(twice)
    assert owned == [0, *before[1:]] and free + sum(owned) == state.cache.pages
    again, _, _ = block.step(twice, feed(kind, [0, 7, 0, 0], [8, 1, 0, 0]))
    counts(again)


@pytest.mark.parametrize("kind", KINDS)
def test_a_denied_row_stays_denied_until_it_is_released(kind: str) -> None:
    block = drafter(kind)
    # Two rings, or ten pages: rows 0 and 1 leave too little for row 2.
    sizes = [8, 8, 8, 0]
    state, at = pooled(kind, pages=2), 0  # 2 + 4 pages
    state, proposal, info = block.step(state, feed(kind, [0] * BATCH, sizes))
    denied = int(NoDraft.DENIED)
    if kind == "dspark":
        assert info.reason.tolist() == [0, 0, 0, 0]  # 2 pages each; nothing is left
        state, proposal, info = block.step(state, feed(kind, [8] * BATCH, [0, 0, 1, 0]))
    assert info.reason.tolist()[:3] == [0, 0, denied] and int(state.misses) == 1
    assert proposal.length.tolist()[2] == 0 and proposal.tokens[2].tolist() == [-1] * 3 + (
        [-1] if kind == "dspark" else []
    )
    assert counts(state)[0][2] == 0  # what it had is free: nobody would read it again
    # Another row goes; the denied one does not join in the middle, nor by starting again.
    state = release(block, state, jnp.asarray([True, False, False, False]))
    for first in (8 + at, 0):
        state, proposal, info = block.step(state, feed(kind, [0, 8, first, 0], [0, 0, 4, 0]))
        assert info.reason.tolist()[2] == denied and proposal.length.tolist()[2] == 0
        assert int(state.misses) == 1 and state.length.tolist()[2] == 0
    state = release(block, state, jnp.asarray([False, False, True, False]))
    given_ = feed(kind, [0, 8, 0, 0], [0, 0, 4, 0], seed=3)
    state, proposal, info = block.step(state, given_)
    assert info.reason.tolist()[2] == 0
    fresh = block.step(block.init(BATCH, 64), given_)[1]
    np.testing.assert_array_equal(proposal.tokens[2], fresh.tokens[2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_rows_that_come_and_go_leak_nothing(kind: str) -> None:
    """Cancelled before prefill, during it, while decoding, denied, and after the end."""
    block, state = drafter(kind), pooled(kind)
    none, start = counts(state)
    for cycle in range(100):
        if cycle % 5 == 0:  # admitted, and cancelled before a token was read
            state = admit(block, state, jnp.ones((BATCH,), bool))
        else:
            state, _, _ = block.step(state, feed(kind, [0] * BATCH, [8, 5, 8, 3]))
        for rounds in range(cycle % 4):
            at = np.asarray(state.length)
            state, _, _ = block.step(state, feed(kind, at, [2, 4, 1, 8], seed=rounds))
        rows = jnp.asarray([cycle % 3 != 0, True, cycle % 2 == 0, True])
        state = release(block, state, rows)
        state = release(block, state, jnp.ones((BATCH,), bool))
        assert counts(state) == (none, start)
        assert not state.denied.any() and state.intact.all() and not state.length.any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_does_not_draft_still_takes_in(kind: str) -> None:
    """No hole appears while a row is limited to zero drafts."""
    block = drafter(kind)
    said = []
    for wants in (True, False):
        state, proposal = pooled(kind), None
        for turn, at in enumerate((0, 8, 12)):
            quiet = jnp.asarray([wants or turn == 2, True, True, True])
            rows = feed(kind, [at, 0, 0, 0], [8 if at == 0 else 4, 0, 0, 0], seed=turn, wants=quiet)
            state, proposal, info = block.step(state, rows)
            assert info.reason.tolist()[0] == (0 if quiet[0] else NoDraft.UNWANTED)
        said.append(proposal)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[0]), *said)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_recompiles(kind: str) -> None:
    """Admissions, denials, growth, releases: one program."""
    chex.clear_trace_counter()  # it goes by name, and the other kind was here

    @jax.jit
    @chex.assert_max_traces(n=1)
    def turn(block: BlockDrafter, state: BlockState, rows: Feed, gone: jax.Array) -> BlockState:
        return block.step(block.release(state, gone), rows)[0]

    state, rng = pooled(kind), np.random.default_rng(0)
    for number in range(12):
        gone = rng.random(BATCH) < 0.3
        at = np.where(gone, 0, np.asarray(state.length))
        count = rng.integers(0, STEPS + 1, BATCH)
        rows = feed(kind, at, count, seed=number)
        state = turn(drafter(kind), state, rows, jnp.asarray(gone))
    assert int(state.misses) > 0
    counts(state)


def test_a_fixed_batch_is_released_too() -> None:
    for kind in KINDS:
        block, state = drafter(kind), drafter(kind).init(BATCH, 64)
        state = block.step(state, feed(kind, [0] * BATCH, [8] * BATCH))[0]
        rows = jnp.asarray([True, False, False, True])
        same = admit(block, state, rows)
        jax.tree.map(np.testing.assert_array_equal, same, state)
        state = release(block, state, rows)
        assert state.length.tolist() == [0, 8, 8, 0]
        given_ = feed(kind, [0, 8, 8, 0], [4, 1, 1, 4], seed=1)
        found, expected = block.step(state, given_)[1], block.step(block.init(BATCH, 64), given_)[1]
        np.testing.assert_array_equal(found.tokens[0], expected.tokens[0])


def test_the_end_of_the_table() -> None:
    """Pages of 8, length 30 of 32: the block of positions 30.. is written nowhere."""
    block = drafter("dspark")
    state = block.init_pool(1, pages=8, page_size=8, columns=4)
    for at in (0, 8, 16, 24):
        state = block.step(state, feed("dspark", [at], [min(8, 30 - at)]))[0]
    assert counts(state) == ([4], 5)  # 8 + 1 pages
    after, proposal, _ = propose(block, state, feed("dspark", [30], [0]))
    assert proposal.length.tolist() == [4]
    jax.tree.map(np.testing.assert_array_equal, after, state)
    # Two more positions fit; a third has no column, and the row stops drafting.
    state, _, info = block.step(state, feed("dspark", [30], [2]))
    assert info.reason.tolist() == [0] and counts(state) == ([4], 5)
    state, _, info = block.step(state, feed("dspark", [32], [1]))
    assert info.reason.tolist() == [NoDraft.DENIED] and counts(state) == ([0], 9)


def test_pools_are_refused_in_words() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("dflash2", dict(pages=4), "has a window of 12: its pool is given in rings"),
        ("dflash2", dict(), "given in rings, but rings is None and pages is None"),
        ("dflash2", dict(rings=2, pages=4), "given in rings"),
        ("dflash2", dict(rings=2, columns=4), "columns is 4"),
        ("dspark", dict(rings=2), "sees everything: its pool is given in pages"),
        ("dspark", dict(pages=4, columns=0), "columns is 0; expected at least 1"),
        ("dflash2", dict(rings=0), "rings is 0; expected at least 1"),
        ("dspark", dict(pages=-1), "pages is -1; expected at least 1"),
        ("dspark", dict(pages=2**29), f"{2**29 + BATCH} pages of 4 slots are"),
        ("dflash2", dict(rings=2**27), f"{6 * 2**27} pages of 4 slots are"),
    ]
    for kind, options, message in cases:
        with pytest.raises(ValueError, match=message):
            drafter(kind).init_pool(BATCH, page_size=SIZE, **options)
    with pytest.raises(ValueError, match="page_size is 0"):
        drafter("dflash2").init_pool(BATCH, rings=1, page_size=0)


# ------------------------------------------------------------------ whole generations


@struct.dataclass
class Pooled:
    """A block drafter whose rows share a pool too small for all of them."""

    inner: BlockDrafter
    size: int = struct.field(pytree_node=False)

    @property
    def draft_tokens(self) -> int:
        return self.inner.draft_tokens

    def init(self, batch: int, capacity: int) -> BlockState:
        del capacity
        if self.inner.config.windowed:
            return self.inner.init_pool(batch, rings=self.size, page_size=SIZE)
        return self.inner.init_pool(batch, pages=self.size, page_size=SIZE, columns=32)

    def ingest(self, state: BlockState, feed: Feed) -> BlockState:
        return self.inner.ingest(state, feed)

    def propose(self, state: BlockState, feed: Feed) -> tuple[BlockState, Proposal, DraftInfo]:
        return self.inner.propose(state, feed)

    def step(self, state: BlockState, feed: Feed) -> tuple[BlockState, Proposal, DraftInfo]:
        return self.inner.step(state, feed)


def test_a_denied_row_decodes_like_one_without_a_drafter() -> None:
    """One ring for three rows: one drafts as ever, two decode plainly and are counted."""
    found = model("dflash2")
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9] * 9]
    plain = generate(found, prompts, max_new_tokens=16, drafter="none")
    free = generate(found, prompts, max_new_tokens=16)
    out = generate(found, prompts, max_new_tokens=16, drafter=Pooled(drafter("dflash2"), 1))
    assert out.ids() == free.ids() == plain.ids()
    undrafted = np.asarray(out.stats.undrafted)[:, NoDraft.DENIED]
    rounds = np.asarray(out.stats.rounds)
    # The last round of a row that still runs has room for no draft, and asks for none.
    assert (
        undrafted[0] == 0 and (undrafted[1:] >= rounds[1:] - 2).all() and (undrafted[1:] > 9).all()
    )
    assert out.stats.proposed.tolist()[1:] == [0, 0]
    np.testing.assert_array_equal(out.stats.accepted_at[0], free.stats.accepted_at[0])
    np.testing.assert_array_equal(out.stats.rounds[1:], plain.stats.rounds[1:])


def test_a_row_that_finds_no_page_goes_on_without_drafts() -> None:
    """Five pages of 4 for three rows that grow to 24 positions: tokens equal, misses counted."""
    found = model("dspark")
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9] * 6]
    plain = generate(found, prompts, max_new_tokens=16, drafter="none")
    out = generate(found, prompts, max_new_tokens=16, drafter=Pooled(drafter("dspark"), 2))
    assert out.ids() == plain.ids()
    denied = np.asarray(out.stats.undrafted)[:, NoDraft.DENIED]
    assert (denied > 0).any() and (np.asarray(out.stats.proposed) > 0).all()


# ------------------------------------------------------------------ the target's pool


def target_pool(target: DecoderTarget, batch: int, pages: int, columns: int) -> DecoderState:
    a = target.config.attention
    assert a is not None
    pool = PagedPool.zeros(
        a.kv_shape(target.config.count("attention"), target.dtype),
        batch=batch,
        pages=pages,
        page_size=SIZE,
        columns=columns,
    )
    return DecoderState(pool, target.init_recurrent(batch))


grow = jax.jit(paged.grow)


@jax.jit
def run(
    target: DecoderTarget,
    state: DecoderState,
    tokens: jax.Array,
    count: jax.Array,
    kept: jax.Array,
) -> tuple[DecoderState, jax.Array]:
    """Run ``count`` rows and commit ``kept`` of them; the token after the last."""
    out = target.forward(tokens, count, state, row=jnp.maximum(count - 1, 0))
    return target.commit(out.state, kept), jnp.argmax(out.logits[:, 0], axis=-1)


def test_two_requests_in_a_pool_for_one() -> None:
    """10 pages of 4, two requests of 8 + 16 tokens, 6 pages each: the second waits its turn, both
    get the tokens they get alone, and 10 pages are free in the end.
    """
    target = tiny_target()
    prompts = [[(5 * row + i) % 48 for i in range(8)] for row in range(2)]
    solo = [generate(Model.of(target), [p], max_new_tokens=16).ids()[0] for p in prompts]
    state = target_pool(target, 2, 10, 6)
    pool, granted = grow(state.pool, jnp.asarray([24, 24], jnp.int32))
    assert granted.tolist() == [True, False] and int(pool.free_count) == 4
    state = dataclasses.replace(state, pool=pool)
    for row in range(2):
        mine = jnp.arange(2) == row
        said, tokens = [], jnp.asarray(prompts, jnp.int32)
        for _ in range(16):
            count = jnp.where(mine, tokens.shape[1], 0).astype(jnp.int32)
            state, following = run(target, state, tokens, count, count)
            said.append(int(following[row]))
            tokens = following[:, None].astype(jnp.int32)
        assert said == solo[row]
        check_pool(state.pool)
        memory = tuple(recurrent.reset(r, mine) for r in state.recurrent)
        state = DecoderState(paged.release(state.pool, mine), memory)
        if row == 0:
            assert int(state.pool.free_count) == 10
            pool, granted = grow(state.pool, jnp.asarray([0, 24], jnp.int32))
            assert granted.all()
            state = dataclasses.replace(state, pool=pool)
    assert int(state.pool.free_count) == 10 and state.pool.length.tolist() == [0, 0]
    empty = target.init_recurrent(2)
    jax.tree.map(np.testing.assert_array_equal, state.recurrent, empty)


@pytest.mark.parametrize(("accepted", "length", "used"), [(0, 8, 2), (4, 12, 3)])
def test_pages_of_rejected_rows_stay_with_their_row(accepted: int, length: int, used: int) -> None:
    """Pages of 4, 7 committed, 5 rows verified: three pages are owned, two or three hold data; the
    third is the row's reserve, and the next window takes it before any from the pool.
    """
    target = tiny_target()
    state = target_pool(target, 1, 6, 4)
    pool, _ = grow(state.pool, jnp.asarray([7], jnp.int32))
    seven, five = jnp.asarray([7], jnp.int32), jnp.asarray([5], jnp.int32)
    tokens = jnp.arange(7, dtype=jnp.int32)[None]
    state = run(target, dataclasses.replace(state, pool=pool), tokens, seven, seven)[0]
    pool, granted = grow(state.pool, state.length + 5)
    assert granted.all() and paged.owned(pool).tolist() == [3]
    window = jnp.arange(5, dtype=jnp.int32)[None] + 20
    state = dataclasses.replace(state, pool=pool)
    state = run(target, state, window, five, jnp.asarray([1 + accepted], jnp.int32))[0]
    assert state.length.tolist() == [length] and -(-length // SIZE) == used
    assert paged.owned(state.pool).tolist() == [3] and int(state.pool.free_count) == 3
    check_pool(state.pool)
    pool, granted = grow(state.pool, jnp.asarray([12], jnp.int32))
    assert granted.all() and int(pool.free_count) == 3
