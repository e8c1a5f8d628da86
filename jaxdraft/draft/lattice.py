"""Lattices: walks and paths, and one scan for every query over all paths at once.

A *path* picks one candidate of every step; its score is the sum of its K edge scores, the first of
which comes from the anchor. Two distributions live on the paths of a lattice, and differ:

* *Locally normalised*: walk from the anchor and draw each step from the softmax of the edge row
  that its predecessor selects. This is what drafting samples from. A step does not depend on the
  steps after it, and adding a constant to a whole row of scores changes nothing.
* *Globally normalised* (Gibbs): a path has probability ``exp(score / T) / Z``, where Z is the sum
  over all paths. A candidate's probability depends on everything that can follow it, and a constant
  added to a row counts. :func:`log_mass`, :func:`marginals` and :func:`sample_path` use
  this one.

:func:`normalize` leads from one to the other: the Gibbs distribution of a lattice whose rows are
log-probabilities is the walk's own, Z = 1. So ``marginals(normalize(lattice))`` gives the
probability that a sampled walk passes each candidate, and
``best_path(normalize(lattice))`` is the most probable walk.

The scan, :func:`to_go`, runs from the last step to the first and keeps for every candidate the
combined worth of all continuations; an :class:`Algebra` defines the combination. In this direction
the first choice is made last, with all its consequences known: ties go to the first path in
lexicographic order, and a walk over *score plus worth of the rest* is the best path if greedy, and
an exact Gibbs sample if drawn (backward filtering, forward sampling).

Masks. A score at or below ``MASKED / 2`` (-inf, NaN) is *masked*, and a path with a masked edge
is not *open*. MASKED is the zero of the algebras: it absorbs anything added to it, and adds
nothing to a sum. If no path is open, score and log mass are MASKED, marginals and indices zero.
Nothing may be +inf.

Source: Rabiner, "A Tutorial on Hidden Markov Models", 1989, section III; Goodman, "Semiring
Parsing", 1999; Lafferty et al., "Conditional Random Fields", 2001 (local and global).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxdraft.base import MASKED, Lattice
from jaxdraft.keys import own_streams

# --------------------------------------------------------------------------- walks

Choose = Callable[[jax.Array, jax.Array], jax.Array]
"""(scores of the C candidates [B, C], step [] int32) -> chosen index [B] int32."""


def walk(lattice: Lattice, choose: Choose) -> jax.Array:
    """Follow ``choose`` from the anchor through all K steps.

    Example, K = 2, C = 2, greedy: step 0 picks the best of ``scores[b, 0, 0]``, say candidate 1;
    step 1 then picks the best of ``scores[b, 1, 1]``, the row of that predecessor.

    Args:
      lattice: see :class:`jaxdraft.base.Lattice`.
      choose: function that picks one candidate of a step, given the row of its predecessor.

    Returns:
      Candidate indices [B, K] int32.
    """
    batch, steps, _ = lattice.candidates.shape
    # One pass for all predecessors of all steps: step by step there would be K of them.
    for_predecessors = jax.vmap(choose, in_axes=(1, None), out_axes=1)
    for_steps = jax.vmap(for_predecessors, in_axes=(1, 0), out_axes=1)
    chosen = for_steps(lattice.scores, jnp.arange(steps, dtype=jnp.int32))  # [B, K, C]
    index = jnp.zeros((batch,), jnp.int32)
    path = []
    for step in range(steps):
        index = jnp.take_along_axis(chosen[:, step], index[:, None], axis=1, mode="clip")[:, 0]
        path.append(index)
    return jnp.stack(path, axis=1)


def greedy(scores: jax.Array, step: jax.Array) -> jax.Array:
    """Return the best candidate; ties go to the lowest index."""
    del step
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def path_tokens(lattice: Lattice, indices: jax.Array) -> jax.Array:
    """Return the token ids [B, K] of candidate indices [B, K]."""
    picked = jnp.take_along_axis(lattice.candidates, indices[..., None], axis=2)
    return picked[..., 0]


# --------------------------------------------------------------------------- the scan


class Algebra(NamedTuple):
    """The combination of values: an edge with its continuation, and alternatives at a fork.

    A node keeps N values, the best first: one for most questions, n for the n best paths.

    Attributes:
      join: alternatives [B, C, M] -> the values [B, C, N] that represent them, and the index of
        each, [B, C, N] int32 in 0..M-1; None if a value comes from all of them.
      extend: (edge score, worth of the continuation) -> worth of both. Must broadcast.
      empty: worth of a path of no steps.
      width: N.
    """

    join: Callable[[jax.Array], tuple[jax.Array, jax.Array | None]]
    extend: Callable[[jax.Array, jax.Array], jax.Array] = jnp.add
    empty: float = 0.0
    width: int = 1


def _best(alternatives: jax.Array) -> tuple[jax.Array, jax.Array]:
    # A gather, not `max`: at a tie the gradient follows the path that is taken, and only that.
    choice = jnp.argmax(alternatives, axis=-1, keepdims=True).astype(jnp.int32)
    return jnp.take_along_axis(alternatives, choice, axis=-1), choice


def _mass(alternatives: jax.Array) -> tuple[jax.Array, None]:
    return jax.nn.logsumexp(alternatives, axis=-1, keepdims=True), None


def _accepted(score: jax.Array, after: jax.Array) -> jax.Array:
    return score + jax.nn.softplus(after)


BEST = Algebra(_best)
"""(max, +): the best path, Viterbi's."""

