"""Checkpoints that the tests read; a test that writes copies them first."""

from __future__ import annotations

import importlib
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxdraft import Model
from jaxdraft.checkpoint import save
from jaxdraft.config import MlpConfig, MoeConfig
from jaxdraft.testing import tiny_drafter, tiny_mtp, tiny_target
from tests.paths import FIRST_FAMILY

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"

MOE = MoeConfig(experts=4, active=2, hidden=24, shared_hidden=32)
MLP = MlpConfig(hidden=40)


@pytest.fixture(scope="session")
def family() -> dict[str, Model]:
    """A small hybrid target with each of the three drafters, all of random numbers."""
    layers = ("delta_net",) * 3 + ("attention",)  # every fourth, as full_attention_interval says
    target = tiny_target(mlp=MLP, layers=layers, taps=(1, 3))
    return {
        "dflash2": Model.of(target, tiny_drafter(target, "dflash2"), stop_ids=(2, 7)),
        "dspark": Model.of(target, tiny_drafter(target, "dspark", embedding_scale=1.0)),
        "mtp": Model.of(target, tiny_mtp(target, mlp=MLP, dtype=jnp.float32)),
    }


@pytest.fixture(scope="session")
def saved(family: dict[str, Model], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole family in one checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint") / "family"
    drafters = [family[kind].drafter for kind in ("dspark", "mtp")]
    save(family["dflash2"], folder, drafters=drafters, tokenizer=FIRST_FAMILY)
    return folder


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of which the first family was exported, tensor by tensor as it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXPERIMENTS)
        write = importlib.import_module("trained_checkpoint").write
    return write(tmp_path_factory.mktemp("checkpoint") / "first_family")


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    import shutil

    return Path(shutil.copytree(saved, tmp_path / "family"))
