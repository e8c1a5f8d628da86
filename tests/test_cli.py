"""The command line: what people see, and that mistakes are sentences."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from typer.testing import CliRunner

from jaxdraft import EMBEDDED, Model, demo
from jaxdraft.cli import app
from jaxdraft.cli_options import load_model
from jaxdraft.demo import QUESTIONS
from jaxdraft.testing import TableTarget
from jaxdraft.text import Text
from tests.paths import FIRST_FAMILY, artifact
from tests.tiny_tokenizers import byte_level

runner = CliRunner()


@pytest.fixture(autouse=True)
def _keep_the_cache_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "unused: conftest has chosen one")


def test_inspect_says_what_an_artifact_is() -> None:
    result = runner.invoke(app, ["inspect", str(FIRST_FAMILY)])
    assert result.exit_code == 0, result.output
    for word in ("dflash2", "no problems found"):
        assert word in result.output
    facts = json.loads(runner.invoke(app, ["inspect", str(FIRST_FAMILY), "--json"]).stdout)
    assert facts["problems"] == []


def test_inspect_reports_problems_and_fails() -> None:
    result = runner.invoke(app, ["inspect", str(artifact("broken_qwen3_paged_fp16_int8kv"))])
    assert result.exit_code == 1
    assert "problem" in result.output and "PagedAttention" in result.output


def test_generate_streams_and_counts() -> None:
    command = ["generate", str(FIRST_FAMILY), "--prompt", "def main(argv):\n", "-n", "12"]
    drafted = runner.invoke(app, command)
    plain = runner.invoke(app, [*command, "--drafter", "none"])
    assert drafted.exit_code == 0, drafted.output
    assert plain.exit_code == 0, plain.output
    text = [re.split(r"\n[\d.]+ tokens/s", r.stdout)[0] for r in (drafted, plain)]
    assert text[0] == text[1] and text[0].startswith("def main(argv):")
    assert re.search(r"\n[\d.]+ tokens/s; compiling took [\d.]+ s", drafted.stdout)
    assert "accepted, by position" in drafted.stdout and "tokens per round" in drafted.stdout
    assert "by position" not in plain.stdout


def test_generate_takes_two_drafters_fewer_drafts_and_blocks() -> None:
    command = ["generate", str(EMBEDDED), "--prompt", "def main(argv):\n", "-n", "12", "--drafter"]
    drafted = runner.invoke(app, [*command, "ngram+dspark", "--draft-tokens", "2", "--blocked"])
    plain = runner.invoke(app, [*command, "none"])
    assert drafted.exit_code == 0, drafted.output
    text = [re.split(r"\n[\d.]+ tokens/s", r.stdout)[0] for r in (drafted, plain)]
    assert text[0] == text[1]
    accepted = re.search(r"accepted, by position: (.*)", drafted.stdout)
    assert accepted is not None and accepted[1].count("%") == 2
    bench = ["bench", str(EMBEDDED), "-n", "8", "--repeats", "1", "--draft-tokens", "2"]
    result = runner.invoke(app, [*bench, "--drafter", "ngram+dspark"])
    assert result.exit_code == 0 and re.search(r"ngram\+dspark .*x", result.stdout), result.output


@pytest.mark.parametrize("command", [("generate", str(EMBEDDED), "--prompt", "x"), ("bench",)])
def test_kernels_are_chosen_by_an_option(command: tuple[str, ...]) -> None:
    result = runner.invoke(app, [*command, "--kernels", "triton"])
    assert result.exit_code == 2
    assert "kernels is 'triton'; expected one of xla, pallas" in result.output.replace("\n", " ")


def test_generate_samples_by_a_seed_and_stops_at_a_string() -> None:
    command = ["generate", str(FIRST_FAMILY), "--prompt", "def main(argv):\n", "-n", "12"]
    command += ["-t", "0.8", "--top-p", "0.9", "--stop", "return"]
    one, two, other = (
        runner.invoke(app, [*command, "--seed", seed]).stdout for seed in ("3", "3", "5")
    )
    outputs = [re.split(r"\n[\d.]+ tokens/s", text)[0] for text in (one, two, other)]
    assert outputs[0] == outputs[1] != outputs[2]
    assert all("return" not in text for text in outputs)


def test_save_writes_checkpoints_that_load(tmp_path: Path) -> None:
    out = tmp_path / "family"
    result = runner.invoke(app, ["save", str(FIRST_FAMILY), str(out)])
    assert result.exit_code == 0, result.output
    assert (out / "target" / "config.json").is_file() and (out / "dflash2").is_dir()
    again = runner.invoke(app, ["save", str(FIRST_FAMILY), str(out)])
    assert again.exit_code == 2  # nothing is overwritten unasked
    command = ["--prompt", "def main(argv):\n", "-n", "12"]
    texts = [
        runner.invoke(app, ["generate", str(folder), *command]).stdout.split("tokens/s")[0]
        for folder in (FIRST_FAMILY, out)
    ]
    assert texts[0].rsplit("\n", 1)[0] == texts[1].rsplit("\n", 1)[0]


def test_save_keeps_every_drafter_of_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "family"
    options = ["--int4", "--dtype", "bfloat16"]
    result = runner.invoke(app, ["save", str(EMBEDDED), str(out), *options])
    assert result.exit_code == 0, result.output
    assert "rounded" not in result.output
    assert {path.name for path in out.iterdir()} == {"target", "dflash2", "dspark"}
    for part in ("target", "dflash2", "dspark"):  # what is here was trained for just this
        weights = f"{part}/model.safetensors"
        assert (out / weights).read_bytes() == (EMBEDDED / weights).read_bytes()
    command = ["generate", str(out), "--prompt", "def f(", "-n", "8", "--drafter"]
    for drafter in ("dspark", str(out / "dspark")):  # a kind, and a folder
        result = runner.invoke(app, [*command, drafter])
        assert result.exit_code == 0, result.output
    result = runner.invoke(app, [*command, "nobody"])
    assert result.exit_code == 2 and "drafter is 'nobody'" in result.output


def test_save_in_eight_bits(tmp_path: Path) -> None:
    """Of block drafters alone."""
    out = tmp_path / "small"
    result = runner.invoke(app, ["save", str(FIRST_FAMILY), str(out), "--int8"])
    assert result.exit_code == 0, result.output
    assert "tensors were rounded" in result.output
    kinds = [
        json.loads((out / part / "config.json").read_text()).get("quantization_config", {})
        for part in ("target", "dflash2")
    ]
    assert [kind.get("format") for kind in kinds] == [None, "int-quantized"]
    result = runner.invoke(
        app, ["save", str(FIRST_FAMILY), str(tmp_path / "both"), "--int8", "--int4"]
    )
    assert result.exit_code == 2 and "int8 and int4" in result.output


@pytest.mark.parametrize("asked", [True, False])
def test_demo_shows_equal_texts(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxdraft.cli.smollm2_file", lambda: None)
    options = ["-n", "8", "--repeats", "1", *["--family"] * asked]
    result = runner.invoke(app, ["demo", *options])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("equal to plain decoding") == 6
    assert re.search(r"dflash2 .*x", result.stdout)
    assert ("SmolLM2-135M-Instruct is not installed" in result.stderr) != asked


def test_demo_answers_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the embedded model in the place of SmolLM2."""
    monkeypatch.setattr("jaxdraft.cli.smollm2_file", lambda: EMBEDDED)
    options = ["-n", "8", "--repeats", "1", "--drafter", "ngram"]
    result = runner.invoke(app, ["demo", *options])
    assert result.exit_code == 0, result.output
    assert all(question in result.stdout for question in QUESTIONS)
    assert result.stdout.count("equal to plain decoding") == len(QUESTIONS)
    assert "without drafts" in result.stdout and "drafter ngram, " in result.stdout


