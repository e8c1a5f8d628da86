"""Checkpoints as other programs write them: what changes nothing does not stop a load."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxdraft
from convert import ArtifactError, inspect_folder
from jaxdraft import LoadWarning, Model
from jaxdraft.checkpoint import save
from jaxdraft.config import AttentionConfig
from jaxdraft.testing import tiny_drafter, tiny_target
from tests.checkpoint.helpers import arrays_of, assert_same, edit_json, edit_tensors

Tensors = dict[str, np.ndarray]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PLAIN = AttentionConfig(heads=4, kv_heads=2, head_dim=16, rotary_dim=16, scale=0.25)


def quietly(folder: Path, **options: Any) -> Model:
    """Loads without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", LoadWarning)
        return jaxdraft.load(folder, **options)


def noted(folder: Path, drafter: str | None = None) -> str:
    """What reports list."""
    report = inspect_folder(folder, drafter)
    assert report.loads, report.problems
    return "\n".join(report.notes)


def llama(folder: Path, *, tied: bool) -> Path:
    """A checkpoint of a Llama."""
    layers = ("attention",) * 2
    target = tiny_target(layers=layers, attention=PLAIN, delta_net=None, tied=tied, taps=())
    return save(Model.of(target, stop_ids=(2,)), folder / "out").folder


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return llama(tmp_path, tied=True)


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    return llama(tmp_path, tied=False)


def weights(folder: Path) -> Path:
    return folder / "target" / "model.safetensors"


def config(folder: Path, **values: Any) -> None:
    edit_json(folder / "target" / "config.json", lambda body: body.update(values))


# ------------------------------------------------------------------------- tensors held twice


def test_a_tied_head_that_is_stored(tied: Path) -> None:
    expected = quietly(tied)
    edit_tensors(weights(tied), lambda t: t.update({HEAD: t[EMBEDDING].copy()}))
    assert_same(quietly(tied), expected)
    assert f"{HEAD} is stored a second time; it is equal to {EMBEDDING}" in noted(tied)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_tied_head_that_is_stored_in_fewer_bits(tied: Path, dtype: Any) -> None:
    expected = quietly(tied)
    edit_tensors(weights(tied), lambda t: t.update({HEAD: t[EMBEDDING].astype(dtype)}))
    assert_same(quietly(tied), expected)


def test_a_tied_head_of_other_numbers(tied: Path) -> None:
    """transformers takes the target as untied, and so do we."""
    other = np.random.default_rng(0).normal(size=load_file(weights(tied))[EMBEDDING].shape)
    edit_tensors(weights(tied), lambda t: t.update({HEAD: other.astype(np.float32)}))
    with pytest.warns(LoadWarning, match="tie_word_embeddings is true, but the numbers of lm_head"):
        model = jaxdraft.load(tied)
    arrays = arrays_of(model)
    assert not model.target.config.tied  # type: ignore[attr-defined]
    assert np.array_equal(arrays["['target']['head']['weight']"], other.astype(np.float32))
    config(tied, tie_word_embeddings=False)
    assert_same(quietly(tied), model)
    assert "tie_word_embeddings" not in noted(tied)


def test_a_tied_head_that_differs_in_one_number(tied: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].copy()
        tensors[HEAD][-1, -1] += 1

    edit_tensors(weights(tied), change)
    assert "the numbers of lm_head.weight are not those" in noted(tied)
    with pytest.warns(LoadWarning):
        assert not jaxdraft.load(tied).target.config.tied  # type: ignore[attr-defined]


def test_a_tied_table_under_the_name_of_the_head(tied: Path) -> None:
    expected = quietly(tied)
    edit_tensors(weights(tied), lambda t: t.update({HEAD: t.pop(EMBEDDING)}))
    assert_same(quietly(tied), expected)
    assert f"{HEAD} is the embedding, too" in noted(tied)


