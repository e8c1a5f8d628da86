"""Every public function under JAX's transformations and settings: the values do not change.

``tests/two_devices.py`` holds what needs two devices; it runs in a process of its own.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxdraft
from jaxdraft import Model, Sampling
from jaxdraft.base import Draw, Truncation
from jaxdraft.draft import lattice as lattices
from jaxdraft.draft.adaptive import AdaptiveDrafter
from jaxdraft.draft.confident import ConfidentDrafter
from jaxdraft.draft.sampled import sampled_walk
from jaxdraft.keys import own_streams
from jaxdraft.testing import LatticeDrafter, TableTarget, tiny_model
from tests.examples import LONG, first

IDS = np.asarray([[1, 2, 3, 4], [5, 6, 7, 8]], np.int32)
WARM = Sampling(
    temperature=1.1, top_k=7, top_p=0.9, min_p=0.02, repetition_penalty=1.2,
    presence_penalty=0.1, min_new_tokens=2, logit_bias={3: 1.5},
)  # fmt: skip


@pytest.fixture(scope="module")
def table() -> Model:
    return Model.of(
        TableTarget.random(jax.random.key(0)), LatticeDrafter.random(jax.random.key(1), 16)
    )


@pytest.fixture(autouse=True)
def _keys_are_used_twice() -> Iterator[None]:
    """One key serves a call and its reference here."""
    with jax.debug_key_reuse(False):
        yield


def arguments(model: Model) -> dict[str, Any]:
    """Everything that may be traced."""
    return dict(
        model=model,
        prompts=jnp.asarray(IDS),
        lengths=jnp.asarray([4, 3], jnp.int32),
        key=jax.random.key(7),
        sampling=WARM,
        draft_limit=jnp.asarray([3, 2], jnp.int32),
        stop_ids=jnp.asarray([9], jnp.int32),
    )


def tokens(given: dict[str, Any]) -> jax.Array:
    return jaxdraft.generate(max_new_tokens=6, logprobs=1, trace=True, **given).tokens


# --------------------------------------------------------------------------- what is traced

SUBSETS = [
    (),
    ("model",),
    ("prompts",),
    ("lengths",),
    ("key",),
    ("sampling",),
    ("draft_limit",),
    ("stop_ids",),
    ("prompts", "stop_ids", "draft_limit"),
    ("model", "prompts", "lengths", "key", "sampling", "draft_limit", "stop_ids"),
]


def under_jit(run: Callable[[Any], jax.Array], given: Any) -> Any:
    return jax.jit(run)(given)


def under_checkpoint(run: Callable[[Any], jax.Array], given: Any) -> Any:
    return jax.jit(jax.checkpoint(run))(given)


def under_map(run: Callable[[Any], jax.Array], given: Any) -> Any:
    stacked = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), given)
    if not jax.tree.leaves(stacked):
        return jax.lax.map(lambda _: run(given), jnp.arange(2, dtype=jnp.int32))[1]
    return jax.lax.map(run, stacked)[1]


def under_vmap(run: Callable[[Any], jax.Array], given: Any) -> Any:
    stacked = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), given)
    if not jax.tree.leaves(stacked):
        return run(given)
    return jax.vmap(run)(stacked)[1]


def under_scan(run: Callable[[Any], jax.Array], given: Any) -> Any:
    return jax.lax.scan(lambda carry, _: (carry, run(carry)), given, None, length=2)[1][1]


def under_shard_map(run: Callable[[Any], jax.Array], given: Any) -> Any:
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("x",))
    whole = PartitionSpec()
    mapped = jax.shard_map(run, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return jax.jit(mapped)(given)


ALL = [under_jit, under_checkpoint, under_map, under_vmap, under_scan, under_shard_map]


@pytest.mark.parametrize("traced", SUBSETS, ids="+".join)
def test_any_argument_may_be_traced(table: Model, traced: tuple[str, ...]) -> None:
    given = arguments(table)
    expected = tokens(given)
    moving = {name: given[name] for name in traced}

    def run(moving: Any) -> jax.Array:
        return tokens({**given, **moving})

    for transform in ALL if LONG or traced == ("model",) else [under_jit, under_vmap]:
        if transform in (under_map, under_vmap, under_scan) and "sampling" in traced:
            continue  # its static fields pass, and its numbers do below
        found = transform(run, moving)
        np.testing.assert_array_equal(found, expected, err_msg=transform.__name__)
    shape = jax.eval_shape(run, moving)
    assert (shape.shape, shape.dtype) == (expected.shape, expected.dtype)


BATCHED: dict[str, list[Any]] = dict(
    temperature=[0.7, 1.2],
    top_k=[3, 0],
    top_p=[0.5, 0.9],
    min_p=[0.3, 0.0],
    logit_bias=[{2: 4.0}, {2: -4.0}],
)


@pytest.mark.parametrize("names", first(1, [tuple(BATCHED), *((name,) for name in BATCHED)]))
def test_numbers_of_sampling_are_batched(table: Model, names: tuple[str, ...]) -> None:
    values = [{name: BATCHED[name][row] for name in names} for row in range(2)]

    def run(value: Any) -> jax.Array:
        how = dataclasses.replace(Sampling(), **value)
        return jaxdraft.generate(table, IDS, max_new_tokens=6, sampling=how, key=3).tokens

    stacked = jax.tree.map(
        lambda *x: jnp.asarray(x, jnp.float32 if isinstance(x[0], float) else jnp.int32), *values
    )
    found = jax.vmap(run)(stacked)
    for value, row in zip(values, found, strict=True):
        np.testing.assert_array_equal(row, run(value))


def test_a_closed_program_has_no_arguments(table: Model) -> None:
    found = jax.jit(lambda: tokens(arguments(table)))()
    np.testing.assert_array_equal(found, tokens(arguments(table)))


def test_keys_are_mapped(table: Model) -> None:
    def draw(key: jax.Array) -> jax.Array:
        return jaxdraft.generate(table, IDS, max_new_tokens=6, sampling=WARM, key=key).tokens

    keys = jax.random.split(jax.random.key(0), 3)
    expected = jnp.stack([draw(key) for key in keys])
    assert not np.array_equal(expected[0], expected[1])
    np.testing.assert_array_equal(jax.vmap(draw)(keys), expected)
    np.testing.assert_array_equal(jax.lax.map(draw, keys), expected)


@pytest.mark.parametrize(
    "name", ["max_new_tokens", "max_length", "draft_tokens", "logprobs", "memory"]
)
def test_what_decides_about_buffers_is_not_traced(table: Model, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is traced; expected a Python number"):
        jax.jit(lambda n: jaxdraft.generate(table, IDS, **{name: n}).tokens)(4)


def test_what_runs_on_the_host_refuses_traced_arguments(table: Model) -> None:
    ids = jnp.asarray(IDS)
    for run in (lambda p: jaxdraft.stream(table, p), lambda p: jaxdraft.stream(table, IDS)):
        with pytest.raises(ValueError, match="under jit, call jaxdraft.generate"):
            jax.jit(run)(ids)
    with pytest.raises(ValueError, match="under jit, call jaxdraft.generate"):
        jax.jit(lambda key: jaxdraft.stream(table, IDS, sampling=WARM, key=key))(jax.random.key(0))
    engine = jaxdraft.Engine(tiny_model(None), max_batch=1, page_size=16, context=64)
    with pytest.raises(ValueError, match="the prompt is traced"):
        jax.jit(lambda p: engine.submit(p))(ids[0])


def test_a_checked_shard_map_is_refused_in_words(table: Model) -> None:
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("x",))
    split = PartitionSpec("x")

    for run in (
        lambda p: jaxdraft.generate(table, p, max_new_tokens=2).tokens,
        lambda p: jaxdraft.score(table, p).logits,
    ):
        mapped = jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split)
        with pytest.raises(ValueError, match=r"over the mesh axes \['x'\].*check_vma=False"):
            jax.jit(mapped)(jnp.asarray(IDS))


def test_score(table: Model) -> None:
    ids, lengths = jnp.asarray(IDS), jnp.asarray([4, 4], jnp.int32)
    expected = jaxdraft.score(table, IDS, lengths).logits

    def close(found: Any) -> None:
        np.testing.assert_allclose(found, expected, rtol=1e-6)

    close(jax.jit(lambda m: jaxdraft.score(m, ids, lengths).logits)(table))
    close(jax.jit(lambda n: jaxdraft.score(table, IDS, n).logits)(lengths))
    expected = jaxdraft.score(table, IDS).logits  # of whole rows
    close(jax.vmap(lambda p: jaxdraft.score(table, p).logits[0])(ids))
    close(jax.lax.map(lambda p: jaxdraft.score(table, p[None]).logits[0], ids))
    shape = jax.eval_shape(lambda m, p: jaxdraft.score(m, p).logits, table, ids)
    assert shape.shape == expected.shape


def test_an_exported_program_takes_the_model(table: Model) -> None:
    from jax import export

    model = tiny_model("dflash2")
    ids = jnp.asarray(IDS)
    leaves, tree = jax.tree.flatten(model)

    def run(leaves: list[jax.Array], ids: jax.Array) -> jax.Array:
        return jaxdraft.generate(tree.unflatten(leaves), ids, max_new_tokens=4).tokens

    expected = jaxdraft.generate(model, ids, max_new_tokens=4).tokens
    exported = export.export(jax.jit(run))(leaves, ids)
    np.testing.assert_array_equal(exported.call(leaves, ids), expected)
    stored = export.deserialize(exported.serialize())
    np.testing.assert_array_equal(stored.call(leaves, ids), expected)
    whole = jax.jit(lambda m, ids: jaxdraft.generate(m, ids, max_new_tokens=4).tokens)
    np.testing.assert_array_equal(export.export(whole)(model, ids).call(model, ids), expected)


# --------------------------------------------------------------------------- forms of arguments


def test_prompts_come_in_every_form(table: Model) -> None:
    row = [1, 2, 3, 4]
    expected = jaxdraft.generate(table, [row], max_new_tokens=5).ids()
    scored = jaxdraft.score(table, [row]).logits
    forms: list[Any] = [
        row,
        (1, 2, 3, 4),
        np.asarray(row),
        np.asarray(row, np.uint8),
        jnp.asarray(row),
        [np.int64(1), 2, np.int32(3), 4],
        [jnp.asarray(1), 2, 3, 4],
        [jnp.asarray(i) for i in row],
        [np.asarray(row)],
        [jnp.asarray(row)],
        np.asarray([row]),
        jnp.asarray([row]),
    ]
    engine = jaxdraft.Engine(tiny_model(None), max_batch=1, page_size=16, context=64)
    served = engine.submit(row, max_new_tokens=3).result()
    for form in forms:
        assert jaxdraft.generate(table, form, max_new_tokens=5).ids() == expected, form
        np.testing.assert_array_equal(jaxdraft.score(table, form).logits, scored)
        events = [e.tokens for e in jaxdraft.stream(table, form, max_new_tokens=5)]
        assert sum(events, []) == expected[0], form
        if np.ndim(form) == 1:
            assert engine.submit(form, max_new_tokens=3).result() == served, form


def test_rows_are_traced_one_by_one(table: Model) -> None:
    expected = jaxdraft.generate(table, [[1, 2, 3, 4], [5, 6]], max_new_tokens=5).tokens
    run = jax.jit(lambda a, b: jaxdraft.generate(table, [a, b], max_new_tokens=5).tokens)
    np.testing.assert_array_equal(run(jnp.asarray([1, 2, 3, 4]), jnp.asarray([5, 6])), expected)
    last = jax.jit(lambda t: jaxdraft.generate(table, [1, 2, 3, t], max_new_tokens=5).tokens)
    np.testing.assert_array_equal(last(4), expected[:1])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (np.asarray(3), "expected a string, ids, or a list of those"),
        (jnp.ones((2, 2, 2), jnp.int32), "prompt 0 has shape"),
        (jnp.asarray([1.0, 2.0]), "prompt 0 holds float32"),
        (jnp.zeros((0,), jnp.int32), "prompt 0 is empty"),
        (jnp.asarray([99]), "prompt 0 holds id 99"),
    ],
)
def test_prompts_of_other_forms_are_refused(table: Model, prompts: Any, message: str) -> None:
    for call in (jaxdraft.generate, jaxdraft.stream, jaxdraft.score):
        with pytest.raises(ValueError, match=message):
            call(table, prompts)


def test_a_seed_is_a_seed(table: Model) -> None:
    def draw(key: Any) -> jax.Array:
        return jaxdraft.generate(table, IDS, max_new_tokens=6, sampling=WARM, key=key).tokens

    expected = draw(jax.random.key(3))
    forms = [3, np.int64(3), np.uint32(3), np.asarray(3), jnp.asarray(3), jnp.uint32(3)]
    for form in [*forms, jax.random.PRNGKey(3), np.asarray(jax.random.PRNGKey(3))]:
        np.testing.assert_array_equal(draw(form), expected, err_msg=str(type(form)))
    np.testing.assert_array_equal(jax.jit(draw)(3), expected)
    np.testing.assert_array_equal(draw(-3), draw(jax.random.key(-3)))
    np.testing.assert_array_equal(draw(2**40 + 3), expected)
    with jax.enable_x64(True):
        for form in (3, jnp.asarray(3)):
            np.testing.assert_array_equal(draw(form), expected)
        np.testing.assert_array_equal(draw(-3), draw(jnp.asarray(-3, jnp.int32)))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("three", "key is 'three'; expected a PRNG key or a seed"),
        (0.5, "key is 0.5; expected a PRNG key or a seed"),
        (np.float32(0.5), "key is .*expected a PRNG key"),
        (jax.random.split(jax.random.key(0), 2), "expected one key"),
        (np.zeros(3, np.uint32), r"key is uint32\[3\]; expected a PRNG key, its 2 or 4 words"),
        (np.zeros(2, np.int32), r"key is int32\[2\]; expected a PRNG key, its 2 or 4 words"),
    ],
)
def test_keys_of_other_forms_are_refused(table: Model, key: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jaxdraft.generate(table, IDS, sampling=WARM, key=key)


# --------------------------------------------------------------------------- kinds of keys


@pytest.mark.parametrize("kind", first(2, ["rbg", "threefry2x32", "unsafe_rbg"]))
def test_a_row_draws_whatever_is_beside_it(table: Model, kind: str) -> None:
    key = jax.random.key(5, impl=kind)

    def draw(ids: np.ndarray, key: jax.Array = key) -> np.ndarray:
        out = jaxdraft.generate(table, ids, max_new_tokens=8, sampling=WARM, key=key)
        return np.asarray(out.tokens)

    both = draw(IDS)
    np.testing.assert_array_equal(draw(IDS[:1])[0], both[0])
    swapped = np.concatenate([IDS[:1], IDS[:1]])
    np.testing.assert_array_equal(draw(swapped)[0], both[0])
    assert not np.array_equal(draw(swapped)[0], draw(swapped)[1])
    assert not np.array_equal(both, draw(IDS, jax.random.key(6, impl=kind)))
    mapped = jax.vmap(lambda k: draw_traced(table, k))(jax.random.split(key, 2))
    for found, one in zip(mapped, jax.random.split(key, 2), strict=True):
        np.testing.assert_array_equal(found, draw_traced(table, one))


def draw_traced(model: Model, key: jax.Array) -> jax.Array:
    return jaxdraft.generate(model, IDS, max_new_tokens=4, sampling=WARM, key=key).tokens


@pytest.mark.parametrize("kind", first(1, ["rbg", "unsafe_rbg"]))
def test_paths_and_drafts_draw_row_by_row(table: Model, kind: str) -> None:
    keys = jax.random.split(jax.random.key(2, impl=kind), 2)
    lattice = table.drafter.lattice(jnp.asarray([3, 3], jnp.int32))  # type: ignore[attr-defined]
    wide = jax.tree.map(lambda x: jnp.repeat(x, 32, axis=0), lattice)
    many = jax.random.split(jax.random.key(2, impl=kind), 64)
    paths = lattices.sample_path(many, wide)
    assert len(np.unique(np.asarray(paths), axis=0)) > 4  # not one draw for all rows
    ones = jnp.ones((2,), jnp.float32)
    none = Truncation(ones, jnp.zeros((2,), jnp.int32), ones, 0 * ones)
    walked = sampled_walk(lattice, Draw(none, keys))[0]
    for row in range(2):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], (lattice, Draw(none, keys)))
        np.testing.assert_array_equal(sampled_walk(*one)[0][0], walked[row])
    for row in (0, 63):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], wide)
        np.testing.assert_array_equal(lattices.sample_path(many[row : row + 1], one)[0], paths[row])
    assert own_streams(keys).shape == (2,)


def test_the_default_kind_of_key_plays_no_part(table: Model) -> None:
    key = jax.random.key(4)
    engine = jaxdraft.Engine(tiny_model(None), max_batch=2, page_size=16, context=64)
    seeded, served = draw_traced(table, 4), []  # type: ignore[arg-type]
    for kind in ("threefry2x32", "rbg"):
        with jax.default_prng_impl(kind):
            np.testing.assert_array_equal(draw_traced(table, 4), seeded)  # type: ignore[arg-type]
            np.testing.assert_array_equal(draw_traced(table, key), seeded)
            fresh = jax.random.key(9)
            one = engine.submit([1, 2, 3], max_new_tokens=4, sampling=Sampling(), key=fresh)
            two = engine.submit([4, 5], max_new_tokens=4, sampling=Sampling(), key=9)
            alone = jaxdraft.generate(
                engine.model, [1, 2, 3], max_new_tokens=4, sampling=Sampling(), key=fresh
            )
            assert one.result() == alone.ids()[0]
            served.append(two.result())
    assert served[0] == served[1]


@pytest.mark.parametrize("partitionable", [False, True])
def test_threefry_partitionable(table: Model, partitionable: bool) -> None:
    with jax.threefry_partitionable(partitionable):
        both = draw_traced(table, jax.random.key(1))
        again = jax.jit(lambda k: draw_traced(table, k))(jax.random.key(1))
        np.testing.assert_array_equal(again, both)


# --------------------------------------------------------------------------- settings

CASES: dict[str, Callable[[Model], Any]] = {
    "none": lambda model: "none",
    "own": lambda model: "auto",
    "fallback": lambda model: "ngram+auto",
    "adaptive": lambda model: AdaptiveDrafter(model.drafter),
    "confident": lambda model: ConfidentDrafter(model.drafter),
    "longest": lambda model: dataclasses.replace(model.drafter, path="longest"),
}


def everything(kind: str, case: str) -> Any:
    """All numbers of a generation, a stream and an engine."""
    model = tiny_model(kind)
    drafter = CASES[case](model)
    options: Any = dict(max_new_tokens=5, drafter=drafter, sampling=WARM, key=3)
    out = jaxdraft.generate(model, IDS, logprobs=2, trace=True, **options)
    greedy = jaxdraft.generate(model, IDS, max_new_tokens=5, drafter=drafter)
    return [
        jax.tree.map(np.asarray, (o.tokens, o.lengths, o.stats, o.trace, o.logprobs))
        for o in (out, greedy)
    ]


@pytest.mark.parametrize(
    ("kind", "case"),
    first(
        2,
        [
            ("dspark", "confident"), ("mtp", "fallback"), ("dflash2", "adaptive"),
            ("dflash2", "own"), ("dflash2", "longest"), ("mtp", "own"), ("dspark", "none"),
        ],
    ),
)  # fmt: skip
def test_x64_gives_the_same_numbers(kind: str, case: str) -> None:
    expected = everything(kind, case)
    with jax.enable_x64(True):
        found = everything(kind, case)
    assert_same(found, expected)


def assert_same(found: Any, expected: Any) -> None:
    """Equal integers, equal types, and floats up to how XLA rounds a program."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        if np.issubdtype(a.dtype, np.floating):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(a, b)


