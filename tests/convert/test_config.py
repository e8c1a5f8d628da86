"""What ``genai_config.json`` may say: every refusal names the path and the value."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from convert import ArtifactError, load_artifact
from convert.artifact.genai_config import read_config
from convert.errors import Problems
from tests.convert.helpers import Config, copied, edit_config
from tests.paths import artifact, artifact_names

DFLASH2 = "qwen35_paged_fp16_dflash2"
DSPARK = "qwen35_paged_fp16_dspark"
MTP = "qwen35_paged_fp16_mtp"
SLIDING = "sliding_qwen3_fp32_cpu"


def errors_of(folder: Path) -> list[ArtifactError]:
    """Everything that reading the configuration finds."""
    problems = Problems()
    try:
        read_config(folder, problems)
    except ArtifactError as error:
        problems.append(error)
    return list(problems)


def at(config: Config, path: str) -> tuple[Any, Any]:
    """The object that holds the last key of a path, and that key."""
    keys = [int(k) if k.isdigit() else k for k in path.split(".")]
    for key in keys[:-1]:
        config = config[key]
    return config, keys[-1]


def setting(path: str, value: Any) -> Callable[[Config], None]:
    """Put ``value`` at ``path``."""

    def change(config: Config) -> None:
        parent, key = at(config, path)
        parent[key] = value

    return change


def without(path: str) -> Callable[[Config], None]:
    """Remove what stands at ``path``."""

    def change(config: Config) -> None:
        parent, key = at(config, path)
        del parent[key]

    return change


def dotted(path: str) -> str:
    """The path as messages spell it, as a pattern."""
    return re.escape(re.sub(r"\.(\d+)", r"[\1]", path))


@pytest.mark.parametrize("name", artifact_names() + artifact_names(broken=True))
def test_what_the_builder_writes_is_accepted(name: str) -> None:
    assert errors_of(artifact(name)) == []


REFUSED = [
    # The number of drafts follows from the block: 7 of 8 for DFlash2, 8 of 8 for DSpark.
    (DFLASH2, "model.dflash2.num_draft_tokens", 8, "7"),
    (DFLASH2, "model.dflash2.num_draft_tokens", 6, "7"),
    (DFLASH2, "model.dflash2.num_draft_tokens", 0, "7"),
    (DFLASH2, "model.dflash2.num_draft_tokens", 7.0, "7"),
    (DFLASH2, "model.dflash2.num_draft_tokens", True, "7"),
    (DSPARK, "model.dspark.num_draft_tokens", 7, "8"),
    (DSPARK, "model.dspark.num_draft_tokens", 9, "8"),
    (DFLASH2, "model.dflash2.block_size", 1, "2"),
    (DFLASH2, "model.dflash2.block_size", 0, "2"),
    (DFLASH2, "model.dflash2.block_size", -8, "2"),
    (DFLASH2, "model.dflash2.block_size", "8", "integer"),
    (DSPARK, "model.dspark.block_size", 0, "1"),
    # Never a fallback to the padding token.
    (DFLASH2, "model.dflash2.mask_token_id", None, "token"),
    (DFLASH2, "model.dflash2.mask_token_id", -1, "token"),
    (DFLASH2, "model.dflash2.mask_token_id", 384, "token"),
    (DFLASH2, "model.dflash2.mask_token_id", "5", "token"),
    (DFLASH2, "model.dflash2.mask_token_id", 5.0, "token"),
    (DFLASH2, "model.dflash2.sliding_window", 0, "full"),
    (DFLASH2, "model.dflash2.sliding_window", -2, "-1"),
    (DFLASH2, "model.dflash2.sliding_window", [64], "integer"),
    (DFLASH2, "model.dflash2.sliding_window", None, "integer"),
    (DFLASH2, "model.dflash2.selector_top_k", 0, "1"),
    (DFLASH2, "model.dflash2.selector_top_k", 385, "384"),
    (DFLASH2, "model.dflash2.aux_hidden_state_layers", [1, 4], "1..3"),
    (DFLASH2, "model.dflash2.aux_hidden_state_layers", [0, 2], "1..3"),
    (DFLASH2, "model.dflash2.aux_hidden_state_layers", [-1, 2], "1..3"),
    (DFLASH2, "model.dflash2.aux_hidden_state_layers", [1, 1], "once"),
    (DFLASH2, "model.dflash2.aux_hidden_state_layers", [], "one or more"),
    (DFLASH2, "model.dflash2.aux_hidden_state_layers", "1,3", "list"),
    (DFLASH2, "model.dflash2.num_hidden_layers", 0, "1"),
    (DFLASH2, "model.dflash2.num_key_value_heads", -1, "1"),
    (DFLASH2, "model.dflash2.head_size", 0, "1"),
    (DFLASH2, "model.dflash2.head_size", 2**40, "integer"),
    (DFLASH2, "model.dflash2.main_aux_hidden_states", "other", "aux_hidden_states"),
    (DFLASH2, "model.dflash2.filename", "../dflash2.onnx", "inside"),
    (DFLASH2, "model.dflash2.filename", "missing.onnx", "file"),
    (DFLASH2, "model.dflash2.filename", "\ud800", "inside"),
    (DFLASH2, "model.dflash2.inputs.block_table", "input_ids", "a unique name"),
    (DFLASH2, "model.dflash2.outputs.scores", "input_ids", "a unique name"),
    (DFLASH2, "model.dflash2.inputs.past_key_names", "past.key", "%d"),
    (DFLASH2, "model.dflash2.inputs.past_key_names", "past.%d.%d", "%d"),
    (DFLASH2, "model.dflash2.inputs.input_ids", "ids%d", "plain"),
    (DFLASH2, "model.dflash2.inputs.input_ids", 5, "name"),
    (DFLASH2, "model.dflash2.inputs.input_ids", "", "name"),
    (DFLASH2, "model.dflash2.shared_initializers.0.offset", 0, "name"),
    (DFLASH2, "model.dflash2.shared_initializers.0.offset", "-1", "digits"),
    (DFLASH2, "model.dflash2.shared_initializers.0.shape", [384, -64], "integers"),
    (DFLASH2, "model.dflash2.shared_initializers.0", "w", "object"),
    (DFLASH2, "model.decoder.hidden_size", 0, "1"),
    (DFLASH2, "model.decoder.num_hidden_layers", 0, "1"),
    (DFLASH2, "model.decoder.num_attention_heads", -4, "1"),
    (DFLASH2, "model.decoder.filename", "/etc/passwd", "inside"),
    (DFLASH2, "model.decoder.inputs", [], "object"),
    (DFLASH2, "model.decoder.state_groups.0.kind", "other", "paged_kv"),
    (DFLASH2, "model.vocab_size", 0, "1"),
    (DFLASH2, "model.context_length", -1, "1"),
    (DFLASH2, "model.eos_token_id", [2, "3"], "383"),
    (DFLASH2, "model.eos_token_id", True, "383"),
    (DFLASH2, "model.type", None, "name"),
    (DFLASH2, "engine.dynamic_batching.block_size", 0, "1"),
    (DFLASH2, "engine.dynamic_batching.max_batch_size", 0, "1"),
    (DFLASH2, "engine.dynamic_batching.num_blocks", 2**40, "integer"),
    (DFLASH2, "engine.dynamic_batching.prefix_caching", "false", "true or false"),
    (SLIDING, "model.decoder.sliding_window", 12, "object"),
    (SLIDING, "model.decoder.sliding_window.window_size", 0, "1"),
    (SLIDING, "model.decoder.sliding_window.window_size", "12", "integer"),
    (SLIDING, "model.decoder.sliding_window.layers", "0,2", "list"),
    (SLIDING, "model.decoder.sliding_window.layers", [-1], "integers"),
    # The runtime would run another model: prompts window by window, and no key of the one before.
    (SLIDING, "model.decoder.sliding_window.slide_key_value_cache", True, "false"),
    (SLIDING, "model.decoder.sliding_window.slide_inputs", True, "false"),
    (SLIDING, "model.decoder.sliding_window.slide_inputs", 0, "true or false"),
    (MTP, "model.mtp.enabled", "false", "true or false"),
    (MTP, "model.mtp.enabled", 0, "true or false"),
    (MTP, "model.mtp.enabled", None, "true or false"),
    (MTP, "model.mtp.main_hidden_states", "other", "hidden_states"),
]


@pytest.mark.parametrize(("name", "path", "value", "wanted"), REFUSED)
def test_values_that_are_refused(
    tmp_path: Path, name: str, path: str, value: Any, wanted: str
) -> None:
    folder = edit_config(copied(name, tmp_path), setting(path, value))
    errors = errors_of(folder)
    assert errors, f"{path} = {value!r} was accepted"
    assert errors[0].file in ("genai_config.json",)
    assert re.search(dotted(path), errors[0].where), str(errors[0])
    assert wanted in errors[0].expected, str(errors[0])
    with pytest.raises(ArtifactError, match=dotted(path)):
        load_artifact(folder)


REQUIRED = [
    (DFLASH2, f"model.dflash2.{key}")
    for key in (
        "block_size",
        "num_draft_tokens",
        "mask_token_id",
        "sliding_window",
        "selector_top_k",
        "aux_hidden_state_layers",
        "main_aux_hidden_states",
        "num_hidden_layers",
        "head_size",
        "num_key_value_heads",
        "filename",
        "inputs",
        "outputs",
        "inputs.qkv_row_map",
        "outputs.scores",
    )
] + [
    (DFLASH2, "model"),
    (DFLASH2, "model.type"),
    (DFLASH2, "model.decoder"),
    (DFLASH2, "model.vocab_size"),
    (DFLASH2, "model.context_length"),
    (DFLASH2, "model.decoder.filename"),
    (DFLASH2, "model.decoder.inputs.input_ids"),
    (DFLASH2, "model.decoder.outputs.logits"),
    (DFLASH2, "model.decoder.outputs.aux_hidden_states"),
    (MTP, "model.mtp.enabled"),
    (MTP, "model.mtp.main_hidden_states"),
    (MTP, "model.decoder.outputs.hidden_states"),
    (SLIDING, "model.decoder.sliding_window.window_size"),
    (SLIDING, "model.decoder.sliding_window.layers"),
    (SLIDING, "model.decoder.sliding_window.slide_inputs"),
    (SLIDING, "model.decoder.sliding_window.slide_key_value_cache"),
]


@pytest.mark.parametrize(("name", "path"), REQUIRED)
def test_keys_without_which_nothing_is_guessed(tmp_path: Path, name: str, path: str) -> None:
    folder = edit_config(copied(name, tmp_path), without(path))
    errors = errors_of(folder)
    assert errors and errors[0].found == "nothing", [str(e) for e in errors]
    assert re.search(dotted(path), errors[0].where)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.dflash2.mask_token_id", 383),
        ("model.eos_token_id", [2, 3, 2]),
        ("model.eos_token_id", None),
        ("model.eos_token_id", [2, 384]),
        ("model.pad_token_id", None),
        ("model.pad_token_id", -1),
        ("model.bos_token_id", 1000),
        ("engine.dynamic_batching.prefix_caching", True),
    ],
)
def test_values_that_are_accepted(tmp_path: Path, path: str, value: Any) -> None:
    folder = edit_config(copied(DFLASH2, tmp_path), setting(path, value))
    assert errors_of(folder) == []


def test_stop_tokens_keep_their_order_and_lose_repeats(tmp_path: Path) -> None:
    folder = edit_config(copied(DFLASH2, tmp_path), setting("model.eos_token_id", [9, 2, 9]))
    assert read_config(folder, Problems()).eos_token_ids == (9, 2)


def test_stop_tokens_that_do_not_exist(tmp_path: Path) -> None:
    """They are never emitted."""
    folder = edit_config(copied(DFLASH2, tmp_path), setting("model.eos_token_id", [384, 2, -1]))
    config = read_config(folder, Problems())
    assert config.eos_token_ids == (2,)
    assert any("model.eos_token_id is [384, 2, -1]" in note for note in config.remarks.notes)
    edit_config(folder, setting("model.eos_token_id", -1))
    config = read_config(folder, Problems())
    assert config.eos_token_ids == () and "model.eos_token_id is -1" in config.remarks.warnings[0]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        (DFLASH2, "model.dflash2.temperature"),
        (DFLASH2, "model.dflash2.inputs.surprise"),
        (DFLASH2, "model.dflash2.shared_initializers.0.surprise"),
        (DFLASH2, "model.dflash2.draft_to_target_ids"),
        (DSPARK, "model.dspark.markov_rank"),
        (MTP, "model.mtp.mask_token_id"),
        (MTP, "model.mtp.outputs.surprise"),
        (SLIDING, "model.decoder.sliding_window.surprise"),
    ],
)
def test_unknown_keys_that_could_matter_are_named(tmp_path: Path, name: str, path: str) -> None:
    folder = edit_config(copied(name, tmp_path), setting(path, 1 if "puts" not in path else "x"))
    with pytest.raises(ArtifactError, match=dotted(path) + ": found an unknown key"):
        load_artifact(folder)


@pytest.mark.parametrize("path", ["mask_token_id", "model.num_draft_tokens", "engine.enabled"])
def test_settings_of_a_drafter_elsewhere_are_named(tmp_path: Path, path: str) -> None:
    folder = edit_config(copied(DFLASH2, tmp_path), setting(path, 5))
    with pytest.raises(ArtifactError, match=dotted(path) + ".*a drafter's section"):
        load_artifact(folder)


def test_unknown_keys_elsewhere_are_kept_for_the_report(tmp_path: Path) -> None:
    folder = edit_config(copied(DFLASH2, tmp_path), setting("model.decoder.surprise", 1))
    (warning,) = read_config(folder, Problems()).remarks.warnings
    assert "model.decoder.surprise is 1" in warning


@pytest.mark.parametrize("other", ["encoder", "vision", "speech", "embedding"])
def test_further_models_are_refused(tmp_path: Path, other: str) -> None:
    folder = edit_config(copied(DFLASH2, tmp_path), setting(f"model.{other}", {}))
    with pytest.raises(ArtifactError, match=f"model.{other}"):
        load_artifact(folder)


def section_of(name: str, kind: str) -> Config:
    """A drafter's section from another artifact."""
    import json

    return json.loads((artifact(name) / "genai_config.json").read_text())["model"][kind]


