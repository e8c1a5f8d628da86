"""Saving: what cannot be said is refused, and no half of a checkpoint is ever seen."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import jaxdraft
from jaxdraft import Model, NgramDrafter
from jaxdraft.checkpoint import Rope, save
from jaxdraft.testing import (
    TableDrafter,
    TableTarget,
    tiny_drafter,
    tiny_target,
    tiny_target_config,
)
from tests.checkpoint.helpers import arrays_of, assert_same
from tests.paths import artifact


def test_a_failure_leaves_nothing(
    family: dict[str, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong, and however far it came."""
    write = safetensors.numpy.save_file
    calls = []

    def fail(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise OSError("no space left on device")
        write(*args, **kwargs)

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        save(family["dflash2"], tmp_path / "deep" / "out", max_shard_bytes=20_000)
    assert len(calls) == 3
    assert list((tmp_path / "deep").iterdir()) == []


def test_a_failure_leaves_what_was_there(
    family: dict[str, Model], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = jaxdraft.load(copy)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        save(family["mtp"], copy, overwrite=True)
    assert_same(jaxdraft.load(copy), before)
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]


def test_nothing_is_overwritten_unasked(family: dict[str, Model], copy: Path) -> None:
    with pytest.raises(FileExistsError, match="overwrite=True replaces a saved checkpoint"):
        save(family["mtp"], copy)
    assert sorted(p.name for p in copy.iterdir()) == ["dflash2", "dspark", "target"]
    save(family["mtp"], copy, overwrite=True)
    assert sorted(p.name for p in copy.iterdir()) == ["target"]
    assert jaxdraft.load(copy).info.drafter == "mtp"


@pytest.mark.parametrize("other", ["notes.txt", "empty", "link", "file"])
def test_only_checkpoints_are_replaced(
    other: str, family: dict[str, Model], copy: Path, tmp_path: Path
) -> None:
    folder = copy
    if other == "notes.txt":
        (copy / other).write_text("mine")
    elif other == "empty":
        folder = tmp_path / "empty"
        folder.mkdir()
    elif other == "link":
        folder = tmp_path / "link"
        folder.symlink_to(copy)
    else:
        folder = tmp_path / "file"
        folder.write_text("mine")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(FileExistsError, match="only a saved checkpoint"):
        save(family["mtp"], folder, overwrite=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_rounding_is_told_once(tmp_path: Path) -> None:
    """Numbers the layout cannot hold are named; what is read back is saved without a difference."""
    target = tiny_target()
    norm = jnp.linspace(0.01, 2.0, 32).at[0].set(0.1)
    decays = -jnp.exp(jnp.linspace(1.0, 3.0, 4))
    target = with_leaf(target, ("norm", "weight"), norm)
    target = with_leaf(target, ("layers", 0, "mixer", "decay_scale"), decays)
    done = save(target, tmp_path / "out")
    prefix = "target/model.language_model."
    names = [f"{prefix}norm.weight", f"{prefix}layers.0.linear_attn.A_log"]
    assert set(done.rounded) <= set(names) and names[0] in done.rounded
    model = jaxdraft.load(tmp_path / "out")
    found = arrays_of(model)
    moved = np.abs(found["['target']['norm']['weight']"] - np.asarray(norm))
    assert float(moved.max()) == done.rounded[names[0]] < 2**-24
    np.testing.assert_allclose(
        found["['target']['layers'][0]['mixer']['decay_scale']"], decays, rtol=2e-7
    )
    again = save(model, tmp_path / "again")
    assert again.rounded == {}


def with_leaf(target: Any, path: tuple[Any, ...], leaf: jax.Array) -> Any:
    """The target with one parameter replaced."""

    def swap(where: Any, old: jax.Array) -> jax.Array:
        keys = tuple(getattr(key, "key", getattr(key, "idx", None)) for key in where)
        return leaf.astype(old.dtype) if keys == path else old

    params = jax.tree_util.tree_map_with_path(swap, target.decoder.params)
    return dataclasses.replace(target, decoder=dataclasses.replace(target.decoder, params=params))


def test_drafters_without_weights_leave_no_trace(tmp_path: Path) -> None:
    target = tiny_target()
    done = save(Model.of(target, NgramDrafter()), tmp_path / "out", drafters=[NgramDrafter()])
    assert done.parts == ("target",)


def test_models_that_have_no_place(family: dict[str, Model], tmp_path: Path) -> None:
    target: Any = family["dflash2"].target
    drafter: Any = family["dflash2"].drafter
    out = tmp_path / "out"

    def refused(model: Any, message: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            save(model, out, **options)
        assert not out.exists()

    key = jax.random.key(0)
    table = TableTarget.random(key)
    refused(Model.of(table), "the target is a TableTarget; expected a DecoderTarget")
    refused(Model.of(target, TableDrafter(jnp.zeros((48, 2), jnp.int32))), "is a TableDrafter")
    other = tiny_drafter(target, "dflash2", seed=5)
    refused(Model.of(target, drafter), "two dflash2 drafters", drafters=[other])
    foreign = dataclasses.replace(drafter, embedding=drafter.embedding + 1)
    refused(Model.of(target, foreign), "dflash2: the embedding is not the target's")
    foreign = dataclasses.replace(drafter, head=drafter.head + 1)
    refused(Model.of(target, foreign), "dflash2: the head is not the target's")
    short = tiny_drafter(target, context_length=128)
    refused(Model.of(target, short), "context_length is 128; expected 256, the target's")
    config = dataclasses.replace(drafter.config, embedding_scale=2.0)
    spark: Any = family["dspark"].drafter
    scaled = dataclasses.replace(
        spark, config=dataclasses.replace(spark.config, embedding_scale=2.0)
    )
    refused(
        Model.of(target, scaled), "embedding_scale is 2.0; a dspark checkpoint can only express"
    )
    assert save(Model.of(target, dataclasses.replace(drafter, config=config)), out)
    shutil.rmtree(out)
    biased = with_leaf(target, ("layers", 0, "mixer", "conv_bias"), jnp.ones(64))
    refused(biased, "parameter layers.0.mixer.conv_bias is not zero")
    turned = with_leaf(target, ("layers", 0, "mlp", "down", "weight"), jnp.ones((40, 32)))
    refused(turned, r"mlp.down.weight has shape \(40, 32\); expected \(32, 40\)")
    gaining = with_leaf(target, ("layers", 1, "mixer", "decay_scale"), jnp.ones(4))
    refused(gaining, "expected negative numbers")
    turned = with_leaf(target, ("rotary", "cos"), jnp.zeros((256, 4)))
    refused(turned, "target: cannot infer rope_theta from the rotary tables")
    refused(
        target,
        "the rotary tables are not those of default, base 5",
        rope={"target": Rope(theta=5.0)},
    )
    refused(target, r"rope is given for \['dspark'\]", rope={"dspark": Rope(theta=1e4)})
    refused(target, "dtype is 'int8'", dtype="int8")
    refused(target, "max_shard_bytes is 0", max_shard_bytes=0)
    refused(target, "there is no tokenizer.json in", tokenizer=tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(scale=0.3), "attention.scale is 0.3"),
        (dict(softcap=30.0), "attention.softcap is 30.0"),
        (dict(norm_eps=1e-5), "attention.norm_eps is 1e-05"),
        (dict(qk_norm=False), "attention.qk_norm is False"),
    ],
)
def test_descriptions_that_no_file_can_say(
    change: dict[str, Any], message: str, family: dict[str, Model], tmp_path: Path
) -> None:
    target: Any = family["dflash2"].target
    attention = dataclasses.replace(target.config.attention, **change)
    config = dataclasses.replace(target.config, attention=attention)
    with pytest.raises(ValueError, match=message):
        save(dataclasses.replace(target, config=config), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_layers_that_the_family_has_not(tmp_path: Path) -> None:
    config = tiny_target_config()
    assert config.attention is not None
    window = dataclasses.replace(config.attention, window=8)
    layers = ("delta_net", "attention", "sliding")
    with pytest.raises(ValueError, match="a qwen3_5 checkpoint has no layers of kind 'sliding'"):
        save(tiny_target(layers=layers, sliding=window), tmp_path / "out")


def test_packed_matrices_of_an_artifact(tmp_path: Path) -> None:
    """They are saved packed, and read back equal; dequantized they are numbers like any other."""
    model = jaxdraft.load(artifact("qwen35_int4_cpu"), packed=True)
    save(model, tmp_path / "packed")
    assert_same(jaxdraft.load(tmp_path / "packed", packed=True), model, tables=6e-8)
    plain = jaxdraft.load(artifact("qwen35_int4_cpu"))
    save(plain, tmp_path / "out")
    assert_same(jaxdraft.load(tmp_path / "out"), plain, tables=6e-8)
