"""The file of answers: one line per answered prompt, and a record of the settings beside it.

A run may be killed at any byte. Every answer is one line of JSON, written at once. The next run
removes a last line without its end and continues with the prompts that have no answer. The record
is written, and on the disk, before the first answer.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

from jaxdraft.mapping.lines import Line

FSYNC_SECONDS = 1.0
"""Longest time between two answers after which the file is forced to the disk, in seconds. A killed
process loses no written answer; a machine that loses its power loses those of about this time."""


class Marks:
    """Set of line numbers, one bit each: a million lines take 125 kB."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self.count = 0

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int)
        place, bit = divmod(number, 8)
        return place < len(self._bits) and bool(self._bits[place] >> bit & 1)

    def add(self, number: int) -> None:
        """Add a number, which must not be there yet."""
        place, bit = divmod(number, 8)
        if place >= len(self._bits):
            self._bits.extend(bytes(place + 1 - len(self._bits)))
        self._bits[place] |= 1 << bit
        self.count += 1


class Answers:
    """A file of answers that is being written.

    Args:
      path: the file. Its record is beside it, with ``.run.json`` after the name.
      record: settings that decide about the answers; JSON.
      overwrite: whether to replace a file of answers, instead of continuing it.

    Raises:
      ValueError: another process writes the file; it has no record, or one of other settings; or
        a line is not an answer.
    """

    def __init__(self, path: Path, record: dict[str, Any], *, overwrite: bool) -> None:
        self.path, self.done = path, Marks()
        self._beside = path.with_name(path.name + ".run.json")
        self._synced = time.monotonic()
        filled = path.exists() and path.stat().st_size > 0
        if filled and not overwrite and not self._beside.exists():
            raise ValueError(
                f"{path} exists and its record {self._beside.name} does not: it cannot be "
                "continued; overwrite replaces it"
            )
        self._file: BinaryIO = path.open("ab")
        try:
            _lock(self._file, path)
            if overwrite:
                self._file.truncate(0)
            elif self._beside.exists():
                self._check(record)
                self._recover()
            self._remember(record)
        except BaseException:
            self._file.close()
            raise

    def write(self, line: Line, answer: dict[str, Any]) -> None:
        """Append the answer to a line.

        Args:
          line: the line.
          answer: its further fields; JSON.
        """
        whole = {"line": line.number, **line.labels, **answer}
        text = json.dumps(whole, ensure_ascii=False, allow_nan=False)
        # Lone surrogates, which JSON escapes may hold, have no UTF-8 form.
        raw = text.encode("utf-8", "backslashreplace") + b"\n"
        self._file.write(raw)
        self._file.flush()
        self.done.add(line.number)
        if time.monotonic() - self._synced > FSYNC_SECONDS:
            self._sync()

    def close(self) -> None:
        """Force the answers to the disk, and close the file."""
        if not self._file.closed:
            self._sync()
            self._file.close()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _check(self, record: dict[str, Any]) -> None:
        """Compare the record of the run to continue with this run's."""
        try:
            before = json.loads(self._beside.read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{self._beside} is not JSON: {error}") from error
        if not isinstance(before, dict):
            raise ValueError(f"{self._beside} is a {type(before).__name__}; expected an object")
        differ = [
            f"{name} was {_short(before.get(name))} and is {_short(record.get(name))}"
            for name in sorted({*before, *record})
            if before.get(name) != record.get(name)
        ]
        if differ:
            raise ValueError(
                f"{self.path} was begun with other settings: {'; '.join(differ)}. Continue with "
                "the same ones, choose another file, or overwrite this one"
            )

    def _recover(self) -> None:
        """Collect the answered lines, and remove an answer that was not written to its end."""
        end = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    break
                end += len(raw)
                self._mark(number, raw)
        self._file.truncate(end)

    def _mark(self, number: int, raw: bytes) -> None:
        try:
            answered = json.loads(raw)["line"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self.path}, line {number}: {raw[:60]!r} is not an answer; the file changed "
                "after it was written"
            ) from error
        if type(answered) is not int or answered < 1 or answered in self.done:
            raise ValueError(
                f"{self.path}, line {number}, answers line {answered!r}; expected another line of "
                "the prompts in each"
            )
        self.done.add(answered)

    def _remember(self, record: dict[str, Any]) -> None:
        """Write the record: whole or not at all."""
        part = self._beside.with_name(self._beside.name + ".part")
        with part.open("w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._beside)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _lock(file: BinaryIO, path: Path) -> None:
    """Lock a file until it is closed, where the system can: two runs would repeat lines."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"another process writes {path}") from error
