"""How fast are native products of a few rows on CPUs, against XLA's, and models with them?

    python experiments/native_products.py [NAME=FOLDER ...]

One process, in turn, with the same arrays. The products are those of one step of SmolLM2-135M, 121
matrices with 134 million numbers in all, with random weights. A folder is decoded plainly and with
windows of its drafter, as stored and with ``packed=True``. Needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAXDRAFT_NATIVE", "on")

import jax
import jax.numpy as jnp
from common import interleave, ratios, table, write_result

import jaxdraft
from jaxdraft.kernels.form import Form
from jaxdraft.native.build import description
from jaxdraft.native.product import without
from jaxdraft.nn.linear import matmul
from jaxdraft.nn.packed import PackedMatrix

LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
SHAPES = LAYER * 30 + ((49152, 576),)


def matrix(key: jax.Array, outputs: int, inputs: int, bits: int) -> Any:
    """Return a random matrix: float32, or packed in blocks of 32."""
    if bits > 8:
        return jax.random.normal(key, (outputs, inputs), jnp.float32)
    blocks = inputs // 32
    raw = jax.random.bits(key, (outputs, blocks, 4 * bits), jnp.uint8)
    arrays = {"weight_q": raw, "scales": jnp.full((outputs, blocks), 0.01, jnp.float32)}
    return PackedMatrix(arrays, Form(inputs, outputs, jnp.dtype("float32"), bits, 32))


def step(weights: list[Any], x: jax.Array) -> jax.Array:
    """Run all products, each after the one before."""
    total = jnp.zeros((), jnp.float32)
    for weight in weights:
        y = matmul(x[:, : weight.shape[1]], weight, out_dtype=jnp.float32)
        total = total + y[0, 0]
        x = x + total * 1e-20
    return total


def by_xla(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, traced and called without native products."""

    def called(*args: Any) -> Any:
        with without():
            return run(*args)

    return called


def products(repeats: int) -> list[list[object]]:
    """Time all products of a step: rows of the table."""
    rows: list[list[object]] = []
    for name, bits in (("float32", 32), ("int8", 8), ("int4", 4)):
        keys = jax.random.split(jax.random.key(0), len(SHAPES))
        weights = [matrix(k, *shape, bits) for k, shape in zip(keys, SHAPES, strict=True)]
        one: dict[str, float] = {}
        for count in (1, 4, 8, 32):
            x = jnp.ones((count, 1536), jnp.float32)
            run = jax.jit(step)
            sides = {"xla": by_xla(run), "native": run}
            seconds = interleave(
                {
                    side: lambda f=f, x=x: f(weights, x).block_until_ready()  # noqa: B023
                    for side, f in sides.items()
                },
                repeats=repeats,
            )
            middle = {side: statistics.median(s) * 1e3 for side, s in seconds.items()}
            one = one or middle
            low, ratio, high = ratios(seconds["xla"], seconds["native"])
            cells = [f"{middle[side]:.1f} ({middle[side] / one[side]:.2f})" for side in sides]
            rows.append([name, count, *cells, f"{ratio:.2f} ({low:.2f}..{high:.2f})"])
    return rows


def models(name: str, folder: Path, tokens: int, repeats: int) -> list[list[object]]:
    """Time whole calls of a model, plainly and with its drafter: rows of the table."""
    rows: list[list[object]] = []
    for packed in (False, True):
        model = jaxdraft.load(folder, packed=packed)
        prompt = [i % model.target.vocab_size for i in (504, 1463, 282, 260, 9403, 2327, 5634, 281)]
        drafters = ["none", "auto"] if model.info.drafter != "none" else ["none", "ngram"]
        for drafter in drafters:
            found: dict[str, list[int]] = {}

            def decode(side: str) -> None:
                context = without() if side == "xla" else contextlib.nullcontext()
                with context:
                    out = jaxdraft.generate(
                        model,  # noqa: B023
                        [prompt],  # noqa: B023
                        max_new_tokens=tokens,
                        stop_ids=(),
                        drafter=drafter,  # noqa: B023
                    )
                    found[side] = out.ids()[0]  # noqa: B023

            seconds = interleave(
                {side: lambda side=side: decode(side) for side in ("xla", "native")},  # noqa: B023
                repeats=repeats,
            )
            rate = {s: tokens / statistics.median(t) for s, t in seconds.items()}
            low, ratio, high = ratios(seconds["xla"], seconds["native"])
            rows.append(
                [
                    name,
                    "packed" if packed else "dense",
                    drafter,
                    *(f"{rate[side]:.1f}" for side in ("xla", "native")),
                    f"{ratio:.2f} ({low:.2f}..{high:.2f})",
                    "equal" if found["xla"] == found["native"] else "differ",
                ]
            )
    return rows


def main() -> None:
    """Time the products, and the models named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--note", default="", help="sentence on the state of the machine")
    args = parser.parse_args()
    head = ["weights", "rows", "XLA, ms", "native, ms", "XLA / native"]
    body = table(head, products(args.repeats))
    body += (
        f"\n\nAll products of a step of SmolLM2-135M, {description()}. Medians of "
        f"{args.repeats} after one warm-up, and in parentheses against one row; the ratio is taken "
        f"pair by pair (least..largest). Blocks have 32 numbers and float32 scales. "
        f"Single float32 rows and 32 packed rows are XLA's on both sides. {args.note}"
    )
    rows: list[list[object]] = []
    for entry in args.models:
        name, _, folder = entry.partition("=")
        rows += models(name, Path(folder), args.tokens, args.repeats)
    if rows:
        head = [
            "model",
            "weights",
            "drafter",
            "XLA, tokens/s",
            "native, tokens/s",
            "ratio",
            "tokens",
        ]
        body += "\n\n" + table(head, rows)
        body += f"\n\nWhole calls, 8 prompt tokens and {args.tokens} new ones, one request, greedy."
    write_result(__file__, "Native products on CPUs", body)


if __name__ == "__main__":
    main()
