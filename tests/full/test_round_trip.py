"""Checkpoints through the model builder and back: no parameter differs by a bit, no draft changes.

``JAXDRAFT_CHECKPOINT`` names a further checkpoint (a folder with ``target``, perhaps ``dflash2``
and ``dspark``) to send round, beside the family in this repository and random models of every
architecture. ``JAXDRAFT_BUILDER`` names an interpreter that has the model builder; default: this
one.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxdraft
from jaxdraft import Model
from jaxdraft.checkpoint import save

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"

SMALL = [
    "Qwen3.5, dflash2",
    "Qwen3.5, dspark",
    "Qwen3.5, mtp",
    "Qwen3.5 MoE, mtp",
    "Qwen3",
    "Qwen3 with windows",
    "Llama, tied",
]
"""Those of the experiment, which only some environments can import."""

BUILDER = os.environ.get("JAXDRAFT_BUILDER", sys.executable)

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def round_trip() -> Any:
    """The experiment of that name; its modules find each other beside it."""
    sys.path.insert(0, str(EXPERIMENTS))
    try:
        return importlib.import_module("round_trip")
    finally:
        sys.path.remove(str(EXPERIMENTS))


def assert_unchanged(round_trip: Any, model: Model, drafter: str, folder: Path) -> None:
    there, again, rounded = round_trip.trip(model, drafter, BUILDER, folder)
    assert rounded == {}
    for trip, tables in ((there, 1e-5), (again, 0.0)):
        assert trip.parameters > 0 and trip.moved == []
        assert trip.tables <= tables
        assert trip.drafts


def families() -> list[tuple[str | None, str]]:
    """(checkpoint, drafter) of everything that is at hand; None: that of the first family."""
    found: list[tuple[str | None, str]] = [(None, "dflash2"), (None, "mtp")]
    if folder := os.environ.get("JAXDRAFT_CHECKPOINT"):
        blocks = [d for d in ("dflash2", "dspark") if Path(folder, d).is_dir()]
        found += [(folder, drafter) for drafter in (*blocks, "mtp")]
    return found


@pytest.mark.parametrize(("checkpoint", "drafter"), families())
def test_a_family(checkpoint: str | None, drafter: str, round_trip: Any, tmp_path: Path) -> None:
    folder = checkpoint or round_trip.trained_checkpoint.write(tmp_path / "trained")
    model = jaxdraft.load(folder, drafter=drafter, dtype="float32")
    assert_unchanged(round_trip, model, drafter, tmp_path)


@pytest.mark.parametrize("name", SMALL)
def test_every_architecture(name: str, round_trip: Any, tmp_path: Path) -> None:
    model, drafter = round_trip.small_model(name)
    assert_unchanged(round_trip, model, drafter, tmp_path)


def test_no_architecture_is_forgotten(round_trip: Any) -> None:
    assert list(round_trip.SMALL) == SMALL


TRANSFORMERS = """
import sys
import numpy as np, torch, transformers
kind, folder, ids, out = sys.argv[1:]
made, told = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
for key in ("missing_keys", "mismatched_keys"):
    assert not told[key], (key, told[key])
assert all(name.startswith("mtp.") for name in told["unexpected_keys"]), told["unexpected_keys"]
with torch.no_grad():
    np.save(out, made.float().eval()(torch.from_numpy(np.load(ids))).logits.numpy())
"""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen3.5, mtp", "Qwen3_5ForConditionalGeneration"),
        ("Qwen3.5 MoE, mtp", "Qwen3_5MoeForConditionalGeneration"),
        ("Qwen3 with windows", "Qwen3ForCausalLM"),
        ("Llama, tied", "LlamaForCausalLM"),
    ],
)
def test_transformers_gives_the_same_logits(
    name: str, kind: str, round_trip: Any, tmp_path: Path
) -> None:
    """Another implementation reads what we write; it misses no tensor and knows every one."""
    model, _ = round_trip.small_model(name)
    save(model, tmp_path / "saved")
    ids = np.random.default_rng(1).integers(0, model.target.vocab_size - 4, (2, 40))
    np.save(tmp_path / "ids.npy", ids)
    files = [str(tmp_path / file) for file in ("saved/target", "ids.npy", "logits.npy")]
    subprocess.run([BUILDER, "-c", TRANSFORMERS, kind, *files], check=True)
    ours = np.asarray(jaxdraft.score(model, ids.tolist()).logits)[:, :40]
    np.testing.assert_allclose(ours, np.load(tmp_path / "logits.npy"), atol=2e-4, rtol=0)


WRITE = """
import json, sys
import numpy as np, torch, transformers
kind, changes, folder, ids, out = sys.argv[1:]
torch.manual_seed(0)
config = getattr(transformers, kind + "Config")(**json.loads(changes))
made = getattr(transformers, kind + "ForCausalLM")(config).float().eval()
for name, parameter in made.named_parameters():
    if parameter.dim() == 1:
        parameter.data += 0.1 * torch.randn(parameter.shape)
made.save_pretrained(folder, max_shard_size="60KB")
with torch.no_grad():
    np.save(out, made(torch.from_numpy(np.load(ids))).logits.numpy())
"""

_SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", dict(num_hidden_layers=2, tie_word_embeddings=True)),
        ("Llama", dict(num_hidden_layers=2, rope_parameters={"rope_theta": 5e5})),
        (
            "Qwen3",
            dict(
                num_hidden_layers=3,
                use_sliding_window=True,
                sliding_window=8,
                max_window_layers=1,
            ),
        ),
    ],
)
def test_what_transformers_writes(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """In shards, with every setting that it likes to write."""
    ids = np.random.default_rng(1).integers(0, 64, (2, 40))
    np.save(tmp_path / "ids.npy", ids)
    files = [str(tmp_path / file) for file in ("saved", "ids.npy", "logits.npy")]
    subprocess.run([BUILDER, "-c", WRITE, kind, json.dumps(_SIZES | changes), *files], check=True)
    assert (tmp_path / "saved" / "model.safetensors.index.json").is_file()
    model = jaxdraft.load(tmp_path / "saved")
    ours = np.asarray(jaxdraft.score(model, ids.tolist()).logits)[:, :40]
    np.testing.assert_allclose(ours, np.load(tmp_path / "logits.npy"), atol=1e-4, rtol=0)
