"""The drafter that comes with the package for a target that does not."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import inspect_folder
from convert.build import fill_shells
from convert.checkpoint.plan import plan_checkpoint
from jaxdraft import SMOLLM2_DRAFTER
from jaxdraft.base import Feed
from jaxdraft.checkpoint.families import LLAMA
from jaxdraft.checkpoint.layout import target_layout
from jaxdraft.config import BlockDrafterConfig
from jaxdraft.draft.block import BlockDrafter

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "eos_token_id": 2,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
"""What SmolLM2-135M-Instruct says of itself."""


@pytest.fixture(scope="module")
def hollow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's configuration and the names and shapes of its tensors; the numbers are a hole."""
    from convert.checkpoint.config import read_target
    from convert.errors import Problems

    folder = tmp_path_factory.mktemp("smollm2")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = read_target(CONFIG, head_stored=False, problems=Problems()).config
    header, end = {}, 0
    for entry in target_layout(config, LLAMA):
        for part in entry.tensors:
            start, end = end, end + 4 * part.size
            header[part.name] = {
                "dtype": "F32",
                "shape": list(part.shape),
                "data_offsets": [start, end],
            }
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


def test_it_fits_its_target(hollow: Path) -> None:
    report = inspect_folder(hollow, "smollm2")
    assert report.problems == () and report.drafter is not None
    config = report.drafter.config
    assert isinstance(config, BlockDrafterConfig) and config.kind == "dflash2"
    assert (config.draft_tokens, config.draft_vocab_size) == (7, 8192)
    size = sum(path.stat().st_size for path in SMOLLM2_DRAFTER.iterdir())
    assert size < 3_000_000 and report.drafter.stored_bytes < size


def test_what_it_computes_is_finite_and_in_its_vocabulary(hollow: Path) -> None:
    """Its own numbers, after the states and beside the embedding of a random target."""
    plan = plan_checkpoint(hollow, "smollm2")
    try:
        frozen, _, _ = fill_shells({"drafter": plan.shells["drafter"]}, None)
    finally:
        plan.files.close()
    backbone = frozen["drafter"]
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(backbone.params))
    vocabulary = np.asarray(backbone.params["vocabulary"])
    assert (np.diff(vocabulary) > 0).all() and {2, 28, 30, 198} <= set(vocabulary.tolist())
    assert isinstance(plan.drafter, BlockDrafterConfig)
    config = plan.drafter
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.standard_normal((49152, 576), np.float32) * 0.1)
    drafter = BlockDrafter.of(backbone, table, table, config, jnp.dtype(jnp.float32))
    feed = Feed(
        aux=jnp.asarray(rng.standard_normal((1, 6, config.aux_width), np.float32) * 11),
        count=jnp.asarray([6]),
        first_position=jnp.asarray([0]),
        anchor=jnp.asarray([504]),
        wants_draft=jnp.asarray([True]),
        limit=jnp.asarray([99]),
    )
    _, proposal, _ = drafter.step(drafter.init(1, 64), feed)
    assert np.isfinite(proposal.lattice.scores).all() and int(proposal.length[0]) == 7
    assert np.isin(proposal.lattice.candidates, vocabulary).all()
    assert np.isin(proposal.tokens, vocabulary).all()
