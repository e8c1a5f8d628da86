"""Matrices in four bits, and whole targets in eight: the numbers, the files, what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load_file

import jaxdraft
from jaxdraft import Model
from jaxdraft.checkpoint import save
from jaxdraft.checkpoint.config import family_of, quantization_json
from jaxdraft.checkpoint.forms import (
    from_int4,
    from_int8,
    pack_int4,
    to_int4,
    to_int8,
    unpack_int4,
)
from jaxdraft.checkpoint.layout import is_matrix, target_layout
from jaxdraft.config import AttentionConfig, DeltaNetConfig, MlpConfig
from jaxdraft.nn.linear import Frozen
from jaxdraft.nn.packed import PackedLinear
from jaxdraft.testing import tiny_drafter, tiny_mtp, tiny_target
from jaxdraft.train import labels, round_as_stored, round_to_bfloat16, round_to_int4
from tests.checkpoint.conftest import MOE
from tests.checkpoint.helpers import arrays_of, assert_same, edit_json, edit_tensors
from tests.checkpoint.test_refusals import GROUP, put, refused

Json = dict[str, Any]

# --------------------------------------------------------------------------- numbers


# Scales below bfloat16's normal numbers have fewer digits, and no matrix has such.
@given(
    arrays.arrays(
        np.float32, (3, 8), elements=st.floats(-9, 9, width=32, allow_subnormal=False)
    ).filter(lambda m: np.abs(m[m != 0]).min(initial=1) > 1e-30)
)
def test_half_a_step_away_and_then_nothing(matrix: np.ndarray) -> None:
    """Half a scale, and what a scale in bfloat16 falls short of the largest number; idempotent."""
    values, scale = to_int4(matrix, 4)
    assert values.dtype == np.int8 and np.abs(values).max() <= 7
    assert scale.dtype == jnp.bfloat16 and scale.shape == (3, 2)
    step = np.repeat(scale.astype(np.float32), 4, axis=1)
    short = np.repeat(np.abs(matrix.reshape(3, 2, 4)).max(axis=2), 4, axis=1) - 7 * step
    rounded = from_int4(values, scale)
    assert (np.abs(rounded - matrix) <= np.maximum(step / 2, short) * (1 + 1e-5)).all()
    again = to_int4(rounded, 4)
    np.testing.assert_array_equal(again[0], values)
    np.testing.assert_array_equal(again[1], scale)


def test_by_hand() -> None:
    matrix = np.asarray([[0.5, -1.75, 0.0, 0.0]], np.float32)
    values, scale = to_int4(matrix, 2)
    assert values.tolist() == [[2, -7, 0, 0]] and scale.astype(np.float32).tolist() == [[0.25, 0]]
    np.testing.assert_array_equal(from_int4(values, scale), matrix)
    with pytest.raises(ValueError, match="a row has 4 numbers; expected groups of 3"):
        to_int4(matrix, 3)


def test_arrays_of_jax_are_rounded_alike() -> None:
    matrix = np.random.default_rng(0).normal(size=(16, 128)).astype(np.float32)
    for ours, theirs in zip(to_int4(matrix), jax.jit(to_int4)(matrix), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


def test_packing() -> None:
    """The numbers are compressed-tensors' own: ``pack_to_int32`` of its release 0.20.1."""
    values = np.asarray([[1, -8, 7, 0, -1, 2, 3, -4, 5], [0] * 8 + [7]], np.int8)
    packed = pack_int4(values)
    assert packed.dtype == np.int32
    assert packed.tolist() == [[1269272329, 13], [-2004318072, 15]]
    np.testing.assert_array_equal(unpack_int4(packed, 9), values)


@given(
    arrays.arrays(
        np.int8,
        st.tuples(st.integers(1, 3), st.integers(1, 19)),
        elements={"min_value": -8, "max_value": 7},
    )
)
def test_packing_loses_nothing(values: np.ndarray) -> None:
    np.testing.assert_array_equal(unpack_int4(pack_int4(values), values.shape[1]), values)


# --------------------------------------------------------------------------- files


