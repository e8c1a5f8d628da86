"""Models on meshes of forced host devices, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxdraft.nn.fused import order, split
from jaxdraft.sharding.placement import ShardingError, check_sizes
from tests.paths import TESTS


def _run(*command: str, devices: int = 1) -> str:
    """Return the output of a program that sees this many CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    if devices > 1:
        flags += f" --xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, *command],
        cwd=TESTS.parent,
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=1200,  # far more than it takes: a hang fails here, and not in CI
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    "sections", ["decode placed", "drafters loading", "engine training saving counts errors"]
)
def test_a_mesh_gives_what_one_device_gives(sections: str) -> None:
    names = sections.split()
    out = _run("-m", "tests.sharding.eight_devices", *names, devices=8)
    assert out.splitlines() == [f"{name} equal" for name in names], out


def test_two_processes_give_what_one_gives() -> None:
    out = _run("experiments/several_hosts.py", "--processes", "2")
    assert out.splitlines() == ["process 0: equal", "process 1: equal"], out


def test_parts_of_a_fused_matrix() -> None:
    parts = [np.arange(4), np.arange(4, 6)]
    assert order(parts, 1).tolist() == [0, 1, 2, 3, 4, 5]
    assert order(parts, 2).tolist() == [0, 1, 4, 2, 3, 5]
    rows = np.arange(12).reshape(2, 6)
    for shards in (1, 2):
        found = split(jax.numpy.asarray(rows[:, order(parts, shards)]), (4, 2), shards)
        assert [part.tolist() for part in found] == [rows[:, :4].tolist(), rows[:, 4:].tolist()]


def test_a_mesh_in_words() -> None:
    assert check_sizes("data=2,model=4") == {"data": 2, "model": 4}
    assert check_sizes("model=8") == {"data": 1, "model": 8}
    for text in ("2x4", "data=", "data=2,data=2", "data=-1"):
        with pytest.raises(ShardingError, match="expected axes and sizes: data=2"):
            check_sizes(text)
    with pytest.raises(ShardingError, match="axes 'heads'; expected 'data' and 'model'"):
        check_sizes("heads=2")
