"""Is this checkout as fast on a CPU as another commit?

    python experiments/against_commit.py COMMIT [--repeats 30] [--processor]

Checks the other commit out into a temporary folder and keeps a process for each. The two run the
same programs in turn, so that a busy machine slows both: a plain step, a window of 8, a round with
DFlash2, one that is sampled, and a prompt. Ratios are taken pair by pair: above one, this checkout
is slower. On a machine that does other work too, ``--processor`` takes the time of processors.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common import HERE, ratios, table, write_result

PROGRAMS = ("plain step", "window of 8", "DFlash2 round", "sampled round", "prompt of 700")

WORKER = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
import jaxdraft
model = jaxdraft.load(jaxdraft.EMBEDDED, drafter="dflash2")
ids = np.random.default_rng(0).integers(1, model.target.vocab_size, 700).tolist()
target = model.target
warm = jaxdraft.Sampling(temperature=0.8, top_k=50, top_p=0.95)
def window(target, state, tokens):
    out = target.forward(tokens, jnp.full((1,), 8, jnp.int32), state)
    return out.logits, target.commit(out.state, jnp.full((1,), 8, jnp.int32))
program = jax.jit(window)
state = target.init(1, 256)
tokens = jnp.asarray([ids[:8]], jnp.int32)
def generate(prompt, new, drafter, **options):
    options = dict(max_new_tokens=new, drafter=drafter, stop_ids=(), **options)
    out = jaxdraft.generate(model, [prompt], **options)
    return int(np.asarray(out.stats.target_forwards))
def windows():
    for _ in range(32):
        jax.block_until_ready(program(target, state, tokens))
    return 32
calls = {
    "plain step": lambda: generate(ids[:16], 128, "none"),
    "window of 8": windows,
    "DFlash2 round": lambda: generate(ids[:16], 128, "auto"),
    "sampled round": lambda: generate(ids[:16], 128, "auto", sampling=warm, key=0),
    "prompt of 700": lambda: generate(ids, 1, "none"),
}
clock = getattr(time, sys.argv[1])
for line in sys.stdin:
    start = clock()
    times = calls[line.strip()]()
    print((clock() - start) / times, flush=True)
"""
"""Times one program per line of input; prints seconds per pass of the target."""


class Checkout:
    """A process that runs the programs of one checkout."""

    def __init__(self, folder: Path, clock: str):
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, clock],
            env=environment,
            cwd=folder,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def seconds(self, program: str) -> float:
        """Run a program once; return the seconds per pass.

        Raises:
          RuntimeError: the process ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{program}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with {self._process.wait()}; its error is above")
        return float(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(
    folders: tuple[Path, Path], repeats: int, clock: str, programs: Sequence[str]
) -> dict[str, tuple[list[float], list[float]]]:
    """Return seconds per pass of every repeat, by program, of the two checkouts in turn."""
    checkouts = [Checkout(folder, clock) for folder in folders]
    found: dict[str, tuple[list[float], list[float]]] = {}
    try:
        for program in programs:
            found[program] = ([], [])
            for turn in range(2 + repeats):
                order = (0, 1) if turn % 2 else (1, 0)
                for which in order:
                    seconds = checkouts[which].seconds(program)
                    if turn >= 2:  # the first compiles, the second warms up
                        found[program][which].append(seconds)
    finally:
        for checkout in checkouts:
            checkout.close()
    return found


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("commit")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--processor", action="store_true", help="processor time, not elapsed")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    root = HERE.parent
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", args.commit], cwd=root, check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        clock = "process_time" if args.processor else "perf_counter"
        found = measure((root, Path(folder)), args.repeats, clock, args.programs)
    rows = []
    for program, (ours, theirs) in found.items():
        low, middle, high = ratios(ours, theirs)
        medians = [f"{statistics.median(part) * 1e3:.3f}" for part in (theirs, ours)]
        rows.append([program, *medians, f"{middle:.3f} ({low:.2f}..{high:.2f})"])
    head = ["program", f"{args.commit}, ms", "this checkout, ms", "this / that"]
    unit = "milliseconds of processors" if args.processor else "milliseconds"
    body = (
        f"{table(head, rows)}\n\nThe shipped family in float32, one row; {unit} per pass of the "
        f"target, medians of {args.repeats} repeats in turn. Load of the machine before the "
        f"first: {load:.1f}."
    )
    if args.dry:
        print(body)
    else:
        write_result(__file__, f"This checkout and {args.commit} on a CPU", body)


if __name__ == "__main__":
    main()
