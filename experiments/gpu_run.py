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

The result file names the device. It is written again after every part, and a part that fails leaves
its error there: what was measured before is never lost. Memory is taken as it is needed and not in
advance, since the tests and the speed tables are processes of their own beside this one.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # before JAX is there

import jax
import jax.numpy as jnp
import numpy as np
from common import HERE, table, write_result

import jaxdraft
from jaxdraft.devices import native_dtype
from jaxdraft.plan import check_batch
from jaxdraft.scoring import score

TOLERANCES = {"float32": 2e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest difference of log-probabilities from float32 on a CPU, over the likely tokens: some ten
times the rounding of the type, through twelve layers."""

LIKELY = -6.0
"""Log-probability from which on a token counts as likely."""

ROOM_27B = 70 * 2**30
"""Bytes that the geometry of 27B takes in 16 bits."""

LONGEST = 3 * 3600
"""Seconds that the tests, or a speed table, may take."""

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


def _run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a process to its end, for at most :data:`LONGEST` seconds."""
    return subprocess.run(
        command,
        cwd=HERE.parent,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=LONGEST,
    )


def run_tests() -> tuple[str, bool]:
    """Run the tests in a process of its own; return their failures and last line, and success."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *TESTS]
    done = _run(command, XLA_FLAGS=os.environ.get("XLA_FLAGS", ""))  # else those of the tests
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-400:] or "nothing printed"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "```\n" + "\n".join([*failed, lines[-1]]) + "\n```", done.returncode == 0


def speed(device: Any) -> tuple[str, bool]:
    """Run the speed tables, which write results of their own; return a line for each."""
    asked: list[list[str]] = [[]]
    if (device.memory_stats() or {}).get("bytes_limit", 0) > ROOM_27B:
        asked.append(["--geometry", "27b"])
    lines, right = [], True
    for options in asked:
        command = [sys.executable, str(HERE / "speed_table.py"), *options]
        done = _run(command)
        right &= done.returncode == 0
        outcome = "written" if done.returncode == 0 else f"failed: {done.stderr.strip()[-400:]}"
        lines.append(f"* `{' '.join(['speed_table.py', *options])}`: {outcome}")
    if len(asked) == 1:
        lines.append(f"* The geometry of 27B was left out: it needs {ROOM_27B / 2**30:.0f} GiB.")
    return "\n".join(lines), right


HEAD = ["dtype", "path", "largest difference", "limit", "drafts change nothing", "right"]


def against_cpu(device: Any) -> tuple[str, bool]:
    """Return the table of :func:`compare`, and whether all of it is right."""
    rows = compare(device)
    return table(HEAD, rows), all(row[-1] == "yes" for row in rows)


Part = Callable[[], tuple[str, bool]]
"""A part of the result in Markdown, and whether what it found is right."""


def parts_of(device: Any) -> dict[str, Part]:
    """Return the parts of the result by title, quick ones first.

    The peak of memory is that of the process, so nothing may run before it.
    """

    def costs() -> tuple[str, bool]:
        return (
            f"Copying: {copy_rate() / 1e12:.2f} TB/s read and written. One launch in a chain: "
            f"{launch_seconds() * 1e6:.2f} us."
        ), True

    return {
        "Memory": lambda: (table(["planned bytes", "peak bytes"], memory(device)), True),
        "Costs": costs,
        "Against float32 on the CPU": functools.partial(against_cpu, device),
        "Speed": functools.partial(speed, device),
        "Tests": run_tests,
    }


def run_parts(parts: dict[str, Part], write: Callable[[str], None], device: str) -> bool:
    """Run all parts, even if others fail; return whether everything is right.

    Args:
      parts: from :func:`parts_of`.
      write: writes the result in Markdown; called after every part.
      device: words for the device.
    """
    done: dict[str, tuple[str, bool]] = {}
    for title, part in parts.items():
        try:
            done[title] = part()
        except Exception:  # whatever fails on hardware that nothing here has seen
            done[title] = f"This part failed:\n\n```\n{traceback.format_exc()[-2000:]}\n```", False
        wrong = [name for name, (_, right) in done.items() if not right]
        left = [name for name in parts if name not in done]
        verdict = f"**Not right: {', '.join(wrong)}.**" if wrong else "Everything is right."
        verdict += f" Not yet run: {', '.join(left)}." if left else ""
        texts = [f"## {name}\n\n{text}" for name, (text, _) in done.items()]
        write("\n\n".join([f"Device: {device}. {verdict}", *texts]))
    return all(right for _, right in done.values())


def main() -> None:
    """Run everything; fail if there is no GPU, or if something is not right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--on-cpu", action="store_true", help="compare on the CPU; write nothing")
    args = parser.parse_args()
    if args.on_cpu:
        text, right = against_cpu(jax.devices("cpu")[0])
        print(text)
        raise SystemExit(not right)
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda"):
        raise SystemExit(
            f"there is no GPU here: JAX's first device is {device}. Nothing was run. "
            "`./run test --gpu` compiles the programs for GPUs without one."
        )
    name = re.sub(r"[^a-z0-9]+", "_", device.device_kind.lower()).strip("_")
    title = f"jaxdraft on {device.device_kind}"

    def write(body: str) -> None:
        write_result(__file__, title, body, f"gpu_{name}")

    words = f"**{device.device_kind}**, {native_dtype(device).name}"
    raise SystemExit(not run_parts(parts_of(device), write, words))


if __name__ == "__main__":
    main()
