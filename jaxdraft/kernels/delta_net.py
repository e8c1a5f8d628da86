"""A window of a gated delta net in one launch: all between its input and output projections.

A program serves one row of the batch and one value head: it convolves the channels of the head's
query, key and value, normalises, solves the triangular system of
:func:`jaxdraft.nn.delta_net.delta_rule` by substitution, and applies the gated norm. The state is
read once and never written; the capsule from which rows are committed is written beside the output.

Rates and decays, two numbers per head and row, are products of the layer's input with two rows of a
matrix; given both, a program makes its own.

A row reads rows before it and never one after it: nothing that a row past ``count`` holds, NaN
included, reaches a row before it.
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

from jaxdraft.config import DeltaNetConfig
from jaxdraft.kernels import MAX_ROWS, PALLAS
from jaxdraft.kernels.launch import LEAST, by_platform, div, iota, launch
from jaxdraft.sizes import power_of_two
from jaxdraft.state.recurrent import Capsule

_WIDTH = 512
"""Columns of the layer's input that are read per step."""

_EXACT = lax.Precision.HIGHEST  # the state is float32 everywhere


def serves(config: DeltaNetConfig, rows: jax.Array) -> bool:
    """Return whether :func:`window` can take these rows, [B, T, ...]."""
    return rows.shape[1] <= MAX_ROWS and config.conv_width > 1


def window(
    config: DeltaNetConfig,
    weights: Any,
    mixed: jax.Array,
    rates: tuple[jax.Array, ...],
    conv: jax.Array,
    state: jax.Array,
    *,
    xla: Callable[..., tuple[jax.Array, Capsule]],
) -> tuple[jax.Array, Capsule]:
    """Run T rows: see :func:`jaxdraft.nn.delta_net.window`, whose results these are.

    Args:
      config: the layer's shape.
      weights: a :class:`jaxdraft.nn.delta_net.Weights`.
      mixed: [B, T, channels + Hv * Dv]; T is at most :data:`jaxdraft.kernels.MAX_ROWS`.
      rates: rates and decays (ba [B, T, 2 * Hv],), or what their product is made of: (x [B, T, D],
        weight [2 * Hv, D]).
      conv: [B, W - 1, channels].
      state: [B, Hv, Dk, Dv] float32.
      xla: the equivalent function without a kernel.

    Returns:
      [B, T, Hv * Dv], and the capsule, which a kernel commits too.
    """
    out, capsule = by_platform(_run, xla, config, weights, mixed, rates, conv, state)
    return out, dataclasses.replace(capsule, implementation=PALLAS)


def _run(
    config: DeltaNetConfig,
    weights: Any,
    mixed: jax.Array,
    rates: tuple[jax.Array, ...],
    conv: jax.Array,
    state: jax.Array,
    *,
    interpret: bool,
) -> tuple[jax.Array, Capsule]:
    batch, steps, _ = mixed.shape
    out, log_decay, key, update, rows = launch(
        functools.partial(_kernel, config=config, steps=steps),
        [mixed, conv, state, *weights, *rates],
        [
            ((batch, steps, config.value_rows), mixed.dtype),
            ((batch, steps, config.value_heads), jnp.float32),
            ((batch, steps, config.key_heads, config.key_dim), jnp.float32),
            ((batch, steps, config.value_heads, config.value_dim), jnp.float32),
            ((batch, steps, config.channels), mixed.dtype),
        ],
        grid=(batch, config.value_heads),
        interpret=interpret,
        name="delta_net",
        warps=8,
    )
    return out, Capsule(log_decay=log_decay, key=key, update=update, rows=rows)


