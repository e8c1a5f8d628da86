"""Reader of JSON files from other programs, key by key, for artifacts and checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from convert.errors import ArtifactError, Problems
from convert.paths import locate
from convert.unused import Remarks, Tracked, is_integer, report_unread, shown, stop_ids

T = TypeVar("T")

INT32 = 2**31 - 1

_MAX_JSON_BYTES = 1 << 26


def read_json(folder: Path, name: str, *, finite: bool = False) -> Mapping[str, Any]:
    """Read the object in a JSON file of ``folder``.

    Args:
      folder: the folder.
      name: name of the file.
      finite: whether to refuse ``NaN`` and ``Infinity``, which are JavaScript, not JSON.

    Raises:
      ArtifactError: there is no such file, or it does not hold a JSON object.
    """
    path = locate(folder, name, folder.name, name)
    size = path.stat().st_size
    if size > _MAX_JSON_BYTES:
        raise ArtifactError(name, "size", f"{size} bytes", f"at most {_MAX_JSON_BYTES}")

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not a finite number")

    options: dict[str, Any] = {"parse_constant": refuse} if finite else {}
    try:
        text = path.read_bytes().decode("utf-8")
        value = json.loads(text, object_pairs_hook=_no_repeats, **options)
    except OSError as error:
        raise ArtifactError(name, "file", error.strerror or error, "a readable file") from error
    except (ValueError, RecursionError) as error:
        raise ArtifactError(name, "content", str(error)[:120], "JSON") from error
    if not isinstance(value, dict):
        raise ArtifactError(name, "content", shown(value), "an object")
    return value


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} appears twice")
    return result


class Section:
    """An object of a file, read key by key, with defaults for absent and null keys.

    Attributes:
      body: its content, which records the keys that were read.
      file: name of the file.
      where: path of the object in the file, empty for the root.
      problems: destination of problems that do not prevent further reading.
      remarks: destination of remarks, which do not prevent loading.
      defaults: values of keys that are absent or null.
    """

    def __init__(
        self,
        body: Mapping[str, Any],
        file: str,
        where: str,
        problems: Problems,
        remarks: Remarks,
        defaults: Mapping[str, Any] | None = None,
    ):
        self.body = Tracked(body)
        self.file, self.where = file, where
        self.problems, self.remarks = problems, remarks
        self.defaults = defaults or {}

    def __contains__(self, key: str) -> bool:
        return key in self.body

    def at(self, key: str) -> str:
        """Return the path of a key in the file."""
        return f"{self.where}.{key}" if self.where else key

    def fail(self, key: str, expected: str, found: str | None = None) -> ArtifactError:
        """Return an error about a key. ``found`` is its value by default."""
        if found is None:
            found = shown(self.body[key]) if key in self.body else "nothing"
        return ArtifactError(self.file, self.at(key), found, expected)

    def report(self, key: str, expected: str, found: str | None = None) -> None:
        """Add an error about a key to the problems."""
        self.problems.append(self.fail(key, expected, found))

    def attempt(self, read: Callable[[], T], default: T) -> T:
        """Call ``read``; a failure becomes a problem, and the result is ``default``."""
        try:
            return read()
        except ArtifactError as error:
            self.problems.extend(error.problems)
            return default

    # Values. Each raises an ArtifactError if the value is of another kind.

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, else ``default`` if it is null, else that of the section."""
        value = self.body.get(key)
        if value is not None:
            return value
        if default is not None and key in self.body:
            return default
        return self.defaults.get(key, default)

    def integer(
        self,
        key: str,
        low: int = 1,
        high: int = INT32,
        default: int | None = None,
        meaning: str = "",
    ) -> int:
        """Return an integer in ``low..high``."""
        value = self.value(key, default)
        # 7.0 and "7" are not integers in JSON's spelling of one.
        if not is_integer(value) or not low <= value <= high:
            raise self.fail(key, f"an integer in {low}..{high}" + f" ({meaning})" * bool(meaning))
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive finite number."""
        value = self.value(key, default)
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not math.isfinite(value) or value <= 0:
            raise self.fail(key, "a positive number")
        return float(value)

    def string(self, key: str) -> str:
        """Return a string that is not empty."""
        value = self.body.get(key)
        if not isinstance(value, str) or not value:
            raise self.fail(key, "a name")
        return value

    def boolean(self, key: str) -> bool:
        """Return a boolean."""
        value = self.body.get(key)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def flag(self, key: str) -> bool:
        """Return a boolean; an absent or null one is the section's default, else False."""
        value = self.value(key)
        if value is not None and not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value is True

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """Return a list of integers in ``low..high``."""
        values = self.body.get(key)
        good = isinstance(values, list) and all(is_integer(v) and low <= v <= high for v in values)
        if not good:
            raise self.fail(key, f"a list of integers in {low}..{high}")
        return tuple(values)

    def section(self, key: str, defaults: Mapping[str, Any] | None = None) -> Self:
        """Return an object of the file as a section."""
        value = self.body.get(key)
        if not isinstance(value, dict):
            raise self.fail(key, "an object")
        return self.inner(value, self.at(key), defaults)

    def sections(self, key: str) -> Iterator[Self]:
        """Return the objects of a list; an absent one is empty."""
        values = self.body.get(key, [])
        if not isinstance(values, list):
            raise self.fail(key, "a list")
        for i, value in enumerate(values):
            where = f"{self.at(key)}[{i}]"
            if not isinstance(value, dict):
                raise ArtifactError(self.file, where, shown(value), "an object")
            yield self.inner(value, where)

    def inner(
        self, body: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None
    ) -> Self:
        """Return another object of the same file."""
        return type(self)(body, self.file, where, self.problems, self.remarks, defaults)

    def token(self, key: str, vocab: int) -> int | None:
        """Return a token without effect here; note a value that is not a token."""
        value = self.value(key)
        if value is None or (is_integer(value) and 0 <= value < vocab):
            return value
        text = f"{self.at(key)} is {shown(value)}, not a token in 0..{vocab - 1}: it is not used"
        self.remarks.note(self.file, text)
        return None

    def stop_ids(self, vocab: int) -> tuple[int, ...]:
        """Return the tokens of ``eos_token_id``."""
        key = "eos_token_id"
        value = self.body[key] if key in self.body else self.defaults.get(key)
        return stop_ids(value, self.at(key), self.file, vocab, self.remarks)

    # Keys that nothing reads.

    def only(self, key: str, *allowed: Any) -> None:
        """Report a key unless it is absent, null, or has a value that is implemented."""
        value = self.body.get(key)
        if value is not None and value not in allowed:
            self.report(key, " or ".join(json.dumps(a) for a in allowed))

    def inert(self, *keys: str) -> None:
        """Mark these keys as read: other keys make them ineffective."""
        self.body.read.update(keys)

    def report_unread(self, harmless: Collection[str] = ()) -> None:
        """Remark on keys that nothing has read."""
        report_unread(self.body, self.where, self.file, harmless, self.remarks)

    def known(self, keys: Collection[str], *, nulls: bool = False) -> None:
        """Report every other key. With ``nulls``, one that is null is noted."""
        for key in sorted(self.body.keys() - set(keys)):
            if nulls and self.body[key] is None:
                self.remarks.note(self.file, f"{self.at(key)} is null: an unknown setting")
            else:
                self.report(key, "one of " + ", ".join(sorted(keys)), "an unknown key")