def test_smollm2_is_found_where_its_package_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is not imported."""
    monkeypatch.syspath_prepend(tmp_path)
    assert demo.smollm2_file() is None
    package = tmp_path / demo.SMOLLM2_PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError")
    importlib.invalidate_caches()
    assert demo.smollm2_file() is None
    (package / "model.gguf").touch()
    assert demo.smollm2_file() == package / "model.gguf"


def test_ways_of_decoding_that_differ_are_seen() -> None:
    rows = [SimpleNamespace(outputs=[SimpleNamespace(ids=lambda i=i: [[1, i]])]) for i in (2, 3)]
    assert demo.equal(rows[:1] * 2, 0) and not demo.equal(rows, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", str(FIRST_FAMILY), "--prompt", "x", "-t", "-1"], "temperature is -1.0"),
        (["inspect", "no-such-folder"], "no-such-folder"),
        (["generate", "no-such-folder", "--prompt", "x"], "no-such-folder"),
        (["generate", str(FIRST_FAMILY), "--prompt", ""], "empty"),
        (["generate", str(FIRST_FAMILY), "--prompt", "x", "--regex", "("], "regular expression"),
        (["generate", str(FIRST_FAMILY), "--prompt", "x", "--json-schema", "no"], "no is not a"),
        (["generate", str(FIRST_FAMILY), "--prompt", "x", "--drafter", "dflash3"], "dflash3"),
        (["generate", str(FIRST_FAMILY), "--prompt", "x", "--dtype", "int7"], "int7"),
    ],
)
def test_mistakes_are_sentences(arguments: list[str], words: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert words in result.output and "Traceback" not in result.output


def test_the_embedded_model_is_in_the_package() -> None:
    for name in ("target/tokenizer.json", "prompts.json", "MODEL_CARD.md"):
        assert (EMBEDDED / name).is_file()
    facts = json.loads(runner.invoke(app, ["inspect", str(EMBEDDED), "--json"]).stdout)
    assert facts["problems"] == []


@pytest.mark.parametrize("kind", ["dflash2", "dspark", "mtp"])
def test_a_drafter_of_the_embedded_model_is_loaded_by_its_name(kind: str) -> None:
    """What ``--drafter`` of every command does with it."""
    model, named = load_model(str(EMBEDDED), None, kind)
    assert named == model.info.drafter == kind and model.drafter is model.choose(kind)
    assert load_model(str(EMBEDDED), None, f"ngram+{kind}", blocked=True)[1] == f"ngram+{kind}"


# --------------------------------------------------------------------------- map


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any folder is a table of 260 tokens, whose programs compile fast."""
    target = TableTarget.random(jax.random.key(0), 260)
    model = Model.of(target, text=Text(tokenizer=byte_level()))
    for module in ("cli", "cli_data"):
        monkeypatch.setattr(f"jaxdraft.{module}.load_model", lambda *_, **how: (model, "none"))


