"""The commit of a window of delta-net rows in one launch."""

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

from jaxdraft.kernels.launch import LEAST, by_platform, div, iota, launch
from jaxdraft.sizes import power_of_two

_CHANNELS = 512
"""Channels of the convolution's rows that a program moves."""


def commit(recurrent: Any, capsule: Any, count: jax.Array, *, xla: Callable[..., Any]) -> Any:
    """Commit rows: see :func:`jaxdraft.nn.delta_net.commit`, which calls this.

    Args:
      recurrent: the state the capsule was made from.
      capsule: T rows.
      count: [B] int32, 0..T.
      xla: the equivalent function without a kernel.
    """
    return by_platform(_run, _reference, xla, recurrent, capsule, count)


def _reference(xla: Callable[..., Any], *arguments: Any) -> Any:
    return xla(*arguments)


def _run(xla: Any, recurrent: Any, capsule: Any, count: jax.Array, *, interpret: bool) -> Any:
    del xla
    batch, heads = recurrent.state.shape[:2]
    width, channels = recurrent.conv.shape[1:]
    moves = -(-channels // _CHANNELS)
    state, conv = launch(
        functools.partial(
            _kernel, heads=heads, width=width, channels=channels, interpret=interpret
        ),
        [
            recurrent.state,
            recurrent.conv,
            capsule.log_decay,
            capsule.key,
            capsule.update,
            capsule.rows,
            count,
        ],
        [(x.shape, x.dtype) for x in (recurrent.state, recurrent.conv)],
        grid=(batch, heads + moves),
        interpret=interpret,
        name="delta_net_commit",
        warps=8,
        aliases={0: 0, 1: 1},  # a program reads its part before it writes it
    )
    return dataclasses.replace(recurrent, state=state, conv=conv)


def _kernel(
    state: Any,
    conv: Any,
    log_decay: Any,
    key: Any,
    update: Any,
    rows: Any,
    count: Any,
    new_state: Any,
    new_conv: Any,
    *,
    heads: int,
    width: int,
    channels: int,
    interpret: bool,
) -> None:
    """Commit one value head, or some channels of the convolution's rows, of one batch row."""
    b, part = pl.program_id(0), pl.program_id(1)

    @pl.when(part < heads)
    def _() -> None:
        _commit_head((state, log_decay, key, update, new_state), b, part, count[b])

    @pl.when(part >= heads)
    def _() -> None:
        channel = iota(_CHANNELS, (part - heads) * _CHANNELS)
        _shift((conv, rows, new_conv), b, channel, channels, width, count[b], interpret)


def _commit_head(refs: tuple[Any, ...], b: jax.Array, head: jax.Array, count: jax.Array) -> None:
    """``S <- exp(g_0 + ... + g_{n-1}) S + sum_{j<n} exp(g_{j+1} + ... + g_{n-1}) k_j (outer) u_j``.

    Rows at or past the count are never read.
    """
    state, log_decay, key, update, new_state = refs
    steps, (_, heads, key_dim, value_dim) = log_decay.shape[1], state.shape
    key_head = div(head, heads // key.shape[2])
    step = iota(power_of_two(steps, least=LEAST))
    kept = step < jnp.minimum(count, steps)
    dk = iota(power_of_two(key_dim, least=LEAST))
    dv = iota(power_of_two(value_dim, least=LEAST))
    in_key, in_value = dk < key_dim, dv < value_dim
    decay = plgpu.load(log_decay.at[b, step, head], mask=kept, other=0.0)
    k = plgpu.load(
        key.at[b, step[:, None], key_head, dk[None, :]],
        mask=kept[:, None] & in_key[None, :],
        other=0.0,
    )
    u = plgpu.load(
        update.at[b, step[:, None], head, dv[None, :]],
        mask=kept[:, None] & in_value[None, :],
        other=0.0,
    )
    later = step[None, :] > step[:, None]
    after = jnp.exp(jnp.sum(jnp.where(later, decay[None, :], 0.0), axis=1))
    added = lax.dot_general(
        k,
        u * after[:, None],
        (((0,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    place = (b, head, dk[:, None], dv[None, :])
    mask = in_key[:, None] & in_value[None, :]
    old = plgpu.load(state.at[place], mask=mask, other=0.0)
    plgpu.store(new_state.at[place], old * jnp.exp(jnp.sum(decay)) + added, mask=mask)


def _shift(
    refs: tuple[Any, ...],
    b: jax.Array,
    channel: jax.Array,
    channels: int,
    width: int,
    count: jax.Array,
    interpret: bool,
) -> None:
    """Write the last W - 1 rows after appending ``count`` rows to the stream.

    Example, W - 1 = 3, conv = [a b c], rows = [d e f g]: count 0 keeps [a b c], count 1 gives
    [b c d], count 4 gives [e f g].
    """
    conv, rows, new_conv = refs
    inside = channel < channels
    moved = []
    for row in range(width):
        at = count + row
        old = plgpu.load(
            conv.at[b, jnp.minimum(at, width - 1), channel], mask=inside & (at < width), other=0
        )
        new = plgpu.load(
            rows.at[b, jnp.clip(at - width, 0, rows.shape[1] - 1), channel],
            mask=inside & (at >= width),
            other=0,
        )
        moved.append(jnp.where(at < width, old, new.astype(conv.dtype)))
    if not interpret:  # another thread may still have to read the rows that these replace
        plgpu.debug_barrier()
    for row in range(width):
        plgpu.store(new_conv.at[b, row, channel], moved[row], mask=inside)
