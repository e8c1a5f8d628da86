"""Every architecture that is written here is read by transformers, to the same logits."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import jaxdraft
from jaxdraft.checkpoint import save
from jaxdraft.checkpoint.families import FAMILIES
from jaxdraft.nn.decoder import Decoder
from jaxdraft.target import DecoderTarget
from jaxdraft.testing import random_target
from tests.hub.helpers import logits_of, small_config

pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", [n for n, family in FAMILIES.items() if not family.experts])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = small_config(FAMILIES[name])
    if config.delta_net is None:
        target = random_target(config)
    else:
        target = DecoderTarget.of(Decoder(config, dtype="float32", rngs=nnx.Rngs(0)))
    saved = save(target, tmp_path / "out", dtype="float32")
    ids = np.asarray(jax.random.randint(jax.random.key(1), (40,), 0, config.vocab_size))
    ours = logits_of(jaxdraft.load(saved.folder), ids)
    other = transformers.AutoModelForCausalLM.from_pretrained(
        saved.folder / "target", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        theirs = other(torch.tensor(ids[None].astype(np.int64))).logits[0].numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
