"""Tables that the shell prints."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from jaxdraft.budget import Plan
from jaxdraft.checks import format_bytes
from jaxdraft.overview import Fit, Overview


def facts_table(folder: str, facts: dict[str, Any]) -> Table:
    """Return a table of all facts of a report, nested keys joined by dots."""
    table = Table(title=folder, show_header=False)

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), inner)
        elif prefix != "problems":
            table.add_row(
                prefix, f"{value:,}" if type(value) is int and value > 9999 else str(value)
            )

    add("", facts)
    return table


def plan_table(plan: Plan) -> Table:
    """Return a table of every term of a plan and the memory left for sequences."""
    rows, parts = plan.mesh
    each = f" of each of {rows} x {parts} devices" if plan.mesh != (1, 1) else ""
    table = Table(title=f"what fits in {format_bytes(plan.memory or plan.bytes)}{each}")
    table.add_column("for")
    for column in ("count", "bytes each", "bytes"):
        table.add_column(column, justify="right")
    table.add_column("because")
    for term in plan.terms:
        numbers = (f"{n:,}" for n in (term.count, term.each, term.bytes))
        table.add_row(term.name, *numbers, term.why)
    table.add_row("left over", "", "", f"{plan.left:,}", "less than a page", end_section=True)
    alone = f"{plan.target_page_bytes:,} without the drafter's"
    mirrored = alone if plan.mirror_page_bytes else ""
    table.add_row("a page", "1", f"{plan.page_bytes:,}", f"{plan.page_bytes:,}", mirrored)
    table.add_row("pages", f"{plan.pages:,}", "", "", f"of {plan.page_size} positions")
    table.add_row("tokens", f"{plan.tokens:,}", "", "", "in all sequences together")
    rows = f"of {plan.max_batch}, each of {plan.context:,} positions: {plan.row_pages:,} pages"
    table.add_row("full rows", f"{plan.rows:,}", "", "", rows)
    return table


def overview_table(name: str, found: Overview) -> Table:
    """Return a table of a model in all forms, and of the tokens that fit."""
    numbers = f"{found.parameters:,} parameters"
    if found.active != found.parameters:
        numbers += f", {found.active:,} of them per token"
    if found.drafter is not None:
        numbers += f"; drafter {found.drafter}: {found.drafter_parameters:,} more"
    table = Table(title=f"{name}\n{numbers}", box=box.SIMPLE_HEAD)
    memories = list(found.fits[0].tokens)
    table.add_column("form", no_wrap=True)
    for column in ("weights", "1000 tokens", "per row", *memories):
        table.add_column(column, justify="right", no_wrap=True)
    for fit in found.fits:
        sizes = (decimal(size) for size in (fit.weights, fit.cache, fit.row))
        table.add_row(fit.form, *sizes, *(fitting(fit, each) for each in memories))
    table.caption = (
        f"Fits beside the weights: x rows of {found.context:,} tokens, the whole context;\n"
        "else tokens of a single row. The working memory of a step is not counted."
    )
    return table


def fitting(fit: Fit, memory: str) -> str:
    """Return what fits in a memory: rows of the whole context, or tokens, or a dash."""
    rows, tokens = fit.rows[memory], fit.tokens[memory]
    if rows:
        return f"x {rows}" if rows < 1000 else f"x {rows // 1000}k"
    return f"{tokens:,}" if tokens else "-"


def decimal(size: int) -> str:
    """Format bytes in powers of 1000, as in the sizes of accelerators: 8065907712 -> "8.07 GB"."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5 or unit == "GB":
            break
        value /= 1000
    return (
        f"{size} B"
        if unit == "B"
        else f"{value:.3g} {unit}"
        if value < 999.5
        else f"{value:,.0f} GB"
    )
