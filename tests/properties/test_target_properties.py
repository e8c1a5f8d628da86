"""Properties of targets, and all that must know them: rounds, the engine, training, kernels."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdraft import Engine, Model, generate, with_kernels
from jaxdraft.config import TargetConfig
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


@every
def test_drafts_change_no_token(name: str) -> None:
    truth = np.zeros((2, 40), np.int32)
    for row, prompt in enumerate(PROMPTS):
        truth[row, : len(prompt) + NEW] = prompt + plain(name)[row]
    right = np.random.default_rng(0).random(truth.shape) < 0.7
    drafter = ScriptedDrafter(jnp.asarray(truth), jnp.asarray(right), 48)
    out = generate(Model.of(target(name)), PROMPTS, max_new_tokens=NEW, drafter=drafter)
    assert out.ids() == plain(name)
    assert 0 < int(out.stats.accepted.sum()) < int(out.stats.proposed.sum())


@pytest.mark.parametrize("name", ["windowed", "experts"])
def test_requests_of_an_engine_have_the_same_tokens(name: str) -> None:
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


@every
def test_taps_at_every_depth(name: str) -> None:
    """Tap 0 is the embedding as the first layer sees it, and the last what the final norm reads."""
    config: TargetConfig = replace(CONFIGS[name](), taps=(0, 2, 3))
    tapped = random_target(config)
    out = jax.jit(forward)(tapped, tokens())
    decoder = tapped.decoder()
    first, _, last = jnp.split(out.aux, 3, axis=-1)
    table = decoder.embed.weight[...]
    np.testing.assert_array_equal(first, table[tokens()] * np.float32(config.embedding_scale))
    np.testing.assert_allclose(decoder.norm(last), out.hidden, rtol=0, atol=1e-6)
