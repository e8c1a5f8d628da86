"""Commands over data sets: ``jaxdraft map | eval``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxdraft.cli_options import (
    BlockedOption,
    ContextOption,
    DrafterOption,
    DraftTokensOption,
    DTypeOption,
    Folder,
    HistoryOption,
    KernelsOption,
    MeshOption,
    RegexOption,
    RevisionOption,
    SchemaOption,
    TokensOption,
    console,
    friendly,
    load_model,
    notes,
    structure_of,
    with_history,
)
from jaxdraft.data import EMBEDDED
from jaxdraft.engine import Engine
from jaxdraft.mapping import MapSummary, map_file
from jaxdraft.plan import MAX_BATCH
from jaxdraft.sampling import Sampling

_PLAIN_SECONDS = 10.0
"""Seconds between lines of progress where there is no terminal."""


def map_command(
    prompts: Annotated[
        Path,
        typer.Argument(
            help="JSON Lines: objects with a prompt or messages, and settings of the line if any."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="File of answers, JSON Lines.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="As FOLDER of generate; default: the embedded one.")
    ] = str(EMBEDDED),
    max_new_tokens: TokensOption = 128,
    n: Annotated[int, typer.Option("--samples", min=1, help="Samples per prompt.")] = 1,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0: greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0: off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1: off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0: off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1: off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="String that ends a text; may be repeated.")
    ] = None,
    json_schema: SchemaOption = None,
    regex: RegexOption = None,
    logprobs: Annotated[
        int | None,
        typer.Option(min=0, help="Add log-probabilities, and those of so many alternatives."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option(help="Replace the file of answers instead of continuing it.")
    ] = False,
    max_batch: Annotated[int, typer.Option(min=1, help="Rows decoded at once.")] = MAX_BATCH,
    memory: Annotated[
        str | None, typer.Option(help='Memory of weights and state, like "12GiB".')
    ] = None,
    context: ContextOption = None,
    drafter: DrafterOption = "auto",
    draft_tokens: DraftTokensOption = None,
    history: HistoryOption = None,
    dtype: DTypeOption = None,
    revision: RevisionOption = None,
    blocked: BlockedOption = False,
    kernels: KernelsOption = None,
    mesh: MeshOption = None,
) -> None:
    """Answer every prompt of a file; the same command continues an interrupted run."""
    with friendly():
        if not prompts.is_file():  # before a model is loaded
            raise ValueError(f"{prompts} is not a file")
        how = dict(blocked=blocked, kernels=kernels, mesh=mesh)
        loaded, drafter = load_model(model, dtype, drafter, revision=revision, **how)
        greedy = temperature == 0 and repetition_penalty == 1
        sampling = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
        )
        rules: dict[str, Any] = dict(
            max_new_tokens=max_new_tokens,
            sampling=None if greedy else sampling,
            key=seed,
            stop=tuple(stop or ()),
            structure=structure_of(json_schema, regex),
            logprobs=logprobs,
        )
        engine = Engine(
            loaded,
            max_batch=max_batch,
            memory=int(memory) if memory is not None and memory.isdecimal() else memory,
            context=context,
            drafter=with_history(loaded, drafter, history),
            draft_tokens=draft_tokens,
        )
        try:
            with engine, _progress() as progress:
                done = map_file(
                    engine, prompts, out, n=n, overwrite=overwrite, progress=progress, **rules
                )
        except KeyboardInterrupt:
            notes.print("interrupted; the same command continues")
            raise typer.Exit(130) from None
    _report(done, out)


def eval_command(
    folder: Folder,
    tasks: Annotated[str, typer.Option(help="Tasks or groups of lm-eval, with commas between.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Examples per task.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples in a prompt.")] = None,
    include_path: Annotated[
        Path | None, typer.Option(help="Folder with tasks of your own, in YAML.")
    ] = None,
    chat: Annotated[bool, typer.Option(help="Apply the chat template to the prompts.")] = False,
    out: Annotated[Path | None, typer.Option(help="File for all results, JSON.")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Rows that run at once.")] = MAX_BATCH,
    context: ContextOption = None,
    drafter: DrafterOption = "auto",
    draft_tokens: DraftTokensOption = None,
    history: HistoryOption = None,
    dtype: DTypeOption = None,
    revision: RevisionOption = None,
    blocked: BlockedOption = False,
    kernels: KernelsOption = None,
    mesh: MeshOption = None,
) -> None:
    """Run tasks of lm-eval-harness (extra eval), and print their table."""
    from jaxdraft.evaluation import LM, evaluate
    from jaxdraft.evaluation.harness import check_installed

    with friendly():
        check_installed()  # before a model is loaded
        how = dict(blocked=blocked, kernels=kernels, mesh=mesh)
        loaded, drafter = load_model(folder, dtype, drafter, revision=revision, **how)
        model = LM(
            loaded,
            drafter=with_history(loaded, drafter, history),
            draft_tokens=draft_tokens,
            batch_size=max_batch,
            max_length=context,
        )
        found, table = evaluate(
            model,
            [task.strip() for task in tasks.split(",")],
            include_path=None if include_path is None else str(include_path),
            limit=limit,
            num_fewshot=num_fewshot,
            apply_chat_template=chat,
        )
        if out is not None:
            out.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
    print(table)


def _report(done: MapSummary, out: Path) -> None:
    kept = f", after {done.kept} of earlier runs" if done.kept else ""
    failed = f"; {done.failed} failed, see their errors" if done.failed else ""
    console.print(f"{done.answered} answers{kept}{failed}: {out}", soft_wrap=True, highlight=False)


@contextmanager
def _progress() -> Generator[Callable[[int, int], None]]:
    """Show progress on stderr: a bar on a terminal, else a line now and then."""
    if not notes.is_terminal:
        last = time.monotonic()

        def line(done: int, total: int) -> None:
            nonlocal last
            if done == total or time.monotonic() - last >= _PLAIN_SECONDS:
                last = time.monotonic()
                notes.print(f"{done} of {total} prompts", highlight=False)

        yield line
        return
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes) as bar:
        task = bar.add_task("prompts", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
