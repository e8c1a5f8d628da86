"""Scoring and drafting are differentiable, and their gradients are those of plain passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdraft
from jaxdraft import testing
from jaxdraft.base import Draw, Feed, Truncation
from jaxdraft.config import AttentionConfig, MoeConfig
from jaxdraft.draft.adaptive import AdaptiveDrafter
from jaxdraft.draft.block import BlockDrafter
from jaxdraft.draft.confident import ConfidentDrafter
from jaxdraft.draft.fallback import FallbackDrafter
from jaxdraft.draft.mtp import MtpDrafter
from jaxdraft.draft.ngram import NgramDrafter
from jaxdraft.nn.linear import matmul
from jaxdraft.nn.packed import PackedLinear
from jaxdraft.scan import checkpointed_scan
from jaxdraft.train.blocks import block_features
from jaxdraft.train.sequence import chain_rows, decoder_rows
from tests.examples import first
from tests.paths import artifact


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def floats(tree: Any) -> Any:
    """The gradients of floats; those of integers have no numbers."""
    return [x for x in jax.tree.leaves(tree) if x.dtype != jax.dtypes.float0]


def assert_close(found: Any, expected: Any, within: float = 2e-4) -> None:
    """Every array agrees, relative to its largest number, and some number is not zero."""
    found, expected = floats(found), floats(expected)
    assert len(found) == len(expected)
    assert any(np.any(np.asarray(x) != 0) for x in expected)
    for x, y in zip(found, expected, strict=True):
        assert np.isfinite(x).all()
        size = max(float(np.abs(y).max(initial=0)), 1e-3)
        np.testing.assert_allclose(x, y, rtol=0, atol=within * size)


# --------------------------------------------------------------------------- targets

TARGETS: dict[str, dict[str, Any]] = {
    "delta net and attention": {},
    "tied": dict(tied=True, layers=("attention",), taps=(0,)),
    "experts": dict(
        layers=("delta_net", "attention"),
        taps=(1,),
        mlp=MoeConfig(experts=4, active=2, hidden=16, shared_hidden=16),
    ),
    "window": dict(
        layers=("sliding", "attention"),
        taps=(1,),
        sliding=AttentionConfig(
            heads=4, kv_heads=2, head_dim=16, rotary_dim=8, scale=0.25, window=20
        ),
    ),
}


@pytest.mark.parametrize("size", [5, 150])
@pytest.mark.parametrize("name", list(TARGETS))
def test_score_has_the_gradient_of_a_plain_pass(name: str, size: int) -> None:
    """Logits, auxiliary states and hidden rows, of ragged rows, in one chunk and in two."""
    if size == 150 and name in ("tied", "experts"):
        pytest.skip("two chunks are tested with the other two")
    model = jaxdraft.Model.of(testing.tiny_target(**TARGETS[name]))
    tokens = jax.random.randint(jax.random.key(3), (3, size), 0, 48)
    lengths = jnp.asarray([size, size // 2, 1])
    seen = (jnp.arange(size)[None] < lengths[:, None])[..., None]
    weights = [normal(i, 3, size, width) for i, width in ((1, 48), (2, 32), (3, 32))]

    def total(logits: jax.Array, aux: jax.Array, hidden: jax.Array) -> jax.Array:
        pairs = zip(weights, (logits, aux[..., -32:], hidden), strict=True)
        return sum((jnp.sum(jnp.where(seen, x * w, 0)) for w, x in pairs), jnp.zeros(()))

    def scored(target: Any) -> jax.Array:
        out = jaxdraft.score(replace(model, target=target), np.asarray(tokens), np.asarray(lengths))
        return total(out.logits, out.aux_hidden, out.hidden)

    def rows(target: Any) -> jax.Array:
        decoder = target.decoder()
        out = decoder_rows(decoder, tokens)
        return total(decoder.logits(out.hidden), out.aux, out.hidden)

    found = jax.jit(jax.grad(scored))(model.target)
    assert_close(found, jax.jit(jax.grad(rows))(model.target))
    if size == 5:  # along its own direction, where the difference is far above the rounding
        norm = float(jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(found))))
        step = 2e-4

        def moved(by: float) -> jax.Array:
            return scored(jax.tree.map(lambda x, g: x + by / norm * g, model.target, found))

        difference = (float(jax.jit(moved)(step)) - float(jax.jit(moved)(-step))) / (2 * step)
        assert difference == pytest.approx(norm, rel=1e-2)


def test_the_gradient_of_a_whole_model() -> None:
    """As users write it: integers beside floats, jitted or not, mapped, checkpointed."""
    model, ids = testing.tiny_model("dspark"), jnp.asarray([[1, 2, 3, 4]], jnp.int32)

    def total(model: jaxdraft.Model) -> jax.Array:
        return jaxdraft.score(model, ids).logits.sum()

    gradient = jax.grad(total, allow_int=True)
    with jax.debug_nans(True):
        found = gradient(model)
    assert_close(jax.jit(gradient)(model), found, 1e-5)
    assert_close(jax.grad(jax.checkpoint(total), allow_int=True)(model), found, 1e-5)
    many = jax.tree.map(lambda x: jnp.stack([x, x]), model)
    mapped = jax.vmap(gradient)(many)
    for x, y in zip(floats(mapped), floats(found), strict=True):
        np.testing.assert_allclose(x, np.stack([y, y]), atol=1e-4)


def test_the_tangent_of_score_is_its_gradient_along_a_direction() -> None:
    model, ids = testing.tiny_model(None), np.asarray([[1, 2, 3, 4, 5]])
    weights = normal(1, 1, 5, 48)

    def total(target: Any) -> jax.Array:
        return jnp.sum(jaxdraft.score(replace(model, target=target), ids).logits * weights)

    direction = jax.tree.map(lambda x: normal(2, *x.shape), model.target)
    _, found = jax.jit(lambda t: jax.jvp(total, (t,), (direction,)))(model.target)
    pairs = zip(*map(jax.tree.leaves, (jax.grad(total)(model.target), direction)), strict=True)
    assert found == pytest.approx(sum(float(jnp.sum(g * d)) for g, d in pairs), rel=1e-3)


@pytest.mark.parametrize(
    "name",
    first(
        1, ["qwen35_int4_cpu", "sliding_qwen3_fp32_cpu", "qwen35_moe_fp32_cpu", "qwen3_fp32_cpu"]
    ),
)
def test_exported_models_have_the_gradient_of_a_plain_pass(name: str) -> None:
    """Dense, hybrid, experts, windows; matrices in four bits with a gradient for their scales."""
    model = jaxdraft.load(artifact(name), dtype="float32", packed=name == "qwen35_int4_cpu")
    tokens = jax.random.randint(jax.random.key(3), (2, 6), 0, model.target.vocab_size)
    weights = normal(1, 2, 6, model.target.vocab_size)

    def scored(target: Any) -> jax.Array:
        out = jaxdraft.score(replace(model, target=target), np.asarray(tokens))
        return jnp.sum(out.logits * weights)

    def rows(target: Any) -> jax.Array:
        decoder = target.decoder()
        return jnp.sum(decoder.logits(decoder_rows(decoder, tokens).hidden) * weights)

    found = jax.jit(jax.grad(scored, allow_int=True))(model.target)
    assert_close(found, jax.jit(jax.grad(rows, allow_int=True))(model.target), 5e-4)


def test_a_gradient_is_in_the_matrix_and_not_in_its_blocks() -> None:
    """Windows of two to six rows read the blocks, which are the matrix once more."""
    shapes = dict(width=64, taps=(0,), layers=("attention",), vocab_size=64)
    plain = testing.tiny_target(**shapes)
    blocked = plain.blocked()
    ids = np.asarray([[1, 2, 3, 4, 5]])
    weights = normal(1, 1, 5, 64)

    def gradient(target: Any) -> Any:
        def total(target: Any) -> jax.Array:
            model = jaxdraft.Model.of(target)
            return jnp.sum(jaxdraft.score(model, ids[:, :5]).logits * weights)

        return jax.jit(jax.grad(total))(target).decoder.params

    def leaves(params: Any) -> dict[str, jax.Array]:
        named = jax.tree_util.tree_leaves_with_path(params)
        return {jax.tree_util.keystr(path): x for path, x in named}

    found, expected = leaves(gradient(blocked)), leaves(gradient(plain))
    copies = [name for name in found if "blocks" in name]
    assert copies
    assert not any(np.any(found.pop(name)) for name in copies)
    assert found.keys() == expected.keys()
    assert_close(list(found.values()), list(expected.values()))


def test_packed_matrices_have_the_gradient_of_the_matrix_they_stand_for() -> None:
    """With respect to rows and scales; the packed numbers are integers."""
    weight_q = jax.random.randint(jax.random.key(1), (6, 2, 8), 0, 256).astype(jnp.uint8)
    scales, x = normal(2, 6, 2), normal(3, 5, 32)
    weights = normal(4, 5, 6)

    def linear(scales: jax.Array) -> PackedLinear:
        return PackedLinear(weight_q, scales, bits=4, block=16, inputs=32, dtype=jnp.float32)

    found = jax.grad(lambda s, x: jnp.sum(linear(s)(x) * weights), (0, 1))(scales, x)
    expected = jax.grad(lambda s, x: jnp.sum(matmul(x, linear(s).dequantized()) * weights), (0, 1))(
        scales, x
    )
    assert_close(found, expected, 1e-5)


def test_a_long_scan_keeps_few_carries() -> None:
    """64 steps, of a carry of 4 MB: the gradient keeps two times eight of them, not 64."""
    size = 2**20

    def total(x: jax.Array, length: int) -> jax.Array:
        carry, out = checkpointed_scan(lambda c, _: (jnp.sin(c), c[0]), x, length)
        return jnp.sum(carry) + jnp.sum(out)

    compiled = jax.jit(jax.grad(total), static_argnums=1).lower(jnp.zeros((size,)), 64).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 24 * 4 * size


@pytest.mark.parametrize("length", [1, 2, 9, 19, 32])
def test_a_checkpointed_scan_is_a_scan(length: int) -> None:
    def step(carry: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        return jnp.sin(2 * carry), carry

    start = jnp.asarray([0.3, 0.7])

    def run(scan: Any) -> Any:
        def total(start: jax.Array) -> Any:
            carry, out = scan(start)
            return jnp.sum(carry * out[-1]) + jnp.sum(jnp.cos(out)), (carry, out)

        return jax.value_and_grad(total, has_aux=True)(start)

    found = run(lambda x: checkpointed_scan(step, x, length))
    expected = run(lambda x: jax.lax.scan(step, x, None, length=length))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, expected)


# --------------------------------------------------------------------------- drafters

COUNT = (30, 11)  # rows that come in: the ring of 12 positions has wrapped in the first


@pytest.fixture(scope="module")
def target() -> Any:
    return testing.tiny_target(layers=("attention",), taps=(0,))


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(3), (2, 40), 0, 48)


def feed_of(text: jax.Array, drafts: int, **changes: Any) -> Feed:
    """The first COUNT positions of every row, and the token after them."""
    count = jnp.asarray(COUNT, jnp.int32)
    fields = dict(
        aux=None,
        count=count,
        first_position=jnp.zeros((2,), jnp.int32),
        anchor=jnp.take_along_axis(text, count[:, None], axis=1)[:, 0],
        wants_draft=jnp.ones((2,), bool),
        limit=jnp.full((2,), drafts, jnp.int32),
    )
    return Feed(**{**fields, **changes})


def spoiled(rows: jax.Array) -> jax.Array:
    """Rows [2, T, X] that hold NaN past COUNT, where anything may be."""
    past = jnp.arange(rows.shape[1])[None] >= jnp.asarray(COUNT)[:, None]
    return jnp.where(past[..., None], jnp.nan, rows)


def states(drafter: BlockDrafter, layout: str) -> Any:
    if layout == "dense":
        return drafter.init(2, 64)
    if drafter.config.windowed:
        return drafter.init_pool(2, rings=2, page_size=8)
    return drafter.init_pool(2, pages=16, page_size=8, columns=8)


@pytest.mark.parametrize("layout", ["dense", "pool"])
@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_lattice_scores_have_the_gradient_of_a_plain_pass(
    kind: str, layout: str, target: Any, tokens: jax.Array
) -> None:
    """With respect to the drafter's floats and the auxiliary rows, of rows of two lengths."""
    drafter = testing.tiny_drafter(target, kind)
    aux = normal(5, 2, 40, target.config.aux_width)
    shape = (2, drafter.draft_tokens, 3, 3)
    weights = normal(6, *shape)

    def stepped(drafter: BlockDrafter, aux: jax.Array) -> tuple[jax.Array, jax.Array]:
        feed = feed_of(tokens, drafter.draft_tokens, aux=spoiled(aux))
        _, proposal, _ = drafter.step(states(drafter, layout), feed)
        assert proposal.lattice is not None
        return jnp.sum(proposal.lattice.scores * weights), proposal.lattice.candidates

    def plainly(drafter: BlockDrafter, aux: jax.Array, candidates: jax.Array) -> jax.Array:
        backbone = drafter.backbone()
        anchors = jnp.asarray(COUNT, jnp.int32)[:, None]
        features = block_features(backbone, drafter.embedding, aux, tokens, anchors)[:, 0]
        logits = matmul(features, drafter.head)
        values = jnp.take_along_axis(logits, candidates, axis=-1)
        start = jnp.take_along_axis(tokens, anchors, axis=1)[..., None]
        before = jnp.concatenate([jnp.tile(start, (1, 1, 3)), candidates[:, :-1]], axis=1)
        pairs = backbone.pair_scores(features, before, candidates)
        return jnp.sum((pairs + values[:, :, None]) * weights)

    gradient = jax.jit(jax.grad(stepped, (0, 1), has_aux=True))
    found, candidates = gradient(drafter, aux)
    assert_close(found, jax.jit(jax.grad(plainly, (0, 1)))(drafter, aux, candidates))
    past = np.arange(40)[None] >= np.asarray(COUNT)[:, None]
    np.testing.assert_array_equal(np.asarray(found[1])[past], 0)
    _, tangent = jax.jvp(lambda aux: stepped(drafter, aux)[0], (aux,), (normal(7, *aux.shape),))
    along = float(jnp.sum(found[1] * normal(7, *aux.shape)))
    assert tangent == pytest.approx(along, rel=1e-3)