def test_copies_in_another_type(tmp_path: Path) -> None:
    """A drafter's copies of the target's tables, rounded as the drafter is stored."""
    target = tiny_target()
    save(Model.of(target, tiny_drafter(target, "dspark")), tmp_path / "out")
    tables = load_file(tmp_path / "out" / "target" / "model.safetensors")
    names = {"embed_tokens.weight": "model.language_model.embed_tokens.weight", HEAD: HEAD}
    copies = {ours: tables[theirs].astype(np.float16) for ours, theirs in names.items()}
    expected = quietly(tmp_path / "out")
    drafter = tmp_path / "out" / "dspark" / "model.safetensors"
    edit_tensors(drafter, lambda t: t.update(copies))
    assert_same(quietly(tmp_path / "out"), expected)
    copies[HEAD][0, 0] += 1
    edit_tensors(drafter, lambda t: t.update(copies))
    with pytest.raises(ArtifactError, match="tensor lm_head.weight: found other numbers"):
        jaxdraft.load(tmp_path / "out")
    assert quietly(tmp_path / "out", drafter="none").info.drafter == "none"


def test_copies_in_a_head(copy: Path) -> None:
    """The same of the multi-token-prediction head, which shares the target's tables."""
    expected = quietly(copy, drafter="mtp")
    table = load_file(weights(copy))["model.language_model.embed_tokens.weight"]
    edit_tensors(weights(copy), lambda t: t.update({"mtp.embed_tokens.weight": table.copy()}))
    assert_same(quietly(copy, drafter="mtp"), expected)
    edit_tensors(weights(copy), lambda t: t.update({"mtp.embed_tokens.weight": 1 + table}))
    with pytest.raises(ArtifactError, match="tensor mtp.embed_tokens.weight: found other numbers"):
        jaxdraft.load(copy, drafter="mtp")


def test_a_tensor_in_two_shards(tmp_path: Path, tied: Path) -> None:
    expected = quietly(tied)
    save(expected, tmp_path / "shards", max_shard_bytes=8_000)
    folder = tmp_path / "shards" / "target"
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name, home = next(iter(index.items()))
    other = next(file for file in index.values() if file != home)
    tensor = load_file(folder / home)[name]
    edit_tensors(folder / other, lambda t: t.update({name: tensor.copy()}))
    assert_same(quietly(tmp_path / "shards"), expected)
    assert f"{other}: tensor {name} is stored a second time; {home}" in noted(tmp_path / "shards")
    edit_tensors(folder / other, lambda t: t.update({name: 1 + tensor}))
    with pytest.raises(ArtifactError, match=f"tensor {name}: found other numbers"):
        jaxdraft.load(tmp_path / "shards")


# ------------------------------------------------------------------------------ optional parts


def without_head(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("mtp.")]:
        del tensors[name]


def test_a_head_that_is_described_and_not_stored(copy: Path) -> None:
    """As fine-tunes are saved: transformers keeps the setting and drops the tensors."""
    edit_tensors(weights(copy), without_head)
    for drafter in ("dflash2", "none"):
        with pytest.warns(LoadWarning, match="the target is loaded without it"):
            assert jaxdraft.load(copy, drafter=drafter).info.drafter == drafter
    for kind in ("dflash2", "dspark"):
        shutil.rmtree(copy / kind)
    with pytest.warns(LoadWarning, match="mtp_num_hidden_layers"):
        assert jaxdraft.load(copy).info.drafter == "none"
    assert "loaded without it" in noted(copy)
    with pytest.raises(ValueError, match="no head for multi-token .* there is no tensor mtp"):
        jaxdraft.load(copy, drafter="mtp")