def served() -> Any:
    model = tiny_model("dflash2")
    engine = jaxdraft.Engine(model, max_batch=2, page_size=16, context=64)
    requests = [
        engine.submit(row, max_new_tokens=5, sampling=how, key=2, logprobs=1)
        for row, how in zip(IDS.tolist(), (None, WARM), strict=True)
    ]
    streamed = [e.tokens for e in jaxdraft.stream(model, IDS, max_new_tokens=5, logprobs=1)]
    scored = jax.tree.map(np.asarray, jaxdraft.score(model, IDS).logits)
    return [request.result() for request in requests], streamed, scored


def test_x64_in_the_engine_the_stream_and_scores() -> None:
    expected = served()
    with jax.enable_x64(True):
        found = served()
    assert found[:2] == expected[:2]
    assert_same(found[2], expected[2])


LATTICE_CALLS: dict[str, Callable[[Any], Any]] = {
    "walk": lambda x: lattices.walk(x, lattices.greedy),
    "best_path": lattices.best_path,
    "top_paths": lambda x: lattices.top_paths(x, 3),
    "longest_path": lattices.longest_path,
    "normalize": lattices.normalize,
    "log_mass": lambda x: lattices.log_mass(x, temperature=0.7),
    "marginals": lattices.marginals,
    "sample_path": lambda x: lattices.sample_path(jax.random.split(jax.random.key(0), 2), x),
}


