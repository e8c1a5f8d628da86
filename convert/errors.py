"""The error for an artifact that cannot be converted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ArtifactError(ValueError):
    """An artifact contradicts itself, or needs something that this package does not implement.

    Attributes:
      file: the file at fault.
      where: the tensor, node or configuration path in it.
      found: the value found there.
      expected: the expected value.
      problems: every problem, when several were found at once; else just this one.
    """

    def __init__(
        self,
        file: object,
        where: str,
        found: Any,
        expected: Any,
        problems: Sequence[ArtifactError] = (),
    ):
        super().__init__(str(file), where, str(found), str(expected), tuple(problems))
        self.file = str(file)
        self.where = where
        self.found = str(found)
        self.expected = str(expected)
        self.problems: tuple[ArtifactError, ...] = tuple(problems) or (self,)

    def __str__(self) -> str:
        line = f"{self.file}: {self.where}: found {self.found}, expected {self.expected}"
        rest = [str(p) for p in self.problems if p is not self][1:]
        return "\n".join([line, *(f"  also {text}" for text in rest)])

    @classmethod
    def of(cls, problems: Sequence[ArtifactError]) -> ArtifactError:
        """Return one error with all ``problems`` (at least one), worded like the first."""
        if len(problems) == 1:
            return problems[0]
        first = problems[0]
        return cls(first.file, first.where, first.found, first.expected, problems)


class Problems(list[ArtifactError]):
    """Problems found so far, for checks that continue after a failure."""

    def report(self, file: object, where: str, found: Any, expected: Any) -> None:
        """Add a problem."""
        self.append(ArtifactError(file, where, found, expected))

    def raise_any(self) -> None:
        """Raise all problems as one error, if there are any."""
        if self:
            raise ArtifactError.of(self)
