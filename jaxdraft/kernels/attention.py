"""Attention of a few query rows over pages and rings, split over the keys.

Source: Dao et al., "Flash-Decoding for long-context inference" (2023); the running softmax is
Milakov and Gimelshein, arXiv:1805.02867.

A program of the first kernel serves one row of the batch, one key head and one share of the keys:
it multiplies all query rows of the head's group with a tile of keys, from the first key that a row
can see to the last. Both are read inside the kernel, so shares beyond the keys in use read nothing.
The second kernel joins the shares. One share needs no second kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxdraft.base import MASKED
from jaxdraft.config import FULL_ATTENTION, AttentionConfig
from jaxdraft.kernels import MAX_ROWS
from jaxdraft.kernels.launch import LEAST, by_platform, ceil_div, div, iota, launch, rem
from jaxdraft.sizes import power_of_two
from jaxdraft.state.paged import Chunk, Source, Span, read_span

_PROGRAMS = 256
"""Programs to keep a GPU busy: about two for each of the 108 to 148 processors."""

_MOST_SPLITS = 32
_TILE = 16384
"""Bytes of a tile of keys. Two of keys, two of values and the queries, twice as large, have to fit
into the shared memory of a processor, of which an L4 has 99 KiB."""

_Running = tuple[jax.Array, jax.Array, jax.Array]  # maximum, mass, weighted sum of values


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The static part of a launch. Rows of a key head are (step, head) pairs, step first."""

    config: AttentionConfig
    causal: bool
    xla: Callable[..., jax.Array]
    steps: int  # T
    slots: int  # Z
    columns: int  # M
    dense: bool  # there is no table
    pages: int  # P
    keys: int  # of a tile
    most: int  # query rows of a program; more are shared out
    splits: int
    block: int  # keys beside the cache; 0: none

    @property
    def share(self) -> int:
        """Query heads per key head."""
        return self.config.heads // self.config.kv_heads

    @property
    def rows(self) -> int:
        """Query rows per key head."""
        return self.steps * self.share

    @property
    def tile(self) -> int:
        """Rows of a program."""
        return min(self.most, power_of_two(self.rows, least=LEAST))

    @property
    def tiles(self) -> int:
        """Programs that share the rows."""
        return -(-self.rows // self.tile)

    @property
    def width(self) -> int:
        """H, rounded up to a power of two."""
        return power_of_two(self.config.head_dim, least=LEAST)


def serves(query: jax.Array, source: Source) -> bool:
    """Return whether :func:`attend` can take this window."""
    return source.span is not None and query.shape[1] <= MAX_ROWS


def attend(
    query: jax.Array,
    positions: jax.Array,
    source: Source,
    config: AttentionConfig,
    *,
    causal: bool,
    block_keys: Chunk | None,
    xla: Callable[..., jax.Array],
    splits: int | None = None,
) -> jax.Array:
    """Compute softmax attention for :func:`jaxdraft.nn.attention.attend`.

    Hidden keys and values are never read, so whatever a free slot holds does no harm.

    Args:
      query: [B, T, N, H], rotated; T is at most :data:`jaxdraft.kernels.MAX_ROWS`.
      positions: [B, T] int32, positions of the queries.
      source: cached keys and values; its ``span`` gives their location.
      config: heads, scale, window, softcap.
      causal: hide keys after the query.
      block_keys: further keys outside the cache.
      xla: the equivalent function without a kernel.
      splits: shares of the keys; default: as many as keep a GPU busy.

    Returns:
      [B, T, N * H].
    """
    assert source.span is not None
    plan = _plan(query, source.span, config, causal, block_keys, xla, splits)
    return by_platform(_run, _reference, plan, query, positions, source.span, block_keys)


def _reference(
    plan: _Plan, query: jax.Array, positions: jax.Array, span: Span, block_keys: Chunk | None
) -> jax.Array:
    """Compute the same without a kernel."""
    source = read_span(span)
    return plan.xla(
        query, positions, source, plan.config, causal=plan.causal, block_keys=block_keys
    )


def _plan(
    query: jax.Array,
    span: Span,
    config: AttentionConfig,
    causal: bool,
    block_keys: Chunk | None,
    xla: Callable[..., jax.Array],
    splits: int | None,
) -> _Plan:
    batch, steps = query.shape[:2]
    pages, _, slots, _ = span.keys.shape
    width = power_of_two(config.head_dim, least=LEAST)
    keys = min(64, max(LEAST, _TILE // (width * query.dtype.itemsize)))
    plan = _Plan(
        config=config,
        causal=causal,
        xla=xla,
        steps=steps,
        slots=slots,
        columns=span.columns,
        dense=span.table is None,
        pages=pages,
        keys=keys,
        most=min(64, 2 * keys),
        splits=1,
        block=0 if block_keys is None else block_keys.keys.shape[1] * block_keys.keys.shape[3],
    )
    if splits is None:
        most = slots * span.columns
        if config.window != FULL_ATTENTION:
            most = min(most, config.window + steps)
        busy = _PROGRAMS // (batch * config.kv_heads * plan.tiles)
        splits = max(1, min(_MOST_SPLITS, busy, -(-most // plan.keys)))
    return dataclasses.replace(plan, splits=splits)


def _run(
    plan: _Plan,
    query: jax.Array,
    positions: jax.Array,
    span: Span,
    block_keys: Chunk | None,
    *,
    interpret: bool,
) -> jax.Array:
    config = plan.config
    batch, steps, heads, dim = query.shape
    grid = (batch, config.kv_heads * plan.tiles, plan.splits)
    result = ((batch, steps, heads, dim), query.dtype)
    arrays = [query, positions, span.keys, span.values, span.first, span.end]
    extra = [x for x in (span.table, *(block_keys or ())) if x is not None]
    wide = dict(
        interpret=interpret, name="attention", warps=8 if plan.tile * plan.width >= 8192 else 4
    )
    share = functools.partial(_share_kernel, plan=plan)
    if plan.splits == 1:
        (out,) = launch(share, arrays + extra, [result], grid=grid, **wide)
    else:
        sums = (batch, config.kv_heads, plan.splits, plan.rows)
        shares = launch(
            share,
            arrays + extra,
            [(sums, jnp.float32), (sums, jnp.float32), ((*sums, dim), jnp.float32)],
            grid=grid,
            **wide,
        )
        (out,) = launch(
            functools.partial(_join_kernel, plan=plan),
            [positions, span.first, span.end, *shares],
            [result],
            grid=(batch, config.kv_heads, plan.rows),
            interpret=interpret,
            name="attention_join",
        )
    return out.reshape(batch, steps, heads * dim)


def _bounds(
    positions: Any, first: Any, end: Any, b: jax.Array, plan: _Plan
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the first position visible to row b, the end, and the tiles of a share."""
    step = iota(power_of_two(plan.steps))
    real = step < plan.steps
    at = plgpu.load(positions.at[b, step], mask=real, other=0)
    low, high = first[b], end[b]
    if plan.causal:
        high = jnp.minimum(high, jnp.max(jnp.where(real, at, -1)) + 1)
    if plan.config.window != FULL_ATTENTION:
        nearest = jnp.min(jnp.where(real, at, jnp.iinfo(jnp.int32).max))
        low = jnp.maximum(low, nearest - plan.config.window + 1)
    tiles = ceil_div(jnp.maximum(high - low, 0), plan.keys)
    return low, high, ceil_div(tiles, plan.splits)


def _share_kernel(
    query: Any,
    positions: Any,
    keys: Any,
    values: Any,
    first: Any,
    end: Any,
    *refs: Any,
    plan: _Plan,
) -> None:
    """Compute one share of one head's keys: its maxima, masses and sums, or the whole result."""
    config = plan.config
    b, split = pl.program_id(0), pl.program_id(2)
    group = div(pl.program_id(1), plan.tiles)
    row = iota(plan.tile, rem(pl.program_id(1), plan.tiles) * plan.tile)
    real = row < plan.rows
    step, head = div(row, plan.share), group * plan.share + rem(row, plan.share)
    channel = iota(plan.width)
    inside = channel < config.head_dim
    q = plgpu.load(
        query.at[b, step[:, None], head[:, None], channel[None, :]],
        mask=real[:, None] & inside[None, :],
        other=0,
    )
    at = plgpu.load(positions.at[b, step], mask=real, other=-1)

    def over_cache(index: jax.Array, running: _Running) -> _Running:
        key = iota(plan.keys, low + index * plan.keys)
        tables = () if plan.dense else refs[:1]
        found = _cached_keys((keys, values, *tables), b, group, key, key < high, channel, plan)
        return _absorb(running, q, at, *found, plan)

    def over_block(_: jax.Array, running: _Running) -> _Running:
        block = refs[0 if plan.dense else 1 :][:3]
        return _absorb(running, q, at, *_block_keys(block, b, group, channel, plan), plan)

    low, high, tiles = _bounds(positions, first, end, b, plan)
    running = (
        jnp.full((plan.tile,), MASKED, jnp.float32),
        jnp.zeros((plan.tile,), jnp.float32),
        jnp.zeros((plan.tile, plan.width), jnp.float32),
    )
    if plan.block:  # the first share has the keys beside the cache
        once = (split == 0).astype(jnp.int32)
        running = lax.fori_loop(jnp.int32(0), once, over_block, running)
    last = jnp.minimum((split + 1) * tiles, ceil_div(jnp.maximum(high - low, 0), plan.keys))
    running = lax.fori_loop(split * tiles, last, over_cache, running)
    peak, mass, total = running
    mask = real[:, None] & inside[None, :]
    if plan.splits == 1:
        out = total / jnp.where(mass > 0, mass, 1.0)[:, None]
        place = (b, step[:, None], head[:, None], channel[None, :])
        plgpu.store(refs[-1].at[place], out.astype(refs[-1].dtype), mask=mask)
        return

    @pl.when((split == 0) | (split * tiles < last))  # what is not written is not read
    def _() -> None:
        peaks, masses, totals = refs[-3:]
        plgpu.store(peaks.at[b, group, split, row], peak, mask=real)
        plgpu.store(masses.at[b, group, split, row], mass, mask=real)
        place = (b, group, split, row[:, None], channel[None, :])
        plgpu.store(totals.at[place], total, mask=mask)


def _cached_keys(
    refs: tuple[Any, ...],
    b: jax.Array,
    group: jax.Array,
    key: jax.Array,
    used: jax.Array,
    channel: jax.Array,
    plan: _Plan,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a tile's positions, -1 where no key lies, and its keys and values, zero there."""
    # Example, Z = 4, M = 3: position 13 is in column 3 % 3 = 0, slot 1 of that page.
    column, slot = rem(div(key, plan.slots), plan.columns), rem(key, plan.slots)
    if plan.dense:
        page = jnp.where(used, b * plan.columns + column, plan.pages)
    else:
        page = plgpu.load(refs[2].at[b, column], mask=used, other=plan.pages)
    there = page < plan.pages  # no page is 2**30
    key, page = jnp.where(there, key, -1), jnp.where(there, page, 0)
    place = (page[:, None], group, slot[:, None], channel[None, :])
    mask = there[:, None] & (channel < plan.config.head_dim)[None, :]
    k, v = (plgpu.load(ref.at[place], mask=mask, other=0) for ref in refs[:2])
    return key, k, v


def _block_keys(
    refs: tuple[Any, ...], b: jax.Array, group: jax.Array, channel: jax.Array, plan: _Plan
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the same for keys beside the cache: [B, C, G, S, H] read as C * S keys."""
    index = iota(power_of_two(plan.block, least=LEAST))
    there = index < plan.block
    index = jnp.minimum(index, plan.block - 1)
    chunk, slot = div(index, refs[0].shape[3]), rem(index, refs[0].shape[3])
    key = plgpu.load(refs[2].at[b, chunk, slot], mask=there, other=-1)
    place = (b, chunk[:, None], group, slot[:, None], channel[None, :])
    mask = (key >= 0)[:, None] & (channel < plan.config.head_dim)[None, :]
    k, v = (plgpu.load(ref.at[place], mask=mask, other=0) for ref in refs[:2])
    return key, k, v


def _absorb(
    running: _Running,
    q: jax.Array,
    at: jax.Array,
    key: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plan: _Plan,
) -> _Running:
    """Add one tile of keys to the running softmax; ``key`` is -1 where there is none."""
    config = plan.config
    peak, mass, total = running
    scores = lax.dot_general(
        q,
        k.astype(q.dtype),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    scores = scores * config.scale
    if config.softcap:
        scores = config.softcap * jnp.tanh(scores / config.softcap)
    key, at = key[None, :], at[:, None]
    seen = jnp.broadcast_to(key >= 0, scores.shape)
    if plan.causal:
        seen = seen & (key <= at)
    if config.window != FULL_ATTENTION:
        seen = seen & (key > at - config.window)
    scores = jnp.where(seen, scores, MASKED)
    higher = jnp.maximum(peak, jnp.max(scores, axis=1))
    weights = jnp.where(seen, jnp.exp(scores - higher[:, None]), 0.0)
    keep = jnp.exp(peak - higher)
    added = lax.dot_general(
        weights.astype(v.dtype),
        v,
        (((1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return higher, mass * keep + jnp.sum(weights, axis=1), total * keep[:, None] + added


def _join_kernel(
    positions: Any,
    first: Any,
    end: Any,
    peaks: Any,
    masses: Any,
    totals: Any,
    out: Any,
    *,
    plan: _Plan,
) -> None:
    """Join the shares of one query row of one head."""
    b, group, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    low, high, tiles = _bounds(positions, first, end, b, plan)
    all_tiles = ceil_div(jnp.maximum(high - low, 0), plan.keys)
    split = iota(power_of_two(plan.splits))
    used = ((split == 0) | (split * tiles < all_tiles)) & (split < plan.splits)
    channel = iota(plan.width)
    inside = channel < plan.config.head_dim
    place = (b, group, split, row)
    peak = plgpu.load(peaks.at[place], mask=used, other=MASKED)
    mass = plgpu.load(masses.at[place], mask=used, other=0.0)
    total = plgpu.load(
        totals.at[b, group, split[:, None], row, channel[None, :]],
        mask=used[:, None] & inside[None, :],
        other=0.0,
    )
    weight = jnp.exp(peak - jnp.max(peak))
    mass = jnp.sum(mass * weight)
    result = jnp.sum(total * weight[:, None], axis=0) / jnp.where(mass > 0, mass, 1.0)
    step, head = div(row, plan.share), group * plan.share + rem(row, plan.share)
    plgpu.store(out.at[b, step, head, channel], result.astype(out.dtype), mask=inside)
