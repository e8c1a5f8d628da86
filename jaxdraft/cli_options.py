"""Options, messages and loading that several commands share."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text as Styled

from jaxdraft.base import Drafter
from jaxdraft.draft.fallback import FallbackDrafter
from jaxdraft.draft.history import HistoryDrafter
from jaxdraft.load import load, locate, locate_drafter
from jaxdraft.model import Model
from jaxdraft.prompts import encode
from jaxdraft.structure import Structure

console = Console()
notes = Console(stderr=True)

Folder = Annotated[
    str,
    typer.Argument(
        help="Folder of an artifact or a checkpoint, or a repository of the Hugging Face hub, "
        "like Qwen/Qwen3-4B."
    ),
]
RevisionOption = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a repository of the hub.")
]
DTypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="float32, bfloat16 or float16; default: the artifact's."),
]
TokensOption = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Tokens to emit.")]
DrafterOption = Annotated[
    str,
    typer.Option(
        help="auto, none, ngram, or a kind that the model has; of a checkpoint, also a drafter's "
        "folder or repository, or smollm2; two with a plus between: ngram+auto."
    ),
]
DraftTokensOption = Annotated[
    int | None, typer.Option(min=1, help="Drafts per round; default: the drafter's own.")
]
MaxBatchOption = Annotated[
    int | None, typer.Option(help="Rows decoded at once; default: the artifact's, else 8.")
]
ContextOption = Annotated[
    int | None, typer.Option(help="Longest sequence; default: the artifact's.")
]
PageSizeOption = Annotated[
    int | None, typer.Option(help="Slots per page; default: the artifact's, else 256.")
]
HistoryOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--history",
        help="Text, or answers of map (.jsonl), to look drafts up in before the drafter drafts; "
        "may be repeated.",
    ),
]
SchemaOption = Annotated[
    Path | None,
    typer.Option("--json-schema", help="File with a JSON schema that the text must satisfy."),
]
RegexOption = Annotated[
    str | None, typer.Option("--regex", help="Regular expression that the whole text must match.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
BlockedOption = Annotated[
    bool,
    typer.Option(
        "--blocked",
        help="Store the target's matrices in blocks, too: twice the memory, and cheaper rounds of "
        "few drafts on CPUs.",
    ),
]
KernelsOption = Annotated[
    str | None,
    typer.Option(
        help="xla, or pallas for kernels that no GPU has run yet; default: JAXDRAFT_KERNELS, or "
        "else xla."
    ),
]
MeshOption = Annotated[
    str | None,
    typer.Option(help="Devices to divide the model over: data=2,model=4. See docs/mesh.md."),
]
DistributedOption = Annotated[
    bool,
    typer.Option(
        "--distributed",
        help="This is one process of several, as a cluster's launcher starts them; the first "
        "prints.",
    ),
]


def load_model(
    folder: str,
    dtype: str | None,
    drafter: str = "auto",
    *,
    revision: str | None = None,
    **how: Any,
) -> tuple[Model, str]:
    """Load a model with a progress bar, and the named drafter if a checkpoint has several.

    Args:
      folder: as for :func:`jaxdraft.load`.
      dtype: as there.
      drafter: the command's option.
      revision: as for :func:`jaxdraft.load`.
      how: its further options.

    Returns:
      The model, and the drafter's name for :func:`jaxdraft.generate`.
    """
    # "ngram+smollm2": the one with weights is the last; a folder may have a plus in its name.
    before, plus, last = ("", "", drafter) if Path(drafter).exists() else drafter.rpartition("+")
    home = locate(folder, revision)  # first, since a download has progress bars of its own
    own = last not in ("auto", "none", "ngram")
    # An artifact has one at most, or a language model of another folder.
    own = own and ("/" in last or not (home / "genai_config.json").exists())
    chosen = locate_drafter(last) if own else None
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task("loading", total=None)

        def progress(done: int, total: int, label: str) -> None:
            bar.update(
                task, completed=done, total=total, description=f"loading {label}"[:48].ljust(48)
            )

        model = load(home, dtype=dtype, progress=progress, drafter=chosen, **how)
        return model, before + plus + (model.info.drafter if own else last)


def structure_of(schema: Path | None, regex: str | None) -> Structure | None:
    """Return the structure of the options ``--json-schema`` and ``--regex``.

    Raises:
      ValueError: both are given, the file is not there, or its content is no supported schema.
    """
    if schema is not None and regex is not None:
        raise ValueError("--json-schema and --regex were given; expected one of them")
    if regex is not None:
        return Structure.regex(regex)
    if schema is None:
        return None
    if not schema.is_file():
        raise ValueError(f"{schema} is not a file; expected a JSON schema")
    return Structure.json_schema(schema)


def with_history(model: Model, drafter: str, files: list[Path] | None) -> str | Drafter:
    """Return a drafter that first looks into files, or the given name if there are none.

    Args:
      model: model whose tokenizer reads the files.
      drafter: name of the drafter; with "none" the files alone are looked up.
      files: texts, or answers of ``jaxdraft map``.

    Raises:
      ValueError: a file is not of that form, or the model has no tokenizer.
    """
    if not files:
        return drafter
    documents = [ids for file in files for ids in _documents(model, file)]
    history = HistoryDrafter.of(documents)
    return history if drafter == "none" else FallbackDrafter(history, model.choose(drafter))


def _documents(model: Model, file: Path) -> list[list[int]]:
    """Return the documents of a file: the outputs in answers of ``map``, or all of a text."""
    if file.suffix != ".jsonl":
        return [encode(model, file.read_text("utf-8"))]
    found: list[list[int]] = []
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        try:
            answer = json.loads(line)
            found += [one["tokens"] for one in answer.get("samples", [answer])]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}, line {number}, is not an answer of jaxdraft map") from error
    return found


@contextmanager
def friendly() -> Generator[None]:
    """Print errors about the input as messages, not tracebacks."""
    try:
        yield
    except (ValueError, OSError) as error:
        notes.print(Styled("error: ", style="bold red").append(str(error), style="default"))
        raise typer.Exit(2) from None
