"""The README's examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_ten_lines_run(capsys) -> None:  # noqa: ANN001
    first = next(code for code in examples() if "import jaxdraft" in code)
    assert len(first.strip().splitlines()) <= 10
    exec(compile(first, "README.md", "exec"), {})
    assert "tokens in" in capsys.readouterr().out