MASS = Algebra(_mass)
"""(logsumexp, +): the log of the sum over all paths."""

ACCEPTED = Algebra(_best, extend=_accepted, empty=MASKED)
"""(max, p (1 + v)) in logs, over a normalised lattice: the log of the expected number of drafts
that a walk matches, and the path for which it is greatest. Not a semiring, but the same scan."""


def best(n: int) -> Algebra:
    """Return the algebra of the n best values per node. Example: ``best(1)`` is BEST."""
    if n < 1:
        raise ValueError(f"n is {n}; expected at least 1 path")
    return Algebra(lambda alternatives: lax.top_k(alternatives, n), width=n)


@struct.dataclass
class ToGo:
    """The worth of all continuations, for every candidate of every step.

    Entry k of ``after`` is the worth after step k: ``scores[b, k, i, j]`` extended by
    ``after[b, k, j]`` is the worth of continuing with j.
    """

    worth: jax.Array  # [B, N] float32, of all paths from the anchor
    after: jax.Array  # [B, K, C, N] float32
    choice: jax.Array | None  # [B, K, C, N] int32, pointers into the C x N values of step k


def to_go(lattice: Lattice, algebra: Algebra, *, length: jax.Array | None = None) -> ToGo:
    """Join all continuations of every candidate, from the last step to the first.

    ``choice`` are Viterbi's backpointers, here pointers ahead: at candidate i of step k - 1, value
    r continues with value ``m % N`` of candidate ``m // N`` of step k, ``m = choice[b, k, i, r]``.

    Args:
      lattice: see :class:`jaxdraft.base.Lattice`. Only ``scores`` is read.
      algebra: see :class:`Algebra`.
      length: [B] int32, number of steps per row. Default: all K.
    """
    scores = _open(lattice)
    batch, steps, width, _ = scores.shape
    values = algebra.width
    length = _lengths(lattice, length)
    nothing = jnp.where(
        jnp.arange(values, dtype=jnp.int32) == 0, jnp.float32(algebra.empty), jnp.float32(MASKED)
    )
    nothing = jnp.broadcast_to(nothing, (batch, width, values))

    def step(
        after: jax.Array, here: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
        number, edges = here  # [], [B, C, C]
        joint = _saturate(algebra.extend(edges[..., None], after[:, None]))  # [B, C, C, N]
        worth, choice = algebra.join(joint.reshape(batch, width, width * values))
        worth = jnp.where((number < length)[:, None, None], worth, nothing)
        return worth, (after, choice)

    numbered = (jnp.arange(steps, dtype=jnp.int32), jnp.swapaxes(scores, 0, 1))
    start, (after, choice) = _scan(step, nothing, numbered, reverse=True)
    after, choice = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (after, choice))
    return ToGo(start[:, 0], after, choice)  # all rows of step 0 are the anchor's


