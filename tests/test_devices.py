"""The data type of every kind of device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jaxdraft.devices import native_dtype


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [
        ("cpu", None, "float32"),
        ("tpu", None, "bfloat16"),
        ("gpu", "7.0", "float16"),
        ("gpu", "7.5", "float16"),
        ("gpu", "8.0", "bfloat16"),
        ("cuda", "9.0", "bfloat16"),
        ("gpu", "10.0", "bfloat16"),
        ("metal", None, "float32"),
    ],
)
def test_dtype_of_a_device(platform: str, capability: str | None, expected: str) -> None:
    device = SimpleNamespace(
        platform=platform, compute_capability=capability, device_kind="NVIDIA something"
    )
    assert native_dtype(device) == expected


def test_gpus_of_other_makers_get_what_always_works() -> None:
    other = SimpleNamespace(platform="gpu", compute_capability="gfx942", device_kind="AMD MI300X")
    assert native_dtype(other) == "float32"


def test_an_nvidia_gpu_without_a_compute_capability_is_refused() -> None:
    device = SimpleNamespace(platform="gpu", compute_capability="sm_90", device_kind="NVIDIA H200")
    with pytest.raises(ValueError, match="compute_capability"):
        native_dtype(device)


def test_the_default_is_the_first_device() -> None:
    assert native_dtype() == "float32"