def test_a_head_that_is_stored_in_part_is_an_error(copy: Path) -> None:
    edit_tensors(weights(copy), lambda tensors: tensors.pop("mtp.fc.weight"))
    for kind in ("dflash2", "dspark"):
        shutil.rmtree(copy / kind)
    for drafter in (None, "mtp"):
        with pytest.raises(ValueError, match=r"tensor mtp\.fc\.weight: found nothing, expected sh"):
            jaxdraft.load(copy, drafter=drafter)
    assert not jaxdraft.inspect(copy).loads
    jaxdraft.load(copy, drafter="none")


def test_a_head_that_is_stored_and_not_described(copy: Path) -> None:
    text = "text_config"
    edit_json(copy / "target" / "config.json", lambda c: c[text].update(mtp_num_hidden_layers=0))
    with pytest.warns(LoadWarning, match="tensors mtp.\\* are not used"):
        jaxdraft.load(copy, drafter="none")
    with pytest.raises(ValueError, match="no head for multi-token prediction. config.json desc"):
        jaxdraft.load(copy, drafter="mtp")
    edit_json(copy / "target" / "config.json", lambda c: c[text].pop("mtp_num_hidden_layers"))
    with pytest.warns(LoadWarning, match="tensors mtp.\\* are not used"):
        jaxdraft.load(copy, drafter="none")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "dspark" / "model.safetensors").unlink(),
        lambda folder: (folder / "dspark" / "config.json").write_text("nonsense"),
        lambda folder: (folder / "dspark" / "config.json").write_text("{}"),
        lambda folder: (folder / "dspark" / "model.safetensors").write_bytes(b"nothing"),
        lambda folder: (folder / "dspark" / "config.json").unlink(),
    ],
)
def test_no_drafter_stops_a_load_without_one(spoil: Callable[[Path], Any], copy: Path) -> None:
    expected = quietly(copy, drafter="none")
    shutil.rmtree(copy / "dflash2")
    spoil(copy)
    assert_same(quietly(copy, drafter="none"), expected)
    noted(copy, "none")


# -------------------------------------------------------------- keys and tensors without effect

BUFFERS: list[tuple[str, np.ndarray]] = [
    ("model.layers.0.self_attn.rotary_emb.inv_freq", np.ones(8, np.float32)),
    ("model.layers.1.self_attn.rotary_emb.cos_cached", np.ones((1, 1, 64, 16), np.float32)),
    ("model.layers.1.self_attn.rotary_emb.sin_cached", np.ones((64, 16), np.float16)),
    ("model.rotary_emb.inv_freq", np.ones(8, np.float64)),
    ("model.layers.0.self_attn.masked_bias", np.full((), -1e9, np.float32)),
    ("model.layers.0.attn.bias", np.ones((1, 1, 64, 64), np.bool_)),
    ("model.layers.0.attention.bias", np.ones((1, 1, 64, 64), np.uint8)),
    ("model.layers.0.self_attn.q_proj.bias", np.zeros(64, np.float32)),
    ("model.layers.0.mlp.up_proj.bias", np.zeros(40, np.float16)),
    ("model.position_ids", np.arange(64)),
]


@pytest.mark.parametrize(("name", "array"), BUFFERS)
def test_tensors_without_effect(name: str, array: np.ndarray, untied: Path) -> None:
    expected = quietly(untied)
    rows = expected.target.config.mlp.hidden  # type: ignore[attr-defined]
    array = np.zeros(rows, np.float16) if "up_proj" in name else array
    edit_tensors(weights(untied), lambda t: t.update({name: array}))
    assert_same(quietly(untied), expected)
    assert f"tensor {name} is not read" in noted(untied)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("model.layers.0.self_attn.q_proj.bias", np.full(64, 1e-3, np.float32)),
        ("model.layers.0.self_attn.bias", np.zeros(64, np.float32)),
        ("model.layers.9.mlp.down_proj.bias", np.zeros(32, np.float32)),
        ("model.layers.0.self_attn.inv_freq", np.ones(8, np.float32)),
    ],
)
def test_tensors_that_may_have_an_effect(name: str, array: np.ndarray, untied: Path) -> None:
    edit_tensors(weights(untied), lambda t: t.update({name: array}))
    with pytest.raises(ArtifactError, match=f"tensor {name}: found shape .* no such tensor"):
        jaxdraft.load(untied)


