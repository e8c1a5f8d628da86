"""Paths of a lattice: every answer of the scan equals enumeration."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads
from scipy import stats

from jaxdraft.base import MASKED, NO_TOKEN, Draw, Feed, Lattice, Truncation
from jaxdraft.draft import lattice as lat
from jaxdraft.testing import tiny_drafter, tiny_target

ROWS = 4
TOP = 5
SHAPES = [(1, 1), (1, 3), (4, 1), (2, 2), (3, 3)]
"""(K, C): one step, one candidate, fewer paths than TOP, more paths than TOP."""


@functools.partial(jax.jit, static_argnames="n")
def answers(lattice: Lattice, temperature: jax.Array, length: jax.Array, n: int) -> dict[str, Any]:
    """Everything at once, so that a shape compiles once."""
    best = lat.best_path(lattice, length=length)
    top = lat.top_paths(lattice, n, length=length)
    rescore = functools.partial(lat.path_score, length=length)
    walks = lat.normalize(lattice, temperature=temperature)
    return {
        "best": best,
        "best again": rescore(lattice, best.indices),
        "top": top,
        "top again": jax.vmap(rescore, in_axes=(None, 1), out_axes=1)(lattice, top.indices),
        "longest": lat.longest_path(lattice, length=length),
        "mass": lat.log_mass(lattice, temperature=temperature, length=length),
        "marginals": lat.marginals(lattice, temperature=temperature, length=length),
        "walks": walks,
        "walks' mass": lat.log_mass(walks, length=length),
    }


@jax.jit
def sample(
    keys: jax.Array, lattice: Lattice, temperature: jax.Array, length: jax.Array
) -> jax.Array:
    return lat.sample_path(keys, lattice, temperature=temperature, length=length)


class Enumerated:
    """All paths of one row, in lexicographic order, in float64."""

    def __init__(self, scores: np.ndarray, length: int):
        steps, width, _ = scores.shape
        self.length, self.shape = length, scores.shape
        masked = scores <= MASKED / 2
        self.paths = list(itertools.product(range(width), repeat=length))
        self.scores = np.zeros(len(self.paths))
        self.edges = []
        for number, path in enumerate(self.paths):
            previous = (0, *path[:-1])
            edges = [(k, i, j) for k, (i, j) in enumerate(zip(previous, path, strict=False))]
            self.edges.append(edges)
            shut = any(masked[e] for e in edges)
            self.scores[number] = -np.inf if shut else sum(float(scores[e]) for e in edges)
        self.open = self.scores > -np.inf

    def ordered(self) -> list[int]:
        """Numbers of the open paths, best first, ties lexicographic (a stable sort)."""
        order = np.argsort(-self.scores, kind="stable")
        return [int(number) for number in order if self.open[number]]

    def probabilities(self, temperature: float) -> np.ndarray:
        weights = np.exp((self.scores - self.scores.max()) / temperature)
        return weights / weights.sum()

    def log_mass(self, temperature: float) -> float:
        return float(np.logaddexp.reduce(self.scores / temperature))

    def marginals(self, temperature: float) -> np.ndarray:
        edges = np.zeros(self.shape)
        if self.open.any():
            for path, p in zip(self.edges, self.probabilities(temperature), strict=True):
                for edge in path:
                    edges[edge] += p
        return edges

    def padded(self, number: int) -> list[int]:
        return [*self.paths[number], *[0] * (self.shape[0] - self.length)]


def lattice_of(scores: np.ndarray) -> Lattice:
    """``scores`` [B, K, C, C] with step 0 as the contract has it, and candidates in between."""
    scores = np.asarray(scores, np.float32).copy()
    scores[:, 0] = scores[:, 0, :1]
    batch, steps, width, _ = scores.shape
    candidates = np.arange(batch * steps * width, dtype=np.int32).reshape(batch, steps, width)
    return Lattice(jnp.asarray(candidates), jnp.asarray(scores))


def drawn(seed: int, shape: tuple[int, int], kind: str, masked: float) -> np.ndarray:
    """Random scores; "ties": small integers, so that sums are exact and many are equal."""
    rng = np.random.default_rng(seed)
    size = (ROWS, shape[0], shape[1], shape[1])
    scores = rng.integers(0, 3, size) if kind == "ties" else 3 * rng.standard_normal(size)
    shut = rng.random(size) < masked
    whole = rng.random(size[:3]) < masked / 2  # rows and columns without any candidate
    shut |= whole[..., None] | whole[:, :, None]
    how = np.where(rng.random(size) < 0.5, MASKED, -np.inf)
    return np.where(shut, how, scores).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@given(
    seed=st.integers(0, 2**31 - 1),
    kind=st.sampled_from(["ties", "normal"]),
    masked=st.sampled_from([0.0, 0.3, 1.0]),
    data=st.data(),
)
def test_all_answers_equal_enumeration(
    shape: tuple[int, int], seed: int, kind: str, masked: float, data: st.DataObject
) -> None:
    lattice = lattice_of(drawn(seed, shape, kind, masked))
    lengths = data.draw(st.lists(st.integers(0, shape[0]), min_size=ROWS, max_size=ROWS))
    temperatures = np.asarray(data.draw(st.sampled_from([[1.0] * ROWS, [0.5, 1.0, 2.0, 7.0]])))
    told = answers(lattice, jnp.asarray(temperatures, jnp.float32), jnp.asarray(lengths), n=TOP)
    told = jax.tree.map(np.asarray, told)
    for row in range(ROWS):
        truth = Enumerated(np.asarray(lattice.scores)[row], lengths[row])
        order, temperature = truth.ordered()[:TOP], float(temperatures[row])
        best, top = told["best"], told["top"]
        if order and kind == "ties":
            assert best.indices[row].tolist() == truth.padded(order[0])
            found = [top.indices[row, r].tolist() for r in range(len(order))]
            assert found == [truth.padded(number) for number in order]
        expected = [truth.scores[number] for number in order] + [MASKED] * (TOP - len(order))
        np.testing.assert_allclose(top.score[row], expected, rtol=1e-6, atol=1e-5)
        np.testing.assert_allclose(best.score[row], expected[0], rtol=1e-6, atol=1e-5)
        # Whatever path was found has the score that was told, bit by bit; fillers are zeros.
        assert told["best again"][row] == best.score[row]
        np.testing.assert_array_equal(
            told["top again"][row, : len(order)], top.score[row][: len(order)]
        )
        assert (top.indices[row, len(order) :] == 0).all()
        assert (best.indices[row, lengths[row] :] == 0).all()
        assert order or (best.indices[row] == 0).all()

        mass, marginals = told["mass"][row], told["marginals"]
        if order:
            np.testing.assert_allclose(mass, truth.log_mass(temperature), rtol=1e-5, atol=1e-5)
        else:
            assert mass == np.float32(MASKED)
        edges = truth.marginals(temperature)
        np.testing.assert_allclose(marginals.edges[row], edges, atol=3e-6)
        np.testing.assert_allclose(marginals.nodes[row], edges.sum(axis=1), atol=3e-6)


@pytest.mark.parametrize("shape", SHAPES)
@given(seed=st.integers(0, 2**31 - 1), data=st.data())
def test_normalized_rows_are_walks(shape: tuple[int, int], seed: int, data: st.DataObject) -> None:
    """Mass one, and the marginals, scores and longest path of walks, enumerated."""
    lattice = lattice_of(drawn(seed, shape, "normal", 0.0))
    lengths = data.draw(st.lists(st.integers(0, shape[0]), min_size=ROWS, max_size=ROWS))
    told = answers(lattice, jnp.full((ROWS,), 0.7), jnp.asarray(lengths), n=TOP)
    np.testing.assert_allclose(told["walks' mass"], np.zeros(ROWS), atol=1e-5)
    scores = np.asarray(lattice.scores, np.float64)
    for row in range(ROWS):
        logs = scores[row] - np.logaddexp.reduce(scores[row], axis=-1, keepdims=True)
        truth = Enumerated(logs, lengths[row])
        agreed = [
            sum(np.exp(sum(logs[e] for e in edges[: k + 1])) for k in range(len(edges)))
            for edges in truth.edges
        ]
        path = told["longest"]
        if lengths[row] == 0:
            assert path.score[row] == np.float32(MASKED) and not path.indices[row].any()
            continue
        np.testing.assert_allclose(np.exp(path.score[row]), max(agreed), rtol=1e-5)
        index = truth.paths.index(tuple(path.indices[row].tolist()[: lengths[row]]))
        np.testing.assert_allclose(agreed[index], max(agreed), rtol=1e-5)


def test_best_path_is_not_the_greedy_walk() -> None:
    """The documented example: the walk takes the better first edge, the path the better sum."""
    scores = np.zeros((1, 2, 2, 2))
    scores[0, 0] = [1, 0]
    scores[0, 1] = [[0, 0], [0, 3]]
    lattice = lattice_of(scores)
    assert lat.walk(lattice, lat.greedy).tolist() == [[0, 0]]
    best = lat.best_path(lattice)
    assert best.indices.tolist() == [[1, 1]] and best.score.tolist() == [3]
    assert lat.path_tokens(lattice, best.indices).tolist() == [[1, 3]]
    assert lat.top_paths(lattice, 2).indices.tolist() == [[[1, 1], [0, 0]]]


def test_equal_scores_take_the_lowest_indices() -> None:
    lattice = lattice_of(np.zeros((1, 3, 3, 3)))
    assert lat.best_path(lattice).indices.tolist() == [[0, 0, 0]]
    top = lat.top_paths(lattice, 4).indices.tolist()
    assert top == [[[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0]]]


def test_a_masked_score_is_masked_at_any_temperature() -> None:
    """MASKED / T with a large T, and MASKED plus something, are still no way through."""
    scores = np.zeros((1, 2, 2, 2))
    scores[0, :, :, 1] = 1.2 * MASKED
    found = lat.marginals(lattice_of(scores), temperature=1e4)
    np.testing.assert_array_equal(found.nodes, [[[1, 0], [1, 0]]])
    dead = lattice_of(np.full((1, 2, 2, 2), 0.7 * MASKED))
    assert lat.log_mass(dead, temperature=1e4).tolist() == [np.float32(MASKED)]
    assert lat.sample_path(jax.random.split(jax.random.key(0), 1), dead).tolist() == [[0, 0]]
    assert not np.asarray(lat.marginals(dead).edges).any()
    np.testing.assert_array_equal(lat.normalize(dead).scores, np.full((1, 2, 2, 2), MASKED, "f4"))


def test_steps_past_the_length_do_not_matter() -> None:
    """A shorter lattice in a longer buffer, whatever the buffer holds."""
    scores = drawn(5, (3, 3), "normal", 0.0)
    lengths = np.asarray([0, 1, 2, 3])
    beyond = (np.arange(3) >= lengths[:, None])[..., None, None]
    one, lengths = jnp.ones((ROWS,)), jnp.asarray(lengths)
    keys = jax.random.split(jax.random.key(1), ROWS)
    found = []
    for garbage in (0.0, 9e4, np.nan):
        lattice = lattice_of(np.where(beyond, np.float32(garbage), scores))
        told = answers(lattice, one, lengths, n=TOP)
        del told["walks"]
        found.append((told, sample(keys.copy(), lattice, one, lengths)))
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, found[0])
    assert not np.asarray(found[0][1])[np.asarray(beyond[..., 0, 0])].any()


def test_marginals_sum_to_one_however_large_the_mass() -> None:
    """A large log Z takes no digits of the sums: every step is one, every node is passed on."""
    scores = drawn(3, (3, 3), "normal", 0.0)
    found = lat.marginals(lattice_of(scores + 3e4))
    np.testing.assert_allclose(found.nodes.sum(axis=-1), np.ones((ROWS, 3)), rtol=1e-6)
    passed = found.edges[:, 1:].sum(axis=-1)
    np.testing.assert_allclose(passed, found.nodes[:, :-1], rtol=1e-6)


# ------------------------------------------------------------------ sampling

SAMPLES = 20_000


def sampling_case() -> tuple[Lattice, float]:
    """27 paths, 18 of them open, whose later steps matter for the first."""
    scores = 1.5 * np.random.default_rng(8).standard_normal((1, 3, 3, 3))
    scores[0, 2, 1] += 2.0  # a row that only the global distribution notices
    scores[0, 1, :, 2] = MASKED
    return lattice_of(scores), 0.8


def p_value(indices: jax.Array, expected: np.ndarray) -> float:
    """Of a chi-square test of paths [S, 1, K] against the probabilities of all paths."""
    numbers = np.asarray(indices)[:, 0] @ np.asarray([9, 3, 1])
    counts = np.bincount(numbers, minlength=expected.size)
    if counts[expected == 0].any():
        return 0.0
    merged = expected * SAMPLES >= 5  # rare paths share a cell
    cells = [*counts[merged], counts[~merged].sum()], [*expected[merged], expected[~merged].sum()]
    found, wanted = (np.asarray(c) for c in cells)
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    return float(stats.chisquare(found, wanted / wanted.sum() * SAMPLES).pvalue)


def test_samples_are_of_the_gibbs_distribution_and_mutants_are_not() -> None:
    lattice, temperature = sampling_case()
    scores = np.asarray(lattice.scores)[0]
    gibbs = Enumerated(scores, 3).probabilities(temperature)
    cooled = scores / temperature
    logs = cooled - np.logaddexp.reduce(cooled, axis=-1, keepdims=True)
    logs[scores <= MASKED / 2] = MASKED
    walked = Enumerated(logs, 3).probabilities(1.0)
    keys = jax.random.split(jax.random.key(2), (3, SAMPLES, 1))

    length = jnp.full((1,), 3)
    draw = jax.vmap(sample, in_axes=(0, None, None, None))
    exact = draw(keys[0], lattice, jnp.full((1,), temperature), length)
    walks = draw(keys[1], lat.normalize(lattice, temperature=temperature), jnp.ones((1,)), length)
    assert p_value(exact, gibbs) > 1e-3
    assert p_value(walks, walked) > 1e-3
    # Mutants: the other distribution, the temperature forgotten, one step drawn with another's key.
    assert p_value(exact, walked) < 1e-9
    assert p_value(walks, gibbs) < 1e-9
    assert p_value(draw(keys[2], lattice, jnp.ones((1,)), length), gibbs) < 1e-9
    stuck = np.asarray(exact)
    assert p_value(np.concatenate([stuck[..., :2], stuck[..., :1]], axis=-1), gibbs) < 1e-9


def test_a_row_is_sampled_alike_in_any_batch() -> None:
    """Rows in another order, with their keys, give the same paths in that order."""
    lattice = lattice_of(drawn(4, (3, 3), "normal", 0.0))
    keys = jax.random.split(jax.random.key(3), ROWS)
    order = jnp.asarray([2, 0, 3, 1])
    rest = jnp.ones((ROWS,)), jnp.full((ROWS,), 3)
    found = sample(keys[order], jax.tree.map(lambda x: x[order], lattice), *rest)
    np.testing.assert_array_equal(found, sample(keys.copy(), lattice, *rest)[order])


# ------------------------------------------------------------------ gradients


def test_gradients() -> None:
    lattice = lattice_of(drawn(6, (3, 2), "normal", 0.0))
    weights = jax.random.normal(jax.random.key(0), lattice.scores.shape)

    @jax.jit
    def mass(scores: jax.Array) -> jax.Array:
        return jnp.sum(lat.log_mass(replace(lattice, scores=scores), temperature=1.5))

    @jax.jit
    def weighed(scores: jax.Array) -> jax.Array:
        return jnp.sum(weights * lat.marginals(replace(lattice, scores=scores)).edges)

    check_grads(mass, (lattice.scores,), order=1, modes=("fwd", "rev"), atol=2e-2, rtol=2e-2)
    check_grads(weighed, (lattice.scores,), order=1, modes=("rev",), atol=2e-2, rtol=2e-2)
    # d log Z / d score = marginal / T, and nothing flows into a masked edge.
    masked = replace(lattice, scores=lattice.scores.at[:, 1, 0, 1].set(MASKED))
    found = lat.marginals(masked, temperature=1.5).edges
    np.testing.assert_allclose(jax.grad(mass)(masked.scores), found / 1.5, atol=1e-6)
    assert not np.asarray(found[:, 1, 0, 1]).any()


def test_the_best_score_has_the_gradient_of_its_path_alone() -> None:
    """At ties too: one on the edges that are taken, zero elsewhere."""
    lattice = lattice_of(np.zeros((1, 2, 3, 3)))
    expected = np.zeros((1, 2, 3, 3))
    expected[0, :, 0, 0] = 1

    def score(scores: jax.Array) -> jax.Array:
        return lat.best_path(replace(lattice, scores=scores)).score[0]

    def third(scores: jax.Array) -> jax.Array:
        return lat.top_paths(replace(lattice, scores=scores), 3).score[0, 2]

    np.testing.assert_array_equal(jax.grad(score)(lattice.scores), expected)
    expected[0, 1, 0] = [0, 0, 1]
    np.testing.assert_array_equal(jax.grad(third)(lattice.scores), expected)


# ------------------------------------------------------------------ proposals


def test_a_block_drafter_proposes_the_path_it_is_told() -> None:
    """Among the drafts that a row can use; a row of temperature zero in a drawn batch too."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    keys = jax.random.split(jax.random.key(5), 3)
    ones, none = jnp.ones((3,)), jnp.zeros((3,))
    cold = Truncation(jnp.asarray([0.0, 1.0, 0.0]), none.astype(jnp.int32), ones, none)
    feed = Feed(
        aux=jax.random.normal(jax.random.key(0), (3, 5, drafter.config.aux_width)),
        count=jnp.full((3,), 5),
        first_position=jnp.zeros((3,), jnp.int32),
        anchor=jnp.asarray([7, 8, 9]),
        wants_draft=jnp.ones((3,), bool),
        limit=jnp.asarray([9, 2, 1]),
    )
    told = replace(drafter, path="best")
    _, proposal, _ = told.step(told.init(3, 64), feed)
    lattice, length = proposal.lattice, proposal.length
    assert lattice is not None and length.tolist() == [3, 2, 1]
    kept = np.arange(3) < np.asarray(length)[:, None]
    best = lat.path_tokens(lattice, lat.best_path(lattice, length=length).indices)
    np.testing.assert_array_equal(proposal.tokens, np.where(kept, best, NO_TOKEN))

    drawn = {}
    for path, choose in lat.PROPOSALS.items():
        told = replace(drafter, path=path)
        expected = lat.path_tokens(lattice, choose(lattice, length))
        pick = jax.jit(type(told)._choose)
        tokens, support = pick(told, lattice, length, None, None)
        assert support is None
        np.testing.assert_array_equal(tokens, expected)
        tokens, support = pick(told, lattice, length, Draw(cold, keys.copy()), None)
        drawn[path] = np.asarray(tokens)
        assert support is not None
        np.testing.assert_array_equal(tokens[::2], expected[::2])
        hit = support.tokens == tokens[..., None]
        certain = np.asarray(jnp.sum(jnp.where(hit, support.probs, 0), axis=-1))
        assert (certain[::2] == 1).all() and 0 < certain[1, 0] < 1
        np.testing.assert_array_equal(tokens[1], drawn["walk"][1])
    assert (drawn["best"] != drawn["walk"]).any()
    with pytest.raises(ValueError, match="'shortest'; expected one of walk, best"):
        replace(drafter, path="shortest")


