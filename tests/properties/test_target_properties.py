"""Properties of targets, and all that must know them: rounds, the engine, training, kernels."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdraft import Engine, Model, generate, with_kernels
from jaxdraft.config import AttentionConfig, MlpConfig, MoeConfig, TargetConfig
from jaxdraft.rope import Rope
from jaxdraft.target import DecoderTarget
from jaxdraft.testing import (
    ScriptedDrafter,
    biased_target_config,
    experts_target_config,
    random_target,
    windowed_target_config,
)
from jaxdraft.train.losses import DraftLoss, language_loss
from jaxdraft.train.sequence import decoder_rows
from tests.examples import examples

CONFIGS = {
    "windowed": windowed_target_config,
    "biased": biased_target_config,
    "experts": experts_target_config,
}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11]]
NEW = 14

every = pytest.mark.parametrize("name", CONFIGS)


@functools.cache
def target(name: str) -> DecoderTarget:
    return random_target(CONFIGS[name]())


@functools.cache
def plain(name: str) -> list[list[int]]:
    return generate(Model.of(target(name)), PROMPTS, max_new_tokens=NEW, drafter="none").ids()


@functools.cache
def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(3), (2, 17), 0, 48)


def forward(target: DecoderTarget, rows: jax.Array) -> Any:
    count = jnp.full(rows.shape[:1], rows.shape[1], jnp.int32)
    return target.forward(rows, count, target.init(rows.shape[0], rows.shape[1]))


@pytest.mark.parametrize("name", ["windowed", "experts"])
def test_drafts_change_no_token(name: str) -> None:
    truth = np.zeros((2, 40), np.int32)
    for row, prompt in enumerate(PROMPTS):
        truth[row, : len(prompt) + NEW] = prompt + plain(name)[row]
    right = np.random.default_rng(0).random(truth.shape) < 0.7
    drafter = ScriptedDrafter(jnp.asarray(truth), jnp.asarray(right), 48)
    out = generate(Model.of(target(name)), PROMPTS, max_new_tokens=NEW, drafter=drafter)
    assert out.ids() == plain(name)
    assert 0 < int(out.stats.accepted.sum()) < int(out.stats.proposed.sum())


def test_requests_of_an_engine_have_the_same_tokens(name: str = "windowed") -> None:
    model = Model.of(target(name))
    with Engine(model, max_batch=2, context=64, page_size=8, pages=16) as engine:
        requests = [engine.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
        assert [request.result() for request in requests] == plain(name)


@every
def test_rows_in_two_passes_and_in_training_are_the_same(name: str) -> None:
    one, rows = target(name), tokens()
    whole = jax.jit(forward)(one, rows)
    state = one.commit(whole.state, jnp.asarray([9, 9], jnp.int32))  # the others are overwritten
    again = jax.jit(lambda t, *given: t.forward(*given).logits)(
        one, rows[:, 9:], jnp.asarray([8, 8], jnp.int32), state
    )
    np.testing.assert_allclose(again, whole.logits[:, 9:], rtol=0, atol=2e-5)
    decoder = one.decoder()
    trained = jax.jit(lambda rows: decoder.logits(decoder_rows(decoder, rows).hidden))(rows)
    np.testing.assert_allclose(trained, whole.logits, rtol=0, atol=2e-5)


@every
def test_every_parameter_has_a_gradient(name: str) -> None:
    def loss(params: Any) -> jax.Array:
        decoder = replace(target(name).decoder, params=params)()
        return language_loss(decoder, tokens())[0]

    gradients = jax.jit(jax.grad(loss))(target(name).decoder.params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        label = jax.tree_util.keystr(path)
        assert "rotary" in label or float(jnp.abs(leaf).max()) > 1e-8, label


def test_drafters_are_taught_by_capped_logits() -> None:
    one, decoder = target("windowed"), target("windowed").decoder()
    hidden, table = decoder_rows(decoder, tokens()).hidden, decoder.embed.weight[...]
    loss = DraftLoss(embedding=table, head=table, softcap=one.config.softcap)
    np.testing.assert_allclose(loss._teacher(hidden, table), decoder.logits(hidden), atol=1e-6)
    plain = DraftLoss(embedding=table, head=table)._teacher(hidden, table)
    assert float(jnp.abs(plain).max()) > one.config.softcap


@every
def test_kernels_know_the_property_or_leave_it_to_the_plain_path(name: str) -> None:
    with pytest.warns(UserWarning, match="interpreted"):
        kernels = with_kernels(target(name), "pallas")
    found, wanted = (jax.jit(forward)(t, tokens()[:, :3]).logits for t in (kernels, target(name)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


def test_taps_at_every_depth(name: str = "windowed") -> None:
    """Tap 0 is the embedding as the first layer sees it, and the last what the final norm reads."""
    config: TargetConfig = replace(CONFIGS[name](), taps=(0, 2, 3))
    tapped = random_target(config)
    out = jax.jit(forward)(tapped, tokens())
    decoder = tapped.decoder()
    first, _, last = jnp.split(out.aux, 3, axis=-1)
    table = decoder.embed.weight[...]
    np.testing.assert_array_equal(first, table[tokens()] * np.float32(config.embedding_scale))
    np.testing.assert_allclose(decoder.norm(last), out.hidden, rtol=0, atol=1e-6)


def test_the_scale_of_embeddings_is_rounded_as_they_are() -> None:
    """In bfloat16 the root of 32 is 5.65625; transformers rounds it so, too."""
    decoder = random_target(windowed_target_config(), dtype=jnp.bfloat16).decoder()
    table = np.asarray(decoder.embed.weight[...], np.float32)[3]
    found = decoder.embedded(jnp.full((1, 1), 3, jnp.int32))[0, 0]
    wanted = (table * np.float32(5.65625)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(found), wanted)


@st.composite
def experts(draw: st.DrawFn) -> MoeConfig:
    """Experts of all sorts."""
    flag, count = st.booleans(), draw(st.integers(1, 6))
    return MoeConfig(
        experts=count,
        active=draw(st.integers(1, count)),
        hidden=8,
        shared_hidden=draw(st.sampled_from((0, 16))),
        renormalized=draw(flag),
        router_bias=draw(flag),
        bias=draw(flag),
        limit=draw(st.sampled_from((0.0, 1.0))),
    )


@st.composite
def configs(draw: st.DrawFn) -> TargetConfig:
    """Properties in any combination, those of no model, too."""
    flag, kv_heads = st.booleans(), draw(st.sampled_from((1, 2, 4)))
    whole = draw(flag)
    attention = AttentionConfig(
        heads=4,
        kv_heads=kv_heads,
        head_dim=8,
        rotary_dim=draw(st.sampled_from((0, 4, 8))),
        interleaved=draw(flag),
        gated=draw(flag),
        qk_norm=whole or draw(flag),
        norm_whole=whole,
        bias=draw(flag),
        out_bias=draw(flag),
        sinks=draw(flag),
        scale=draw(st.sampled_from((0.2, 0.5))),
        softcap=draw(st.sampled_from((0.0, 2.0))),
    )
    layers = tuple(
        draw(st.lists(st.sampled_from(("attention", "sliding")), min_size=1, max_size=3))
    )
    own = draw(flag) and len(set(layers)) == 2
    routed = draw(flag)
    dense = MlpConfig(
        hidden=24, activation=draw(st.sampled_from(("silu", "gelu_tanh"))), bias=draw(flag)
    )
    window, other = draw(st.integers(1, 9)), draw(st.sampled_from((4, 8)))
    sliding = replace(attention, window=window, rotary_dim=other if own else attention.rotary_dim)
    return windowed_target_config(
        layers=layers,
        attention=attention,
        sliding=sliding,
        mlp=draw(experts()) if routed else dense,
        dense=dense,
        dense_layers=(0,) if routed and draw(flag) else (),
        tied=draw(flag),
        norms=draw(st.sampled_from(("pre", "post", "both"))),
        embedding_scale=draw(st.sampled_from((1.0, 3.0))),
        softcap=draw(st.sampled_from((0.0, 2.0))),
        own_tables=own,
        rope=Rope(theta=100.0),
        sliding_rope=Rope(theta=10.0) if own else None,
        taps=(),
    )


@settings(max_examples=examples(1))
@given(config=configs(), seed=st.integers(0, 2**31 - 1))
def test_any_combination_decodes_as_it_is_trained(config: TargetConfig, seed: int) -> None:
    """In two passes over pages and rings, and in one over the whole sequence."""
    one = random_target(config, seed)
    rows, decoder = tokens()[:, :13], one.decoder()
    trained = decoder.logits(decoder_rows(decoder, rows).hidden)
    state, found = one.init(2, 13), []
    for part in (rows[:, :8], rows[:, 8:]):
        count = jnp.full((2,), part.shape[1], jnp.int32)
        out = one.forward(part, count, state)
        state = one.commit(out.state, count)
        found.append(out.logits)
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), trained, rtol=0, atol=5e-5)
