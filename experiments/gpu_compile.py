"""Compile programs for a GPU that is not there, and keep the reports of the compiler.

XLA compiles for a card from a description of it: no driver, no CUDA library and no GPU is needed,
only the two packages that hold the compiler (``jax-cuda12-plugin`` and ``jax-cuda12-pjrt``, of the
version of ``jaxlib``), and ``JAX_PLATFORMS=cpu`` in the environment, since they look for a driver
otherwise. ``gpu_targets/`` has the descriptions, ``GpuTargetConfigProto`` in text form.

Products are not tuned, since nothing can be timed: XLA's default tiles are used. What happens
before tuning (fusions, copies, loops, CUDA graphs) is what a device would run.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

TARGETS = Path(__file__).parent / "gpu_targets"


@dataclass(frozen=True)
class Card:
    """A GPU to compile for."""

    name: str  # of its description in gpu_targets/
    dtype: DTypeLike  # of weights, where the card has products in it
    bandwidth: float  # bytes per second of its memory, from its data sheet


CARDS = {
    card.name: card
    for card in (
        Card("t4", jnp.float16, 320e9),
        Card("a100", jnp.bfloat16, 2039e9),
        Card("l4", jnp.bfloat16, 300e9),
        Card("h200", jnp.bfloat16, 4800e9),
        Card("b200", jnp.bfloat16, 8000e9),
    )
}
"""The cards by name: sm_75, sm_80, sm_89, sm_90a and sm_100a."""


@dataclass(frozen=True)
class Compiled:
    """The compiler's output for one program."""

    hlo: str  # the optimized module
    thunks: str  # what is launched, in order, with its CUDA graphs and loops
    thunk_names: Mapping[int, str]  # number of a thunk -> its instruction in the module
    temporary: int  # bytes of scratch memory
    seconds: float  # to compile


def unavailable() -> str | None:
    """Return the reason why nothing can be compiled for a GPU here, or None if it can."""
    try:
        _topology(CARDS["h200"])
    except Exception as error:  # whatever a missing or ill-fitting plugin raises
        return (
            "cannot compile for a GPU: needs jax-cuda12-plugin and jax-cuda12-pjrt of the version "
            f"of jaxlib, and JAX_PLATFORMS=cpu: {error}"
        )
    return None


def compile_for(
    card: Card,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    static: Mapping[str, Any] | None = None,
    options: Mapping[str, str | bool] | None = None,
) -> Compiled:
    """Compile a jitted function for a card.

    Args:
      card: the card.
      function: made by ``jax.jit``.
      arguments: its arguments, arrays or ``jax.ShapeDtypeStruct``.
      static: its static keyword arguments.
      options: XLA's, by name.
    """
    there = SingleDeviceSharding(_topology(card).devices[0])
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), arguments
    )
    lowered = function.trace(*placed, **(static or {})).lower()  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        told = {"xla_gpu_autotune_level": "0", "xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        start = time.perf_counter()
        with _nothing_kept():
            compiled = lowered.compile(compiler_options={**told, **(options or {})})
        seconds = time.perf_counter() - start
        # A program too short for a CUDA graph has only the first list.
        thunks = _largest(folder, "*.thunk_sequence_after_thunk_passes.txt", "*.thunk_sequence.txt")
        names = _thunk_names(_largest(folder, "*.thunk_metadata.txt"))
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return Compiled(compiled.as_text(), thunks, names, temporary, seconds)


@contextlib.contextmanager
def _nothing_kept() -> Generator[None]:
    """Keep programs out of JAX's cache on disk, which could not load them without a GPU."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def _topology(card: Card) -> Any:
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        raise RuntimeError(f"JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS')!r}; expected 'cpu'")
    text = (TARGETS / f"{card.name}.txtpb").read_text(encoding="utf-8")
    return topologies.get_topology_desc(
        platform="cuda", topology_name=card.name, topology="1x1x1", target_config=text
    )


def _largest(folder: str, *patterns: str) -> str:
    """Return the largest file of the first pattern that matches: helper modules are smaller."""
    for pattern in patterns:
        if found := sorted(Path(folder).glob(pattern), key=lambda path: path.stat().st_size):
            return found[-1].read_text(encoding="utf-8")
    raise FileNotFoundError(f"XLA dumped no {' or '.join(patterns)}")


def _thunk_names(text: str) -> dict[int, str]:
    pair = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')
    return {int(number): name for name, number in pair.findall(text)}
