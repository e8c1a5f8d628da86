"""JSON schemas, checked and written out so that a regular expression can hold them.

Every text that is produced satisfies the schema. The reverse does not hold: a text has the order of
the schema's properties, no other properties, and at most one blank between its parts. A keyword
without effect would be a broken promise, so every keyword that is not handled here is refused.

References are written out. A recursive one is followed ``depth`` times; what lies deeper is left
out where the schema permits it: in ``anyOf``, in optional properties and in arrays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_NOTES = frozenset(
    "title description default examples deprecated readOnly writeOnly discriminator "
    "$schema $id $comment $defs definitions".split()
)
"""Keywords that describe, and allow or refuse nothing."""

_STRINGS = ({"minLength", "maxLength"}, {"pattern"}, {"format"})
"""Keywords of strings that exclude each other here."""

FORMATS = ("date", "uuid")
"""Formats of strings that the library's expressions describe without mistakes."""

_TYPES: dict[str, frozenset[str]] = {
    "null": frozenset(),
    "boolean": frozenset(),
    "integer": frozenset(),
    "number": frozenset(),
    "string": frozenset().union(*_STRINGS),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
"""The types, and the keywords that each can have."""

Schema = Mapping[str, Any] | bool


def write_out(schema: Schema, depth: int) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return a schema without references, and the patterns in it with their places.

    Args:
      schema: a JSON schema.
      depth: number of times that a reference is followed inside itself.

    Raises:
      ValueError: a keyword or value that is not supported, a reference that leads nowhere, or no
        finite text satisfies the schema; with the place in the schema.
    """
    walk = _Walk(schema, depth)
    found = walk.at(schema, "#", {})
    if found is None:
        raise ValueError(
            f"no text satisfies the schema with at most {depth} levels of its recursive references"
        )
    return found, walk.patterns


class _Walk:
    """A walk through a schema. None stands for a schema that nothing satisfies."""

    def __init__(self, root: Schema, depth: int) -> None:
        self.root, self.depth = root, depth
        self.patterns: list[tuple[str, str]] = []

    def at(self, schema: Any, where: str, seen: dict[str, int]) -> dict[str, Any] | None:
        """Return the schema at one place, written out.

        Args:
          schema: the schema.
          where: its place, for messages.
          seen: how often each reference around it was followed.
        """
        if schema is True:
            return {}
        if schema is False:
            return None
        if not isinstance(schema, Mapping):
            raise ValueError(f"{where} is {schema!r}; expected a schema")
        words = set(schema) - _NOTES
        if not words:
            return {}
        for form, method in (
            ("$ref", self._reference),
            ("anyOf", self._any_of),
            ("enum", self._enum),
            ("const", self._const),
        ):
            if form in words:
                beside = {"type"} if form in ("enum", "const") else set()
                self._only(schema, words, {form, *beside}, where)
                return method(schema, where, seen)
        kind = schema.get("type", "object" if "properties" in words else None)
        if isinstance(kind, list):
            self._only(schema, words, {"type"}, where)
            return self._any_of({"anyOf": [{"type": one} for one in kind]}, where, seen)
        if not isinstance(kind, str) or kind not in _TYPES:
            if "type" in words:
                raise ValueError(f"{where}/type is {kind!r}; expected one of {', '.join(_TYPES)}")
            raise ValueError(
                f"{where} has {', '.join(sorted(words))} without a type; expected a type, or "
                "anyOf, enum, const, properties or $ref"
            )
        self._only(schema, words, {"type", *_TYPES[kind]}, where)
        method = getattr(self, f"_{kind}", None)
        return {"type": kind} if method is None else method(schema, where, seen)

    def _only(self, schema: Any, words: set[str], known: set[str], where: str) -> None:
        if more := sorted(words - known):
            beside = " beside " + ", ".join(sorted(known & words)) if known & words else ""
            hint = ": oneOf is not checked to be exclusive, use anyOf" if "oneOf" in more else ""
            raise ValueError(
                f"{where} has {', '.join(more)}{beside}, which structured output does not support"
                f"{hint}; expected {', '.join(sorted(known))}"
            )

    def _reference(self, schema: Any, where: str, seen: dict[str, int]) -> dict[str, Any] | None:
        name = schema["$ref"]
        if not isinstance(name, str) or not name.startswith("#"):
            raise ValueError(f"{where}/$ref is {name!r}; expected a place in this schema: '#/...'")
        times = seen.get(name, 0)
        if times > self.depth:
            return None
        found: Any = self.root
        for part in name[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                raise ValueError(f"{where}/$ref is {name!r}, which is not in the schema")
        return self.at(found, name, {**seen, name: times + 1})

    def _any_of(self, schema: Any, where: str, seen: dict[str, int]) -> dict[str, Any] | None:
        choices = schema["anyOf"]
        if not isinstance(choices, list) or not choices:
            raise ValueError(f"{where}/anyOf is {choices!r}; expected a list of schemas")
        found = [self.at(one, f"{where}/anyOf/{n}", seen) for n, one in enumerate(choices)]
        left = [one for one in found if one is not None]
        return {"anyOf": left} if left else None

    def _enum(self, schema: Any, where: str, seen: dict[str, int]) -> dict[str, Any] | None:
        values = schema["enum"]
        if not isinstance(values, list) or not values:
            raise ValueError(f"{where}/enum is {values!r}; expected a list of values")
        fits = [value for value in values if _has_type(value, schema.get("type"), where)]
        return {"enum": fits} if fits else None

    def _const(self, schema: Any, where: str, seen: dict[str, int]) -> dict[str, Any] | None:
        return self._enum({**schema, "enum": [schema["const"]]}, where, seen)

    def _string(self, schema: Any, where: str, seen: dict[str, int]) -> dict[str, Any] | None:
        kinds = [group for group in _STRINGS if group & set(schema)]
        if len(kinds) > 1:
            raise ValueError(
                f"{where} has {', '.join(sorted(set(schema) & _TYPES['string']))} together; "
                "expected lengths, a pattern or a format"
            )
        low, high = self._range(schema, "minLength", "maxLength", where)
        if high is not None and low > high:
            return None
        if (wanted := schema.get("format", FORMATS[0])) not in FORMATS:
            raise ValueError(f"{where}/format is {wanted!r}; expected {', '.join(FORMATS)}")
        found = {word: schema[word] for word in schema if word in {"type", *_TYPES["string"]}}
        if "pattern" in schema:
            pattern = schema["pattern"]
            if not isinstance(pattern, str):
                raise ValueError(f"{where}/pattern is {pattern!r}; expected a regular expression")
            pattern = pattern.removeprefix("^")
            if pattern.endswith("$") and not pattern.endswith("\\$"):
                pattern = pattern[:-1]
            self.patterns.append((f"{where}/pattern", pattern))
            found["pattern"] = f"(?:{pattern})"
        return found

    def _array(self, schema: Any, where: str, seen: dict[str, int]) -> dict[str, Any] | None:
        low, high = self._range(schema, "minItems", "maxItems", where)
        items = self.at(schema.get("items", True), f"{where}/items", seen)
        if items is None:
            high = 0
        if high is not None and low > high:
            return None
        found: dict[str, Any] = {"type": "array", "items": items or {}, "minItems": low}
        return found if high is None else {**found, "maxItems": high}

    def _object(self, schema: Any, where: str, seen: dict[str, int]) -> dict[str, Any] | None:
        properties, others = schema.get("properties"), schema.get("additionalProperties", True)
        required = schema.get("required", [])
        if properties is None and not required:
            if others is True:
                return {"type": "object"}
            found = self.at(others, f"{where}/additionalProperties", seen)
            if found is not None:
                return {"type": "object", "additionalProperties": found}
            properties = {}
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise ValueError(f"{where} has properties {properties!r} and required {required!r}")
        if missing := [name for name in required if name not in properties]:
            raise ValueError(f"{where}/required has {missing[0]!r}, which is not in properties")
        if not isinstance(others, bool):
            raise ValueError(
                f"{where} has properties and a schema for additionalProperties; expected one"
            )
        kept = {}
        for name, part in properties.items():
            found = self.at(part, f"{where}/properties/{name}", seen)
            if found is not None:
                kept[json.dumps(name, ensure_ascii=False)[1:-1]] = found
            elif name in required:
                return None
        if not kept:
            return {"const": {}}
        names = [json.dumps(name, ensure_ascii=False)[1:-1] for name in required]
        return {"type": "object", "properties": kept, "required": names}

    def _range(self, schema: Any, low: str, high: str, where: str) -> tuple[int, int | None]:
        for word in (low, high):
            value = schema.get(word, 0)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{where}/{word} is {value!r}; expected a number of at least 0")
        return schema.get(low, 0), schema.get(high)


def _has_type(value: Any, kind: Any, where: str) -> bool:
    """Return whether a value of ``enum`` has the type beside it."""
    if kind is None:
        return True
    kinds = kind if isinstance(kind, list) else [kind]
    classes: dict[str, Any] = {
        "null": type(None), "boolean": bool, "integer": int, "number": (int, float),
        "string": str, "array": list, "object": dict,
    }  # fmt: skip
    if unknown := [one for one in kinds if one not in classes]:
        raise ValueError(f"{where}/type is {unknown[0]!r}; expected one of {', '.join(_TYPES)}")
    if isinstance(value, bool):
        return "boolean" in kinds
    return any(isinstance(value, classes[one]) for one in kinds)
