"""Chat templates: the files that hold them, and conversations rendered as transformers does.

The source of every rule here is ``apply_chat_template`` of transformers 5; goldens made with it are
in ``tests/chat_templates``. Templates come with a model and are not trusted: they run in a sandbox
and see plain data only.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Templates = str | Mapping[str, str]
"""One template, or several by name."""

FILES = ("chat_template.jinja", "chat_template.json", "special_tokens_map.json")
"""Files beside a tokenizer that a chat may need; further templates are in :data:`FOLDER`."""

FOLDER = "additional_chat_templates"

_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_NOT_OURS = {
    "conversation": "messages",
    "max_length": "generate(..., max_length=...)",
    "padding": "a list of prompts, which generate() pads",
    "return_assistant_tokens_mask": "render() of the messages before each answer",
    "return_dict": "chat(), which returns ids",
    "return_tensors": "chat(), which returns ids",
    "sanitize_control_tokens": "messages whose control tokens the caller has removed",
    "tokenize": "render() for text, chat() for ids",
    "tokenizer_kwargs": "encode(render(...))",
    "truncation": "a shorter conversation",
}
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MARK = "JAXDRAFT_CONTINUES_HERE "
"""Mark after the message to continue. A template that trims takes its blank away."""


# -------------------------------------------------------------------------------------------- files


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a file holds; an empty one for a file that is not there.

    Raises:
      ValueError: it is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not an object")
    return found


def read_special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a tokenizer by name.

    Each is a string or an object with its ``content``. ``special_tokens_map.json`` of older files
    goes before a configuration that lists no added tokens.

    Args:
      folder: the tokenizer's folder.
      config: what ``tokenizer_config.json`` holds.

    Raises:
      ValueError: a token is neither, or a file is not JSON.
    """
    found = dict(config)
    if "added_tokens_decoder" not in config:
        found |= read_json(folder / "special_tokens_map.json")
    named = {k: v for k, v in found.items() if k in _TOKEN_NAMES and v is not None}
    # Models have names of their own as well: image_token, or those that "extra" gives.
    named |= {k: v for k, v in found.items() if k.endswith("_token") and isinstance(v, str | dict)}
    for extra in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(found.get(extra), dict):
            named |= found[extra]
    contents: dict[str, str] = {}
    for name, token in named.items():
        content = token.get("content") if isinstance(token, dict) else token
        if not isinstance(content, str):
            raise ValueError(f"{name} in {folder} is {token!r}; expected a token")
        contents[name] = content
    return contents


def read_templates(folder: Path, config: Mapping[str, Any]) -> Templates | None:
    """Return the chat templates that lie beside a tokenizer.

    ``chat_template.jinja`` is the default and ``additional_chat_templates/NAME.jinja`` one by name.
    Without such files the configuration's are taken, and without those ``chat_template.json``.

    Args:
      folder: the tokenizer's folder.
      config: what ``tokenizer_config.json`` holds.

    Raises:
      ValueError: a file or an entry is not a template.
    """
    found: dict[str, str] = {}
    if (folder / FILES[0]).is_file():
        found["default"] = _template_text(folder / FILES[0])
    for path in sorted((folder / FOLDER).glob("*.jinja")):
        found[path.name.removesuffix(".jinja")] = _template_text(path)
    if found:
        return found["default"] if set(found) == {"default"} else found
    place = folder / "tokenizer_config.json"
    template = config.get("chat_template")
    if template is None:
        place = folder / FILES[1]
        template = read_json(place).get("chat_template")
    if isinstance(template, list):
        whole = [e for e in template if isinstance(e, dict) and {"name", "template"} <= set(e)]
        if len(whole) < len(template):
            raise ValueError(f"chat_template in {place}: expected a name and a template for each")
        template = {entry["name"]: entry["template"] for entry in whole}
    texts = template.values() if isinstance(template, dict) else [template]
    if template is not None and not all(isinstance(t, str) for t in texts):
        raise ValueError(f"chat_template in {place} is not a string, or strings by name")
    return template


def write_special_tokens(folder: Path, tokens: Mapping[str, str]) -> None:
    """Write a ``tokenizer_config.json`` from which :func:`read_special_tokens` reads the same."""
    body: dict[str, Any] = {k: v for k, v in tokens.items() if k.endswith("_token")}
    others = {k: v for k, v in tokens.items() if k not in body}
    body |= {"extra_special_tokens": others} if others else {}
    text = json.dumps(body, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def write_templates(folder: Path, chat_template: Templates | None) -> None:
    """Write files from which :func:`read_templates` reads the same.

    Args:
      folder: an existing folder.
      chat_template: a template, several by name, or None.

    Raises:
      ValueError: a name that is no name of a file.
    """
    named = {"default": chat_template} if isinstance(chat_template, str) else chat_template or {}
    for name in named:
        if not name or Path(name).name != name or "\\" in name or "\0" in name:
            raise ValueError(f"chat template {name!r}: expected the name of a file")
    for name, text in named.items():
        path = folder / FILES[0]
        if name != "default":
            path = folder / FOLDER / f"{name}.jinja"
            path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode("utf-8"))


def _template_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


# ---------------------------------------------------------------------------------------- rendering


