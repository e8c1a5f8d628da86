"""The lines of a file of prompts: JSON objects, checked before any of them is answered."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxdraft.engine import Engine
from jaxdraft.engine.rules import check_rules
from jaxdraft.requests import Options
from jaxdraft.sampling import Sampling

_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_new_tokens",
)  # fmt: skip
_RULES = ("max_new_tokens", "stop_ids", "draft_limit", "max_length", "stop", "logprobs")
OVERRIDES = (*_RULES, *_SAMPLING, "seed")
"""Settings that a line may have for itself."""

_CONTENT = ("prompt", "messages")
_LABELS = ("id", "data")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a file of prompts.

    Attributes:
      number: number of the line in the file, from 1.
      prompt: a string or ids; None if there are messages.
      messages: a conversation; None if there is a prompt.
      labels: "id" and "data" of the line, which its answer repeats.
      overrides: settings of this line alone.
    """

    number: int
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    labels: dict[str, Any]
    overrides: dict[str, Any]

    def options(self, common: Options) -> Options:
        """Return the options of this line, given those of the file.

        Without a seed of its own, line i draws as row i - 1 of the file's key. With one, it draws
        as the only prompt of a call with that seed.

        Args:
          common: options of all lines.
        """
        own = self.overrides
        changed: dict[str, Any] = {name: own[name] for name in _RULES if name in own}
        numbers = {name: own[name] for name in _SAMPLING if name in own}
        if numbers:
            base = common.sampling or Sampling(temperature=0.0)
            changed["sampling"] = dataclasses.replace(base, **numbers)
        changed["row"] = self.number - 1
        if "seed" in own:
            changed |= dict(key=own["seed"], row=0)
        return dataclasses.replace(common, **changed)


def numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, with their numbers from 1."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield number, raw


def parse(number: int, raw: bytes) -> Line:
    """Return a line, its form checked.

    Raises:
      ValueError: it is not a JSON object, has an unknown key or a value of another type, or it has
        not exactly one of a prompt and messages.
    """
    where = f"line {number}"
    try:
        found = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_finite,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} is a {type(found).__name__}; expected a JSON object")
    known = (*_CONTENT, *_LABELS, *OVERRIDES)
    if unknown := sorted(set(found) - set(known)):
        raise ValueError(
            f"{where} has {', '.join(map(repr, unknown))}; expected keys from {', '.join(known)} "
            "(what the answer is only to repeat goes into data)"
        )
    given = [name for name in _CONTENT if name in found]
    if len(given) != 1:
        raise ValueError(f"{where} has {given or 'no prompt'}; expected one of prompt and messages")
    prompt, messages = found.get("prompt"), found.get("messages")
    if "prompt" in found and not (isinstance(prompt, str) or _ids(prompt)):
        raise ValueError(f"{where}: prompt is {prompt!r:.80}; expected a string or a list of ids")
    if "messages" in found and not _conversation(messages):
        raise ValueError(
            f"{where}: messages are {messages!r:.80}; expected a list of objects with a role"
        )
    if "id" in found and not isinstance(found["id"], str | int):
        raise ValueError(f"{where}: id is {found['id']!r:.80}; expected a string or an integer")
    return Line(
        number=number,
        prompt=prompt,
        messages=messages,
        labels={name: found[name] for name in _LABELS if name in found},
        overrides={name: found[name] for name in OVERRIDES if name in found},
    )


def check_line(engine: Engine, line: Line, common: Options) -> None:
    """Check that a line can be submitted, apart from the content of its prompt.

    Raises:
      ValueError: a setting outside its range, or text for a model without a tokenizer or without
        a chat template.
    """
    text = engine.model.text
    try:
        if text is None and not isinstance(line.prompt, list):
            raise ValueError("the model has no tokenizer: a prompt must be a list of ids")
        if line.overrides:
            _check_types(line.overrides)
            check_options(engine, line.options(common))
    except ValueError as error:
        raise ValueError(f"line {line.number}: {error}") from error


def check_options(engine: Engine, options: Options) -> None:
    """Check options for any prompt.

    Raises:
      ValueError: as for :meth:`jaxdraft.Engine.submit`.
    """
    check_rules(engine.model, engine.draft_tokens, engine.context, 1, options)


def _check_types(overrides: Mapping[str, Any]) -> None:
    """Refuse values that JSON allows and no setting has, before they reach an array."""
    for name, value in overrides.items():
        if name == "stop":
            fits = isinstance(value, str) or _list_of(str, value)
            expected = "a string, or a list of strings"
        elif name == "stop_ids":
            fits, expected = _ids(value), "a list of ids"
        elif name in (*_RULES, "seed"):
            fits = isinstance(value, int) and not isinstance(value, bool)
            expected = "an integer"
            if fits and name == "seed" and not -(2**63) <= value < 2**63:
                fits, expected = False, "an integer of 64 bits"
        else:
            fits = isinstance(value, int | float) and not isinstance(value, bool)
            expected = "a number"
        if not fits:
            raise ValueError(f"{name} is {value!r:.80}; expected {expected}")


def _list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is kind for one in value)


def _ids(value: Any) -> bool:
    return _list_of(int, value)


def _conversation(value: Any) -> bool:
    return _list_of(dict, value) and bool(value) and all("role" in one for one in value)


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is not a finite number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return found
