"""Is the GPU of this machine right, and how fast is it? Everything that only a GPU can answer.

    ./run gpu                                   # on a machine with a GPU; it fails elsewhere
    python experiments/gpu_run.py --on-cpu      # the comparisons alone, as a check of this script

1. The project's tests with JAX on the GPU.
2. The shipped models on the GPU against the same in float32 on the CPU, in every data type that the
   device is made for; and with kernels against the XLA path.
3. Peak memory of a generation against the result of ``jaxdraft.plan``.
4. The rate at which the device copies and the time of one small launch: two of the three numbers
   that ``gpu_estimate.py`` assumes.
5. The speed tables: of the shipped family, and at the geometry of 27B if it fits.

The result file names the device.
"""

from __future__ import annotations

import argparse
import functools
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import HERE, table, write_result

import jaxdraft
from jaxdraft.devices import native_dtype
from jaxdraft.generate import score
from jaxdraft.plan import check_batch

TOLERANCES = {"float32": 2e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest difference of log-probabilities from float32 on a CPU, over the likely tokens: some ten
times the rounding of the type, through twelve layers."""

LIKELY = -6.0
"""Log-probability from which on a token counts as likely."""

ROOM_27B = 70 * 2**30
"""Bytes that the geometry of 27B takes in 16 bits."""

PROMPT = "def fibonacci(n):\n    "
TESTS = tuple(
    f"tests/{name}" for name in ("nn", "state", "draft", "kernels", "properties", "engine")
)


def log_probs(model: jaxdraft.Model, ids: list[int]) -> np.ndarray:
    """Return the log-probabilities [T, V] of every token after each of ``ids``."""
    logits = score(model, [ids]).logits[0]
    return np.asarray(jax.nn.log_softmax(logits, axis=-1))


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference over tokens that are likely in ``expected``."""
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - expected)[expected > LIKELY].max())


def compare(device: Any) -> list[list[str]]:
    """Compare the shipped family on a device with itself on the CPU, in every data type.

    Args:
      device: a ``jax.Device``.

    Returns:
      Rows of a table; the last cell of each is "yes" or "no".
    """
    with jax.default_device(jax.devices("cpu")[0]):
        exact = jaxdraft.load(jaxdraft.EMBEDDED, dtype="float32")
        assert exact.text is not None
        ids = exact.text.encode(PROMPT)
        ids += jaxdraft.generate(exact, [ids], max_new_tokens=64).ids()[0]
        expected = log_probs(exact, ids)
    rows = []
    with jax.default_device(device):
        for dtype in dict.fromkeys(("float32", native_dtype(device).name)):
            model = jaxdraft.load(jaxdraft.EMBEDDED, dtype=dtype)
            variants: dict[str, Callable[[], jaxdraft.Model]] = {"xla": lambda model=model: model}
            if device.platform != "cpu":
                variants["pallas"] = functools.partial(jaxdraft.with_kernels, model, "pallas")
            for name, make in variants.items():
                try:
                    chosen = make()
                except ValueError as error:  # a device without kernels
                    rows.append([dtype, name, str(error), "", "no kernels", "yes"])
                    continue
                apart = difference(log_probs(chosen, ids), expected)
                same = _drafts_change_nothing(chosen)
                # In 16 bits two logits may tie but for rounding: such tokens differ lawfully.
                right = apart <= TOLERANCES[dtype] and (same or dtype != "float32")
                limit = f"{TOLERANCES[dtype]:g}"
                cells = [dtype, name, f"{apart:.2g}", limit, "yes" if same else "no"]
                rows.append([*cells, "yes" if right else "no"])
    return rows


def _drafts_change_nothing(model: jaxdraft.Model) -> bool:
    """Whether greedy tokens are the same with and without drafts."""
    plain, drafted = (
        jaxdraft.generate(model, PROMPT, max_new_tokens=96, drafter=drafter).ids()
        for drafter in ("none", "auto")
    )
    return plain == drafted


