"""What do the programs do on a GPU? Compiled for one here, where there is none.

    JAX_PLATFORMS=cpu python experiments/gpu_program.py [PROGRAM...] [--layers 64] [--card h200]

Weights are shapes alone, so 27B take no memory. Needs ``jax-cuda12-plugin`` and
``jax-cuda12-pjrt`` (no GPU, no driver, no CUDA library); ``./run test --gpu`` installs them. For
every program and length of the text: launches, CUDA graphs, waits for the host, bytes moved, the
least bytes possible, weights that are concatenated or rewritten, large copies, scratch memory, and
seconds to compile. All are facts of the compiled program; no time on a GPU is known.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import jax.numpy as jnp
from common import table
from gpu_compile import CARDS, compile_for, unavailable
from gpu_count import Program
from gpu_models import PROGRAMS, case

from jaxdraft.kernels import KERNELS, XLA

HEAD = [
    "program",
    "positions",
    "launches",
    "graphs",
    "host waits",
    "GB moved",
    "least GB",
    "ratio",
    "GB of weights concatenated",
    "GB of weights rewritten",
    "GB copied",
    "scratch MB",
    "s to compile",
]


def rows_of(
    name: str,
    card: str,
    *,
    layers: int,
    kernels: str,
    lengths: Sequence[int],
    capacity: int,
    dtype: str | None,
    lines: int,
) -> list[list[str]]:
    """Return the table rows of one program, compiled once for all lengths."""
    target = CARDS[card]
    program_case = case(
        name,
        kernels=kernels,
        layers=layers,
        dtype=jnp.dtype(dtype or target.dtype),
        capacity=capacity,
    )
    compiled = compile_for(target, program_case.function, program_case.arguments)
    program = Program(compiled, program_case.weights)
    rows = []
    for length in lengths:
        trips = functools.partial(program_case.trips, length)
        branches = functools.partial(program_case.branches, length)
        count = program.count(trips, program_case.part, branches)
        least = program_case.least(length)
        cells = [name, f"{length:,}", f"{count.launches:,}", f"{count.graphs:,}"]
        cells += [f"{count.waits:,}", _giga(count.moved), _giga(least)]
        cells += [f"{count.moved / least:.2f}", _giga(count.joined), _giga(count.rewritten)]
        cells += [_giga(count.copied), f"{compiled.temporary / 1e6:.0f}"]
        rows.append([*cells, f"{compiled.seconds:.0f}"])
        for source, part in program.lines(trips, program_case.part, branches)[:lines]:
            print(f"{part.launches:8,} launches {part.moved / 1e6:12,.1f} MB  {source}")
    return rows


def _giga(count: int) -> str:
    return f"{count / 1e9:.2f}"


def main() -> None:
    """Compile, count, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS), metavar="PROGRAM")
    parser.add_argument("--card", choices=tuple(CARDS), default="h200")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kernels", choices=KERNELS, default=XLA)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--capacity", type=int, default=9216)
    parser.add_argument("--dtype", help="of weights, keys and values; default: the card's own")
    parser.add_argument("--lines", type=int, default=0, help="also print so many source lines")
    args = parser.parse_args()
    if why := unavailable():
        raise SystemExit(why)
    rows = []
    for name in args.programs:
        found = rows_of(
            name,
            args.card,
            layers=args.layers,
            kernels=args.kernels,
            lengths=args.lengths,
            capacity=args.capacity,
            dtype=args.dtype,
            lines=args.lines,
        )
        for row in found:
            print(" | ".join(row), flush=True)
        rows += found
    print(table(HEAD, rows))


if __name__ == "__main__":
    main()
