"""The data type of every kind of device."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

import jaxdraft
from jaxdraft import devices, testing
from jaxdraft.devices import native_dtype, prompt_chunk


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


@pytest.mark.parametrize(
    ("batch", "size", "room", "expected"),
    [
        (1, 16, 16, 16),
        (1, 512, 16, 512),
        (1, 8192, 16, 512),
        (2, 8192, 16, 256),
        (3, 8192, 16, 128),
        (64, 8192, 16, 128),
        # 640 rows in chunks of 256 end at 768, in chunks of 512 at 1,024: 128 past what is theirs
        (1, 640, 1, 256),
        (1, 640, 256, 512),
    ],
)
def test_a_gpu_runs_512_rows_of_prompts_at_once(
    batch: int, size: int, room: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No chunk writes past the room that a state has."""
    target = testing.tiny_target()
    assert prompt_chunk(target, batch=batch, size=size, room=room) == min(size, 128)
    monkeypatch.setattr(devices, "platform_of", lambda tree: "gpu")
    chunk = prompt_chunk(target, batch=batch, size=size, room=room)
    assert chunk == expected
    assert -(-size // chunk) * chunk <= size + room + 128


def test_targets_with_scratch_room_for_less_get_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings are made for windows of 128 rows, and nothing is known about other targets."""
    monkeypatch.setattr(devices, "platform_of", lambda tree: "gpu")
    window = dataclasses.replace(testing.tiny_target().config.attention, window=20)
    rings = testing.tiny_target(layers=("sliding", "attention"), taps=(0, 1), sliding=window)
    for target in (rings, testing.TableTarget(np.zeros((8, 8), np.float32))):
        assert prompt_chunk(target, batch=1, size=8192, room=16) == 128


@pytest.mark.parametrize(("kind", "lengths"), [("dflash2", (601, 30)), ("mtp", (601,))])
def test_a_prompt_in_larger_chunks_is_the_same_prompt(
    kind: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and accepted drafts, of prompts that fill no chunk of 256 and 512 rows."""
    model = testing.tiny_model(kind, context_length=2048)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 48, length).tolist() for length in lengths]
    outputs = []
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(devices, "platform_of", lambda tree, platform=platform: platform)
        out = jaxdraft.generate(model, prompts, max_new_tokens=12)
        outputs.append((out.ids(), np.asarray(out.stats.accepted_at).tolist()))
    assert outputs[0] == outputs[1]
