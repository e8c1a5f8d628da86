"""Checkpoints and artifacts of the same weights are the same model."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import jaxdraft
from jaxdraft import Model
from jaxdraft.checkpoint import Rope, save
from jaxdraft.config import AttentionConfig
from jaxdraft.draft.block import BlockDrafter
from jaxdraft.testing import tiny_drafter, tiny_mtp, tiny_target
from tests.checkpoint.conftest import MOE
from tests.checkpoint.helpers import (
    ROTARY_WITHIN,
    arrays_of,
    assert_same,
    edit_json,
    edit_tensors,
)
from tests.paths import FIRST_FAMILY, artifact, first_prompts


@pytest.fixture(scope="module")
def exported() -> Model:
    """Converted from ONNX."""
    return jaxdraft.load(FIRST_FAMILY)


@pytest.fixture(scope="module")
def trained(original: Path) -> Model:
    """The checkpoint of which the first family was exported, stored in bfloat16."""
    return jaxdraft.load(original, dtype="float32")


def test_a_checkpoint_of_transformers_is_the_converted_artifact(
    trained: Model, exported: Model
) -> None:
    assert_same(trained, exported, tables=ROTARY_WITHIN)
    assert trained.info == exported.info
    assert trained.text is not None


def test_its_drafts_are_the_golden_ones(trained: Model) -> None:
    """The program is that of the first family's golden test, compiled once for both."""
    prompts = first_prompts()
    ids = [prompt["prompt_ids"] for prompt in prompts]
    out = jaxdraft.generate(trained, ids, max_new_tokens=64, stop_ids=(), trace=True)
    assert out.ids() == [prompt["greedy"] for prompt in prompts]
    assert out.trace is not None
    for accepted, prompt in zip(np.asarray(out.trace.accepted), prompts, strict=True):
        found = accepted[accepted >= 0].tolist()
        expected = prompt["dflash2"]["accepted_per_round"]
        assert found[:-1] == expected[: len(found) - 1]  # the last round is cut to fit


def test_a_saved_artifact_has_the_tensors_of_its_checkpoint(
    exported: Model, original: Path, tmp_path: Path
) -> None:
    done = save(exported, tmp_path / "out")
    assert done.rounded == {} and done.parts == ("target", "dflash2")
    assert_same(jaxdraft.load(tmp_path / "out"), exported, tables=ROTARY_WITHIN)
    for part in done.parts:
        ours, theirs = facts(tmp_path / "out" / part), facts(original / part)
        head = {name for name in theirs if name.startswith("mtp.")}  # the artifact has none
        assert ours.keys() == theirs.keys() - head
        for name, (shape, _) in ours.items():
            assert shape == theirs[name][0], name


def test_what_was_stored_is_stored_again(trained: Model, original: Path, tmp_path: Path) -> None:
    """In bfloat16, as all numbers were: to the bit, or to the same ``1 + w``, ``exp(A_log)``."""
    done = save(trained, tmp_path / "out", dtype="bfloat16", compute_dtype="float32")
    assert done.rounded == {}
    assert_same(jaxdraft.load(tmp_path / "out"), trained)  # in float32, unasked
    for part in done.parts:
        theirs = load_file(original / part / "model.safetensors")
        for name, array in load_file(tmp_path / "out" / part / "model.safetensors").items():
            if name.startswith("model.visual."):
                continue
            pair = (array, theirs[name])
            if "norm" in name and part == "target":
                pair = tuple(np.float32(1) + x.astype(np.float32) for x in pair)
            elif name.endswith("A_log"):
                pair = tuple(np.exp(x.astype(np.float64)).astype(np.float32) for x in pair)
            assert pair[0].tobytes() == pair[1].tobytes(), name