def lattice_of(model: Model) -> Any:
    return model.drafter.lattice(jnp.asarray([1, 2], jnp.int32))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", LATTICE_CALLS)
def test_lattices(table: Model, name: str) -> None:
    call, lattice = LATTICE_CALLS[name], lattice_of(table)
    expected = jax.tree.map(np.asarray, call(lattice))
    with jax.enable_x64(True):
        given = jax.tree.map(jnp.asarray, lattice)
        assert_same(jax.tree.map(np.asarray, call(given)), expected)
        wide = dataclasses.replace(given, scores=given.scores.astype(jnp.float64))
        assert_same(jax.tree.map(np.asarray, call(wide)), expected)
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), lattice)
    for found in (
        under_jit(call, lattice),
        under_shard_map(call, lattice),
        jax.tree.map(lambda x: x[1], jax.vmap(call)(twice)),
        jax.tree.map(lambda x: x[1], jax.lax.map(call, twice)),
    ):
        assert_same(jax.tree.map(np.asarray, found), expected)


@pytest.mark.parametrize("name", ["best_path", "top_paths", "longest_path", "log_mass"])
def test_gradients_of_lattices(table: Model, name: str) -> None:
    lattice = lattice_of(table)

    def total(scores: jax.Array) -> jax.Array:
        found = LATTICE_CALLS[name](dataclasses.replace(lattice, scores=scores))
        return jnp.sum(getattr(found, "score", found))

    gradient = jax.jit(jax.grad(total))(lattice.scores)
    step = jax.random.normal(jax.random.key(5), lattice.scores.shape, jnp.float32)
    size = 1e-2
    slope = (total(lattice.scores + size * step) - total(lattice.scores - size * step)) / (2 * size)
    assert float(jnp.sum(gradient * step)) == pytest.approx(float(slope), rel=2e-2, abs=2e-2)


