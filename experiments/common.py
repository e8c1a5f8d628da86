"""Helpers of the experiments: timing, the machine, result files, the first family."""

from __future__ import annotations

import json
import os
import platform
import runpy
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import jaxdraft
from convert import ArtifactError
from jaxdraft import Drafter, Model

HERE = Path(__file__).parent
START = time.perf_counter()


def interleave(
    variants: dict[str, Callable[[], Any]],
    *,
    repeats: int,
    warmups: int = 1,
    between: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """Time every variant in turn, so that a change of the machine's load meets all of them.

    Args:
      variants: functions to time; each must leave nothing running.
      repeats: number of timed calls per variant.
      warmups: number of calls before them.
      between: function to call before every timed call, for example to wait for idle threads.

    Returns:
      Seconds of each repeat, by variant.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(warmups + repeats):
        for name, run in variants.items():
            between()
            start = time.perf_counter()
            run()
            if turn >= warmups:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratios(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """Return the least, median and largest ratio of the repeats, pair by pair."""
    pairs = sorted(a / b for a, b in zip(above, below, strict=True))
    return pairs[0], statistics.median(pairs), pairs[-1]


def drafters_of(
    folder: Path, draft_tokens: int, dtype: str | None = None
) -> dict[str, tuple[Model, Drafter]]:
    """Load every drafter of an artifact or a checkpoint, "ngram" last, each with its own target.

    Args:
      folder: folder of an artifact or a checkpoint.
      draft_tokens: K of the drafters that allow any.
      dtype: type of the weights; None for that of the files.
    """
    first = jaxdraft.load(folder, dtype=dtype)
    models = {first.info.drafter: first} if first.info.drafter != "none" else {}
    if not (folder / "genai_config.json").exists():  # a checkpoint may have several
        for kind in ("dflash2", "dspark", "mtp"):
            try:
                models[kind] = jaxdraft.load(folder, dtype=dtype, drafter=kind)
            except ArtifactError:
                raise
            except ValueError:
                pass  # there is no such drafter
    free = {"mtp": draft_tokens}
    found = {k: (m, m.choose(k, free.get(k))) for k, m in models.items()}
    return {**found, "ngram": (first, first.choose("ngram", draft_tokens))}


def machine() -> str:
    """Return processor, cores and versions, for the head of a result file."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    devices = ", ".join(sorted({d.device_kind for d in jax.devices()}))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{model}, {cores} cores; JAX devices: {devices}; jax {jax.__version__}, "
        f"Python {platform.python_version()}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def command(script: str) -> str:
    """Return the command line of this run, every path in it cut to its last name.

    Example: ``loading.py smollm2=hf`` for ``loading.py smollm2=/data/models/hf``.
    """
    words = [Path(script).name]
    for argument in sys.argv[1:]:
        name, sign, value = argument.rpartition("=")
        words.append(name + sign + (Path(value).name if os.sep in value else value))
    return shlex.join(words)


def write_result(script: str, title: str, body: str, name: str | None = None) -> None:
    """Write a result beside its script, and print it.

    The head has the command line, the machine, and the minutes since the script began.

    Args:
      script: path of the script.
      title: heading of the result.
      body: text below the head, in Markdown.
      name: name of the file, without ``.md``; default: the script's.
    """
    minutes = (time.perf_counter() - START) / 60
    head = f"`{command(script)}` on {machine()}; {minutes:.1f} minutes."
    text = f"# {title}\n\n{head}\n\n{body}\n"
    path = HERE / f"{name or Path(script).stem}.md"
    path.write_text(text, encoding="utf-8")
    print(text)


def first_family() -> tuple[Path, list[dict[str, Any]]]:
    """Restore the files of the first family, the model of many results here.

    It is an artifact of 0.8 million parameters with a DFlash2 drafter; see its MODEL_CARD.md.

    Returns:
      Its folder, complete, and its held-out prompts.
    """
    tests = HERE.parent / "tests"
    folder = tests / "first_family"
    runpy.run_path(str(tests / "golden" / "twins.py"))["restore"](folder)
    return folder, json.loads((folder / "prompts.json").read_text(encoding="utf-8"))["prompts"]
