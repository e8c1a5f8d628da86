"""Kernels are chosen by name, for a model, once; the choice is a part of its programs."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jaxdraft
from jaxdraft.kernels import PALLAS, VARIABLE, XLA, resolve
from jaxdraft.nn import choice
from jaxdraft.testing import tiny_drafter, tiny_target

WARNS = "interpreted"


def structure(tree: object) -> object:
    return jax.tree.structure(tree)


def test_an_unknown_choice_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match=r"kernels is 'cuda'; expected one of xla, pallas"):
        jaxdraft.load("no such folder", kernels="cuda")
    monkeypatch.setenv(VARIABLE, "triton")
    with pytest.raises(ValueError, match=f"{VARIABLE} is 'triton'; expected one of xla, pallas"):
        jaxdraft.load("no such folder")
    with pytest.raises(ValueError, match="expected one of xla, pallas"):
        jaxdraft.with_kernels(tiny_target())


def test_the_environment_decides_where_no_argument_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert resolve(None) == XLA
    monkeypatch.setenv(VARIABLE, PALLAS)
    assert resolve(None) == PALLAS
    assert resolve(XLA) == XLA
    monkeypatch.setenv(VARIABLE, "")
    assert resolve(None) == XLA


def test_the_choice_is_static_and_can_be_taken_back() -> None:
    """Another choice is another program; the same choice is the same, and no array is copied."""
    target = tiny_target()
    model = jaxdraft.Model.of(target, tiny_drafter(target, "dflash2"))
    with pytest.warns(UserWarning, match=WARNS):
        chosen = jaxdraft.with_kernels(model, PALLAS)
    assert structure(chosen.target) != structure(model.target)
    assert structure(chosen.drafter) != structure(model.drafter)
    with pytest.warns(UserWarning, match=WARNS):
        assert structure(jaxdraft.with_kernels(chosen, PALLAS)) == structure(chosen)
    assert structure(jaxdraft.with_kernels(chosen, XLA)) == structure(model)
    assert structure(jaxdraft.with_kernels(model)) == structure(model)
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(chosen), strict=True):
        assert a is b


def device(platform: str, kind: str, capability: str | None = None) -> SimpleNamespace:
    found = SimpleNamespace(platform=platform, device_kind=kind)
    if capability is not None:
        found.compute_capability = capability
    return found


@pytest.mark.parametrize(
    "old", [device("gpu", "Tesla T4", "7.5"), device("gpu", "MI300X", "gfx942"),
            device("tpu", "TPU v5e")]
)  # fmt: skip
def test_devices_without_kernels_are_refused_by_name(old: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=f"found {old.device_kind}.*use kernels='xla'"):
        choice.check_device(old)


@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0", "10.0"])
def test_newer_gpus_are_served(capability: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice.check_device(device("gpu", "some GPU", capability))


def test_every_number_has_32_bits_with_64_bit_types_enabled() -> None:
    """A window of a hybrid target, from tokens to the committed state."""
    with pytest.warns(UserWarning, match=WARNS):
        target = jaxdraft.with_kernels(tiny_target(), PALLAS)
    with jax.enable_x64(True):
        state = target.init(2, 32)
        tokens, count = jnp.ones((2, 3), jnp.int32), jnp.full((2,), 3, jnp.int32)

        def run(tokens: jax.Array, count: jax.Array) -> object:
            return target.commit(target.forward(tokens, count, state).state, count)

        text = str(jax.make_jaxpr(run)(tokens, count))
    assert text.count("pallas_call") >= 4  # attention, a delta net, its commit, an MLP
    wide = [line for line in text.splitlines() if re.search(r":[fi]64\[\d", line)]
    # Pallas writes static indices, such as the tap of a convolution, as 64-bit constants.
    assert not [line for line in wide if "= broadcast_to[" not in line]
