"""Block drafters in published layouts: drafts, scores and counts of an independent program.

See ``regenerate_blocks.py`` for the arrays.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxdraft
from jaxdraft import Model, generate, rounds
from jaxdraft.base import NO_TOKEN
from jaxdraft.checkpoint import save
from jaxdraft.draft.block import BlockDrafter
from jaxdraft.rounds import RoundState, Rules
from tests.checkpoint.helpers import arrays_of, edit_json
from tests.hub import helpers
from tests.hub.regenerate_blocks import ROUNDS, TARGET, compute

FOLDERS = helpers.folders("block_drafts")


def drafter_of(model: Model) -> BlockDrafter:
    assert isinstance(model.drafter, BlockDrafter)
    return model.drafter


@jax.jit
def start(model: Model, ids: jax.Array, length: jax.Array, rules: Rules) -> RoundState:
    return rounds.prefill(model.target, model.drafter, ids, length, rules, capacity=128, chunk=32)[
        0
    ]


@jax.jit
def step(model: Model, state: RoundState, rules: Rules) -> Any:
    return rounds.round(model.target, model.drafter, state, rules)


@jax.jit
def scored(model: Model, state: RoundState) -> tuple[jax.Array, jax.Array | None]:
    """Scores of all target ids [K, V] after the drafts before, and the confidence's logits."""
    drafter, drafts = drafter_of(model), state.proposal.tokens
    backbone, config = drafter.backbone(), drafter.config
    features = drafter.features(state.drafter, state.anchor)
    before = jnp.concatenate([state.anchor[:, None], drafts[:, :-1]], axis=1)
    scores = jnp.full((drafts.shape[1], config.vocab_size), -jnp.inf)
    if config.chained:
        bias = backbone.pair_bias(features, backbone.predecessors(before))
        whole = backbone.logits(features, drafter.head) + bias
        scores = scores.at[:, backbone.tokens(jnp.arange(config.draftable))].set(whole[0])
    else:
        lattice = drafter.lattice(state.drafter, state.anchor)
        place = jnp.argmax(lattice.candidates[:, :-1] == drafts[:, :-1, None], axis=-1)
        place = jnp.pad(place, ((0, 0), (1, 0)))[..., None, None]
        rows = jnp.take_along_axis(lattice.scores, place, axis=2)[0, :, 0]
        scores = scores.at[jnp.arange(len(rows))[:, None], lattice.candidates[0]].set(rows)
    if config.confidence is None:
        return scores, None
    return scores, backbone.trust(features, backbone.predecessors(before))[0]


@pytest.mark.parametrize("name", FOLDERS)
def test_rounds(name: str) -> None:
    """Every round through the real prefill and round, and the counters that they keep."""
    model, arrays = helpers.load(TARGET, drafter=helpers.DATA / name), helpers.golden(name)
    for prompt in helpers.prompts(arrays):
        want = {key: arrays.get(f"{prompt}_block_{key}") for key in KEYS}
        ids = arrays[f"{prompt}_ids"]
        padded = np.zeros((1, 128), np.int32)
        padded[0, : len(ids)] = ids
        one = lambda value: jnp.asarray([value], jnp.int32)  # noqa: E731
        rules = Rules(jnp.full((1, 1), NO_TOKEN), one(100), one(128), one(99))
        state = start(model, jnp.asarray(padded), one(len(ids)), rules)
        for k in range(ROUNDS):
            np.testing.assert_array_equal(state.proposal.tokens[0], want["drafts"][k])
            scores, trust = scored(model, state)
            found = np.take_along_axis(np.asarray(scores), want["candidates"][k], axis=-1)
            np.testing.assert_allclose(found, want["scores"][k], rtol=0, atol=helpers.WITHIN)
            if want["trust"] is not None:
                np.testing.assert_allclose(trust, want["trust"][k], rtol=0, atol=helpers.WITHIN)
            state, info = step(model, state, rules)
            assert int(info.accepted[0]) == want["accepted"][k]
        drafts = np.arange(want["drafts"].shape[1])
        reached = (want["accepted"][:, None] > drafts[None]).sum(axis=0)
        np.testing.assert_array_equal(state.stats.accepted_at[0], reached)
        tokens = want["tokens"].tolist()
        assert state.tokens[0, len(ids) : int(state.length[0])].tolist() == tokens
        out = generate(model, [ids.tolist()], max_new_tokens=len(tokens), stop_ids=())
        assert out.ids() == [tokens]
        assert int(out.stats.accepted[0]) > 0


