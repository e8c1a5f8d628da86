"""Render every case with transformers, and write ``rendered.json``.

In an environment with transformers 5 and jinja2; torch is not needed::

    python -m tests.chat_templates.regenerate
"""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
TOKENIZER = {
    "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
    "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"<s>": 0, "</s>": 1, "<pad>": 2}, "unk_token": "<s>"},
}  # fmt: skip


def write(folder: Path, files: dict[str, str]) -> Path:
    """Write a tokenizer and the files of a case."""
    for name, content in {"tokenizer.json": json.dumps(TOKENIZER), **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def main() -> None:
    """Write what transformers renders: a string, or null where it raises."""
    import transformers  # pyrefly: ignore[missing-import]

    from tests.chat_templates.cases import CASES

    found: dict[str, str | None] = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), case["files"])
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
            try:
                messages = copy.deepcopy(case["messages"])
                found[name] = tokenizer.apply_chat_template(
                    messages, tokenize=False, **case["options"]
                )
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {str(error)[:90]}")
                found[name] = None
    text = json.dumps({"transformers": transformers.__version__, "rendered": found}, indent=1)
    (HERE / "rendered.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
