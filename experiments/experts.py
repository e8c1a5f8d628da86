"""What does it save to read the chosen experts alone, and to keep them packed?

    python experiments/experts.py

The experts of one layer on a CPU, 4 of 32 per row, random weights: all experts over every row
(`all_experts`, as training does), and those that some row chose, one after the other
(`experts_in_turn`), as floats and in MXFP4. In turn, in one process. Processor time is given:
other programs disturb it less than the time on the clock.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import table, write_result

from jaxdraft.config import MoeConfig
from jaxdraft.kernels.linear import Form
from jaxdraft.nn.experts import Experts, PackedExperts, all_experts, experts_in_turn
from jaxdraft.nn.packed import PackedMatrix

CONFIG = MoeConfig(experts=32, active=4, hidden=768, shared_hidden=0)
WIDTH = 1024
REPEATS = 15


def packed(rng: np.random.Generator, outputs: int, inputs: int, dtype: Any) -> Any:
    """Return random matrices in MXFP4."""
    shape = (CONFIG.experts, outputs, inputs // 32)
    arrays = {
        "weight_q": jnp.asarray(rng.integers(0, 256, (*shape, 16), np.uint8)),
        "scales": jnp.asarray(np.full(shape, 120, np.uint8).view(jnp.float8_e8m0fnu)),
    }
    form = Form(inputs, outputs, jnp.dtype(dtype), 4, 32, values="e2m1")
    return PackedExperts(arrays, form).table


def measure(dtype: str, rows: int) -> list[list[object]]:
    """Return the rows of the table for one type and one number of rows."""
    rng = np.random.default_rng(rows)
    gate_up = packed(rng, 2 * CONFIG.hidden, WIDTH, dtype)
    down = packed(rng, WIDTH, CONFIG.hidden, dtype)
    in_mxfp4 = Experts(gate_up, down)
    wide = jax.vmap(PackedMatrix.dequantized)
    floats = Experts(wide(gate_up), wide(down))
    x = jnp.asarray(rng.standard_normal((rows, WIDTH)), dtype)
    probability = jax.nn.softmax(jnp.asarray(rng.standard_normal((rows, 32)), jnp.float32))
    share, chosen = jax.lax.top_k(probability, CONFIG.active)
    variants = {
        "all": (all_experts, floats),
        "in turn": (experts_in_turn, floats),
        "in turn, MXFP4": (experts_in_turn, in_mxfp4),
    }
    runs, temporary = {}, {}
    for name, (form, experts) in variants.items():
        program = jax.jit(functools.partial(form, CONFIG)).lower(x, share, chosen, experts)
        compiled = program.compile()
        temporary[name] = compiled.memory_analysis().temp_size_in_bytes  # type: ignore[union-attr]
        runs[name] = lambda c=compiled, e=experts: c(x, share, chosen, e).block_until_ready()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(REPEATS + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if turn:
                seconds[name].append(time.process_time() - start)
    used = len(np.unique(np.asarray(chosen)))
    return [
        [
            dtype,
            rows,
            used,
            name,
            f"{sum(leaf.nbytes for leaf in jax.tree.leaves(variants[name][1])) / 1e6:.0f}",
            f"{temporary[name] / 1e6:.0f}",
            f"{statistics.median(found) * 1e3:.1f}",
        ]
        for name, found in seconds.items()
    ]


def main() -> None:
    """Measure single rows, a verify window, and a chunk of a prompt."""
    lines = [
        line for dtype in ("float32", "bfloat16") for r in (1, 5, 64) for line in measure(dtype, r)
    ]
    head = [
        "dtype",
        "rows",
        "experts in use",
        "form",
        "arrays, MB",
        "temporary, MB",
        "processor ms",
    ]
    body = table(head, lines) + (
        f"\n\n{CONFIG.active} of {CONFIG.experts} experts per row, width {WIDTH}, "
        f"{CONFIG.hidden} inner channels; medians of {REPEATS} repeats in turn."
    )
    write_result(__file__, "Experts", body)


if __name__ == "__main__":
    main()
