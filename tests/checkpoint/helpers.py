"""What the tests of checkpoints share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxdraft import Model

ROTARY_WITHIN = 6e-8
"""Of a target's rotary tables: the last place of float32 below 1."""


def arrays_of(model: Model) -> dict[str, np.ndarray]:
    """Every parameter of target and drafter, by name."""
    target: Any = model.target
    drafter: Any = model.drafter
    parts = {"target": target.decoder.params}
    for name in ("backbone", "mtp"):
        if hasattr(drafter, name):
            parts["drafter"] = getattr(drafter, name).params
    leaves = jax.tree_util.tree_leaves_with_path(parts)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_same(found: Model, expected: Model, *, tables: float = 0.0) -> None:
    """Descriptions equal, parameters equal bit for bit.

    Rotary tables of the target, and of its own head, within ``tables``: the model builder takes
    cosines in float32, and we round exact ones. Tables of block drafters are equal.
    """
    assert found.target.config == expected.target.config  # type: ignore[attr-defined]
    assert getattr(found.drafter, "config", None) == getattr(expected.drafter, "config", None)
    ours, theirs = arrays_of(found), arrays_of(expected)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        other = theirs[name]
        assert (array.dtype, array.shape) == (other.dtype, other.shape), name
        if "rotary" in name and ("target" in name or found.info.drafter == "mtp"):
            wide = array.astype(np.float64) - other.astype(np.float64)
            assert np.max(np.abs(wide)) <= tables, name
        else:
            assert array.tobytes() == other.tobytes(), name


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a JSON file."""
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


def edit_tensors(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Rewrite a safetensors file."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