@pytest.mark.parametrize("kind", ["dflash2", "dspark", "mtp"])
def test_steps_of_drafters(kind: str) -> None:
    model = tiny_model(kind)
    target, drafter = model.target, model.drafter

    def step(drafter: Any, ids: jax.Array) -> Any:
        count = jnp.full((2,), 4, jnp.int32)
        out = target.forward(ids, count, target.init(2, 32))
        feed = jaxdraft.base.Feed(
            aux=out.aux, hidden=out.hidden, tokens=ids, count=count,
            first_position=jnp.zeros((2,), jnp.int32), anchor=jnp.asarray([3, 4], jnp.int32),
            wants_draft=jnp.ones((2,), bool), limit=jnp.full((2,), 3, jnp.int32),
        )  # fmt: skip
        return drafter.step(drafter.init(2, 32), feed)[1].tokens

    ids = jnp.asarray(IDS)
    expected = np.asarray(step(drafter, ids))
    np.testing.assert_array_equal(jax.jit(step)(drafter, ids), expected)
    twice = jnp.stack([ids, ids])
    mapped = jax.jit(jax.vmap(step, in_axes=(None, 0)))(drafter, twice)
    np.testing.assert_array_equal(mapped[1], expected)
    assert jax.eval_shape(step, drafter, ids).shape == expected.shape
    with jax.enable_x64(True):
        np.testing.assert_array_equal(step(drafter, ids), expected)