def hot() -> Draw:
    """Draw from the best twelve, at a temperature per row."""
    truncation = Truncation(
        temperature=jnp.asarray([0.8, 1.5], jnp.float32),
        top_k=jnp.full((2,), 12, jnp.int32),
        top_p=jnp.ones((2,), jnp.float32),
        min_p=jnp.zeros((2,), jnp.float32),
    )
    return Draw(truncation, jax.random.split(jax.random.key(8)))


@pytest.mark.parametrize("layout", ["dense", "pool"])
def test_chained_supports_have_the_gradient_of_a_plain_pass(
    layout: str, target: Any, tokens: jax.Array
) -> None:
    """Probabilities of drawn drafts, through three links, with respect to weights and rows."""
    drafter = testing.tiny_mtp(target)
    hidden = normal(5, 2, 40, 32)
    weights = normal(6, 2, 3, 32)
    first = jnp.asarray(COUNT, jnp.int32)[:, None]

    def stepped(drafter: MtpDrafter, hidden: jax.Array) -> Any:
        feed = feed_of(tokens, 3, hidden=spoiled(hidden), tokens=tokens, draw=hot())
        state = drafter.init(2, 64)
        if layout == "pool":
            state = drafter.init_pool(2, pages=16, page_size=8, columns=8)
        _, proposal, _ = drafter.step(state, feed)
        assert proposal.support is not None
        return jnp.sum(proposal.support.probs * weights), proposal

    def plainly(drafter: MtpDrafter, hidden: jax.Array, proposal: Any) -> jax.Array:
        row = jnp.arange(2)[:, None]
        text = tokens.at[row, first + 1 + jnp.arange(3)[None]].set(proposal.tokens)
        total = jnp.zeros(())
        for link, rows in enumerate(chain_rows(drafter.mtp(), drafter.embedding, hidden, text, 3)):
            logits = drafter.logits(rows[jnp.arange(2), first[:, 0] - 1])
            scores = jnp.take_along_axis(logits, proposal.support.tokens[:, link], axis=1)
            scores = scores / hot().truncation.temperature[:, None]
            kept = proposal.support.probs[:, link] > 0
            probs = jax.nn.softmax(jnp.where(kept, scores, -1e30), axis=-1)
            total = total + jnp.sum(probs * weights[:, link])
        return total

    found, proposal = jax.jit(jax.grad(stepped, (0, 1), has_aux=True))(drafter, hidden)
    assert (proposal.support.probs > 0).sum(axis=-1).tolist() == [[12] * 3] * 2
    assert_close(found, jax.jit(jax.grad(plainly, (0, 1)))(drafter, hidden, proposal))
    _, tangent = jax.jvp(
        lambda hidden: stepped(drafter, hidden)[0], (hidden,), (normal(7, *hidden.shape),)
    )
    along = float(jnp.sum(found[1] * normal(7, *hidden.shape)))
    assert tangent == pytest.approx(along, rel=1e-3)