def _kernel(
    mixed: Any,
    conv: Any,
    state: Any,
    conv_weight: Any,
    conv_bias: Any,
    decay_scale: Any,
    dt_bias: Any,
    norm_weight: Any,
    *refs: Any,
    config: DeltaNetConfig,
    steps: int,
) -> None:
    """Compute one value head of one row of the batch."""
    *rates, out, log_decay, key, update, rows = refs
    b, head = pl.program_id(0), pl.program_id(1)
    shared = config.value_heads // config.key_heads  # consecutive heads that share a key
    key_head = div(head, shared)
    step = iota(power_of_two(steps, least=LEAST))
    real = step < steps
    dk = iota(power_of_two(config.key_dim, least=LEAST))
    dv = iota(power_of_two(config.value_dim, least=LEAST))
    in_key, in_value = dk < config.key_dim, dv < config.value_dim

    queries = key_head * config.key_dim + dk  # channels
    keys = config.key_rows + queries
    values = 2 * config.key_rows + head * config.value_dim + dv

    def convolve(channel: jax.Array, inside: jax.Array) -> jax.Array:
        refs = (mixed, conv, conv_weight, conv_bias)
        return _convolve(refs, b, step, real, channel, inside, config.conv_width)

    def keep(channel: jax.Array, mask: jax.Array) -> None:
        place = (b, step[:, None], channel[None, :])
        plgpu.store(rows.at[place], plgpu.load(mixed.at[place], mask=mask, other=0), mask=mask)

    q = _normalize(convolve(queries, in_key)) * config.key_dim**-0.5
    k = _normalize(convolve(keys, in_key))
    v = convolve(values, in_value)
    rate = _sigmoid(_rate(rates, b, step, real, head))
    decay = _rate(rates, b, step, real, config.value_heads + head)
    decay = jnp.where(real, decay_scale[head] * _softplus(decay + dt_bias[head]), 0.0)
    memory = plgpu.load(
        state.at[b, head, dk[:, None], dv[None, :]],
        mask=in_key[:, None] & in_value[None, :],
        other=0.0,
    )
    result, delta = _recurrence(q, k, v, decay, rate, memory, steps)

    plgpu.store(log_decay.at[b, step, head], decay, mask=real)
    value_mask = real[:, None] & in_value[None, :]
    plgpu.store(update.at[b, step[:, None], head, dv[None, :]], delta, mask=value_mask)

    @pl.when(head == key_head * shared)  # one of the heads that share it
    def _() -> None:
        mask = real[:, None] & in_key[None, :]
        plgpu.store(key.at[b, step[:, None], key_head, dk[None, :]], k, mask=mask)
        keep(queries, mask)
        keep(keys, mask)

    keep(values, value_mask)

    place = config.channels + head * config.value_dim + dv
    gate = plgpu.load(mixed.at[b, step[:, None], place[None, :]], mask=value_mask, other=0)
    weight = plgpu.load(norm_weight.at[dv], mask=in_value, other=0).astype(jnp.float32)
    result = result.astype(out.dtype).astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(result * result, axis=1) / config.value_dim + config.norm_eps)
    gate = gate.astype(jnp.float32)
    result = result * scale[:, None] * weight[None, :] * (gate * _sigmoid(gate))
    place = head * config.value_dim + dv
    plgpu.store(out.at[b, step[:, None], place[None, :]], result.astype(out.dtype), mask=value_mask)


