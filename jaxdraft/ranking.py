"""The best of a vocabulary: one token, or the few largest scores in order."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxdraft.meshes import along_last

_GROUP = 64
"""Size of the groups of logits in :func:`best_token`."""

_MANY = 4096
"""Smallest vocabulary that is searched in groups or lines."""

_FEW = 16
"""Maximum count of largest scores that XLA's GPU compiler finds without a sort."""

_LINE = 32
"""Size of the lines of scores that :func:`_best_places` keeps or drops as a whole."""


def best_token(logits: jax.Array) -> jax.Array:
    """Return the ``argmax`` of [..., V]: [...] int32.

    Ties go to the lowest id, a NaN counts as infinity.

    XLA's CPU backend finds an index number by number, and a maximum on vectors: with 8 rows of
    49,152 logits the best group first, then the best within it, takes a tenth of the time of one
    ``argmax``.

    Example, groups of 2: of [1 5 | 5 2] the maxima are [5 5], the first group wins, and in it
    place 1.
    """
    return along_last(_best_of_part, logits)


def _best_of_part(logits: jax.Array, axis: str | None) -> jax.Array:
    """Compute :func:`best_token`, of logits that are divided over the devices of ``axis``."""
    best = _best_here(logits)
    if axis is None:
        return best
    value = jnp.take_along_axis(logits, best[..., None], axis=-1)
    # In the order of the devices, so ties go to the lowest id.
    values = lax.all_gather(jnp.where(jnp.isnan(value), jnp.inf, value), axis, axis=-1, tiled=True)
    ids = best[..., None] + lax.axis_index(axis).astype(jnp.int32) * logits.shape[-1]
    ids = lax.all_gather(ids, axis, axis=-1, tiled=True)
    winner = jnp.argmax(values, axis=-1, keepdims=True)
    return jnp.take_along_axis(ids, winner, axis=-1)[..., 0]


def _best_here(logits: jax.Array) -> jax.Array:
    vocab = logits.shape[-1]
    if vocab < _MANY:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    short = -vocab % _GROUP
    if short:
        widths = [(0, 0)] * (logits.ndim - 1) + [(0, short)]
        logits = jnp.pad(logits, widths, constant_values=-jnp.inf)
    groups = logits.reshape(*logits.shape[:-1], -1, _GROUP)
    # XLA's CPU backend may drop a NaN from a maximum (never from an argmax): infinity stays.
    largest = jnp.max(jnp.where(jnp.isnan(groups), jnp.inf, groups), axis=-1)
    group = jnp.argmax(largest, axis=-1, keepdims=True)
    within = jnp.take_along_axis(groups, group[..., None], axis=-2)[..., 0, :]
    return (group[..., 0] * _GROUP + jnp.argmax(within, axis=-1)).astype(jnp.int32)


def largest_first(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the ``count`` largest of [..., X], best first, and their places: [..., count] each.

    Ties go to the lowest place, and a NaN counts as more than infinity. Elsewhere than on CPUs no
    more than a few thousand scores are ever sorted, whatever X is: see :func:`_best_places`.

    On a mesh every device finds the largest of its part, and the largest of these are gathered.

    The barriers keep XLA from merging a slice of the results into the top-k. Otherwise it
    would not recognise that only ``count`` entries are needed, and would sort all of them. One
    barrier per result: over both at once XLA ends the process when the scores lie on several
    devices.

    Args:
      scores: [..., X].
      count: static, at most X.
    """

    values, index = along_last(
        functools.partial(_largest_of_part, count), scores, least=max(count, 16)
    )
    return lax.optimization_barrier(values), lax.optimization_barrier(index)


def _largest_of_part(
    count: int, scores: jax.Array, axis: str | None
) -> tuple[jax.Array, jax.Array]:
    """Compute :func:`largest_first`, of scores that are divided over the devices of ``axis``."""
    values, index = _largest_here(scores, count)
    if axis is None:
        return values, index
    index = index + lax.axis_index(axis).astype(jnp.int32) * scores.shape[-1]
    # In the order of the devices, so ties go to the lowest place.
    values, index = (lax.all_gather(x, axis, axis=-1, tiled=True) for x in (values, index))
    values, best = lax.top_k(values, count)
    return values, jnp.take_along_axis(index, best, axis=-1)


def _largest_here(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    def plain(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, index = lax.top_k(scores, count)
        return values, index

    if count <= _FEW or scores.shape[-1] < _MANY:
        return plain(scores)
    lines = functools.partial(_in_lines, count=count)
    return lax.platform_dependent(scores, cpu=plain, default=lines)


def _in_lines(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Compute :func:`largest_first` with sorts of a few thousand numbers."""
    bits = lax.bitcast_convert_type(scores.astype(jnp.float32) + 0.0, jnp.uint32)  # one zero
    high = jnp.uint32(0x80000000)
    order = jnp.where(bits & high, ~bits, bits | high)  # integers in the order of the scores
    order = jnp.where(jnp.isnan(scores), jnp.uint32(0xFFFFFFFF), order)
    places = _best_places(order, count)
    return jnp.take_along_axis(scores, places, axis=-1), places


def _best_places(order: jax.Array, count: int) -> jax.Array:
    """Return places [..., count] of the largest of [..., X] uint32, by lines of 32.

    Only the ``count`` lines with the largest maxima matter: the maximum of each of them comes
    before all numbers of the other lines.

    Example, the two largest of lines of 2, [1 5 | 4 2 | 3 6]: the lines' largest are [5 4 6], so
    the first and the last line have both, 5 and 6.
    """
    width = order.shape[-1]
    if width < max(_MANY, 2 * count * _LINE):
        places = lax.broadcasted_iota(jnp.int32, order.shape, order.ndim - 1)
        return _sorted(order, places, count)
    pad = [(0, 0)] * (order.ndim - 1) + [(0, -width % _LINE)]
    lines = jnp.pad(order, pad).reshape(*order.shape[:-1], -1, _LINE)  # no number is as low as zero
    best = _best_places(jnp.max(lines, axis=-1), count)[..., None]  # [..., count, 1]
    kept = jnp.take_along_axis(lines, best, axis=-2)  # [..., count, 32]
    places = best * _LINE + lax.broadcasted_iota(jnp.int32, kept.shape, kept.ndim - 1)
    flat = (*kept.shape[:-2], count * _LINE)
    return _sorted(kept.reshape(flat), places.reshape(flat), count)


def _sorted(order: jax.Array, places: jax.Array, count: int) -> jax.Array:
    """Return places of the ``count`` largest; among equal ones the lowest place comes first."""
    return lax.sort((~order, places), num_keys=2)[1][..., :count]