@pytest.mark.parametrize(
    ("values", "note"),
    [
        ({"pad_token_id": -1}, "pad_token_id is -1"),
        ({"pad_token_id": 10**6}, "pad_token_id is 1000000"),
        ({"bos_token_id": [1, 2]}, "bos_token_id is [1, 2]"),
        ({"eos_token_id": [2, 10**6]}, "eos_token_id is [2, 1000000]"),
        ({"dtype": "auto"}, ""),
        ({"dtype": "float32", "torch_dtype": "float32"}, ""),
        ({"dtype": None, "torch_dtype": "torch.float32"}, ""),
        ({"torch_dtype": None, "use_sliding_window": None, "rope_scaling": None}, ""),
        ({"rope_parameters": None, "rope_theta": 10000.0}, ""),
        ({"rms_norm_eps": None, "num_key_value_heads": 2, "hidden_act": None}, ""),
        ({"pretraining_tp": 2, "mlp_bias": False, "attention_dropout": 0.1}, ""),
        ({"_name_or_path": "x", "transformers_version": "4.31.0", "use_cache": False}, ""),
        ({"is_decoder": None}, "is_decoder is null"),
        ({"temperature": 0.5, "max_length": 20}, "temperature 0.5"),
        ({"return_dict": True, "pruned_heads": {}, "id2label": {"0": "a"}}, ""),
    ],
)
def test_keys_without_effect(values: dict[str, Any], note: str, untied: Path) -> None:
    expected = quietly(untied)
    config(untied, **values)
    assert_same(quietly(untied), expected)
    assert note in noted(untied)


@pytest.mark.parametrize(
    ("key", "value"), [("attn_logit_softcapping", 30.0), ("surprise", [1]), ("hidden_size_", 8)]
)
def test_unknown_keys_are_named(key: str, value: Any, untied: Path) -> None:
    config(untied, **{key: value})
    with pytest.warns(LoadWarning, match=f"config.json: {key} is .*no effect"):
        jaxdraft.load(untied)
    assert f"config.json: {key} is" in noted(untied)


def test_keys_that_are_left_out(untied: Path) -> None:
    """What a file leaves out is as in the configuration class of transformers."""
    expected = quietly(untied)
    body = json.loads((untied / "target" / "config.json").read_text())
    assert body["rms_norm_eps"] == 1e-6 and body["eos_token_id"] == 2
    for key in ("rms_norm_eps", "hidden_act", "attention_bias", "eos_token_id", "dtype"):
        edit_json(untied / "target" / "config.json", lambda c, key=key: c.pop(key, None))
    (untied / "target" / "generation_config.json").unlink()
    again = quietly(untied)
    assert_same(again, expected)
    assert again.info.stop_ids == (2,)
    config(untied, eos_token_id=None)
    assert quietly(untied).info.stop_ids == ()
    edit_json(untied / "target" / "config.json", lambda c: c.pop("vocab_size"))
    with pytest.raises(ArtifactError, match=r"expected shape \[32000, "):
        jaxdraft.load(untied)