# --------------------------------------------------------------------------- paths


@struct.dataclass
class Path:
    """Paths and their scores. ``path_tokens`` gives their tokens."""

    indices: jax.Array  # [B, K] int32, or [B, n, K]; zero at and past the row's length
    score: jax.Array  # [B] float32, or [B, n]; MASKED: there is no such path


def best_path(lattice: Lattice, *, length: jax.Array | None = None) -> Path:
    """Return the path with the greatest score (Viterbi).

    At every step it takes the lowest index among the candidates of greatest score to go, where
    scores are summed in float32 from the last step on: the lexicographically first of equal paths.

    Example: the anchor scores its candidates ``[1 0]``, and they their successors ``[0 0]`` and
    ``[0 3]``. The greedy walk takes 0, then 0, for 1; the best path is 1, then 1, for 3.

    Args:
      lattice: see :class:`jaxdraft.base.Lattice`.
      length: [B] int32, number of steps that count. Default: all.

    Returns:
      Indices [B, K] and scores [B]. The score is differentiable: its gradient is one on the path's
      edges and zero elsewhere.
    """
    return _first(_paths(lattice, BEST, length))


def top_paths(lattice: Lattice, n: int, *, length: jax.Array | None = None) -> Path:
    """Return the n paths of greatest score, best first; ties in lexicographic order.

    If there are fewer than n open paths, the rest have score MASKED and indices zero.

    Args:
      lattice: see :class:`jaxdraft.base.Lattice`.
      n: number of paths; static.
      length: [B] int32, number of steps that count. Default: all.

    Returns:
      Indices [B, n, K] and scores [B, n], differentiable as those of :func:`best_path`.

    Raises:
      ValueError: ``n`` is less than one.
    """
    return _paths(lattice, best(n), length)


def longest_path(lattice: Lattice, *, length: jax.Array | None = None) -> Path:
    """Return the path whose prefix a sampled walk is expected to match for longest.

    With p_k the probability of its step k given the one before, the path maximises ``p_1 + p_1 p_2
    + ... + p_1 ... p_K``: the expected number of accepted drafts, if the target's tokens were drawn
    as the walk's are. The best path of the normalised lattice maximises the last term alone. Ties
    as in :func:`best_path`.

    Args:
      lattice: see :class:`jaxdraft.base.Lattice`; normalised here.
      length: [B] int32, number of steps that count. Default: all.

    Returns:
      Indices [B, K] and scores [B]: the log of that expectation.
    """
    return _first(_paths(normalize(lattice), ACCEPTED, length))


def path_score(
    lattice: Lattice, indices: jax.Array, *, length: jax.Array | None = None
) -> jax.Array:
    """Return the score [B] of the paths with the candidate indices [B, K].

    Summed from the last step on, as the scan does: equal to the score of :func:`best_path`, bit by
    bit. Over ``normalize(lattice)`` it is the log-probability of a walk. For indices [B, n, K]:

        jax.vmap(path_score, in_axes=(None, 1), out_axes=1)(lattice, indices)
    """
    chex.assert_shape(indices, lattice.candidates.shape[:2])
    previous = jnp.pad(indices[:, :-1], ((0, 0), (1, 0)))  # before step 0 any row is the anchor's
    rows = jnp.take_along_axis(_open(lattice), previous[:, :, None, None], axis=2)
    edges = jnp.take_along_axis(rows[:, :, 0], indices[:, :, None], axis=2)[..., 0]  # [B, K]
    steps = jnp.arange(edges.shape[1], dtype=jnp.int32)[None]
    edges = jnp.where(steps < _lengths(lattice, length)[:, None], edges, 0.0)

    def step(after: jax.Array, edge: jax.Array) -> tuple[jax.Array, None]:
        return _saturate(edge + after), None

    start = jnp.zeros(edges.shape[:1], jnp.float32)
    return _scan(step, start, jnp.swapaxes(edges, 0, 1), reverse=True)[0]


