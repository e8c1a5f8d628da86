"""EAGLE-3 and draft models in published layouts: drafts, scores and counts of another program.

See ``regenerate_chains.py`` for the arrays.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxdraft
from jaxdraft import Model, rounds
from jaxdraft.base import NO_TOKEN
from jaxdraft.checkpoint import save
from jaxdraft.config import DRAFT_MODEL
from jaxdraft.draft.draft_model import DraftModel
from jaxdraft.draft.eagle3 import Eagle3Drafter
from jaxdraft.rounds import RoundState, Rules
from tests.checkpoint.helpers import arrays_of, edit_json, edit_tensors
from tests.hub import helpers
from tests.hub.regenerate_chains import DRAFTS, ROUNDS, TARGETS, compute

SIZE = 64


def load(name: str) -> Model:
    model = helpers.load(TARGETS[name], drafter=helpers.DATA / name)
    return replace(model, drafter=model.choose("auto", DRAFTS))


@jax.jit
def start(model: Model, ids: jax.Array, length: jax.Array, rules: Rules) -> RoundState:
    return rounds.prefill(
        model.target, model.drafter, ids, length, rules, capacity=SIZE, chunk=SIZE
    )[0]


@jax.jit
def step(model: Model, state: RoundState, rules: Rules) -> Any:
    return rounds.round(model.target, model.drafter, state, rules)


@jax.jit
def scored(model: Model, state: RoundState) -> jax.Array:
    """Scores of all target ids [K, V], of one pass after another."""
    drafter, drafts = model.drafter, state.proposal.tokens
    vocab = model.target.vocab_size
    tokens = jnp.concatenate([state.anchor[:, None], drafts], axis=1)[:, :DRAFTS]
    if isinstance(drafter, DraftModel):  # the whole text at once, without its caches
        text = jax.lax.dynamic_update_slice(state.tokens, tokens, (0, state.length[0] - 1))
        count = state.length + DRAFTS - 1
        logits = drafter.model.forward(text, count, drafter.model.init(1, SIZE)).logits
        return jax.lax.dynamic_slice_in_dim(logits[0], state.length[0] - 1, DRAFTS)
    assert isinstance(drafter, Eagle3Drafter)
    pool, hidden, found = state.drafter.pool, state.drafter.pending[:, None], []
    ids = drafter.vocabulary()
    assert ids is not None
    for k in range(DRAFTS):
        at = replace(pool, length=state.drafter.pool.length + k)
        embedded = drafter.embed(tokens[:, k])[:, None]
        hidden, pool = drafter.layer()(embedded, hidden, jnp.ones((1,), jnp.int32), at)
        found.append(drafter.logits(hidden)[0, 0])
    scores = jnp.full((DRAFTS, vocab), -jnp.inf)
    return scores.at[:, ids].set(jnp.stack(found))


@pytest.mark.parametrize("name", TARGETS)
def test_rounds(name: str) -> None:
    """Every round through the real prefill and round, and the counters that they keep."""
    model, arrays = load(name), helpers.golden(name)
    for prompt in helpers.prompts(arrays):
        want = {key: arrays[f"{prompt}_chain_{key}"] for key in KEYS}
        ids = arrays[f"{prompt}_ids"]
        padded = np.zeros((1, SIZE), np.int32)
        padded[0, : len(ids)] = ids
        one = lambda value: jnp.asarray([value], jnp.int32)  # noqa: E731
        rules = Rules(jnp.full((1, 1), NO_TOKEN), one(100), one(128), one(99))
        state = start(model, jnp.asarray(padded), one(len(ids)), rules)
        for k in range(ROUNDS):
            np.testing.assert_array_equal(state.proposal.tokens[0], want["drafts"][k])
            found = np.take_along_axis(
                np.asarray(scored(model, state)), want["candidates"][k], axis=-1
            )
            np.testing.assert_allclose(found, want["scores"][k], rtol=0, atol=helpers.WITHIN)
            state, info = step(model, state, rules)
            assert int(info.accepted[0]) == want["accepted"][k]
        reached = (want["accepted"][:, None] > np.arange(DRAFTS)[None]).sum(axis=0)
        np.testing.assert_array_equal(state.stats.accepted_at[0], reached)
        tokens = want["tokens"].tolist()
        assert state.tokens[0, len(ids) : int(state.length[0])].tolist() == tokens


KEYS = ("tokens", "drafts", "accepted", "candidates", "scores")


@pytest.mark.parametrize("name", ["draft_model_llama32", "speculators_eagle3_norms"])
def test_an_independent_program_computes_these_numbers(name: str) -> None:
    """The arrays are what ``regenerate_chains.py`` makes of the files."""
    old = helpers.golden(name)
    new = compute(name, {"prompt0": old["prompt0_ids"].tolist()})
    for key, value in new.items():
        np.testing.assert_allclose(value, old[key], rtol=0, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", TARGETS)
def test_it_is_written_as_it_was(name: str, tmp_path: Path) -> None:
    """Tensors bit for bit, under the same names; every setting that the file has in common."""
    folder = helpers.DATA / name
    model = jaxdraft.load(helpers.DATA / TARGETS[name], drafter=folder)
    home = save(model, tmp_path / "out").folder / model.info.drafter
    old, new = (load_file(each / "model.safetensors") for each in (folder, home))
    assert old.keys() == new.keys()
    for key, value in old.items():
        assert new[key].dtype == value.dtype and new[key].tobytes() == value.tobytes(), key
    before, after = (json.loads((each / "config.json").read_text()) for each in (folder, home))
    for body in (before, after):
        body |= body.pop("transformer_layer_config", {})
    free = {"architectures", "speculators_config", "max_position_embeddings", "rope_scaling"}
    free |= {"eos_token_id"} if name == "draft_model_llama32" else {"rope_theta"}
    assert {key for key in before.keys() & after.keys() if before[key] != after[key]} <= free
    again = jaxdraft.load(tmp_path / "out")
    assert again.info.drafter == model.info.drafter
    assert again.drafter.config == model.drafter.config  # type: ignore[attr-defined]
    ours, theirs = arrays_of(model), arrays_of(again)
    for key, array in ours.items():
        assert array.tobytes() == theirs[key].tobytes(), key
    report = jaxdraft.inspect(tmp_path / "out")
    assert not report.problems and report.drafter is not None
    assert report.drafter.kind == again.info.drafter
    assert report.drafter.config == again.drafter.config  # type: ignore[attr-defined]
    plans = [
        jaxdraft.plan(part, pages=3, max_batch=2, context=32, page_size=16)
        for part in (again, tmp_path / "out")
    ]
    assert plans[0] == plans[1] and plans[0].mirror_page_bytes > 0


def settings(**changes: Any) -> Any:
    return lambda body: body.update(changes)


REFUSED = [
    ("eagle3_llama", settings(hidden_size=32), "hidden_size: found 32, expected 64, the target's"),
    ("eagle3_llama", settings(vocab_size=99), "vocab_size: found 99, expected 256, the target's"),
    ("eagle3_llama", settings(num_hidden_layers=2), "num_hidden_layers: found 2, expected 1"),
    ("eagle3_llama", settings(attention_bias=True), "attention_bias: found true, expected false"),
    ("eagle3_llama", settings(draft_vocab_size=300), "expected an integer in 1..256"),
    ("eagle3_llama", settings(draft_vocab_size=95), "tensor d2t: found shape [96]"),
    (
        "eagle3_specforge",
        settings(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}),
        "eagle_config.eagle_aux_hidden_state_layer_ids: found [0, 1, 3], expected a list of "
        "integers in 0..2",
    ),
    (
        "eagle3_specforge",
        settings(eagle_config={"use_aux_hidden_state": False}),
        "use_aux_hidden_state: found false, expected true",
    ),
    ("speculators_eagle3_norms", settings(norm_before_fc=True), "norm_before_fc: found true"),
    ("speculators_eagle3_norms", settings(target_hidden_size=32), "target_hidden_size: found 32"),
    ("speculators_eagle3_norms", settings(speculators_model_type="eagle"), 'expected "eagle3"'),
    (
        "speculators_eagle3_norms",
        settings(eagle_aux_hidden_state_layer_ids=[1, 2, 4]),
        "expected a list of integers in 0..3",
    ),
    ("draft_model_llama32", settings(num_key_value_heads=2), "num_key_value_heads: found 2"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_settings_that_are_refused(name: str, change: Any, message: str, tmp_path: Path) -> None:
    shutil.copytree(helpers.DATA / name, tmp_path / "drafter")
    edit_json(tmp_path / "drafter" / "config.json", change)
    target = helpers.DATA / TARGETS[name]
    with pytest.raises(ValueError) as caught:
        jaxdraft.load(target, drafter=tmp_path / "drafter")
    assert message in str(caught.value)
    report = jaxdraft.inspect(target, tmp_path / "drafter")
    assert any(message in str(problem) for problem in report.problems)


def tokens(*ids: int) -> Any:
    """The draft vocabulary ends with other tokens."""

    def change(tensors: Any) -> None:
        first = len(tensors["d2t"]) - len(ids)
        tensors["d2t"][first:] = np.asarray(ids) - np.arange(first, len(tensors["d2t"]))

    return change


def another_member(tensors: Any) -> None:
    tensors["t2d"][np.flatnonzero(~tensors["t2d"])[0]] = True


def without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


BROKEN = [
    (tokens(256), "tensor d2t: found draft id 95 for token 256, after token"),
    (tokens(3), "expected tokens in 0..255, each greater than the one before"),
    (another_member, "tensor t2d: found 97 tokens, expected the 96 tokens of d2t"),
    (without("midlayer.mlp.up_proj.weight"), "tensor midlayer.mlp.up_proj.weight: found nothing"),
    (without("lm_head.weight"), "tensor lm_head.weight: found nothing"),
    (without("d2t"), "tensor d2t: found nothing"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_tensors_that_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    shutil.copytree(helpers.DATA / "eagle3_llama", tmp_path / "drafter")
    edit_tensors(tmp_path / "drafter" / "model.safetensors", change)
    with pytest.raises(ValueError) as caught:
        jaxdraft.load(helpers.DATA / "target_llama31", drafter=tmp_path / "drafter")
    assert message in str(caught.value)


def test_a_pickle_is_refused_in_words(tmp_path: Path) -> None:
    shutil.copytree(helpers.DATA / "eagle3_llama", tmp_path / "drafter")
    (tmp_path / "drafter" / "model.safetensors").rename(tmp_path / "drafter" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: format: found a pickle.*save_file"):
        jaxdraft.load(helpers.DATA / "target_llama31", drafter=tmp_path / "drafter")


def test_a_model_beside_another_vocabulary(tmp_path: Path) -> None:
    """It is refused before the weights of either are read, and the report says so."""
    small = helpers.DATA / "draft_model_llama32"
    other = helpers.DATA / "glm4"
    assert jaxdraft.load(small).target.vocab_size == 256
    size = json.loads((other / "config.json").read_text())["vocab_size"]
    if size == 256:
        shutil.copytree(small, tmp_path / "small")
        edit_json(tmp_path / "small" / "config.json", settings(vocab_size=128))
        edit_tensors(
            tmp_path / "small" / "model.safetensors",
            lambda tensors: tensors.update(
                {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"][:128]}
            ),
        )
        small = tmp_path / "small"
    message = f"the target has {size} tokens and the draft model"
    with pytest.raises(ValueError, match=message):
        jaxdraft.load(other, drafter=small)
    assert any(message in str(problem) for problem in jaxdraft.inspect(other, small).problems)


def test_the_names_of_draft_models(tmp_path: Path) -> None:
    """A folder, a loaded model, its place beside a target, and the word for it."""
    target, folder = helpers.DATA / "target_llama31", helpers.DATA / "draft_model_llama32"
    loaded = jaxdraft.load(folder, dtype="float32")
    one = jaxdraft.load(target, dtype="float32", drafter=loaded)
    assert isinstance(one.drafter, DraftModel) and one.info.drafter == DRAFT_MODEL
    chosen = jaxdraft.load(target, dtype="float32").choose(loaded, 2)
    assert isinstance(chosen, DraftModel) and chosen.draft_tokens == 2
    shutil.copytree(target, tmp_path / "both")
    shutil.copytree(folder, tmp_path / "both" / DRAFT_MODEL)
    assert jaxdraft.load(tmp_path / "both").info.drafter == DRAFT_MODEL
    assert jaxdraft.load(tmp_path / "both", drafter=DRAFT_MODEL).info.drafter == DRAFT_MODEL
    assert jaxdraft.load(tmp_path / "both", drafter="none").info.drafter == "none"
    with pytest.raises(ValueError, match="there is no such folder"):
        jaxdraft.load(target, drafter=DRAFT_MODEL)