def render(
    templates: Templates | None,
    messages: Sequence[Any],
    *,
    source: str,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool | None,
    continue_final_message: bool | str,
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    chat_template: str | None,
    variables: Mapping[str, Any],
) -> str:
    """Return a conversation as a string; see :meth:`jaxdraft.text.Text.render`."""
    template = _choose(templates, chat_template, tools, source)
    if foreign := sorted(set(variables) & set(_NOT_OURS)):
        instead = "; ".join(f"{name}: use {_NOT_OURS[name]}" for name in foreign)
        raise ValueError(f"{foreign} are not variables of a template. {instead}")
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message and add_generation_prompt exclude each other")
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    chat = _messages(messages)
    for kind, given in (("tool", tools), ("document", documents)):
        for entry in given or ():
            if not isinstance(entry, Mapping):
                raise ValueError(f"a {kind} is {entry!r}; expected a JSON object, as a mapping")
    final = ""
    if continue_final_message:
        final = _mark(chat, continue_final_message, template)
    data = {"tools": tools, "documents": documents, **special_tokens, **variables}
    try:
        shown = _compile(template).render(
            messages=chat, add_generation_prompt=add_generation_prompt, **_plain(data)
        )
    # A template may do anything to a value of the wrong type.
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"the chat template of {source}: {error}") from error
    return _continued(shown, final) if continue_final_message else shown


def _choose(
    templates: Templates | None, name: str | None, tools: Sequence[Any] | None, source: str
) -> str:
    """Return the template of a name, the template itself, or the one for tools or for all."""
    named = templates if isinstance(templates, Mapping) else {}
    if name is not None:
        return named.get(name, name)
    if isinstance(templates, str):
        return templates
    if tools is not None and "tool_use" in named:
        return named["tool_use"]
    if "default" in named:
        return named["default"]
    if named:
        raise ValueError(
            f"{source} has chat templates {sorted(named)} and none is the default; pass "
            "chat_template=NAME"
        )
    raise ValueError(f"{source} has no chat template; encode a prompt instead")


def _messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages as plain data, without entries that are None."""
    messages = getattr(messages, "messages", messages)
    chat = [_plain(m) for m in messages]
    if not chat:
        raise ValueError("the conversation is empty; expected at least one message")
    for given, message in zip(messages, chat, strict=True):
        if not isinstance(message, dict) or "role" not in message:
            raise ValueError(f"a message is {given!r}; expected a mapping with a 'role'")
    chat = [{k: v for k, v in message.items() if v is not None} for message in chat]
    for message in chat:  # names of the same thing in different templates
        reasoning = next((message[name] for name in _REASONING if name in message), None)
        if reasoning is not None:
            message.setdefault("thinking", reasoning)
            message["reasoning_content"] = reasoning
    return chat


def _plain(value: Any) -> Any:
    """Return a value as JSON types; anything else as the name of its type."""
    if isinstance(value, np.generic):
        return _plain(value.item())
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # an enumeration may be one too
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):  # pydantic
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"


def _mark(chat: list[dict[str, Any]], field: bool | str, template: str) -> str:
    """Put the mark after the text to continue, and return that text."""
    name = field if isinstance(field, str) else "content"
    message = chat[-1]
    final = message.get(name)
    if final is None:
        raise ValueError(f"continue_final_message: the last message has no {name!r}")
    names = [n for n in _REASONING if message.get(n) == final] if name in _REASONING else [name]
    if not any(n in template for n in names):
        raise ValueError(f"continue_final_message: the chat template does not use {name!r}")
    if isinstance(final, list | tuple):
        block = next((b for b in reversed(final) if isinstance(b, dict) and "text" in b), None)
        if block is None:
            raise ValueError("continue_final_message: the last message has no text to continue")
        final = block["text"]
        block["text"] = final + _MARK
        return final
    if not isinstance(final, str):
        raise ValueError(f"continue_final_message: {name!r} is {final!r}; expected text")
    message |= dict.fromkeys(names, final + _MARK)
    return final


def _continued(shown: str, final: str) -> str:
    """Return a rendered conversation up to the mark."""
    mark = _MARK.strip()
    if final.strip() not in shown or mark not in shown:
        raise ValueError(
            "continue_final_message: the rendered conversation does not hold the last "
            f"message verbatim; the chat template changes or drops it: {final!r}"
        )
    end = shown.rindex(mark)
    kept = shown[:end]
    return kept if shown.startswith(_MARK, end) else kept.rstrip()


# ------------------------------------------------------------------------------------------ sandbox


class _Generation(Extension):
    """``{% generation %}`` marks the model's own words for training; here it is only a block."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Names(Namespace):
    """``namespace()``; a template cannot name anything private on it."""

    def __init__(*args: Any, **names: Any) -> None:  # a name may be "self"
        for name in dict(*args[1:], **names):
            _refuse_private(name)
        Namespace.__init__(*args, **names)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"{name!r} on a namespace; expected a name without an underscore first")


class _Dict:
    """``dict`` as a function, without the methods of the type."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON; Jinja's own filter would escape it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    """Compile a template in a sandbox, with access only to the values passed to it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    names = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Names,
    }
    return environment.from_string(template, globals=names)