def test_nothing_is_transferred_unseen(table: Model) -> None:
    ids, key = jnp.asarray(IDS), jax.random.key(0)
    expected = jaxdraft.generate(table, ids, max_new_tokens=5, sampling=WARM, key=key).ids()
    with jax.transfer_guard("disallow"):
        out = jaxdraft.generate(table, ids, max_new_tokens=5, sampling=WARM, key=key)
        for _ in jaxdraft.stream(table, ids, max_new_tokens=5, logprobs=1):
            pass
        jaxdraft.generate(table, IDS, max_new_tokens=5, sampling=WARM, key=3, trace=True)
        jaxdraft.score(table, ids)
    assert out.ids() == expected


def test_nan_debugging(table: Model) -> None:
    model = tiny_model("dflash2")
    with jax.debug_nans(True):
        found = jaxdraft.generate(model, IDS, max_new_tokens=5, sampling=WARM, key=3)
    expected = jaxdraft.generate(model, IDS, max_new_tokens=5, sampling=WARM, key=3)
    assert found.ids() == expected.ids()


def test_nothing_of_the_caller_is_donated() -> None:
    model, ids = tiny_model("mtp"), jnp.asarray(IDS)
    for _ in jaxdraft.stream(model, ids, max_new_tokens=4):
        pass
    engine = jaxdraft.Engine(model, max_batch=1, page_size=16, context=64)
    engine.submit(ids[0], max_new_tokens=3).result()
    assert not any(leaf.is_deleted() for leaf in (*jax.tree.leaves(model), ids))


def test_a_donated_model_is_gone_and_its_tokens_are_right(table: Model) -> None:
    model = jax.tree.map(jnp.copy, table)
    run = jax.jit(lambda m: jaxdraft.generate(m, IDS, max_new_tokens=5), donate_argnums=0)
    expected = jaxdraft.generate(table, IDS, max_new_tokens=5).ids()
    assert run(model).ids() == expected


def test_two_devices() -> None:
    """In a process of its own: a fault here used to end it."""
    here = Path(__file__).parent
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-m", "tests.two_devices"],
        cwd=here.parent,
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=1200,  # far more than it takes: a hang fails here, and not in CI
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "all equal", done.stdout
