"""Cheap models whose tokens depend on every position of their caches, and on what rows remember."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxdraft import Engine, Model, Output, generate
from jaxdraft.base import Drafter, Feed, Proposal, Support, TargetOutput
from jaxdraft.config import KvShape
from jaxdraft.state import paged
from jaxdraft.state.paged import PagedPool
from jaxdraft.testing import propose_tokens

VOCAB, ROWS = 12, 97


def pool_of(batch: int, pages: int, page_size: int, columns: int) -> PagedPool:
    return PagedPool.zeros(
        KvShape(layers=1, kv_heads=1, head_dim=1, dtype=jnp.float32),
        batch=batch,
        pages=pages,
        page_size=page_size,
        columns=columns,
    )


def dense_pool(batch: int, capacity: int) -> PagedPool:
    return PagedPool.one_page_per_row(
        KvShape(layers=1, kv_heads=1, head_dim=1, dtype=jnp.float32),
        batch=batch,
        capacity=paged.room(capacity, 128),
    )


def sums(pool: PagedPool) -> jax.Array:
    """What the first p + 1 tokens of each row's pages come to, [B, capacity] int32."""
    table = jnp.minimum(pool.table, pool.pages - 1)
    tokens = jnp.take(pool.keys[0], table, axis=0)  # [B, M, 1, Z, 1]
    tokens = tokens.reshape(table.shape[0], -1).astype(jnp.int32)
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return jnp.cumsum((tokens + 1) * (place * place * 5 + place * 3 + 1)[None] % ROWS, axis=1)


def put(pool: PagedPool, tokens: jax.Array, count: jax.Array) -> PagedPool:
    rows = tokens.astype(jnp.float32)[..., None, None]
    return paged.write(pool, 0, rows, rows, count)


@struct.dataclass
class HistoryState:
    pool: PagedPool  # the tokens themselves, as keys
    memory: jax.Array  # [B] int32, of all committed tokens; stays 0 unless the target is recurrent
    window: jax.Array  # [B, T] int32 memories after each row of the last forward pass