def memory(device: Any) -> list[list[str]]:
    """Compare the peak of a generation with the bytes that are planned for it."""
    model = jaxdraft.load(jaxdraft.EMBEDDED, dtype=native_dtype(device).name)
    jaxdraft.generate(model, [PROMPT] * 8, max_new_tokens=128)
    stats = device.memory_stats() or {}
    drafter = model.choose("auto", None)
    limit = stats.get("bytes_limit", 2**40)
    planned = check_batch(model.target, drafter, batch=8, capacity=256, memory=limit)
    peak = stats.get("peak_bytes_in_use")
    return [[f"{planned:,}", "unknown" if peak is None else f"{peak:,}"]]


def copy_rate() -> float:
    """Return bytes per second, read and written, of adding one to 2 GiB; the best of ten."""
    x = jnp.zeros((2**29,), jnp.float32)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    best = float("inf")
    for _ in range(12):
        start = time.perf_counter()
        x = jax.block_until_ready(add(x))
        best = min(best, time.perf_counter() - start)
    return 2 * x.nbytes / best


def launch_seconds() -> float:
    """Return the seconds per launch of a program of 1,000 that depend on each other."""

    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        for _ in range(1000):
            x = jax.lax.optimization_barrier(x + 1)
        return x

    x = jnp.zeros((8,), jnp.float32)
    best = float("inf")
    for _ in range(12):
        start = time.perf_counter()
        jax.block_until_ready(chain(x))
        best = min(best, time.perf_counter() - start)
    return best / 1000


def run_tests() -> tuple[bool, str]:
    """Run the tests in a process of its own; return whether all passed, and pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *TESTS]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or ["pytest printed nothing"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 0, "\n".join([*failed, lines[-1]])


def speed(device: Any) -> list[str]:
    """Run the speed tables, which write results of their own; return a line for each."""
    asked: list[list[str]] = [[]]
    if (device.memory_stats() or {}).get("bytes_limit", 0) > ROOM_27B:
        asked.append(["--geometry", "27b"])
    lines = []
    for options in asked:
        command = [sys.executable, str(HERE / "speed_table.py"), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = "written" if done.returncode == 0 else f"failed: {done.stderr.strip()[-400:]}"
        lines.append(f"* `speed_table.py {' '.join(options)}`: {said}")
    if len(asked) == 1:
        lines.append(f"* The geometry of 27B was left out: it needs {ROOM_27B / 2**30:.0f} GiB.")
    return lines


def main() -> None:
    """Run everything; fail if there is no GPU, or if something is not right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--on-cpu", action="store_true", help="compare on the CPU; write nothing")
    args = parser.parse_args()
    head = ["dtype", "path", "largest difference", "limit", "drafts change nothing", "right"]
    if args.on_cpu:
        rows = compare(jax.devices("cpu")[0])
        print(table(head, rows))
        raise SystemExit(any(row[-1] != "yes" for row in rows))
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda"):
        raise SystemExit(
            f"there is no GPU here: JAX's first device is {device}. Nothing was run. "
            "`./run test --gpu` compiles the programs for GPUs without one."
        )
    passed, tests = run_tests()
    rows = compare(device)
    right = passed and all(row[-1] == "yes" for row in rows)
    parts = [
        f"Device: **{device.device_kind}**, {native_dtype(device).name}. "
        f"{'Everything is right.' if right else '**Something is not right.**'}",
        f"## Tests\n\n```\n{tests}\n```",
        f"## Against float32 on the CPU\n\n{table(head, rows)}",
        f"## Memory\n\n{table(['planned bytes', 'peak bytes'], memory(device))}",
        f"## Costs\n\nCopying: {copy_rate() / 1e12:.2f} TB/s read and written. "
        f"One launch in a chain: {launch_seconds() * 1e6:.2f} us.",
        "## Speed\n\n" + "\n".join(speed(device)),
    ]
    name = re.sub(r"[^a-z0-9]+", "_", device.device_kind.lower()).strip("_")
    write_result(__file__, f"jaxdraft on {device.device_kind}", "\n\n".join(parts), f"gpu_{name}")
    raise SystemExit(not right)


if __name__ == "__main__":
    main()