KEYS = ("tokens", "drafts", "accepted", "candidates", "scores", "trust")


def test_an_independent_program_computes_these_numbers() -> None:
    """The arrays are what ``regenerate_blocks.py`` makes of the files, of one folder here."""
    name = "dspark_rnn"
    old = helpers.golden(name)
    texts = {prompt: old[f"{prompt}_ids"].tolist() for prompt in helpers.prompts(old)}
    new = compute(name, texts)
    assert new.keys() == old.keys()
    for key, value in new.items():
        np.testing.assert_allclose(value, old[key], rtol=0, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", FOLDERS)
def test_it_is_written_as_it_was(name: str, tmp_path: Path) -> None:
    """Tensors bit for bit, under the same names; every setting that the file has in common."""
    folder = helpers.DATA / name
    model = jaxdraft.load(helpers.DATA / TARGET, drafter=folder)
    kind = model.info.drafter
    home = save(model, tmp_path / "out").folder / kind
    old, new = (load_file(each / "model.safetensors") for each in (folder, home))
    assert old.keys() == new.keys()
    for key, value in old.items():
        assert new[key].dtype == value.dtype and new[key].tobytes() == value.tobytes(), key
    before, after = (json.loads((each / "config.json").read_text()) for each in (folder, home))
    free = {"speculators_config", "rope_theta", "rope_scaling", "max_position_embeddings"}
    assert _differences(before, after) <= free
    again = jaxdraft.load(tmp_path / "out", drafter=kind)
    assert drafter_of(again).config == drafter_of(model).config
    ours, theirs = arrays_of(model), arrays_of(again)
    for key, array in ours.items():
        assert "rotary" in key or array.tobytes() == theirs[key].tobytes(), key


def _differences(before: Any, after: Any) -> set[str]:
    """Names of settings in both that are not the same, at any depth."""
    found = set()
    for key in before.keys() & after.keys():
        if isinstance(before[key], dict) and isinstance(after[key], dict):
            found |= _differences(before[key], after[key])
        elif before[key] != after[key]:
            found.add(key)
    return found


REFUSED = [
    ("dflash_v1_mixed", {"hidden_size": 32}, "the drafter belongs to another target"),
    (
        "dflash_v1_mixed",
        {"dflash_config": {"mask_token_id": 9, "target_layer_ids": [0, 9]}},
        "target_layer_ids: found [0, 9], expected layers in -1..2, each once: the target has "
        "layers 0 to 3",
    ),
    ("dflash_v1_mixed", {"is_causal": False, "sliding_window": 9}, "at least the block's 10 rows"),
    ("dflash_v1_mixed", {"architectures": ["X"]}, "architectures DFlashDraftModel of dflash"),
    ("dspark_rnn", {"selector_top_k": 8}, "a recurrent head scores paths"),
    ("dspark_rnn", {"markov_head_type": "lstm"}, '"vanilla" or "gated" or "rnn"'),
    (
        "speculators_dspark_pruned",
        {"aux_hidden_state_layer_ids": [1, 4]},
        "layers in 0..3",
    ),
    ("speculators_dspark_pruned", {"target_hidden_size": 32}, "belongs to another target"),
    ("speculators_dspark_pruned", {"sample_from_anchor": None}, "expected true or false"),
    ("dflash2_softcap", {"speculators_model_type": "dflash2"}, "is not supported in this layout"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_what_is_refused(name: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    shutil.copytree(helpers.DATA / name, tmp_path / "drafter")
    edit_json(tmp_path / "drafter" / "config.json", lambda body: body.update(change))
    with pytest.raises(ValueError) as caught:
        jaxdraft.load(helpers.DATA / TARGET, drafter=tmp_path / "drafter")
    assert message in str(caught.value)
