"""What loading gives: exact parameters, in memory of their own."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
import pytest
from flax import nnx

from convert import ArtifactError, Loaded, load_artifact
from convert.build import abstract, split
from convert.recipes import transpose_into
from jaxdraft.config import BlockDrafterConfig, MtpConfig
from jaxdraft.nn.decoder import Decoder
from jaxdraft.nn.dflash2 import DFlash2
from jaxdraft.nn.dspark import DSpark
from jaxdraft.nn.mtp import Mtp
from tests.convert.helpers import copied, edit_config, edit_graph, node_of
from tests.paths import artifact, artifact_names

MODULES = {"dflash2": DFlash2, "dspark": DSpark, "mtp": Mtp}
DFLASH2 = "qwen35_paged_fp16_dflash2"


def parts(loaded: Loaded) -> list[tuple[type, object, object]]:
    """Module, description and parameters of what was loaded."""
    found = [(Decoder, loaded.target_config, loaded.target)]
    if loaded.drafter_kind is not None:
        found.append((MODULES[loaded.drafter_kind], loaded.drafter_config, loaded.drafter))
    return found


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, None) for name in artifact_names()),
        ("qwen35_paged_fp16_dflash2", "bfloat16"),
        ("qwen35_moe_int4_cpu", "bfloat16"),
        ("qwen35_paged_bf16_dspark", "float16"),
    ],
)
def test_every_kind_converts(name: str, dtype: str | None) -> None:
    """Keys, shapes, dtypes and structure are those of a module made in the ordinary way."""
    folder = artifact(name)
    model = json.loads((folder / "genai_config.json").read_text())["model"]
    loaded = load_artifact(folder, dtype=dtype)
    kinds = [kind for kind in MODULES if kind in model]
    assert loaded.drafter_kind == (kinds[0] if kinds else None)
    sizes = (64, 256, (1,)) if name.startswith("sliding_") else (384, 640, (2,))
    assert (loaded.vocab_size, loaded.context_length, loaded.eos_token_ids) == sizes
    assert loaded.model_type == model["type"]
    for module, config, frozen in parts(loaded):
        body = frozen.params["norm"]["weight"].dtype
        assert body == (dtype or body)
        structure, wanted = split(abstract(module, config, body))
        assert structure == frozen.structure
        leaves = {
            tuple(key.key for key in path): leaf
            for path, leaf in jax.tree_util.tree_flatten_with_path(frozen.params)[0]
        }
        found = {path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
        assert found == {path: (leaf.shape, leaf.dtype) for path, leaf in wanted.items()}
        for leaf in leaves.values():
            assert np.isfinite(np.asarray(leaf, np.float32)).all()


@pytest.mark.parametrize(
    "name",
    [
        "qwen35_paged_fp16_dflash2",
        "qwen3_fp32_cpu",
        "qwen35_moe_fp32_cpu",
        "patched_fp32_paged_dspark",
        "patched_fp32_paged_mtp",
        "qwen35_tied_fp32_cpu",
        "sliding_qwen3_fp32_cpu",
    ],
)
def test_the_quick_abstract_module_is_the_honest_one(name: str) -> None:
    for module, config, _ in parts(load_artifact(artifact(name))):
        honest = nnx.eval_shape(lambda m=module, c=config: m(c, dtype="float16", rngs=nnx.Rngs(0)))
        structure, wanted = split(honest)
        quick, found = split(abstract(module, config, "float16"))
        assert quick == structure and hash(quick) == hash(structure)
        assert list(found.items()) == list(wanted.items())


def test_stored_dtypes_are_kept_by_default() -> None:
    loaded = load_artifact(artifact("qwen35_paged_fp16_dspark"))
    target, drafter = loaded.target.params, loaded.drafter.params
    assert target["embed"]["weight"].dtype == jnp.float16
    assert drafter["fc"]["weight"].dtype == jnp.bfloat16
    assert drafter["rotary"]["cos"].dtype == jnp.bfloat16
    for path in (("rotary", "cos"), ("layers", 0, "mixer", "decay_scale")):
        leaf = target
        for key in path:
            leaf = leaf[key]
        assert leaf.dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float64", "int8", "uint8"])
def test_dtypes_that_are_not_supported(dtype: str) -> None:
    with pytest.raises(ValueError, match="is not one of"):
        load_artifact(artifact(DFLASH2), dtype=np.dtype(dtype))


def test_the_drafter_has_no_embedding_and_no_head() -> None:
    for name in artifact_names():
        loaded = load_artifact(artifact(name))
        if loaded.drafter is None:
            continue
        assert not {"embed", "head", "lm_head"} & set(loaded.drafter.params)
        table = np.asarray(loaded.target.params["embed"]["weight"])
        for leaf in jax.tree.leaves(loaded.drafter.params):
            assert leaf.shape != table.shape or not np.array_equal(leaf, table)


def test_a_tied_head_is_one_array() -> None:
    for name in ("qwen35_tied_fp32_cpu", "qwen35_tied_int4_cpu"):
        loaded = load_artifact(artifact(name))
        assert loaded.target_config.tied and "head" not in loaded.target.params
        assert loaded.target().head_weight is loaded.target.params["embed"]["weight"]
    untied = load_artifact(artifact("qwen35_int4_cpu_gather")).target.params
    assert not np.array_equal(untied["embed"]["weight"], untied["head"]["weight"])


def test_parameters_live_in_memory_of_their_own(tmp_path: Path) -> None:
    """What happens to the files afterwards does not reach the parameters."""
    for name in (DFLASH2, "qwen3_fp32_cpu"):
        folder = copied(name, tmp_path)
        loaded = load_artifact(folder)
        before = jax.tree.map(np.array, loaded.target.params)
        for file in folder.glob("*.data"):
            with open(file, "r+b") as data:
                data.write(b"\xff" * file.stat().st_size)
        jax.tree.map(np.testing.assert_array_equal, before, loaded.target.params)
        fresh = load_artifact(folder).target.params
        assert np.isnan(np.asarray(fresh["norm"]["weight"], np.float32)).all()


def test_values_of_every_transform(tmp_path: Path) -> None:
    """Fused rows, transposes and the decay, against the stored tensors read by onnx."""
    folder = copied(DFLASH2, tmp_path)  # onnx refuses files with a second hard link
    graph = onnx.load(str(folder / "model.onnx")).graph
    stored = {t.name: onnx.numpy_helper.to_array(t).astype(np.float32) for t in graph.initializer}
    params = load_artifact(folder, dtype="float32").target.params
    layer = "model.layers.0.linear_attn."
    mixer = params["layers"][0]["mixer"]

    def rows(*names: str) -> np.ndarray:
        return np.concatenate([stored[layer + f"{n}.MatMul.weight"].T for n in names])

    np.testing.assert_array_equal(mixer["qkvz"]["weight"], rows("qkv_proj", "z_proj"))
    np.testing.assert_array_equal(mixer["ba"]["weight"], rows("b_proj", "a_proj"))
    np.testing.assert_array_equal(mixer["conv_weight"], stored[layer + "conv1d.weight"][:, 0])
    np.testing.assert_allclose(mixer["decay_scale"], -np.exp(stored[layer + "A_log"]), rtol=1e-7)
    np.testing.assert_array_equal(params["embed"]["weight"], stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["head"]["weight"], stored["lm_head.MatMul.weight"].T)


def test_a_fused_drafter_is_the_same_module_as_a_plain_one(tmp_path: Path) -> None:
    folder = copied("qwen35_paged_fp16_dflash2_fused", tmp_path)
    loaded = load_artifact(folder)
    plain = load_artifact(artifact(DFLASH2))
    assert loaded.drafter_config.block_size == 4 and plain.drafter_config.block_size == 8
    first, second = (
        jax.tree_util.tree_flatten_with_path(x.drafter.params)[0] for x in (loaded, plain)
    )
    assert [(p, x.shape) for p, x in first] == [(p, x.shape) for p, x in second]
    layer = onnx.load(str(folder / "dflash2.onnx")).graph
    fused = next(
        onnx.numpy_helper.to_array(t)
        for t in layer.initializer
        if t.name == "dflash2.layers.1.attn.qkv_proj.MatMul.weight"
    )
    part = loaded.drafter.params["layers"][1]
    np.testing.assert_array_equal(np.asarray(part["q"]["weight"]), fused.T[:128])
    np.testing.assert_array_equal(np.asarray(part["kv"]["weight"]), fused.T[128:])


def test_descriptions() -> None:
    loaded = load_artifact(artifact("qwen35_8l_paged_fp16_dflash2"))
    target, drafter = loaded.target_config, loaded.drafter_config
    assert target.layers == (("delta_net",) * 3 + ("attention",)) * 2
    assert target.taps == (2, 4, 7) and target.aux_width == 192
    assert target.norm_eps == 1e-6 and target.attention.scale == pytest.approx(32**-0.5)
    assert target.attention.gated and target.attention.qk_norm
    assert (target.attention.rotary_dim, target.attention.head_dim) == (16, 32)
    assert isinstance(drafter, BlockDrafterConfig) and drafter.conv is not None
    assert (drafter.conv.taps, drafter.conv.group, drafter.rank) == (2, 16, 16)
    assert (drafter.draft_tokens, drafter.candidates, drafter.mask_token) == (7, 4, 5)
    window = load_artifact(artifact("qwen35_paged_fp16_dflash2_sw")).drafter_config
    assert window.attention.window == 40 and window.windowed
    mtp = load_artifact(artifact("qwen35_fp32_cpu_mtp"))
    assert isinstance(mtp.drafter_config, MtpConfig) and mtp.target_config.hidden_states
    moe = load_artifact(artifact("qwen35_moe_int4_cpu")).target_config.mlp
    assert (moe.experts, moe.active, moe.hidden, moe.shared_hidden) == (4, 2, 32, 64)


def test_an_embedding_scale(tmp_path: Path) -> None:
    """The builder multiplies the block's embeddings by a constant when it is not one."""

    def change(graph: onnx.GraphProto) -> None:
        cast = next(n for n in graph.node if n.name.endswith("embed_tokens/Cast"))
        out = cast.output[0]
        cast.output[0] = "narrow"
        at = list(graph.node).index(cast)
        value = onnx.numpy_helper.from_array(np.full((1,), 3.5, np.float32))
        make = onnx.helper.make_node
        graph.node.insert(at + 1, make("Constant", [], ["scale"], name="c", value=value))
        graph.node.insert(at + 2, make("Cast", ["scale"], ["scale16"], name="sc", to=16))
        graph.node.insert(at + 3, make("Mul", ["narrow", "scale16"], [out], name="m"))

    folder = edit_graph(copied(DFLASH2, tmp_path), change, "dflash2.onnx")
    assert load_artifact(folder).drafter_config.embedding_scale == 3.5