PROPOSALS: dict[str, Callable[[Lattice, jax.Array], jax.Array]] = {
    "walk": lambda lattice, length: walk(lattice, greedy),
    "best": lambda lattice, length: best_path(lattice, length=length).indices,
    "probable": lambda lattice, length: best_path(normalize(lattice), length=length).indices,
    "longest": lambda lattice, length: longest_path(lattice, length=length).indices,
}
"""Ways to choose a proposal without random draws: indices [B, K] from a lattice and
the number of drafts [B] that can be used. *walk*: step by step; *best*: the greatest score, which
trusts the level of scores from row to row; *probable*: the most probable walk; *longest*: the walk
with the longest expected match."""


# --------------------------------------------------------------------------- distributions


@struct.dataclass
class Marginals:
    """Probability that a path passes each node and edge. Each step sums to one, or to zero."""

    nodes: jax.Array  # [B, K, C] float32
    edges: jax.Array  # [B, K, C, C] float32; of step 0 in row 0, the other rows are zero


def normalize(lattice: Lattice, *, temperature: float | jax.Array = 1.0) -> Lattice:
    """Return edge scores as log-probabilities, for which Gibbs and walk distributions are equal.

    A row without an open candidate stays masked.

    Args:
      lattice: see :class:`jaxdraft.base.Lattice`.
      temperature: T > 0, one number or one per row [B].
    """
    scores = _open(_temper(lattice, temperature))
    logs = jax.nn.log_softmax(scores, axis=-1)
    return replace(lattice, scores=jnp.where(scores > MASKED, logs, MASKED))


def log_mass(
    lattice: Lattice,
    *,
    temperature: float | jax.Array = 1.0,
    length: jax.Array | None = None,
) -> jax.Array:
    """Return log Z, the log [B] of the sum of ``exp(score / T)`` over all paths.

    The Gibbs probability of a path is ``exp(path_score / T - log_mass)``. Differentiable; a row of
    no steps has one path, of log mass zero.

    Args:
      lattice: see :class:`jaxdraft.base.Lattice`.
      temperature: T > 0, one number or one per row [B].
      length: [B] int32, number of steps that count. Default: all.
    """
    return to_go(_temper(lattice, temperature), MASS, length=length).worth[:, 0]


def marginals(
    lattice: Lattice,
    *,
    temperature: float | jax.Array = 1.0,
    length: jax.Array | None = None,
) -> Marginals:
    """Return the Gibbs probabilities of every candidate and of every edge.

    They are the gradient of the log mass with respect to the edge scores. Reverse mode follows the
    scan's softmaxes from the anchor on: an edge has the probability of its first candidate times
    that of the second given the first. So every step sums to one however large log Z is, where the
    forward-backward formula ``exp(alpha + score + beta - log Z)`` turns the rounding of three long
    sums into errors of probability; and it is one line. Differentiable again.

    Args:
      lattice: see :class:`jaxdraft.base.Lattice`.
      temperature: T > 0, one number or one per row [B].
      length: [B] int32, number of steps that count; later ones get zeros. Default: all.
    """
    tempered = _temper(lattice, temperature)

    def total(scores: jax.Array) -> jax.Array:
        return jnp.sum(log_mass(replace(tempered, scores=scores), length=length))

    edges = jax.grad(total)(tempered.scores)
    return Marginals(jnp.sum(edges, axis=2), edges)


