"""Conversations as transformers renders them, from every file that may hold a template."""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdraft.text import Text
from tests.chat_templates.cases import ANSWER, CASES, HI, PLAIN, TOOLS
from tests.chat_templates.regenerate import HERE, write

RENDERED = json.loads((HERE / "rendered.json").read_text(encoding="utf-8"))["rendered"]


@pytest.mark.parametrize("name", CASES)
def test_as_transformers(name: str, tmp_path: Path) -> None:
    case, expected = CASES[name], RENDERED[name]
    text = Text.from_folder(write(tmp_path, case["files"]))
    messages = copy.deepcopy(case["messages"])
    if expected is None:
        with pytest.raises(ValueError):
            text.render(messages, **case["options"])
    else:
        assert text.render(messages, **case["options"]) == expected
    assert messages == case["messages"]  # the caller's own are not touched


def test_every_case_is_rendered() -> None:
    assert list(RENDERED) == list(CASES)


def test_a_template_of_a_processor_comes_last(tmp_path: Path) -> None:
    """``chat_template.json``, which transformers' processors read where tokenizers do not."""
    files = {"chat_template.json": json.dumps({"chat_template": "old {{ messages[0].content }}"})}
    assert Text.from_folder(write(tmp_path, files)).render(HI) == "old hi"
    write(tmp_path, {"tokenizer_config.json": json.dumps({"chat_template": "new"})})
    assert Text.from_folder(tmp_path).render(HI) == "new"


def test_an_answer_is_prompted_for_unless_it_is_continued(tmp_path: Path) -> None:
    text = Text.from_folder(write(tmp_path, {"chat_template.jinja": PLAIN}))
    assert text.render(HI).endswith("<assistant>")
    assert text.render(ANSWER, continue_final_message=True).endswith("The answer is")
    with pytest.raises(ValueError, match="exclude each other"):
        text.render(ANSWER, continue_final_message=True, add_generation_prompt=True)


class Role(str, enum.Enum):  # noqa: UP042 - as in older code of users
    USER = "user"


@dataclasses.dataclass
class Message:
    role: str
    content: Any


class Pydantic:
    def model_dump(self) -> dict[str, Any]:
        return {"role": "user", "content": "dumped", "tool_calls": None}


def test_messages_of_other_kinds(tmp_path: Path) -> None:
    text = Text.from_folder(write(tmp_path, {}))
    shown = "{% for m in messages %}{{ m.role }}:{{ m.content }}/{{ m | length }};{% endfor %}"
    messages = [Message(Role.USER, np.float64(1.5)), Pydantic(), {"role": "user", "content": b"x"}]
    expected = "user:1.5/2;user:dumped/2;user:<bytes>/2;"
    assert text.render(messages, chat_template=shown) == expected


@pytest.mark.parametrize("name", ["tokenize", "return_assistant_tokens_mask", "padding"])
def test_arguments_of_transformers_that_are_no_variables(name: str, tmp_path: Path) -> None:
    text = Text.from_folder(write(tmp_path, {"chat_template.jinja": PLAIN}))
    with pytest.raises(ValueError, match=f"{name}.*are not variables of a template.*use"):
        text.render(HI, **{name: True})


def test_functions_are_not_tools(tmp_path: Path) -> None:
    text = Text.from_folder(write(tmp_path, {"chat_template.jinja": PLAIN}))
    with pytest.raises(ValueError, match="a tool is .*expected a JSON object"):
        text.render(HI, tools=[len])  # pyrefly: ignore[bad-argument-type]
    assert text.render(HI, tools=TOOLS) == text.render(HI)  # a template may not use them


@pytest.mark.parametrize(
    "files, message",
    [
        ({"tokenizer_config.json": '{"chat_template": [{"name": "x"}]}'}, "a name and a template"),
        ({"tokenizer_config.json": '{"chat_template": {"x": 1}}'}, "strings by name"),
        ({"chat_template.json": "[]"}, "chat_template.json holds a list"),
        ({"special_tokens_map.json": '{"bos_token": 3}'}, "bos_token .*expected a token"),
        ({"special_tokens_map.json": "{"}, "special_tokens_map.json is not JSON"),
    ],
)
def test_broken_files_are_named(files: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Text.from_folder(write(tmp_path, files))