def test_outputs_for_a_drafter_without_a_drafter(tmp_path: Path) -> None:
    """The builder exports the auxiliary output of a Qwen3 and does not list it."""

    def change(config: dict) -> None:
        del config["model"]["dflash2"]
        del config["model"]["decoder"]["outputs"]["aux_hidden_states"]

    loaded = load_artifact(edit_config(copied(DFLASH2, tmp_path), change))
    assert loaded.drafter is None and loaded.target_config.taps == (1, 3)


def test_the_context_is_what_the_tables_cover(tmp_path: Path) -> None:
    folder = copied("qwen3_fp32_cpu", tmp_path)
    for configured, expected in ((100, 100), (4096, 640)):
        edit_config(folder, lambda c, n=configured: c["model"].update(context_length=n))
        loaded = load_artifact(folder)
        assert loaded.context_length == expected
        assert loaded.target_config.context_length == 640


def test_softcap_and_window_reach_the_description(tmp_path: Path) -> None:
    from tests.convert.helpers import set_attribute

    def change(graph: onnx.GraphProto) -> None:
        for i in range(3):
            set_attribute(node_of(graph, "GroupQueryAttention", i), "softcap", 30.0)
            set_attribute(node_of(graph, "GroupQueryAttention", i), "local_window_size", 128)

    folder = edit_graph(copied("qwen3_fp32_cpu", tmp_path), change)
    target = load_artifact(folder).target_config
    assert target.layers == ("sliding",) * 3 and target.attention is None
    assert (target.sliding.softcap, target.sliding.window) == (30.0, 128)
    # Layers of one kind have one shape: a second window is not the first one.
    edit_graph(
        folder,
        lambda g: set_attribute(node_of(g, "GroupQueryAttention", 1), "local_window_size", 64),
    )
    with pytest.raises(ArtifactError, match="shapes of sliding layers"):
        load_artifact(folder)