def facts(folder: Path) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype of every tensor."""
    found = {}
    with safe_open(folder / "model.safetensors", framework="numpy") as opened:
        for name in opened.keys():  # noqa: SIM118
            part = opened.get_slice(name)
            found[name] = (list(part.get_shape()), part.get_dtype())
    return found


def test_the_settings_are_those_of_transformers(
    exported: Model, original: Path, tmp_path: Path
) -> None:
    """Every setting that we write has the value that transformers wrote for the same model."""
    save(exported, tmp_path / "out")
    ours = json.loads((tmp_path / "out" / "target" / "config.json").read_text())
    theirs = json.loads((original / "target" / "config.json").read_text())
    text, other = ours.pop("text_config"), theirs["text_config"]
    assert text.pop("mtp_num_hidden_layers") == 0 and text.pop("dtype") == "float32"
    assert text == {key: other[key] for key in text}
    vision = ours.pop("vision_config")
    assert vision == {key: theirs["vision_config"][key] for key in vision}
    assert ours == {key: theirs[key] for key in ours}
    drafter = json.loads((tmp_path / "out" / "dflash2" / "config.json").read_text())
    assert drafter.pop("dtype") == "float32"
    theirs = json.loads((original / "dflash2" / "config.json").read_text())
    assert sorted(drafter.items(), key=str) == sorted(theirs.items(), key=str)


YARN = Rope(theta=10000.0, kind="yarn", factor=4.0, original_length=160)
"""Of the DSpark artifacts: nothing in an artifact says how its tables were made."""

ARTIFACTS = {
    "qwen35_fp32_cpu_mtp": "mtp inside the target, dense",
    "qwen35_moe_fp32_cpu": "experts",
    "qwen35_tied_fp32_cpu": "a tied head",
    "qwen3_fp32_cpu": "no delta net, no gates, norms as they are",
    "sliding_qwen3_fp32_cpu": "layers with a window, dense",
    "sliding_qwen3_paged_fp16": "layers with a window, paged, float16",
    "patched_fp32_paged_dflash2_sw": "a drafter with a window",
    "patched_fp32_paged_dspark": "a Markov head",
    "qwen35_paged_bf16_dspark": "bfloat16 throughout",
    "qwen35_paged_fp16_dflash2": "a bfloat16 drafter under a float16 target",
}


@pytest.mark.parametrize("name", ARTIFACTS)
def test_artifacts_survive_being_saved(name: str, tmp_path: Path) -> None:
    model = jaxdraft.load(artifact(name))
    rope = {"dspark": YARN} if name.endswith("dspark") else None
    done = save(model, tmp_path / "out", rope=rope)
    assert done.rounded == {}
    again = jaxdraft.load(tmp_path / "out")
    # Some float16 artifacts have tables of float16; what is loaded is exact.
    narrow = name == "sliding_qwen3_paged_fp16"
    assert_same(again, model, tables=5e-4 if narrow else ROTARY_WITHIN)
    assert again.info == dataclasses.replace(model.info, name="out")
    # What was read from a checkpoint is saved without any difference at all.
    save(again, tmp_path / "again", rope=rope)
    assert_same(jaxdraft.load(tmp_path / "again"), again)


@pytest.mark.parametrize("kind", ["dflash2", "dspark", "mtp"])
def test_a_family_is_saved_in_one_folder(kind: str, family: dict[str, Model], saved: Path) -> None:
    model = jaxdraft.load(saved, drafter=kind)
    assert model.info.drafter == kind
    ours, theirs = arrays_of(model), arrays_of(family[kind])
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        if "target" in name and "rotary" in name or (kind == "mtp" and "rotary" in name):
            np.testing.assert_allclose(array, theirs[name], atol=2e-5, rtol=0)
        elif "decay" in name:  # random numbers, which exp need not reach
            np.testing.assert_allclose(array, theirs[name], rtol=2e-7)
        else:
            np.testing.assert_array_equal(array, theirs[name], name)


def test_which_drafter_is_loaded(family: dict[str, Model], saved: Path, tmp_path: Path) -> None:
    assert jaxdraft.load(saved).info.drafter == "dflash2"
    assert jaxdraft.load(saved / "target").info.drafter == "dflash2"  # beside it
    assert jaxdraft.load(saved, drafter="none").info.drafter == "none"
    assert jaxdraft.load(saved, drafter=saved / "dspark").info.drafter == "dspark"
    assert jaxdraft.load(saved, drafter=str(saved / "dspark")).info.drafter == "dspark"
    alone = tmp_path / "somewhere"
    (saved / "target").rename(alone)  # only a folder called target has drafters beside it
    try:
        assert jaxdraft.load(alone).info.drafter == "mtp"
        assert jaxdraft.load(alone, drafter=saved / "dflash2").info.drafter == "dflash2"
        with pytest.raises(ValueError, match="drafter is 'dspark'.*expected mtp, none"):
            jaxdraft.load(alone, drafter="dspark")
    finally:
        alone.rename(saved / "target")


def test_stop_ids_and_tokenizer(saved: Path) -> None:
    model = jaxdraft.load(saved)
    assert model.info.stop_ids == (2, 7) and model.info.name == "family"
    assert model.text is not None
    assert model.text.encode("def f") == jaxdraft.load(FIRST_FAMILY).text.encode("def f")  # type: ignore[union-attr]


def test_all_chat_templates_are_saved(saved: Path, tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    (source / "additional_chat_templates").mkdir(parents=True)
    shutil.copy(FIRST_FAMILY / "tokenizer.json", source)
    (source / "chat_template.jinja").write_text("plain")
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    save(jaxdraft.load(saved), tmp_path / "out", tokenizer=source)
    text = jaxdraft.load(tmp_path / "out").text
    assert text is not None
    hi = [{"role": "user", "content": "hi"}]
    assert (text.render(hi), text.render(hi, tools=[{}])) == ("plain", "tools")


def test_shards_are_one_checkpoint(saved: Path, tmp_path: Path) -> None:
    model = jaxdraft.load(saved)
    save(model, tmp_path / "out", max_shard_bytes=20_000)
    shards = sorted(path.name for path in (tmp_path / "out" / "target").glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((tmp_path / "out" / "target" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    assert_same(jaxdraft.load(tmp_path / "out"), model)


def test_a_narrower_dtype_is_reported(saved: Path, tmp_path: Path) -> None:
    model = jaxdraft.load(saved)
    done = save(model, tmp_path / "out", dtype="bfloat16")
    matrix = "target/model.language_model.layers.0.mlp.down_proj.weight"
    assert 0 < done.rounded[matrix] < 0.01
    assert {dtype for _, dtype in facts(tmp_path / "out" / "target").values()} == {"BF16"}
    narrow = jaxdraft.load(tmp_path / "out")
    assert arrays_of(narrow)["['target']['embed']['weight']"].dtype == jnp.bfloat16
    wide = jaxdraft.load(tmp_path / "out", dtype="float32")
    exact = arrays_of(model)["['drafter']['fc']['weight']"]
    found = arrays_of(wide)["['drafter']['fc']['weight']"]
    np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16).astype(np.float32))


def test_bfloat16_modules_are_saved_exactly(tmp_path: Path) -> None:
    """Their matrices in bfloat16, and what is shifted or a logarithm in float32."""
    target = tiny_target(dtype=jnp.bfloat16)
    model = Model.of(target, tiny_drafter(target, dtype=jnp.bfloat16))
    assert save(model, tmp_path / "out").rounded == {}
    stored = {name: dtype for name, (_, dtype) in facts(tmp_path / "out" / "target").items()}
    assert stored["lm_head.weight"] == "BF16"
    assert stored["model.language_model.norm.weight"] == "F32"
    first = jaxdraft.load(tmp_path / "out")
    assert first.target.dtype == jnp.bfloat16  # type: ignore[attr-defined]
    assert_same(first, model, tables=2e-5)


def test_a_llama_like_target(tmp_path: Path) -> None:
    attention = AttentionConfig(heads=4, kv_heads=2, head_dim=8, rotary_dim=8, scale=8**-0.5)
    target = tiny_target(
        attention=attention, layers=("attention",) * 2, delta_net=None, taps=(), tied=True
    )
    save(target, tmp_path / "out", stop_ids=(3,))
    config = json.loads((tmp_path / "out" / "target" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"]
    names = facts(tmp_path / "out" / "target")
    assert names["model.layers.1.self_attn.k_proj.weight"] == ([16, 32], "F32")
    assert "lm_head.weight" not in names and len(names) == 2 + 2 * 9
    model = jaxdraft.load(tmp_path / "out" / "target")  # no folder around it
    assert model.info.stop_ids == (3,) and model.info.drafter == "none"
    # The scale is the shortest decimal of its float32, as in converted artifacts.
    scale = model.target.config.attention.scale  # type: ignore[attr-defined]
    assert scale == pytest.approx(8**-0.5, rel=1e-7)


def test_every_layer_with_a_window(tmp_path: Path) -> None:
    window = AttentionConfig(
        heads=4, kv_heads=2, head_dim=16, rotary_dim=16, qk_norm=True, scale=0.25, window=8
    )
    layers = ("sliding",) * 2
    target = tiny_target(layers=layers, attention=None, sliding=window, delta_net=None, taps=())
    save(target, tmp_path / "out")
    assert_same(jaxdraft.load(tmp_path / "out"), Model.of(target), tables=2e-5)


def test_a_dspark_checkpoint_of_its_authors(saved: Path, tmp_path: Path) -> None:
    """Settings at the top, copies of the target's matrices, and a confidence head."""
    folder = Path(shutil.copytree(saved / "dspark", tmp_path / "theirs"))
    target = load_file(saved / "target" / "model.safetensors")

    def flatten(config: dict[str, Any]) -> None:
        config |= config.pop("dflash_config")
        config |= {"architectures": ["Qwen3DSparkModel"], "markov_head_type": "vanilla"}
        config |= {"enable_confidence_head": True, "num_anchors": 64, "num_target_layers": 4}

    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["embed_tokens.weight"] = target["model.language_model.embed_tokens.weight"]
        tensors["lm_head.weight"] = target["lm_head.weight"]
        tensors["confidence_head.proj.weight"] = np.zeros((1, 40), np.float32)
        tensors["confidence_head.proj.bias"] = np.zeros(1, np.float32)

    edit_json(folder / "config.json", flatten)
    edit_tensors(folder / "model.safetensors", add)
    found, plain = (jaxdraft.load(saved, drafter=each).drafter for each in (folder, "dspark"))
    assert isinstance(found, BlockDrafter) and isinstance(plain, BlockDrafter)
    described = dataclasses.replace(plain.config, confidence="pair", layout="flat")
    assert found.config == described
    params = dict(found.backbone.params)
    assert params.pop("trust_weight").shape == (1, 40) and params.pop("trust_bias").shape == (1,)
    jax.tree.map(np.testing.assert_array_equal, params, dict(plain.backbone.params))
    edit_json(folder / "config.json", lambda config: config.update(selector_top_k=None))
    chained = jaxdraft.load(saved, drafter=folder).drafter.config  # type: ignore[attr-defined]
    assert chained == dataclasses.replace(described, chained=True, candidates=16)