def test_map_answers_a_file_and_continues(tiny: None, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "ab"}\n{"prompt": [5, 6, 7], "id": "b"}\n')
    command = ["map", str(prompts), "--out", str(out), "--model", "any", "-n", "12"]
    command += ["--max-batch", "2", "--context", "64"]
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "2 answers" in result.stdout and "2 of 2 prompts" in result.stderr
    answers = {a["line"]: a for a in map(json.loads, out.read_text().splitlines())}
    assert len(answers[1]["tokens"]) == 12 and answers[2]["id"] == "b"
    whole = out.read_bytes()
    out.write_bytes(whole[:-9])
    again = runner.invoke(app, command)
    assert "1 answers, after 1 of earlier runs" in again.stdout and out.read_bytes() == whole
    other = runner.invoke(app, [*command, "--seed", "1"])
    assert other.exit_code == 2 and "key was 0 and is 1" in " ".join(other.output.split())
    missing = runner.invoke(app, ["map", str(tmp_path / "none"), "--out", str(out)])
    assert missing.exit_code == 2 and "is not a file" in " ".join(missing.output.split())
    # The answers, and a text, as places to look drafts up in.
    text = tmp_path / "text.txt"
    text.write_text("any text")
    command = ["generate", "any", "--prompt", "ab", "-n", "12"]
    plain = runner.invoke(app, command)
    found = runner.invoke(app, [*command, "--history", str(text), "--history", str(out)])
    assert found.exit_code == 0, found.output
    one, two = (re.split(r"\n[\d.]+ tokens/s", r.stdout)[0] for r in (plain, found))
    assert one == two and "by position" in found.stdout and "by position" not in plain.stdout
    out.write_text('{"line": 1}\n')
    wrong = runner.invoke(app, [*command, "--history", str(out)])
    words = " ".join(wrong.output.split())
    assert wrong.exit_code == 2 and "line 1, is not an answer of jaxdraft map" in words


def test_eval_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxdraft.evaluation.harness.INSTALLED", False)
    result = runner.invoke(app, ["eval", str(FIRST_FAMILY), "--tasks", "arc_easy"])
    assert result.exit_code == 2 and "pip install 'jaxdraft[eval]'" in result.output
