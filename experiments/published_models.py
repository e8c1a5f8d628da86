"""What do published models take, and where do they fit?

    python experiments/published_models.py

``published_models.json`` has the settings of models as their repositories publish them, without
settings that change no size. No weights are read: every number follows from these settings, as
``jaxdraft plan FOLDER`` computes it for a folder with only ``config.json``. The numbers of
parameters that repositories (in their index) and model cards publish are listed beside it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from common import HERE, table, write_result

import jaxdraft
from jaxdraft.overview import FORMS, MEMORIES, Fit
from jaxdraft.tables import decimal, fitting

SHOWN = ("bfloat16", "int4")
"""Forms for which the table shows what fits."""


def published() -> dict[str, dict[str, Any]]:
    """Return the models by name: their settings, and their published numbers."""
    return json.loads((HERE / "published_models.json").read_text(encoding="utf-8"))


def overview_of(config: dict[str, Any]) -> jaxdraft.Overview:
    """Return the overview of a folder with nothing but these settings."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return jaxdraft.overview(folder, drafter="none")


def stated(number: int | float) -> str:
    """Return a published number of parameters; a float is a rounded one."""
    return f"{number:,}" if isinstance(number, int) else f"{number / 1e9:.2f} billion"


def both(fits: dict[str, Fit], memory: str) -> str:
    """Return what fits in a memory, in the two forms."""
    return ", ".join(fitting(fits[form], memory) for form in SHOWN)


TEXT = """

Parameters are those of the text model. *1000 tokens*: their keys and values in the layers without a
window, in bfloat16. *A row*: bytes per row for windows and recurrent states, at any length.

What fits beside the weights, in bfloat16 and in int4: rows of the whole context (*x*), else tokens
of a single row. The working memory of a step is not counted.

"""


def main() -> None:
    sizes, rows, notes = [], [], []
    for name, model in published().items():
        found = overview_of(model["config"])
        fits = {fit.form: fit for fit in found.fits}
        sizes.append(
            [name, f"{found.parameters:,}", stated(model["published"])]
            + ["-" if found.active == found.parameters else f"{found.active:,}"]
            + [stated(model["published_active"]) if "published_active" in model else "-"]
            + [decimal(fits[form].weights) for form in FORMS]
            + [decimal(fits["bfloat16"].cache), decimal(fits["bfloat16"].row)]
        )
        rows.append([name, f"{found.context:,}", *(both(fits, memory) for memory in MEMORIES)])
        if "note" in model:
            notes.append(f"* {name}: {model['note']}.")
    head = ["model", "parameters", "published", "active", "published", *FORMS]
    body = table([*head, "1000 tokens", "a row"], sizes) + TEXT
    body += table(["model", "context", *MEMORIES], rows) + "\n\n" + "\n".join(notes)
    write_result(__file__, "Published models", body)


if __name__ == "__main__":
    main()