@pytest.mark.parametrize("kind", ["dflash2", "mtp"])
def test_supports_that_nobody_wants_have_the_gradient_zero(
    kind: str, target: Any, tokens: jax.Array
) -> None:
    """Rows without drafts, and rows that no page was left for, give no NaN."""
    drafter: Any = testing.tiny_mtp(target)
    if kind == "dflash2":
        drafter = testing.tiny_drafter(target, kind)

    def total(drafter: Any, wants: jax.Array) -> jax.Array:
        feed = feed_of(
            tokens,
            3,
            aux=spoiled(normal(5, 2, 40, target.config.aux_width)),
            hidden=spoiled(normal(5, 2, 40, 32)),
            tokens=tokens,
            draw=hot(),
            wants_draft=wants,
        )
        if kind == "mtp":  # the second row finds no page
            state = drafter.init_pool(2, pages=5, page_size=8, columns=5)
        else:
            state = drafter.init_pool(2, rings=1, page_size=8)
        _, proposal, _ = drafter.step(state, feed)
        kept = jnp.arange(3)[None] < proposal.length[:, None]
        return jnp.sum(jnp.where(kept[..., None], proposal.support.probs**2, 0.0))

    gradient = jax.jit(jax.grad(total))
    some = gradient(drafter, jnp.asarray([True, True]))
    assert_close(some, some)
    for x in floats(gradient(drafter, jnp.asarray([False, False]))):
        np.testing.assert_array_equal(x, 0)


