"""What does a verify window cost, in single steps?

    python experiments/window_cost.py NAME=FOLDER [NAME=FOLDER ...]

A step is a forward pass and its commit, inside one compiled loop with a carried cache, one request
at position 100. Windows of all sizes are timed in turn.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from common import interleave, ratios, table, write_result
from jax import lax

import jaxdraft

STEPS = 16
START = 100


@functools.partial(jax.jit, donate_argnames=("state",))
def steps(target: Any, state: Any, tokens: jax.Array) -> Any:
    """``STEPS`` forward passes over windows of ``tokens.shape[1]`` rows, all rows committed."""
    count = jnp.full((1,), tokens.shape[1], jnp.int32)

    def step(_: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        state, tokens = carry
        out = target.forward(tokens, count, state)
        return target.commit(out.state, count), jnp.argmax(out.logits, axis=-1).astype(jnp.int32)

    return lax.fori_loop(0, STEPS, step, (state, tokens))


def cost(name: str, folder: Path, windows: list[int], repeats: int) -> list[object]:
    """One row of the table: milliseconds of one step, and ratios to it."""
    target = jaxdraft.load(folder).target

    def run(rows: int) -> None:
        state = target.init(1, 512)
        state = state.replace(pool=state.pool.replace(length=jnp.full((1,), START, jnp.int32)))
        jax.block_until_ready(steps(target, state, jnp.ones((1, rows), jnp.int32)))

    seconds = interleave({str(n): functools.partial(run, n) for n in windows}, repeats=repeats)
    one = seconds["1"]
    row: list[object] = [name, f"{statistics.median(one) / STEPS * 1e3:.1f}"]
    return row + [f"{ratios(seconds[str(n)], one)[1]:.2f}" for n in windows[1:]]


def main() -> None:
    """Time every artifact named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifacts", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    windows = [1, 2, 4, 8, 16]
    rows = [
        cost(name, Path(folder), windows, args.repeats)
        for name, _, folder in (entry.partition("=") for entry in args.artifacts)
    ]
    head = ["artifact", "1 row, ms", *(f"{n} rows" for n in windows[1:])]
    body = table(head, rows) + (
        f"\n\nFloat32. Ratios to one row: medians of {args.repeats} pairs after one warm-up, "
        f"{STEPS} steps each (the empty state is made anew and counted in)."
    )
    write_result(__file__, "The cost of a verify window", body)


if __name__ == "__main__":
    main()