def test_two_drafters_are_refused(tmp_path: Path) -> None:
    folder = copied(DFLASH2, tmp_path)
    edit_config(folder, setting("model.dspark", section_of(DSPARK, "dspark")))
    with pytest.raises(ArtifactError, match="dflash2 section and dspark section"):
        load_artifact(folder)


@pytest.mark.parametrize(("name", "kind"), [(DFLASH2, "dflash2"), (DSPARK, "dspark")])
def test_a_drafter_beside_an_enabled_head_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    folder = copied(name, tmp_path)
    edit_config(folder, setting("model.mtp", section_of(MTP, "mtp")))
    with pytest.raises(ArtifactError, match=f"{kind} section and mtp section"):
        load_artifact(folder)
    edit_config(folder, setting("model.mtp.enabled", False))
    assert load_artifact(folder).drafter_kind == kind


def test_a_head_that_is_switched_off_is_none(tmp_path: Path) -> None:
    folder = edit_config(copied(MTP, tmp_path), setting("model.mtp.enabled", False))
    (folder / "mtp.onnx").unlink()
    assert load_artifact(folder).drafter_kind is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b"null",
        b'{"model": 1}',
        b"\xff\xfe",
        b'{"model": {"vocab_size": NaN}}',
        b'{"model": {}, "model": {}}',
        b"[" * 100000,
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: bytes) -> None:
    folder = copied("qwen3_fp32_cpu", tmp_path)
    (folder / "genai_config.json").write_bytes(text)
    with pytest.raises(ArtifactError, match=r"genai_config\.json"):
        load_artifact(folder)


def test_a_missing_configuration_and_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"genai_config\.json.*does not exist"):
        load_artifact(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_artifact(tmp_path / "nowhere")


def test_a_configuration_that_is_a_link_out_of_the_folder(tmp_path: Path) -> None:
    folder = copied("qwen3_fp32_cpu", tmp_path)
    (folder / "genai_config.json").rename(tmp_path / "elsewhere")
    (folder / "genai_config.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="a link to"):
        load_artifact(folder)