@struct.dataclass
class HistoryTarget:
    """Logits from a row of ``table`` [S, V] that every earlier token decides.

    The tokens are read back from the pages, and with ``recurrent`` a running sum of the row goes in
    too: a page of somebody else's, or a memory of another prefix, changes what follows.
    """

    table: jax.Array
    recurrent: bool = struct.field(pytree_node=False, default=False)
    context: int = struct.field(pytree_node=False, default=64)

    @property
    def vocab_size(self) -> int:
        return self.table.shape[1]

    @property
    def context_length(self) -> int:
        return self.context

    def init(self, batch: int, capacity: int) -> HistoryState:
        return self._start(dense_pool(batch, capacity))

    def init_pool(self, batch: int, *, pages: int, page_size: int, columns: int) -> HistoryState:
        return self._start(pool_of(batch, pages, page_size, columns))

    def _start(self, pool: PagedPool) -> HistoryState:
        batch = pool.length.shape[0]
        return HistoryState(pool, jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, 0), jnp.int32))

    def skip(self, state: HistoryState, tokens: jax.Array, length: jax.Array) -> Any:
        del tokens
        if self.recurrent:
            return None
        return replace(state, pool=replace(state.pool, length=length))

    def forward(
        self, tokens: jax.Array, count: jax.Array, state: HistoryState, *, row: Any = None
    ) -> TargetOutput:
        pool = put(state.pool, tokens, count)
        place = pool.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        # A dense pool scribbles past `count`, which the rows that count never see.
        seen = jnp.take_along_axis(sums(pool), place, axis=1, mode="clip")

        def remember(memory: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
            memory = (memory * 5 + token + 1) % 1009 if self.recurrent else memory
            return memory, memory

        _, window = lax.scan(remember, state.memory, tokens.T)
        logits = self.table[(seen + window.T) % self.table.shape[0]]
        if row is not None:
            logits = jnp.take_along_axis(logits, row[:, None, None], axis=1)
        return TargetOutput(logits, None, None, HistoryState(pool, state.memory, window.T))

    def commit(self, state: HistoryState, count: jax.Array) -> HistoryState:
        last = jnp.maximum(count - 1, 0)[:, None]
        after = jnp.take_along_axis(state.window, last, axis=1)[:, 0]
        pool = replace(state.pool, length=state.pool.length + count)
        return HistoryState(pool, jnp.where(count > 0, after, state.memory), state.window[:, :0])


@struct.dataclass
class HistoryDrafter:
    """Reads its own cache back as the target does, and is right two times of three."""

    target: HistoryTarget
    width: int = struct.field(pytree_node=False, default=3)

    @property
    def draft_tokens(self) -> int:
        return self.width

    def init(self, batch: int, capacity: int) -> HistoryState:
        return self.target.init(batch, capacity)

    def init_pool(self, batch: int, *, pages: int, page_size: int, columns: int) -> HistoryState:
        return self.target.init_pool(batch, pages=pages, page_size=page_size, columns=columns)

    def skip(self, state: HistoryState, tokens: jax.Array, length: jax.Array) -> Any:
        return self.target.skip(state, tokens, length)

    def ingest(self, state: HistoryState, feed: Feed) -> HistoryState:
        assert feed.tokens is not None
        out = self.target.forward(feed.tokens, feed.count, state)
        return self.target.commit(out.state, feed.count)

    def propose(self, state: HistoryState, feed: Feed) -> tuple[HistoryState, Proposal, Any]:
        # Its scratch stays in the pages it was lent, past the committed positions.
        token, memory, emitted = feed.anchor, state, []
        one = jnp.where(feed.wants_draft, 1, 0).astype(jnp.int32)
        for _ in range(self.width):
            out = self.target.forward(token[:, None], one, memory)
            memory = self.target.commit(out.state, one)
            best = jnp.argmax(out.logits[:, 0], axis=-1).astype(jnp.int32)
            token = jnp.where(best % 3 == 2, (best + 1) % self.target.vocab_size, best)
            emitted.append(token)
        pool = replace(memory.pool, length=state.pool.length)
        drafts = jnp.stack(emitted, axis=1)
        proposal, info = propose_tokens(drafts, feed)
        if feed.draw is not None:
            # Not what they were drawn from, but what comes out depends on it: that it is not lost
            # or mixed up between rows is what is tested.
            others = jnp.stack([drafts, (drafts + 1) % self.target.vocab_size], axis=-1)
            sure = 0.5 + 0.4 * (drafts % 2).astype(jnp.float32)
            support = Support(others, jnp.stack([sure, 1 - sure], axis=-1))
            proposal = replace(proposal, support=support)
        return replace(state, pool=pool), proposal, info

    def step(self, state: HistoryState, feed: Feed) -> Any:
        return self.propose(self.ingest(state, feed), feed)


@functools.cache
def history_model(*, recurrent: bool = False, drafts: bool = True) -> Model:
    table = jax.random.normal(jax.random.key(3), (ROWS, VOCAB), jnp.float32)
    target = HistoryTarget(table, recurrent)
    return Model.of(target, HistoryDrafter(target) if drafts else None)


def alone(model: Model, prompts: list[list[int]], new: int, **rules: Any) -> Output:
    """What :func:`jaxdraft.generate` makes of prompts; those of all lengths share a program."""
    ids = np.zeros((len(prompts), 64), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    return generate(model, ids, lengths=lengths, max_new_tokens=new, **rules)


def greedy(model: Model, prompt: list[int], new: int, stops: tuple[int, ...] = ()) -> list[int]:
    """What a history model says greedily, in numpy."""
    target = model.target
    assert isinstance(target, HistoryTarget)
    table, ids, memory = np.asarray(target.table), list(prompt), 0
    if target.recurrent:
        for token in prompt:
            memory = (memory * 5 + token + 1) % 1009
    for _ in range(new):
        seen = sum((t + 1) * (p * p * 5 + p * 3 + 1) % ROWS for p, t in enumerate(ids))
        ids.append(int(table[(seen + memory) % ROWS].argmax()))
        memory = (memory * 5 + ids[-1] + 1) % 1009 if target.recurrent else 0
        if ids[-1] in stops or len(ids) >= target.context:
            break
    return ids[len(prompt) :]


def assert_engine_equals_generate(model: Model, drafter: Drafter, prompts: list[list[int]]) -> None:
    """Two rows at a time, over shared pages, say what every prompt says alone and undrafted."""
    alone = [
        generate(model, [prompt], max_new_tokens=20, drafter="none").ids()[0] for prompt in prompts
    ]
    engine = Engine(model, drafter=drafter, max_batch=2, page_size=8, pages=24)
    requests = [engine.submit(prompt, max_new_tokens=20) for prompt in prompts]
    for _ in engine.run():
        pass
    assert [request.tokens for request in requests] == alone
