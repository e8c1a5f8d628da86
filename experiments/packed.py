"""What does keeping quantized weights packed save, and what does it cost?

    python experiments/packed.py FOLDER

FOLDER holds a quantized artifact. Dequantized to float32 on load against packed, in one process, in
turn: bytes of the arrays, temporary bytes of the compiled step, and one forward pass over 1 and 8
rows. The processor time is given too: other programs disturb it less than the time on the clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from common import ratios, table, write_result

import jaxdraft


def nbytes(model: Any) -> int:
    """Return the bytes of all arrays, each counted once."""
    return sum({id(x): x.nbytes for x in jax.tree.leaves(model)}.values())


def step(target: Any, tokens: jax.Array, state: Any) -> jax.Array:
    """Return the logits of one window."""
    count = jnp.full((tokens.shape[0],), tokens.shape[1], jnp.int32)
    return target.forward(tokens, count, state).logits


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds on the clock and of the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Measure the artifact named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=25)
    args = parser.parse_args()
    models: dict[str, Any] = {
        name: jaxdraft.load(args.folder, dtype="float32", packed=name == "packed")
        for name in ("dequantized", "packed")
    }
    rows = []
    for count in (1, 8):
        runs, compiling, temporary = {}, {}, {}
        for name, model in models.items():
            tokens = jnp.ones((1, count), jnp.int32)
            state = model.target.init(1, 128)
            start = time.perf_counter()
            program = jax.jit(step).lower(model.target, tokens, state).compile()
            compiling[name] = time.perf_counter() - start
            memory: Any = program.memory_analysis()
            temporary[name] = memory.temp_size_in_bytes
            runs[name] = lambda p=program, m=model, t=tokens, s=state: p(
                m.target, t, s
            ).block_until_ready()
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for turn in range(args.repeats + 2):
            for name, run in runs.items():
                found = timed(run)
                if turn >= 2:
                    seconds[name].append(found)
        for name, pairs in seconds.items():
            wall, cpu = ([p[i] for p in pairs] for i in (0, 1))
            base = [p[1] for p in seconds["dequantized"]]
            rows.append(
                [
                    name,
                    count,
                    f"{nbytes(models[name]) / 1e6:.0f}",
                    f"{temporary[name] / 1e6:.1f}",
                    f"{compiling[name]:.1f}",
                    f"{min(wall) * 1e3:.1f}",
                    f"{statistics.median(wall) * 1e3:.1f}",
                    f"{statistics.median(cpu) * 1e3:.1f}",
                    f"{ratios(cpu, base)[1]:.2f}",
                ]
            )
    head = ["weights", "rows", "arrays, MB", "temporary, MB", "compile, s"]
    head += ["least ms", "median ms", "processor ms", "to dequantized"]
    body = table(head, rows) + (
        f"\n\n`{args.folder.name}` in float32, one forward pass over a cache of 128 slots, "
        f"{args.repeats} repeats in turn. The last column: median ratio of processor time, pair "
        "by pair."
    )
    write_result(__file__, "Packed weights", body)


if __name__ == "__main__":
    main()
