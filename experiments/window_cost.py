"""What does a verify window cost, in single steps?

    python experiments/window_cost.py NAME=FOLDER [NAME=FOLDER ...]

A step is a forward pass and its commit, inside one compiled loop with a carried cache, one request
at position 100. Windows of all sizes are timed in turn, with the plain layout of the target's
matrices alone, and with blocks beside it (``jaxdraft.load(blocked=True)``).
"""

from __future__ import annotations

import argparse
import functools
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from common import interleave, ratios, table, write_result
from jax import lax

import jaxdraft
from jaxdraft.target import DecoderTarget

STEPS = 16
START = 100


@functools.partial(jax.jit, donate_argnames=("state",))
def steps(target: Any, state: Any, tokens: jax.Array) -> Any:
    """Run ``STEPS`` forward passes over windows of ``tokens.shape[1]`` rows, all committed."""
    count = jnp.full((1,), tokens.shape[1], jnp.int32)

    def step(_: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        state, tokens = carry
        out = target.forward(tokens, count, state)
        return target.commit(out.state, count), jnp.argmax(out.logits, axis=-1).astype(jnp.int32)

    return lax.fori_loop(0, STEPS, step, (state, tokens))


def cost(name: str, folder: Path, windows: list[int], repeats: int) -> list[list[object]]:
    """Return two rows of the table: milliseconds of one plain step, and ratios to it."""
    model = jaxdraft.load(folder, drafter="none" if (folder / "config.json").exists() else None)
    assert isinstance(model.target, DecoderTarget)
    targets = {"no": model.target, "yes": model.target.blocked()}

    def run(blocks: str, rows: int) -> None:
        target = targets[blocks]
        state = target.init(1, 512)
        state = replace(state, pool=replace(state.pool, length=jnp.full((1,), START, jnp.int32)))
        jax.block_until_ready(steps(target, state, jnp.ones((1, rows), jnp.int32)))

    runs = {f"{b} {n}": functools.partial(run, b, n) for b in targets for n in windows}
    seconds = interleave(runs, repeats=repeats)
    one = seconds["no 1"]
    plain = f"{statistics.median(one) / STEPS * 1e3:.1f}"
    return [
        [name, b, plain, *(f"{ratios(seconds[f'{b} {n}'], one)[1]:.2f}" for n in windows[1:])]
        for b in targets
    ]


def main() -> None:
    """Time every artifact named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifacts", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    windows = [1, 2, 3, 4, 5, 8, 16]
    rows = [
        row
        for name, _, folder in (entry.partition("=") for entry in args.artifacts)
        for row in cost(name, Path(folder), windows, args.repeats)
    ]
    head = ["artifact", "blocks", "1 row, ms", *(f"{n} rows" for n in windows[1:])]
    body = table(head, rows) + (
        f"\n\nFloat32. Ratios to one row without blocks: medians of {args.repeats} pairs after "
        f"one warm-up, {STEPS} steps each (the time includes making the empty state)."
    )
    write_result(__file__, "The cost of a verify window", body)


if __name__ == "__main__":
    main()
