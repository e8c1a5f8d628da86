"""What do products with packed matrices cost on this CPU, in one piece and in blocks?

    python experiments/packed_products.py

Matrices of several sizes in float32, 4 or 8 bits and a scale for 32 inputs: the dense product, the
packed one that makes all floats first, and the packed one that makes some at a time, as
``jaxdraft.nn.packed`` does for large matrices. Processor time, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import table, write_result

from jaxdraft.nn import packed
from jaxdraft.nn.linear import matmul
from jaxdraft.nn.packed import PackedLinear, PackedMatrix

SIZES = (
    (3072, 576, 4),
    (4096, 4096, 8),
    (12288, 2048, 4),
    (49152, 576, 8),
)
"""Outputs, inputs and bits."""


def made(outputs: int, inputs: int, bits: int) -> PackedMatrix:
    """Return a packed matrix of random numbers."""
    rng, blocks = np.random.default_rng(0), inputs // 32
    values = rng.integers(0, 256, (outputs, blocks, 4 * bits), dtype=np.uint8)
    scales = rng.normal(size=(outputs, blocks)).astype(np.float16)
    shape: dict[str, Any] = dict(bits=bits, block=32, inputs=inputs, dtype="float32")
    return PackedLinear(jnp.asarray(values), jnp.asarray(scales), **shape).table


def least(run: Callable[[], Any], repeats: int) -> float:
    """Return the least milliseconds of processor time."""
    found = []
    for _ in range(repeats + 1):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return 1e3 * min(found[1:])


def main() -> None:
    """Measure every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    rows, usual = [], packed._AT_ONCE
    for outputs, inputs, bits in SIZES:
        matrix = made(outputs, inputs, bits)
        forms = {"dense": (matrix.dequantized(), usual)}
        forms |= {"one piece": (matrix, outputs * inputs), "blocks": (matrix, usual)}
        for count in (1, 8, 128):
            x = jnp.asarray(np.random.default_rng(1).normal(size=(count, inputs)), jnp.float32)
            cells = [f"{outputs} x {inputs}", bits, count]
            for weight, at_once in forms.values():
                packed._AT_ONCE = at_once
                # A new function: the compiled program of an equal one would be taken again.
                program = jax.jit(lambda x, w: matmul(x, w)).lower(x, weight).compile()
                run = functools.partial(lambda p, *a: p(*a).block_until_ready(), program, x, weight)
                cells.append(f"{least(run, args.repeats):.2f}")
            rows.append(cells)
    packed._AT_ONCE = usual
    head = ["matrix", "bits", "rows", "dense, ms", "packed in one piece, ms", "in blocks, ms"]
    words = f"\n\nLeast processor time of {args.repeats} calls. Blocks have {usual:,} numbers."
    write_result(__file__, "Products with packed matrices", table(head, rows) + words)


if __name__ == "__main__":
    main()