def test_end_tokens_past_the_vocabulary(untied: Path) -> None:
    generation = untied / "target" / "generation_config.json"
    edit_json(generation, lambda c: c.update(eos_token_id=[2, 10**6]))
    assert quietly(untied).info.stop_ids == (2,)
    assert "generation_config.json: eos_token_id is [2, 1000000]" in noted(untied)
    edit_json(generation, lambda c: c.update(eos_token_id=10**6))
    with pytest.warns(LoadWarning, match="eos_token_id is 1000000"):
        assert jaxdraft.load(untied).info.stop_ids == (2,)  # config.json's


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty is 1.1: not applied"),
        ({"num_beams": 4}, "num_beams is 4: not applied"),
        ({"bad_words_ids": [[5]]}, "bad_words_ids"),
        ({"surprise": 1}, "surprise is 1: an unknown setting"),
    ],
)
def test_recommended_settings(values: dict[str, Any], message: str, untied: Path) -> None:
    """They are not applied, and loading says so, once."""
    edit_json(untied / "target" / "generation_config.json", lambda c: c.update(values))
    with pytest.warns(LoadWarning, match=message) as caught:
        jaxdraft.load(untied)
    assert len(caught) == 1
    assert message in noted(untied)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95}, "temperature 0.6, top_p 0.95"),
        ({"do_sample": True}, "do_sample is true"),
    ],
)
def test_recommended_sampling_is_noted(values: dict[str, Any], message: str, untied: Path) -> None:
    """Most published models recommend some, and every call chooses; loading is quiet."""
    edit_json(untied / "target" / "generation_config.json", lambda c: c.update(values))
    quietly(untied)
    assert message in noted(untied)


@pytest.mark.parametrize(
    "values",
    [
        {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0},
        {"repetition_penalty": 1.0, "num_beams": 1, "max_new_tokens": 2048},
        {"temperature": None, "bad_words_ids": None, "transformers_version": "4.31.0"},
        {"pad_token_id": -1, "cache_implementation": "hybrid"},
    ],
)
def test_settings_of_decoding_without_effect(values: dict[str, Any], untied: Path) -> None:
    edit_json(untied / "target" / "generation_config.json", lambda c: c.update(values))
    quietly(untied)


def test_files_that_are_not_read(untied: Path) -> None:
    home = untied / "target"
    for name in ("README.md", "LICENSE", "pytorch_model.bin", "merges.txt", "consolidated.00.pth"):
        (home / name).write_text("")
    quietly(untied)
    before = noted(untied)
    assert "is not read" not in before
    (home / "surprise.py").write_text("")
    (home / "model-00002-of-00002.safetensors").write_bytes(b"")
    quietly(untied)
    assert "surprise.py is not read" in noted(untied)
    assert "model-00002-of-00002.safetensors is not read" in noted(untied)
    save_file({"a": np.zeros(1, np.float32)}, home / "adapter_model.safetensors")
    with pytest.warns(LoadWarning, match="the adapter is not applied"):
        jaxdraft.load(untied)


def test_settings_of_the_tokenizer(copy: Path) -> None:
    quietly(copy)
    path = copy / "target" / "tokenizer_config.json"
    edit_json(path, lambda c: c.update(surprise=1, clean_up_tokenization_spaces=True, legacy=True))
    text = noted(copy)
    assert "tokenizer_config.json: surprise is 1" in text
    assert "clean_up_tokenization_spaces is true" in text and "legacy" not in text


def test_nulls_and_labels_of_a_drafter(copy: Path) -> None:
    expected = quietly(copy)
    change = dict(surprise=None, return_dict=True, pretraining_tp=1, mlp_bias=False)
    edit_json(copy / "dflash2" / "config.json", lambda c: c.update(change))
    assert_same(quietly(copy), expected)
    assert "dflash2/config.json: surprise is null" in noted(copy)


def test_a_dense_model_lists_no_dense_layers(copy: Path) -> None:
    """transformers writes the key of its mixtures for Qwen3.5 without experts, too."""
    path = copy / "target" / "config.json"
    edit_json(path, lambda c: c["text_config"].update(mlp_only_layers=[]))
    quietly(copy)
    assert "mlp_only_layers" not in noted(copy)


def test_nothing_is_said_about_what_is_as_it_should_be(saved: Path) -> None:
    for kind in ("dflash2", "dspark", "mtp", "none"):
        quietly(saved, drafter=kind)
    quietly(jaxdraft.EMBEDDED)
    assert "no effect" not in noted(jaxdraft.EMBEDDED)