def wide_model(*, mtp: bool = False) -> Model:
    """A hybrid whose every matrix has rows of a multiple of 64."""
    mlp = MlpConfig(hidden=128)
    target = tiny_target(
        width=64,
        layers=("delta_net",) * 3 + ("attention",),
        taps=(1, 3),
        mlp=mlp,
        attention=AttentionConfig(
            heads=4, kv_heads=2, head_dim=16, rotary_dim=8, gated=True, qk_norm=True, scale=0.25
        ),
        delta_net=DeltaNetConfig(
            key_heads=2, value_heads=4, key_dim=16, value_dim=16, conv_width=4
        ),
    )
    if mtp:
        return Model.of(target, tiny_mtp(target, mlp=mlp, dtype=jnp.float32))
    return Model.of(target, tiny_drafter(target, mlp_hidden=64))


@pytest.fixture(scope="module")
def model() -> Model:
    return wide_model()


@pytest.fixture(scope="module")
def small(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int4") / "small"
    done = save(model, folder, drafters=[wide_model(mtp=True).drafter], int4=True)
    assert {name.split("/")[0] for name in done.rounded} == {"target", "dflash2"}
    assert "target/mtp.fc.weight" in done.rounded and "target/lm_head.weight" not in done.rounded
    return folder


@pytest.fixture
def copy(small: Path, tmp_path: Path) -> Path:
    """To spoil."""
    import shutil

    return Path(shutil.copytree(small, tmp_path / "copy"))


def rounded(model: Model) -> Model:
    """What four bits leave of it."""
    target, drafter = model.target, model.drafter

    def of(frozen: Frozen) -> Frozen:
        return Frozen(round_to_int4(frozen.params, labels(frozen)), frozen.structure)

    target = dataclasses.replace(target, decoder=of(target.decoder))  # type: ignore[attr-defined, type-var]
    drafter = dataclasses.replace(drafter, backbone=of(drafter.backbone))  # type: ignore[attr-defined, type-var]
    return dataclasses.replace(model, target=target, drafter=drafter)


def test_what_is_saved_is_what_training_rounds_to(model: Model, small: Path) -> None:
    """Every matrix and nothing else: the two rules about what is one agree."""
    assert_same(jaxdraft.load(small), rounded(model), tables=2e-5)


def test_the_files(small: Path) -> None:
    config = json.loads((small / "target" / "config.json").read_text())
    described = config["quantization_config"]
    assert described["format"] == "pack-quantized"
    assert described["ignore"] == ["lm_head", "re:.*visual.*"]
    weights = described["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["strategy"], weights["group_size"]) == (4, "group", 64)
    assert "quantization_config" not in config["text_config"]
    tensors = load_file(small / "target" / "model.safetensors")
    gate = "model.language_model.layers.0.mlp.down_proj.weight"
    assert gate not in tensors and tensors[f"{gate}_shape"].tolist() == [64, 128]
    assert tensors[f"{gate}_packed"].shape == (64, 16)
    assert tensors[f"{gate}_scale"].shape == (64, 2)
    assert tensors["lm_head.weight"].dtype == np.float32  # tables stay as they are


def test_saved_again_it_is_the_same_to_the_byte(small: Path, tmp_path: Path) -> None:
    mtp = jaxdraft.load(small, drafter="mtp").drafter
    done = save(jaxdraft.load(small), tmp_path / "again", drafters=[mtp], int4=True)
    assert not done.rounded
    for part in ("target", "dflash2"):
        files = [folder / part / "model.safetensors" for folder in (small, tmp_path / "again")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_saved_as_floats_it_is_the_same_model(small: Path, tmp_path: Path) -> None:
    """The way to runtimes that read no four bits."""
    model = jaxdraft.load(small)
    save(model, tmp_path / "wide", dtype="float32")
    assert "quantization_config" not in (tmp_path / "wide/target/config.json").read_text()
    assert_same(jaxdraft.load(tmp_path / "wide"), model)


@pytest.mark.parametrize("drafter", ["dflash2", "mtp"])
def test_it_decodes(drafter: str, small: Path) -> None:
    model = jaxdraft.load(small, drafter=drafter)
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6]]
    out = jaxdraft.generate(model, prompts, max_new_tokens=12, stop_ids=())
    plain = jaxdraft.generate(model, prompts, max_new_tokens=12, stop_ids=(), drafter="none")
    assert out.ids() == plain.ids()


def test_packed_it_has_the_same_numbers_and_is_saved_equal(small: Path, tmp_path: Path) -> None:
    """Target and drafter in four bits."""
    model: Any = jaxdraft.load(small, packed=True)
    wide: Any = jaxdraft.load(small)
    theirs: Any = dict(nnx.iter_modules(wide.drafter.backbone()))
    found = [
        (module.dequantized(), theirs[path].weight[...])
        for path, module in nnx.iter_modules(model.drafter.backbone())
        if isinstance(module, PackedLinear)
    ]
    assert found
    for ours, expected in found:
        np.testing.assert_array_equal(ours, expected)
    save(model, tmp_path / "again")
    again: Any = jaxdraft.load(tmp_path / "again", packed=True)
    jax.tree.map(np.testing.assert_array_equal, again.target, model.target)
    jax.tree.map(np.testing.assert_array_equal, again.drafter, model.drafter)


def test_a_scale_a_row(copy: Path, model: Model) -> None:
    """Strategy "channel", which other writers use."""

    def widen(tensors: dict[str, np.ndarray]) -> None:
        for name in [n for n in tensors if n.endswith("_packed")]:
            scale = name.replace("_packed", "_scale")
            tensors[scale] = tensors[scale][:, :1].copy()

    def by_row(body: Json) -> None:
        weights = body["quantization_config"]["config_groups"]["group_0"]["weights"]
        weights.update(strategy="channel", group_size=None)

    edit_tensors(copy / "dflash2" / "model.safetensors", widen)
    edit_json(copy / "dflash2" / "config.json", by_row)
    stored = load_file(copy / "dflash2" / "model.safetensors")
    fc = arrays_of(jaxdraft.load(copy))["['drafter']['fc']['weight']"]
    values = unpack_int4(stored["fc.weight_packed"], 128).astype(np.float32)
    np.testing.assert_array_equal(fc, values * stored["fc.weight_scale"].astype(np.float32))


def test_a_target_in_eight_bits(model: Model, tmp_path: Path) -> None:
    """Nothing here writes one, others do."""
    save(model, tmp_path / "out")
    frozen: Frozen = model.target.decoder  # type: ignore[attr-defined]
    config = model.target.config  # type: ignore[attr-defined]
    entries = target_layout(config, family_of(config))
    matrices = [tensor.name for entry in entries if is_matrix(entry) for tensor in entry.tensors]

    def narrow(tensors: dict[str, np.ndarray]) -> None:
        for name in matrices:
            tensors[name], tensors[f"{name}_scale"] = to_int8(tensors[name], np.dtype(np.float32))

    edit_tensors(tmp_path / "out/target/model.safetensors", narrow)
    described = {"quantization_config": quantization_json(8, ["lm_head"])}
    edit_json(tmp_path / "out/target/config.json", lambda body: body.update(described))
    again = jaxdraft.load(tmp_path / "out")
    ours, theirs = arrays_of(again), arrays_of(model)
    down = "['target']['layers'][0]['mlp']['down']['weight']"
    np.testing.assert_array_equal(
        ours[down], from_int8(*to_int8(theirs[down], np.dtype(np.float32)))
    )
    assert np.abs(ours[down] - theirs[down]).max() > 0
    np.testing.assert_array_equal(
        ours["['target']['head']['weight']"], frozen.params["head"]["weight"]
    )


def test_rounding_of_what_checkpoints_store(model: Model) -> None:
    """Matrices to four bits, the rest to bfloat16."""
    frozen: Frozen = model.target.decoder  # type: ignore[attr-defined]
    kinds = labels(frozen)
    done = round_as_stored(frozen, kinds, shifted_norms=True).params
    plain = round_to_bfloat16(frozen, shifted_norms=True).params
    both = round_to_int4(frozen.params, kinds)
    np.testing.assert_array_equal(done["embed"]["weight"], plain["embed"]["weight"])
    for module in ("mixer", "mlp"):
        name = "out" if module == "mixer" else "down"
        ours, four = (tree["layers"][0][module][name]["weight"] for tree in (done, both))
        np.testing.assert_array_equal(ours, four)


# --------------------------------------------------------------------------- refusals


def test_what_cannot_be_saved(tmp_path: Path, model: Model) -> None:
    with pytest.raises(ValueError, match="int8 and int4 are both True"):
        save(model, tmp_path / "out", int8=True, int4=True)
    with pytest.raises(ValueError, match="rows of 32; int4 needs a multiple of 64"):
        save(tiny_target(), tmp_path / "out", int4=True)
    layers = ("delta_net",) * 3 + ("attention",)
    with pytest.raises(ValueError, match="the target has experts; expected a dense target"):
        save(tiny_target(mlp=MOE, layers=layers), tmp_path / "out", int4=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_what_is_not_finite_is_no_integer(bits: str, model: Model, tmp_path: Path) -> None:
    """Found while the files are written; the folder never appears."""
    drafter: Any = model.drafter
    params = dict(drafter.backbone.params)
    params["fc"] = {"weight": params["fc"]["weight"].at[3, 5].set(jnp.nan)}
    spoilt = dataclasses.replace(drafter, backbone=Frozen(params, drafter.backbone.structure))
    broken: Model = dataclasses.replace(model, drafter=spoilt)  # type: ignore[type-var]
    with pytest.raises(ValueError, match=r"dflash2: tensor fc.weight has numbers that are not fin"):
        save(broken, tmp_path / "out", **{bits: True})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("quantization_config", "format", value="nvfp4"), 'format: found "nvfp4", expected'),
        (put(*GROUP, "weights", "num_bits", value=3), "num_bits: found 3, expected 2 or 4 or 8"),
        (put(*GROUP, "weights", "num_bits", value=8), ", four of the 64 numbers of a row"),
        (put(*GROUP, "weights", "strategy", value="tensor"), 'found "tensor", expected "channel"'),
        (put(*GROUP, "weights", "actorder", value="group"), "weight_g_idx: found nothing, expec"),
        (put(*GROUP, "weights", "symmetric", value=False), "weight_zero_point: found nothing, e"),
        (
            put(*GROUP, "weights", "group_size", value=None),
            "group_size: found null, expected an",
        ),
        (
            put(*GROUP, "weights", "group_size", value=32),
            "expected shape [4, 2], a scale per 32 numbers",
        ),
        (put(*GROUP, "weights", "group_size", value=48), "expected groups of 48 that make 64 inp"),
        (
            put("text_config", "quantization_config", value={}),
            "text_config.quantization_config: found {}, expected none here",
        ),
        (put("quantization_config", value=None), "in_proj_qkv.weight: found nothing, exp"),
    ],
)
def test_settings(change: Callable[[Json], None], message: str, copy: Path) -> None:
    edit_json(copy / "target" / "config.json", change)
    assert message in refused(copy)


