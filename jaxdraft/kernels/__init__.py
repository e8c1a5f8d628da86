"""GPU kernels in Pallas, drop-ins for functions of ``nn``. They have not yet run on a GPU.

They are compiled through Triton for NVIDIA GPUs of compute capability 8.0 and later, and the tests
count what comes out of the compiler. No time of theirs was ever measured. Therefore the XLA path is
the default, and the kernels are chosen by name:

    model = jaxdraft.load("artifact_dir", kernels="pallas")

or by the environment variable ``JAXDRAFT_KERNELS=pallas``, which ``load`` reads, or for a model of
your own by :func:`jaxdraft.with_kernels`. The choice is a static part of the modules: another
choice is another program, and nothing recompiles unless the choice changes.

What the kernels share:

* They serve windows of at most :data:`MAX_ROWS` rows, and products of at most
  :data:`jaxdraft.kernels.linear.MOST_ROWS` rows. Wider windows, prompts among them, take the
  XLA path.
* All sums run in float32.
* Under differentiation the XLA path runs instead, for the value and the gradient. ``vmap`` works.
* On CPUs they run interpreted, slowly: that is for tests. GPUs before compute capability 8.0 (T4)
  and other accelerators are rejected when the kernels are chosen; the XLA path serves them.
"""

from __future__ import annotations

import os

XLA, PALLAS = KERNELS = ("xla", "pallas")
"""The choices: the XLA path, and Pallas kernels."""

VARIABLE = "JAXDRAFT_KERNELS"
"""The environment variable that is used where no argument makes the choice."""

MAX_ROWS = 16
"""Rows of the widest window that a kernel serves."""


def resolve(kernels: str | None) -> str:
    """Return the choice that an argument, or else the environment, makes.

    Args:
      kernels: "xla", "pallas", or None for the environment's choice, which is "xla" by default.

    Raises:
      ValueError: no such choice.
    """
    origin = "kernels"
    if kernels is None:
        kernels, origin = os.environ.get(VARIABLE) or XLA, f"the environment variable {VARIABLE}"
    if kernels not in KERNELS:
        raise ValueError(f"{origin} is {kernels!r}; expected one of {', '.join(KERNELS)}")
    return kernels