@pytest.mark.parametrize("name", ["sliding_qwen3_fp32_cpu", "sliding_qwen3_paged_fp16"])
def test_windows_of_single_layers(name: str) -> None:
    """The first and the last layer see twelve keys, the one between them sees all."""
    target = load_artifact(artifact(name)).target_config
    assert target.layers == ("sliding", "attention", "sliding")
    assert (target.attention.window, target.sliding.window) == (-1, 12)
    assert dataclasses.replace(target.sliding, window=-1) == target.attention


def test_progress_counts_to_the_end() -> None:
    calls: list[tuple[int, int, str]] = []
    load_artifact(artifact(DFLASH2), progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done) and done[-1] == calls[-1][1]
    assert len({call[1] for call in calls}) == 1
    assert "layers.0.mixer.qkvz.weight" in {call[2] for call in calls}


def test_byte_counts() -> None:
    loaded = load_artifact(artifact("qwen35_int4_cpu_gather"))
    assert loaded.weight_bytes["target"] == sum(
        leaf.nbytes for leaf in jax.tree.leaves(loaded.target.params)
    )
    data = artifact("qwen35_int4_cpu_gather") / "model.onnx.data"
    assert loaded.stored_bytes == {"target": data.stat().st_size}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (577, 769), (1, 1000), (1000, 1)])
def test_transposition_rounds_once_from_the_exact_value(
    dtype: type, wanted: type, shape: tuple[int, int]
) -> None:
    stored = np.random.default_rng(0).normal(size=shape).astype(dtype)
    out = np.empty(shape[::-1], wanted)
    transpose_into(out, stored)
    np.testing.assert_array_equal(out, stored.astype(np.float32).T.astype(wanted))


def test_errors_can_be_sent_between_processes(tmp_path: Path) -> None:
    folder = edit_config(copied(DFLASH2, tmp_path), lambda c: c["model"].update(vocab_size=1))
    with pytest.raises(ArtifactError) as caught:
        load_artifact(folder)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.file == caught.value.file
    assert isinstance(caught.value, ValueError)


def test_copying_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces far smaller than the matrices, and one for all of each."""
    for name in ("qwen35_paged_fp16_dflash2", "qwen35_tied_fp32_cpu"):
        whole = load_artifact(artifact(name))
        monkeypatch.setattr("convert.recipes._PIECE", 1000)
        pieces = load_artifact(artifact(name))
        monkeypatch.undo()
        for a, b in zip(
            jax.tree.leaves((whole.target, whole.drafter)),
            jax.tree.leaves((pieces.target, pieces.drafter)),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)