# ------------------------------------------------------------------ transformations and errors


def ask(lattice: Lattice, keys: jax.Array) -> Any:
    return lat.best_path(lattice), lat.marginals(lattice), lat.sample_path(keys, lattice)


@functools.cache
def asked_together() -> tuple[list[Lattice], jax.Array, Any]:
    """Two lattices, keys, and the answers under vmap over one more axis."""
    lattices = [lattice_of(drawn(seed, (2, 2), "normal", 0.2)) for seed in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *lattices)
    keys = jax.random.split(jax.random.key(0), (2, ROWS))
    return lattices, keys, jax.jit(jax.vmap(ask))(stacked, keys.copy())


class TransformTest(chex.TestCase):
    """The same answers with jit, without it, and under vmap."""

    @chex.variants(with_jit=True, without_jit=True)
    def test_variants(self) -> None:
        lattices, keys, together = asked_together()
        for number, lattice in enumerate(lattices):
            alone = self.variant(ask)(lattice, keys.copy()[number])
            here = jax.tree.map(lambda x, n=number: x[n], together)
            chex.assert_trees_all_close(here, alone, rtol=1e-6, atol=1e-7)


def test_an_algebra_of_ones_own() -> None:
    """Counting open paths: the mass of zero scores, in numbers instead of logs."""
    scores = np.zeros((1, 3, 3, 3))
    scores[0, 1, :, 2] = MASKED
    scores[0, 2, 0] = MASKED
    ways = lat.to_go(lattice_of(scores), lat.MASS).worth
    np.testing.assert_allclose(np.exp(ways), [[3 * 1 * 3]], rtol=1e-6)
    worst = lat.Algebra(lambda x: (-lat.BEST.join(-x)[0], lat.BEST.join(-x)[1]))
    costs = np.random.default_rng(0).integers(0, 9, (ROWS, 3, 3, 3))
    lattice = lattice_of(costs)
    found = lat.to_go(lattice, worst).worth[:, 0]
    expected = [Enumerated(np.asarray(row), 3).scores.min() for row in lattice.scores]
    np.testing.assert_array_equal(found, expected)


def test_wrong_arguments_are_refused_with_their_values() -> None:
    lattice = lattice_of(np.zeros((1, 2, 3, 3)))
    with pytest.raises(ValueError, match="n is 0"):
        lat.top_paths(lattice, 0)
    for temperature in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature is"):
            lat.log_mass(lattice, temperature=temperature)
    bad = replace(lattice, scores=lattice.scores[:, :1])
    with pytest.raises(ValueError, match=r"\(1, 1, 3, 3\).*\(1, 2, 3\).*expected \(1, 2, 3, 3\)"):
        lat.best_path(bad)