def _rate(
    refs: list[Any], b: jax.Array, step: jax.Array, real: jax.Array, column: jax.Array
) -> jax.Array:
    """Return one column of the rates and decays of all rows, [T] float32."""
    if len(refs) == 1:
        return plgpu.load(refs[0].at[b, step, column], mask=real, other=0).astype(jnp.float32)
    x, weight = refs
    width = weight.shape[1]

    def add(index: jax.Array, total: jax.Array) -> jax.Array:
        channel = iota(_WIDTH, index * _WIDTH)
        inside = channel < width
        mask = real[:, None] & inside[None, :]
        part = plgpu.load(x.at[b, step[:, None], channel[None, :]], mask=mask, other=0)
        row = plgpu.load(weight.at[column, channel], mask=inside, other=0).astype(jnp.float32)
        return total + jnp.sum(part.astype(weight.dtype).astype(jnp.float32) * row[None, :], axis=1)

    steps = jnp.int32(-(-width // _WIDTH))
    total = lax.fori_loop(jnp.int32(0), steps, add, jnp.zeros(step.shape, jnp.float32))
    return total.astype(weight.dtype).astype(jnp.float32)  # rounded, as it would be in memory


def _convolve(
    refs: tuple[Any, ...],
    b: jax.Array,
    step: jax.Array,
    real: jax.Array,
    channel: jax.Array,
    inside: jax.Array,
    width: int,
) -> jax.Array:
    """Compute the depthwise causal convolution and SiLU of some channels, [T, channels] float32.

    Row t sees rows t - W + 1 .. t; those before the first come from ``conv``. Example, W = 4: row 1
    sees rows 1 and 2 of ``conv`` and rows 0 and 1 of the window.
    """
    mixed, conv, conv_weight, conv_bias = refs
    total = plgpu.load(conv_bias.at[channel], mask=inside, other=0).astype(jnp.float32)
    total = jnp.broadcast_to(total[None, :], (step.shape[0], channel.shape[0]))
    for tap in range(width):
        row = step + (tap - width + 1)
        stream = plgpu.load(
            mixed.at[b, jnp.maximum(row, 0)[:, None], channel[None, :]],
            mask=((row >= 0) & real)[:, None] & inside[None, :],
            other=0,
        )
        if tap < width - 1:
            before = plgpu.load(
                conv.at[b, jnp.minimum(step + tap, width - 2)[:, None], channel[None, :]],
                mask=(row < 0)[:, None] & inside[None, :],
                other=0,
            )
            stream = jnp.where((row < 0)[:, None], before.astype(mixed.dtype), stream)
        weight = plgpu.load(conv_weight.at[channel, tap], mask=inside, other=0)
        total = total + stream.astype(jnp.float32) * weight.astype(jnp.float32)[None, :]
    # Rounded as the rows are stored.
    return (total * _sigmoid(total)).astype(mixed.dtype).astype(jnp.float32)


def _recurrence(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    rate: jax.Array,
    memory: jax.Array,
    steps: int,
) -> tuple[jax.Array, jax.Array]:
    """Run :func:`jaxdraft.nn.delta_net.delta_rule` of one head: outputs and updates, [T, Dv]."""
    product = functools.partial(
        lax.dot_general, precision=_EXACT, preferred_element_type=jnp.float32
    )
    plain, transposed = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))
    row = iota(q.shape[0])
    after = row[:, None] > row[None, :]
    upto = row[:, None] >= row[None, :]
    # G_i - G_j as a sum of its own terms: the difference of two long sums would lose their digits.
    later = jnp.where(after, decay[:, None], 0.0)  # [m, j]
    between = jnp.sum(jnp.where(upto[:, :, None], later[None], 0.0), axis=1)  # of [i, m, j]
    since = jnp.exp(between)
    seen = jnp.exp(jnp.sum(jnp.where(upto, decay[None, :], 0.0), axis=1))[:, None]
    system = jnp.where(after, rate[:, None] * since * product(k, k, transposed), 0.0)
    overlap = jnp.where(upto, since * product(q, k, transposed), 0.0)
    update = rate[:, None] * (v - seen * product(k, memory, plain))
    output = seen * product(q, memory, plain)

    def substitute(i: jax.Array, rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Subtract the final row i of the updates from later rows; add it to the outputs."""
        update, output = rows
        this, column = (row == i)[:, None], (row == i)[None, :]
        done = jnp.sum(jnp.where(this, update, 0.0), axis=0)[None, :]
        coupled = jnp.sum(jnp.where(column, system, 0.0), axis=1)[:, None]
        shown = jnp.sum(jnp.where(column, overlap, 0.0), axis=1)[:, None]
        # Selected, not multiplied by zero: 0 * NaN is NaN.
        update = update - jnp.where((row > i)[:, None], coupled * done, 0.0)
        return update, output + jnp.where((row >= i)[:, None], shown * done, 0.0)

    update, output = lax.fori_loop(jnp.int32(0), jnp.int32(steps), substitute, (update, output))
    return output, update


def _normalize(x: jax.Array) -> jax.Array:
    """Return ``x / |x|`` of every row; a zero row stays zero."""
    square = jnp.sum(x * x, axis=1)
    return x * lax.rsqrt(jnp.where(square > 0, square, 1.0))[:, None]


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _softplus(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