def sample_path(
    keys: jax.Array,
    lattice: Lattice,
    *,
    temperature: float | jax.Array = 1.0,
    length: jax.Array | None = None,
) -> jax.Array:
    """Draw one path per row from the Gibbs distribution, exactly.

    Each step is drawn from the softmax of its edge scores plus the log mass of the continuations:
    backward filtering, forward sampling. The walk of drafting leaves the second term out; draw from
    ``normalize(lattice)`` to have its distribution.

    Args:
      keys: [B] PRNG keys, one per row, so that a row's path does not depend on the batch. Consumed.
      lattice: see :class:`jaxdraft.base.Lattice`.
      temperature: T > 0, one number or one per row [B].
      length: [B] int32, number of steps that count. Default: all.

    Returns:
      Candidate indices [B, K] int32, zero at and past the row's length.
    """
    chex.assert_shape(keys, lattice.candidates.shape[:1])
    streams = own_streams(keys)
    tempered = _temper(lattice, temperature)
    ahead = to_go(tempered, MASS, length=length)
    scores = _saturate(_open(tempered) + ahead.after[..., 0][:, :, None])

    def draw(row: jax.Array, step: jax.Array) -> jax.Array:
        here = jax.vmap(jax.random.fold_in, in_axes=(0, None))(streams, step)
        return jax.vmap(jax.random.categorical)(here, row).astype(jnp.int32)

    indices = walk(replace(tempered, scores=scores), draw)
    return _cut(indices, ahead.worth[:, 0], _lengths(lattice, length))


# --------------------------------------------------------------------------- parts


def _paths(lattice: Lattice, algebra: Algebra, length: jax.Array | None) -> Path:
    """Return the N paths that an algebra's pointers select, [B, N, K]."""
    ahead = to_go(lattice, algebra, length=length)
    assert ahead.choice is not None, "the algebra keeps no pointers"
    batch, steps, width, values = ahead.choice.shape
    pointers = jnp.swapaxes(ahead.choice.reshape(batch, steps, width * values), 0, 1)

    def step(value: jax.Array, here: jax.Array) -> tuple[jax.Array, jax.Array]:
        value = jnp.take_along_axis(here, value, axis=1)
        return value, value

    start = jnp.broadcast_to(jnp.arange(values, dtype=jnp.int32), (batch, values))
    _, followed = _scan(step, start, pointers)  # [K, B, N]
    indices = jnp.moveaxis(followed // values, 0, -1)
    return Path(_cut(indices, ahead.worth, _lengths(lattice, length)), ahead.worth)


_scan = functools.partial(lax.scan, unroll=True)
"""A scan over the few steps of a lattice, written out: a loop would end a CUDA graph."""


def _first(paths: Path) -> Path:
    return Path(paths.indices[:, 0], paths.score[:, 0])


def _cut(indices: jax.Array, worth: jax.Array, length: jax.Array) -> jax.Array:
    """Return indices [B, K] or [B, N, K], zeroed where the row has no step or no path."""
    steps = jnp.arange(indices.shape[-1], dtype=jnp.int32)
    within = steps[None] < length[:, None]  # [B, K]
    within = within if indices.ndim == 2 else within[:, None]
    return jnp.where(within & (worth > MASKED)[..., None], indices, 0)


def _lengths(lattice: Lattice, length: jax.Array | None) -> jax.Array:
    batch, steps = lattice.candidates.shape[:2]
    if length is None:
        return jnp.full((batch,), steps, jnp.int32)
    chex.assert_shape(length, (batch,))
    return jnp.asarray(length, jnp.int32)


def _temper(lattice: Lattice, temperature: float | jax.Array) -> Lattice:
    """Return scores divided by T; masked ones stay unchanged."""
    if isinstance(temperature, int | float) and not temperature > 0:
        raise ValueError(f"temperature is {temperature}; expected T > 0 (best_path is its limit)")
    batch = lattice.scores.shape[0]
    divisor = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (batch,))
    scores = _open(lattice)
    cooled = scores / divisor[:, None, None, None]
    return replace(lattice, scores=jnp.where(scores > MASKED, cooled, MASKED))


def _open(lattice: Lattice) -> jax.Array:
    """Return edge scores [B, K, C, C] with every masked one set to MASKED."""
    batch, steps, width = lattice.candidates.shape
    if lattice.scores.shape != (expected := (batch, steps, width, width)):
        raise ValueError(
            f"scores of shape {lattice.scores.shape} with candidates of shape "
            f"{lattice.candidates.shape}; expected {expected}"
        )
    return _saturate(lattice.scores.astype(jnp.float32))


def _saturate(scores: jax.Array) -> jax.Array:
    # Not `maximum`: a masked score passes no gradient on.
    return jnp.where(scores > MASKED / 2, scores, MASKED)