def test_two_sizes_of_groups(copy: Path) -> None:
    """Targets by name come before targets by class, whatever the order."""

    def twice(body: Json) -> None:
        groups = body["quantization_config"]["config_groups"]
        groups["group_1"] = json.loads(json.dumps(groups["group_0"]))
        groups["group_1"]["weights"]["group_size"] = 32
        groups["group_1"]["targets"] = ["re:.*mlp.down_proj"]

    edit_json(copy / "target" / "config.json", twice)
    message = refused(copy)
    assert "mlp.down_proj.weight_scale: found shape [64, 2], expected shape [64, 4]" in message
    assert "gate_proj" not in message


DOWN = "model.language_model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop(f"{DOWN}_packed"),
            f"{DOWN}_packed: found nothing, expected shape [64",
        ),
        (lambda t: t.pop(f"{DOWN}_scale"), f"{DOWN}_scale: found nothing, expected shape [64, 2]"),
        (lambda t: t.pop(f"{DOWN}_shape"), f"{DOWN}_shape: found nothing, expected shape [2]"),
        (
            lambda t: t.update({f"{DOWN}_packed": np.zeros((64, 8), np.int32)}),
            "found shape [64, 8], expected shape [64, 16], eight of the 128 numbers of a row",
        ),
        (
            lambda t: t.update({f"{DOWN}_packed": np.zeros((64, 16), np.float32)}),
            f"{DOWN}_packed: found FLOAT, expected INT32",
        ),
        (
            lambda t: t.update({f"{DOWN}_shape": np.asarray([128, 64])}),
            f"{DOWN}_shape: found [128, 64], expected [64, 128]",
        ),
        (
            lambda t: t.update({DOWN: np.zeros((64, 128), np.float32)}),
            f"tensor {DOWN}: found shape [64, 128], expected no such tensor",
        ),
    ],
)
def test_tensors(change: Callable[[dict[str, np.ndarray]], None], message: str, copy: Path) -> None:
    edit_tensors(copy / "target" / "model.safetensors", change)
    assert message in refused(copy)
