"""In which form does XLA run thin products fastest on a CPU?

    python experiments/linear_forms.py

The products of a 135M-parameter decoder's layers (30 x [576 x 960, 576 x 576, 576 x 3072,
1536 x 576], float32, 425 MB), chained inside one compiled loop so that nothing can be left out.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from common import interleave, table, write_result
from jax import lax

from jaxdraft.nn.linear import BLOCK, blocked_matmul

LAYERS, STEPS = 30, 8
SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576))
Product = Callable[[jax.Array, jax.Array], jax.Array]


def rows_by_columns(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return x @ W, with W as [in, out]."""
    return x @ w


def weights_first(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return (W @ x.T).T, with W as [out, in]."""
    return lax.dot_general(w, x, (((1,), (1,)), ((), ()))).T


def weights_first_in(parts: int, x: jax.Array, w: jax.Array) -> jax.Array:
    """Return the same as a batch of ``parts`` products."""
    w = w.reshape(parts, -1, w.shape[1])
    many = jnp.broadcast_to(x[None], (parts, *x.shape))
    y = lax.dot_general(w, many, (((2,), (2,)), ((0,), (0,))))
    return y.reshape(-1, x.shape[0]).T


def chain(product: Product, weights: list[list[jax.Array]], x: jax.Array) -> jax.Array:
    """Run all products of all layers ``STEPS`` times, each depending on the one before."""

    def step(_: jax.Array, x: jax.Array) -> jax.Array:
        for qkv, o, gate_up, down in weights:
            x = x + product(product(x, qkv)[:, :576], o) * 0.01
            gate, up = jnp.split(product(x, gate_up), 2, axis=-1)
            x = x + product(jax.nn.silu(gate) * up, down) * 0.01
        return x / (1e-3 + jnp.max(jnp.abs(x)))

    return lax.fori_loop(0, STEPS, step, x)


def run(program: Callable[..., jax.Array], weights: list[list[jax.Array]], x: jax.Array) -> None:
    """Run one call to the end."""
    program(weights, x).block_until_ready()


def main() -> None:
    """Time every form at every number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    noise = np.random.default_rng(0).standard_normal(1536 * 3072, dtype=np.float32) * 0.03

    def layers(shape: Callable[[int, int], tuple[int, ...]]) -> list[list[jax.Array]]:
        """Return separate copies for every layer, so that none stays in a cache."""
        shapes = [shape(i, o) for i, o in SHAPES]
        return [
            [jnp.array(noise[: math.prod(s)].reshape(s)) for s in shapes] for _ in range(LAYERS)
        ]

    by_columns = layers(lambda inputs, outputs: (inputs, outputs))
    by_rows = layers(lambda inputs, outputs: (outputs, inputs))
    forms: dict[str, tuple[Product, list[list[jax.Array]]]] = {
        "x @ W, [in, out]": (rows_by_columns, by_columns),
        "W @ x.T, [out, in]": (weights_first, by_rows),
    }
    for parts in (2, 4, 8):
        form = functools.partial(weights_first_in, parts)
        forms[f"W @ x.T, [out, in], batch of {parts}"] = (form, by_rows)
    blocks = layers(lambda inputs, outputs: (outputs // BLOCK, inputs, BLOCK))
    forms[f"x @ W, [out / {BLOCK}, in, {BLOCK}]"] = (blocked_matmul, blocks)
    counts = (1, 2, 4, 5, 6, 8, 16)
    results: dict[str, list[str]] = {name: [] for name in forms}
    for count in counts:
        x = jnp.ones((count, 576))
        runs = {}
        for name, (product, weights) in forms.items():
            program = jax.jit(functools.partial(chain, product))
            runs[name] = functools.partial(run, program, weights, x)
        for name, seconds in interleave(runs, repeats=args.repeats).items():
            results[name].append(f"{statistics.median(seconds) / STEPS * 1e3:.1f}")
    head = ["form", *(f"{n} rows" if n > 1 else "1 row" for n in counts)]
    body = table(head, [[name, *cells] for name, cells in results.items()])
    body += (
        f"\n\nMilliseconds for all layers; medians of {args.repeats} after one warm-up, in turn."
    )
    write_result(__file__, "Forms of a thin product", body)


if __name__ == "__main__":
    main()