def test_experts_and_their_head(tmp_path: Path) -> None:
    target = tiny_target(mlp=MOE, taps=())
    model = Model.of(target, tiny_mtp(target, mlp=MOE))
    save(model, tmp_path / "out")
    names = facts(tmp_path / "out" / "target")
    assert names["mtp.layers.0.mlp.experts.gate_up_proj"] == ([4, 48, 32], "F32")
    again = jaxdraft.load(tmp_path / "out")
    assert again.drafter.config.mlp == MOE  # type: ignore[attr-defined]
    moe = "['drafter']['mlp']['gate_up']"
    np.testing.assert_array_equal(arrays_of(again)[moe], arrays_of(model)[moe])


def test_an_older_spelling_of_the_settings(saved: Path, tmp_path: Path) -> None:
    """``torch_dtype``, ``rope_theta`` at the top, ``full_attention_interval``, no optional keys."""
    model = jaxdraft.load(saved, drafter="none")
    folder = Path(shutil.copytree(saved / "target", tmp_path / "older"))

    def change(config: dict[str, Any]) -> None:
        text = config["text_config"]
        rope = text.pop("rope_parameters")
        text["rope_theta"] = rope["rope_theta"]
        text["partial_rotary_factor"] = rope["partial_rotary_factor"]
        text["rope_scaling"] = {"type": "default", "mrope_section": rope["mrope_section"]}
        del text["layer_types"], config["tie_word_embeddings"], text["tie_word_embeddings"]
        text["full_attention_interval"] = 4
        config["torch_dtype"] = config.pop("dtype")
        del text["dtype"]

    edit_json(folder / "config.json", change)
    assert_same(jaxdraft.load(folder, drafter="none"), model)


