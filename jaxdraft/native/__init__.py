"""Products of a few rows on CPUs, in C++ that XLA calls.

XLA has no product for CPUs that reads packed bytes: it decodes a matrix to floats first. The
functions here read matrices as they are stored, 32, 16, 8, 4 or 2 bits per number, and share XLA's
own threads. Sums are float32. Their order depends on the matrix alone, so a row has the same result
in every native product, bit for bit; XLA's sums have another order.

The environment variable :data:`VARIABLE` switches them on. The source is compiled at the first use,
with the C++ compiler of the machine, and kept in ``jaxdraft/native`` of ``XDG_CACHE_HOME`` or
``~/.cache``. Without a compiler, or where it fails, the XLA path serves, and ``jaxdraft inspect``
shows the reason. The XLA path also serves single rows of float32 matrices, wider windows and
prompts, programs on several devices, exported programs, derivatives, and the experts of a mixture.
"""

from __future__ import annotations

import os

VARIABLE = "JAXDRAFT_NATIVE"
"""The environment variable: "off", "on", or the name of an instruction set."""

OFF, ON = "off", "on"

SETS = ("avx512", "avx2", "plain")
"""The instruction sets, best first. "on" takes the first that the processor has."""

DEFAULT = OFF

MOST_ROWS = 32
"""Number of rows of the widest product."""


def choice() -> str:
    """Return the choice that the environment makes: "off", "on" or an instruction set.

    Raises:
      ValueError: the variable has another value.
    """
    found = os.environ.get(VARIABLE) or DEFAULT
    found = {"0": OFF, "1": ON}.get(found, found)
    if found not in (OFF, ON, *SETS):
        expected = ", ".join((OFF, ON, *SETS))
        raise ValueError(
            f"the environment variable {VARIABLE} is {found!r}; expected one of {expected}"
        )
    return found
