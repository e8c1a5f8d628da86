"""Write the table of architectures into ``docs/models.md``.

    python docs/models.py

The table comes from ``jaxdraft.checkpoint.families``; a test compares the two.
"""

from __future__ import annotations

from pathlib import Path

from jaxdraft.checkpoint.describe import table

PAGE = Path(__file__).with_name("models.md")
BEGIN, END = "<!-- table -->\n", "<!-- end -->"


def page(text: str) -> str:
    """Return the text of the page with the table of today between its marks."""
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