WRAPPERS = {
    "adaptive": lambda drafter: AdaptiveDrafter(drafter),
    "confident": lambda drafter: ConfidentDrafter(drafter),
    "fallback": lambda drafter: FallbackDrafter(NgramDrafter(), drafter),
}


@pytest.mark.parametrize("name", first(1, ["fallback", "adaptive", "confident"]))
def test_wrapped_drafters_are_differentiable(name: str, target: Any, tokens: jax.Array) -> None:
    """The drafts' probabilities have the gradient that they have without the wrapper."""
    inner = testing.tiny_drafter(target, "dflash2")
    aux = normal(5, 2, 40, target.config.aux_width)
    distinct = jnp.broadcast_to(jnp.arange(40, dtype=jnp.int32)[None], (2, 40))  # no match

    def proposed(drafter: Any, aux: jax.Array) -> Any:
        feed = feed_of(tokens, 3, aux=spoiled(aux), tokens=distinct, draw=hot())
        feed = replace(feed, anchor=jnp.asarray([44, 45], jnp.int32))
        return drafter.step(drafter.init(2, 64), feed)[1]

    def total(drafter: Any, aux: jax.Array, drafted: jax.Array) -> Any:
        probs = proposed(drafter, aux).support.probs[:, :1, :3]
        return jnp.sum(jnp.where(drafted[:, None, None], probs**2, 0.0))

    wrapped = WRAPPERS[name](inner)
    drafted = proposed(wrapped, aux).length > 0
    assert drafted.any()
    gradient = jax.grad(total, 1)
    assert_close(gradient(wrapped, aux, drafted), gradient(inner, aux, drafted))
