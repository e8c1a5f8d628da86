"""Layers with a window in a bounded number of pages: they read what the full history would."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdraft
from jaxdraft import Engine, Model, generate
from jaxdraft.base import TargetOutput
from jaxdraft.config import KvShape
from jaxdraft.engine.programs import Buckets
from jaxdraft.state.decoder import DecoderState
from jaxdraft.state.ring import Ring
from jaxdraft.target import DecoderTarget
from jaxdraft.testing import (
    ScriptedDrafter,
    check_pool,
    tiny_target,
    tiny_target_config,
)
from tests.examples import examples
from tests.paths import artifact

WINDOW, ROWS, SIZE, COLUMNS = 8, 5, 4, 20  # ceil((8 + 5) / 4) + 1 = 5 pages, 20 slots a row
BATCH, LONG = 2, COLUMNS * SIZE
SEEDS = st.integers(0, 2**31 - 1)


@functools.cache
def target() -> DecoderTarget:
    """A window, everything, and a window again."""
    shape = tiny_target_config().attention
    assert shape is not None
    layers: Any = ("sliding", "attention", "sliding")
    sliding = replace(shape, window=WINDOW, kv_heads=1)  # nothing but the rotary table is shared
    return tiny_target(layers=layers, sliding=sliding, taps=())


forward = jax.jit(lambda target, *args: target.forward(*args))
commit = jax.jit(lambda target, *args: target.commit(*args))
grow = jax.jit(lambda target, *args: target.grow(*args))
release = jax.jit(lambda target, *args: target.release(*args))


def pooled(batch: int = BATCH, rows: int = ROWS, pages: int = BATCH * COLUMNS) -> DecoderState:
    return target().init_pool(batch, pages=pages, page_size=SIZE, columns=COLUMNS, rows=rows)


def unbounded(positions: int) -> DecoderState:
    """A fixed batch whose windowed layers keep their whole history too: nothing wraps."""
    whole = Ring.zeros(
        KvShape(layers=2, kv_heads=1, head_dim=16, dtype=jnp.float32),
        batch=BATCH,
        window=WINDOW,
        rows=positions,
        page_size=2 * positions,
    )
    return replace(target().init(BATCH, positions), sliding=whole)


def random_tokens(seed: int, rows: int) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (BATCH, rows), 0, 48)


def each(count: int, batch: int = BATCH) -> jax.Array:
    return jnp.full((batch,), count, jnp.int32)


def pages_of(state: DecoderState) -> tuple[int, int]:
    """Free pages of both pools, whose laws are checked."""
    assert state.sliding is not None
    check_pool(state.pool)
    check_pool(state.sliding)  # type: ignore[arg-type]
    return int(state.pool.free_count), int(state.sliding.free_count)


# ------------------------------------------------------------------ the law


@settings(max_examples=examples(15))
@given(data=st.data(), seed=SEEDS)
def test_any_split_and_any_rejections_read_the_full_history(data: st.DataObject, seed: int) -> None:
    """72 positions in rounds of up to five rows of which any number is committed: the logits of
    every committed row are those of one pass over them all. Rejected rows are other tokens.
    """
    total = 72
    truth = np.asarray(random_tokens(seed, total))
    whole = forward(target(), jnp.asarray(truth), each(total), unbounded(total))
    expected = np.asarray(whole.logits)
    state, granted = grow(target(), pooled(), each(LONG))
    assert granted.all() and state.sliding is not None
    assert state.sliding.slots == 20  # more than three wraps
    rng = np.random.default_rng(seed)
    at = np.zeros(BATCH, np.int32)
    while (at < total).any():
        kept = np.asarray(data.draw(st.lists(st.integers(0, ROWS), min_size=2, max_size=2)))
        if not kept.any():
            kept[:] = 1
        kept = np.minimum(kept, total - at).astype(np.int32)
        count = np.minimum(kept + rng.integers(0, ROWS + 1, BATCH), ROWS).astype(np.int32)
        window = rng.integers(0, 48, (BATCH, ROWS))
        for b in range(BATCH):
            window[b, : kept[b]] = truth[b, at[b] : at[b] + kept[b]]
        out = forward(target(), jnp.asarray(window), jnp.asarray(count), state)
        state, found = commit(target(), out.state, jnp.asarray(kept)), np.asarray(out.logits)
        for b in range(BATCH):
            rows = expected[b, at[b] : at[b] + kept[b]]
            np.testing.assert_allclose(found[b, : kept[b]], rows, atol=5e-5)
        at = at + kept  # a new array: jnp.asarray may have borrowed the old one
        np.testing.assert_array_equal(state.length, at)
        np.testing.assert_array_equal(state.sliding.length, at)


@given(seed=SEEDS, counts=st.lists(st.integers(0, ROWS), min_size=BATCH, max_size=BATCH))
def test_verify_T_and_commit_n_equals_running_n_rows(seed: int, counts: list[int]) -> None:
    """After several wraps: logits row by row, and the next ones after n single rows."""
    start, count = wrapped(), jnp.asarray(counts, jnp.int32)
    window, probe = random_tokens(seed, ROWS), random_tokens(seed + 1, 1)
    out = forward(target(), window, each(ROWS), start)
    found = np.asarray(out.logits)
    committed = forward(target(), probe, each(1), commit(target(), out.state, count))
    alone = start
    for row in range(ROWS):
        feed = jnp.asarray(row < count, jnp.int32)
        single = forward(target(), window[:, row : row + 1], feed, alone)
        alone, logits = commit(target(), single.state, feed), np.asarray(single.logits)
        ran = row < np.asarray(counts)
        np.testing.assert_allclose(found[ran, row], logits[ran, 0], atol=5e-5)
    single = forward(target(), probe, each(1), alone)
    np.testing.assert_allclose(committed.logits, single.logits, atol=5e-5)


@functools.cache
def wrapped() -> DecoderState:
    """45 positions in: more than two wraps of the ring."""
    state, _ = grow(target(), pooled(), each(LONG))
    for start in range(0, 45, ROWS):
        out = forward(target(), random_tokens(start, ROWS), each(ROWS), state)
        state = commit(target(), out.state, each(ROWS))
    return state


def test_a_dropped_verify_pass_never_happened() -> None:
    """Nothing of it is committed: the next logits are bit for bit those without it."""
    window, probe = random_tokens(0, ROWS), random_tokens(1, 1)
    dropped = commit(target(), forward(target(), window, each(ROWS), wrapped()).state, each(0))
    ends = [forward(target(), probe, each(1), state).logits for state in (dropped, wrapped())]
    np.testing.assert_array_equal(*ends)


@pytest.mark.parametrize("poison", [np.nan, 1e30])
def test_what_no_row_reaches_is_never_read(poison: float) -> None:
    """Bit-identical logits when every slot behind the windows and past the ends is spoiled."""
    state = wrapped()
    ring = state.sliding
    assert ring is not None
    keep = {
        (int(ring.table[b, p // SIZE % ring.table.shape[1]]), p % SIZE)
        for b in range(BATCH)
        for p in range(45 - WINDOW + 1, 45)
    }
    spoil = np.ones((ring.pages, 1, SIZE, 1), bool)
    for page, slot in keep:
        spoil[page, :, slot] = False
    spoiled = replace(
        ring,
        keys=tuple(jnp.where(spoil, poison, k) for k in ring.keys),
        values=tuple(jnp.where(spoil, poison, v) for v in ring.values),
    )
    window, rows = random_tokens(0, ROWS), jnp.asarray([ROWS, 2], jnp.int32)
    clean = forward(target(), window, rows, state)
    dirty = forward(target(), window, rows, replace(state, sliding=spoiled))
    for row, n in enumerate(np.asarray(rows)):
        np.testing.assert_array_equal(dirty.logits[row, :n], clean.logits[row, :n])


def test_a_fixed_batch_past_the_end_of_its_rings() -> None:
    """640 positions through rings of 384 slots, 128 rows at a time, beside a shorter row."""
    shape = tiny_target_config().attention
    assert shape is not None
    layers: Any = ("sliding", "sliding")
    model = tiny_target(
        layers=layers, sliding=replace(shape, window=100), taps=(), context_length=1024
    )
    state = model.init(2, 640)
    assert state.sliding is not None and state.sliding.slots == 384
    whole = Ring.zeros(
        KvShape(layers=2, kv_heads=2, head_dim=16, dtype=jnp.float32),
        batch=2,
        window=100,
        rows=640,
        page_size=768,
    )
    ends = np.asarray([640, 421], np.int32)
    states = [state, replace(state, sliding=whole)]
    for start in range(0, 640, 128):
        tokens, count = random_tokens(start, 128), jnp.asarray(np.clip(ends - start, 0, 128))
        outs = [forward(model, tokens, count, s) for s in states]
        found, expected = (np.asarray(o.logits) for o in outs)
        for b, n in enumerate(np.asarray(count)):
            np.testing.assert_allclose(found[b, :n], expected[b, :n], atol=5e-5)
        states = [commit(model, o.state, count) for o in outs]


def test_more_rows_than_the_ring_was_made_for_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"6 rows are written at once; .* window of 8 has room for 5"
    ):
        target().forward(random_tokens(0, ROWS + 1), each(1), pooled())


# ------------------------------------------------------------------ pages


def test_pages_are_bounded_and_come_back() -> None:
    """A row takes ring pages as it grows, never more than five, and gives them all back."""
    state = pooled(pages=30)
    assert pages_of(state) == (30, 10)
    state, granted = grow(target(), state, jnp.asarray([9, 0], jnp.int32))
    assert granted.all() and pages_of(state) == (27, 7)
    state, granted = grow(target(), state, jnp.asarray([80, 60], jnp.int32))
    # Row 1 finds no pages of the other layers, and takes none of these.
    assert granted.tolist() == [True, False] and pages_of(state) == (10, 5)
    state = release(target(), state, jnp.asarray([True, False]))
    assert pages_of(state) == (30, 10)
    again = release(target(), state, jnp.asarray([True, False]))
    jax.tree.map(np.testing.assert_array_equal, again, state)


def test_pages_of_a_row_that_left_hold_nothing_for_the_next() -> None:
    """A row on the pages of another one, and beside a row that runs on, runs as it does alone."""
    state = wrapped()
    state = release(target(), state, jnp.asarray([True, False]))
    state, granted = grow(target(), state, each(LONG))
    assert granted.all()
    fresh, _ = grow(target(), pooled(), each(LONG))
    for step in range(6):
        window = random_tokens(step, ROWS)
        out, alone = (forward(target(), window, each(ROWS), s) for s in (state, fresh))
        np.testing.assert_allclose(out.logits[0], alone.logits[0], atol=5e-5)
        state, fresh = (commit(target(), o.state, each(ROWS)) for o in (out, alone))


def test_rows_without_pages_touch_no_page() -> None:
    """Idle rows, and rows whose tables are blank, write nowhere, whatever they are fed."""
    state, _ = grow(target(), pooled(), jnp.asarray([40, 0], jnp.int32))
    out = forward(target(), random_tokens(0, ROWS), jnp.asarray([0, ROWS], jnp.int32), state)
    assert out.state.sliding is not None and state.sliding is not None
    jax.tree.map(np.testing.assert_array_equal, out.state.sliding.keys, state.sliding.keys)
    jax.tree.map(np.testing.assert_array_equal, out.state.sliding.values, state.sliding.values)


# ------------------------------------------------------------------ whole generations


@struct.dataclass
class Pooled:
    """The target over a pool of small pages, every row grown to the end at once."""

    inner: DecoderTarget
    rows: int = struct.field(pytree_node=False)

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def context_length(self) -> int:
        return self.inner.context_length

    def init(self, batch: int, capacity: int) -> DecoderState:
        columns = -(-(capacity + self.rows) // SIZE)
        state = self.inner.init_pool(
            batch, pages=batch * columns, page_size=SIZE, columns=columns, rows=self.rows
        )
        return self.inner.grow(state, jnp.full((batch,), columns * SIZE, jnp.int32))[0]

    def forward(
        self, tokens: jax.Array, count: jax.Array, state: Any, *, row: jax.Array | None = None
    ) -> TargetOutput:
        return self.inner.forward(tokens, count, state, row=row)

    def commit(self, state: Any, count: jax.Array) -> Any:
        return self.inner.commit(state, count)


@pytest.mark.parametrize("script", ["wrong", "alternate", "right"])
def test_generation_over_wrapping_rings_is_lossless(script: str) -> None:
    """Prompts of 16 and 3, 48 tokens, drafts of four: rejected rows in every round, in every other
    one, and in none. Tokens equal those of a fixed batch without drafts, which never wraps.
    """
    prompts = [list(range(1, 17)), [5, 6, 7]]
    plain = generate(Model.of(target()), prompts, max_new_tokens=48, drafter="none")
    truth = np.zeros((2, 96), np.int32)
    for b, (prompt, tokens) in enumerate(zip(prompts, plain.ids(), strict=True)):
        truth[b, : len(prompt) + 48] = prompt + tokens
    place = np.arange(96)[None] + np.zeros((2, 1), int)
    right = {"wrong": place < 0, "alternate": place // 5 % 2 == 0, "right": place >= 0}[script]
    drafter = ScriptedDrafter(jnp.asarray(truth), jnp.asarray(right), 48)
    model = Model.of(Pooled(target(), rows=16))
    out = generate(model, prompts, max_new_tokens=48, drafter=drafter)
    assert out.ids() == plain.ids()
    accepted = int(out.stats.accepted.sum())
    assert accepted == 0 if script == "wrong" else accepted > 20


def test_the_engine_over_wrapping_rings() -> None:
    """Three requests in two rows, of which two share 144 positions, past the end of rings of 144
    slots: the tokens of each alone, with a prefix taken from a checkpoint that holds its rings.
    """
    model = Model.of(target())
    shared = [3 + i % 37 for i in range(150)]
    prompts = [shared, [7, 8, 9], [*shared[:146], 40, 41]]
    alone = [generate(model, [p], max_new_tokens=16, drafter="none").ids()[0] for p in prompts]
    buckets = Buckets(rows=(2,), chunks=(16,), columns=(24,))
    engine = Engine(
        model, max_batch=2, page_size=8, context=192, chunk=16, drafter="ngram", buckets=buckets
    )
    requests = [engine.submit(prompt, max_new_tokens=16) for prompt in prompts]
    for _ in engine.run():
        engine.check()
    assert [request.tokens for request in requests] == alone
    assert requests[2].reused == 144 and engine.runner.state.target.sliding.slots == 144
    engine.close()


# ------------------------------------------------------------------ exported models


@pytest.mark.parametrize("name", ["sliding_qwen3_fp32_cpu", "sliding_qwen3_paged_fp16"])
def test_exported_windows_past_many_wraps(name: str) -> None:
    """Three prompts and their greedy tokens through rings of 24 slots, eight rows at a time, with
    wrong drafts in every other call: up to 136 positions of a window of twelve.
    """
    with np.load(artifact(name) / "golden.npz") as stored:
        golden = {k: stored[k] for k in stored.files}
    model = jaxdraft.load(artifact(name), dtype="float32").target
    assert isinstance(model, DecoderTarget)
    lines = [
        np.concatenate([golden[f"prompt{i}/ids"], golden[f"greedy{i}/tokens"][:-1]])
        for i in (1, 2, 3)
    ]
    lengths = np.asarray([len(line) for line in lines])
    state = model.init_pool(3, pages=120, page_size=4, columns=40, rows=8)
    state, granted = grow(model, state, each(160, 3))
    assert granted.all() and state.sliding is not None and state.sliding.slots == 24
    found = np.zeros((3, lengths.max(), model.vocab_size), np.float32)
    at, call = np.zeros(3, np.int32), 0
    while (at < lengths).any():
        kept = np.clip(lengths - at, 0, 8 if call % 2 else 3).astype(np.int32)
        window = np.full((3, 8), 7)
        for b, line in enumerate(lines):
            window[b, : kept[b]] = line[at[b] : at[b] + kept[b]]
        out = forward(model, jnp.asarray(window), jnp.where(kept > 0, 8, 0), state)
        state = commit(model, out.state, jnp.asarray(kept))
        for b in range(3):
            found[b, at[b] : at[b] + kept[b]] = out.logits[b, : kept[b]]
        at, call = at + kept, call + 1
    for b, i in enumerate((1, 2, 3)):
        size = len(golden[f"prompt{i}/ids"])
        first = int(golden.get(f"prompt{i}/logits_from", 0))
        expected = golden[f"prompt{i}/logits"]
        np.testing.assert_allclose(found[b, first:size], expected, atol=5e-4, rtol=0)
        chosen = found[b, size - 1 : lengths[b]].argmax(axis=-1)
        sure = golden[f"greedy{i}/margins"] > 1e-3
        np.testing.assert_array_equal(chosen[sure], golden[f"greedy{i}/tokens"][sure])
        assert sure.sum() > 35
