"""Structures of tests, and the library's own matcher."""

from __future__ import annotations

from typing import Any

import outlines_core

from jaxdraft.text import Text

PATTERNS = [
    r"[0-9]{1,3}(\.[0-9]+)?",
    r"(yes|no|maybe 1)+",
    r'\{"x": "[^"\\]{0,8}"\}',
    r"a(bc)*|€{2}|\d\w",
]

TREE: dict[str, Any] = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["v", "next"],
        }
    },
}


def _person(value: Any) -> bool:
    known = {"name", "age", "kind", "tags"}
    return (
        isinstance(value, dict)
        and {"name", "age"} <= set(value) <= known
        and 1 <= len(value["name"]) <= 5
        and type(value["age"]) is int
        and value.get("kind", "x") in ("x", 'a "b"', None)
        and 1 <= len(value.get("tags", [1])) <= 2
    )


def _tree(value: Any) -> bool:
    if value is None:
        return True
    return set(value) == {"v", "next"} and type(value["v"]) is int and _tree(value["next"])


SCHEMAS: dict[str, tuple[Any, Any]] = {
    "person": (
        {
            "type": "object",
            "title": "a person",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 5},
                "age": {"type": "integer"},
                "kind": {"enum": ["x", 'a "b"', None, 7], "type": ["string", "null"]},
                "tags": {
                    "type": "array",
                    "items": {"type": "boolean"},
                    "minItems": 1,
                    "maxItems": 2,
                },
            },
            "required": ["name", "age"],
            "additionalProperties": False,
        },
        _person,
    ),
    "tree": (TREE, _tree),
    "names": (
        {"type": "object", "additionalProperties": {"type": "string", "pattern": "^(a|b)+$|c"}},
        lambda value: all(set(x) <= {"a", "b"} or x == "c" for x in value.values()),
    ),
    "quoted": (
        {"properties": {'"a\n': {"const": 'x"\\'}}, "required": ['"a\n']},
        lambda value: value == {'"a\n': 'x"\\'},
    ),
    "empty": ({"type": "array", "items": False}, lambda value: value == []),
    "any": ({}, lambda value: True),
}
"""Schemas, and whether a value satisfies each."""


def index_of(pattern: str, text: Text) -> Any:
    """The library's own automaton over the tokens of a model."""
    words: dict[bytes, list[int]] = {}
    for number, token in enumerate(text.token_bytes):
        if token:
            words.setdefault(token, []).append(number)
    return outlines_core.Index(pattern, outlines_core.Vocabulary(len(text.token_bytes), words))
