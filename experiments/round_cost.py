"""What does a round cost, and where does drafting start to pay?

    python experiments/round_cost.py [NAME=FOLDER ...]

The parts of a round of the first family (or of other artifacts with a block drafter), each
inside a compiled loop of its own, one request: a plain step, a verify window of 1 + K rows,
ingesting three committed rows, and proposing. Drafting pays when a round emits more tokens than it
costs steps.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from common import first_family, interleave, table, write_result
from jax import lax

import jaxdraft

STEPS = 50


@functools.partial(jax.jit, static_argnames="rows")
def windows(target: Any, state: Any, rows: int) -> jax.Array:
    """Run ``STEPS`` forward passes of ``rows`` rows, one of them committed."""

    def step(_: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        state, tokens = carry
        out = target.forward(tokens, jnp.full((1,), rows, jnp.int32), state)
        state = target.commit(out.state, jnp.ones((1,), jnp.int32))
        return state, jnp.argmax(out.logits, axis=-1).astype(jnp.int32)

    return lax.fori_loop(0, STEPS, step, (state, jnp.ones((1, rows), jnp.int32)))[1]


def feed(drafter: Any, state: Any, anchor: jax.Array) -> jaxdraft.Feed:
    """Return a feed of three committed rows, after those that the drafter has."""
    return jaxdraft.Feed(
        aux=jnp.ones((1, 8, drafter.config.aux_width)),
        count=jnp.full((1,), 3, jnp.int32),
        first_position=state.length,
        anchor=anchor,
        wants_draft=jnp.ones((1,), bool),
        limit=jnp.full((1,), drafter.draft_tokens, jnp.int32),
    )


@jax.jit
def ingests(drafter: Any, state: Any) -> Any:
    """Ingest three rows ``STEPS`` times. The cache is the result, so nothing is left out."""
    anchor = jnp.ones((1,), jnp.int32)
    return lax.fori_loop(0, STEPS, lambda _, s: drafter.ingest(s, feed(drafter, s, anchor)), state)


@jax.jit
def proposals(drafter: Any, state: Any) -> jax.Array:
    """Make ``STEPS`` proposals, each after the first token of the one before."""

    def step(_: jax.Array, anchor: jax.Array) -> jax.Array:
        return drafter.propose(state, feed(drafter, state, anchor))[1].tokens[:, 0]

    return lax.fori_loop(0, STEPS, step, jnp.ones((1,), jnp.int32))


def cost(name: str, folder: Path, repeats: int) -> list[object]:
    """Measure one artifact, and return its row of the table."""
    model = jaxdraft.load(folder)
    target, drafter = model.target, model.drafter
    state, drafts = target.init(1, 512), drafter.init(1, 512)
    width = drafter.draft_tokens + 1
    runs: dict[str, Callable[[], Any]] = {
        "step": lambda: windows(target, state, 1).block_until_ready(),
        "window": lambda: windows(target, state, width).block_until_ready(),
        "ingest": lambda: jax.block_until_ready(ingests(drafter, drafts)),
        "propose": lambda: proposals(drafter, drafts).block_until_ready(),
    }
    seconds = interleave(runs, repeats=repeats)
    ms = {part: statistics.median(times) / STEPS * 1e3 for part, times in seconds.items()}
    steps = (ms["window"] + ms["ingest"] + ms["propose"]) / ms["step"]
    return [name, *(f"{ms[part]:.3f}" for part in runs), f"{steps:.2f}"]


def main() -> None:
    """Time the first family and every artifact named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifacts", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    named = [entry.partition("=") for entry in args.artifacts]
    artifacts = [("first family", first_family()[0])] + [(n, Path(f)) for n, _, f in named]
    rows = [cost(name, folder, args.repeats) for name, folder in artifacts]
    head = ["artifact", "step, ms", "window, ms", "ingest, ms", "propose, ms", "round, in steps"]
    body = table(head, rows) + (
        f"\n\nFloat32, one request, medians of {args.repeats}. Drafting pays if a round emits "
        "more tokens than the last column."
    )
    write_result(__file__, "The cost of a round", body)


if __name__ == "__main__":
    main()