def test_the_text_model_alone(saved: Path, tmp_path: Path) -> None:
    """Without the model it is a part of: settings at the top, names without language_model."""
    folder = Path(shutil.copytree(saved / "target", tmp_path / "text"))
    config = json.loads((folder / "config.json").read_text())["text_config"]
    (folder / "config.json").write_text(json.dumps(config))

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            array = tensors.pop(name)
            if not name.startswith("model.visual."):
                tensors[name.replace("model.language_model.", "model.")] = array

    edit_tensors(folder / "model.safetensors", rename)
    edit_json(folder / "config.json", lambda c: c.update(architectures=["Qwen3_5ForCausalLM"]))
    assert_same(jaxdraft.load(folder), jaxdraft.load(saved, drafter="mtp"))


def test_tables_of_no_plain_base_are_asked_for(tmp_path: Path) -> None:
    model = jaxdraft.load(artifact("patched_fp32_paged_dspark"))
    with pytest.raises(ValueError, match="dspark: cannot infer rope_theta from the rotary tables"):
        save(model, tmp_path / "out")
    wrong = dataclasses.replace(YARN, factor=8.0)
    with pytest.raises(ValueError, match="dspark: the rotary tables are not those of"):
        save(model, tmp_path / "out", rope={"dspark": wrong})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_a_draft_vocabulary(kind: str, tmp_path: Path) -> None:
    target = tiny_target()
    scale = {} if kind == "dflash2" else {"embedding_scale": 1.0}
    model = Model.of(target, tiny_drafter(target, kind, draft_vocab_size=20, **scale))
    assert save(model, tmp_path / "out").rounded == {}
    config = json.loads((tmp_path / "out" / kind / "config.json").read_text())
    assert config["draft_vocab_size"] == 20 and config["vocab_size"] == 48
    stored = load_file(tmp_path / "out" / kind / "model.safetensors")["d2t"]
    ids = np.asarray(model.drafter.backbone.params["vocabulary"])  # type: ignore[attr-defined]
    np.testing.assert_array_equal(stored + np.arange(20), ids)
    again = jaxdraft.load(tmp_path / "out")
    assert_same(again, model, tables=2e-5)
    head = model.target.decoder.params["head"]["weight"]  # type: ignore[attr-defined]
    np.testing.assert_array_equal(again.drafter.head, head[ids])  # type: ignore[attr-defined]
    other = dataclasses.replace(model.drafter, head=head[:20])  # type: ignore[type-var]
    with pytest.raises(ValueError, match="the head is not the target's"):
        save(target, tmp_path / "other", drafters=[other])


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_matrices_in_eight_bits(kind: str, saved: Path, tmp_path: Path) -> None:
    """Rounded by half a scale; norms and tables as they were; read and saved again, the same."""
    model = jaxdraft.load(saved, drafter=kind)
    done = save(model, tmp_path / "out", int8=True)
    types = facts(tmp_path / "out" / kind)
    matrices = {name for name, (_, dtype) in types.items() if dtype == "I8"}
    assert {
        "fc.weight",
        "layers.1.self_attn.v_proj.weight",
        "layers.0.mlp.up_proj.weight",
    } < matrices
    zero = {name for name in matrices if "kernel_projection" in name}  # of a fresh convolution
    assert set(done.rounded) == {f"{kind}/{name}" for name in matrices - zero}
    assert {f"{name}_scale" for name in matrices} == {n for n in types if n.endswith("_scale")}
    assert types["norm.weight"][1] == "F32" and not any(
        "I8" in v for v in facts(tmp_path / "out" / "target").values()
    )
    again = jaxdraft.load(tmp_path / "out")
    stored = load_file(tmp_path / "out" / kind / "model.safetensors")
    ours, theirs = arrays_of(again), arrays_of(model)
    fc = "['drafter']['fc']['weight']"
    assert ours[fc].dtype == np.float32
    error = np.abs(ours[fc] - theirs[fc])
    assert (error <= stored["fc.weight_scale"] * 0.5001).all() and error.max() > 0
    table = "['drafter']['successor']" if kind == "dflash2" else "['drafter']['markov_w2']"
    np.testing.assert_array_equal(ours[table], theirs[table])
    twice = save(again, tmp_path / "twice", int8=True)
    assert max(twice.rounded.values(), default=0.0) < 1e-7
    # In half the type, scales of half the type.
    save(model, tmp_path / "half", int8=True, dtype="bfloat16")
    assert facts(tmp_path / "half" / kind)["fc.weight_scale"][1] == "BF16"
    narrow = jaxdraft.load(tmp_path / "half")
    assert arrays_of(narrow)[fc].dtype == jnp.bfloat16
