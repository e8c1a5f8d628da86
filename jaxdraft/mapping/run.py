"""The run over a file of prompts: checks, then requests of an engine, a few more than its rows."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdraft.checks import check_int
from jaxdraft.engine import Engine, Request
from jaxdraft.mapping.answers import Answers
from jaxdraft.mapping.lines import Line, check_line, check_options, numbered, parse
from jaxdraft.requests import Options
from jaxdraft.sampling import Sampling
from jaxdraft.structure import Structure, TokenAutomaton

_FORM = 1
"""Version of the files' form."""

_LEADING = 16
"""Leading numbers of each array that identify the weights of a model."""


@dataclasses.dataclass(frozen=True)
class MapSummary:
    """Counts of a run over a file of prompts."""

    lines: int  # prompts in the file
    answered: int  # answers that this run wrote
    kept: int  # answers that earlier runs had written
    failed: int  # answers of this run that are errors


def map_file(
    engine: Engine,
    prompts: str | Path,
    out: str | Path,
    *,
    n: int = 1,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **rules: Any,
) -> MapSummary:
    """Answer every line of a file of prompts, and continue where an interrupted run ended.

    A line of ``prompts`` is a JSON object with a ``prompt`` (a string or ids) or ``messages`` (a
    conversation for the chat template). It may have an ``id`` and ``data``, which its answer
    repeats, and settings of its own: ``max_new_tokens``, ``max_length``, ``stop``, ``stop_ids``,
    ``draft_limit``, ``logprobs``, ``seed``, and the numbers of :class:`jaxdraft.Sampling`. Blank
    lines have no answer. All lines are checked before the first one runs.

    An answer is a JSON object with the number of its ``line`` (from 1), ``id`` and ``data`` if
    given, ``prompt_tokens``, ``text`` (null without a tokenizer), ``tokens``, ``finish_reason`` and
    ``error`` (null, or a message). With ``logprobs`` it also has ``logprobs``, one number per
    token, and above zero ``alternatives``, pairs of token and log-probability; sampled answers
    also have ``sampled_logprobs``, in the distribution that was drawn from. With ``n`` above 1, all
    but ``line``, ``id``, ``data`` and ``prompt_tokens`` are in ``samples``, a list of n.
    Answers are in the order in which they were finished. A prompt that cannot run, for example
    because it is longer than the context, has ``finish_reason`` ``"refused"``; it stops no other.

    Line i draws as row ``(i - 1) * n`` of ``generate(..., key=key)`` and the rows after it, so the
    answers of an interrupted and resumed run are those of an uninterrupted one. Beside ``out`` a
    record of the settings is kept in ``out`` + ``.run.json``; a run with other settings, prompts
    or weights is refused. Sizes of the engine may differ.

    Memory does not grow with the file, apart from one bit per line. Every answer is written to the
    file at once. About once per second, and at the end, it is forced to the disk.

    Args:
      engine: the engine that runs the requests.
      prompts: the file of prompts, JSON Lines.
      out: the file of answers, JSON Lines.
      n: samples per prompt.
      overwrite: whether to replace an existing file of answers instead of continuing it.
      progress: function that is called with the number of answered lines and of all lines, after
        every answer.
      **rules: options of all lines, as in :meth:`jaxdraft.Engine.submit`, except ``row`` and
        ``keep``.

    Returns:
      The counts of this run.

    Raises:
      ValueError: a line or a setting is wrong, or the file of answers belongs to another run.
        Nothing was written.
      OSError: a file cannot be read or written. The run can be continued.
    """
    prompts, out = Path(prompts), Path(out)
    count = check_int("n", n)
    common = _common(engine, rules)
    if out.exists() and prompts.samefile(out):
        raise ValueError(f"{out} is the file of prompts; expected another file for the answers")
    total, digest = _checked(engine, prompts, common)
    record = _record(engine, common, count, digest)
    answers = Answers(out, record, overwrite=overwrite)
    try:
        kept = answers.done.count
        if kept > total:
            raise ValueError(f"{out} has {kept} answers; {prompts} has {total} prompts")
        run = _Run(engine, common, count, answers, total, progress)
        failed = run.all(parse(*line) for line in numbered(prompts) if line[0] not in answers.done)
        return MapSummary(total, answers.done.count - kept, kept, failed)
    finally:
        answers.close()


class _Run:
    """Requests in flight, and their answers."""

    def __init__(
        self,
        engine: Engine,
        common: Options,
        count: int,
        answers: Answers,
        total: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.engine, self.common, self.count = engine, common, count
        self.answers, self.total, self.progress = answers, total, progress
        self.failed = 0

    def all(self, lines: Iterator[Line]) -> int:
        """Answer all lines, and return the number of those that failed."""
        # One more line than rows waits, so that a free row never waits for the file.
        window = 2 * self.engine.max_batch
        flight: dict[int, tuple[Line, list[Request]]] = {}
        try:
            for line in lines:
                if (requests := self._submit(line)) is not None:
                    flight[line.number] = (line, requests)
                while sum(len(requests) for _, requests in flight.values()) >= window:
                    self._collect(flight)
            while flight:
                self._collect(flight)
        finally:
            for _, requests in flight.values():
                for request in requests:
                    request.close()
        return self.failed

    def _submit(self, line: Line) -> list[Request] | None:
        """Submit the requests of a line; if it is refused, write that and return None."""
        requests: list[Request] = []
        options = line.options(self.common)
        rules = {field.name: getattr(options, field.name) for field in fields(Options)}
        first = rules.pop("row") * self.count
        try:
            prompt = line.prompt
            if line.messages is not None:
                assert self.engine.model.text is not None
                prompt = self.engine.model.text.chat(line.messages)
            assert prompt is not None
            for sample in range(self.count):
                requests.append(self.engine.submit(prompt, row=first + sample, **rules))
        except ValueError as error:
            for request in requests:
                request.close()
            nothing = dict(text=None, tokens=[], finish_reason="refused", error=str(error))
            self._write(line, None, [nothing] * self.count)
            return None
        return requests

    def _collect(self, flight: dict[int, tuple[Line, list[Request]]]) -> None:
        """Run until a line is finished, and write the answers of all finished lines."""

        def finished() -> list[int]:
            return [
                number
                for number, (_, requests) in flight.items()
                if all(request.finished for request in requests)
            ]

        self.engine.wait(lambda: bool(finished()))
        for number in finished():
            line, requests = flight[number]
            self._write(line, len(requests[0].prompt), [_sample(request) for request in requests])
            del flight[number]
            for request in requests:
                request.close()

    def _write(self, line: Line, size: int | None, samples: list[dict[str, Any]]) -> None:
        answer: dict[str, Any] = {"prompt_tokens": size}
        answer |= samples[0] if self.count == 1 else {"samples": samples}
        self.answers.write(line, answer)
        self.failed += any(sample["error"] is not None for sample in samples)
        if self.progress is not None:
            self.progress(self.answers.done.count, self.total)


def _sample(request: Request) -> dict[str, Any]:
    """Return the output of a finished request as JSON."""
    error = request.error
    found: dict[str, Any] = dict(
        text=request.text,
        tokens=request.tokens,
        finish_reason=request.finish_reason,
        error=None if error is None else f"{type(error).__name__}: {error}",
    )
    if request.logprobs is not None:
        found["logprobs"] = [_number(own) for own, _ in request.logprobs]
        if request._sequence.options.sampling is not None:
            found["sampled_logprobs"] = [_number(own) for own in request.sampled_logprobs or ()]
        if any(others for _, others in request.logprobs):
            found["alternatives"] = [
                [[token, _number(value)] for token, value in others]
                for _, others in request.logprobs
            ]
    return found


def _number(value: float) -> float | None:
    """Return a number as JSON has it; null stands for one that is not finite."""
    return float(value) if math.isfinite(value) else None


def _common(engine: Engine, rules: Mapping[str, Any]) -> Options:
    """Return the options of all lines, checked."""
    names = [field.name for field in fields(Options) if field.name != "row"]
    if unknown := sorted(set(rules) - set(names)):
        raise ValueError(f"unknown rules {unknown}; expected {names}")
    common = Options(**rules)
    if common.sampling is not None and common.sampling.mask is not None:
        raise ValueError(
            "sampling.mask is a function, which the record of a run cannot hold; expected a "
            "structure, or arrays (allowed, logit_bias)"
        )
    check_options(engine, common)
    return common


def _checked(engine: Engine, path: Path, common: Options) -> tuple[int, str]:
    """Check every line of a file of prompts, and return their number and the file's sha256."""
    count = 0
    for number, raw in numbered(path):
        try:
            check_line(engine, parse(number, raw), common)
        except ValueError as error:
            raise ValueError(f"{path}, {error}") from error
        count += 1
    with path.open("rb") as file:
        return count, hashlib.file_digest(file, "sha256").hexdigest()


# --------------------------------------------------------------------------- the record


def _record(engine: Engine, common: Options, count: int, digest: str) -> dict[str, Any]:
    """Return everything that decides about the answers, as JSON."""
    options = {
        field.name: _plain(getattr(common, field.name))
        for field in fields(Options)
        if field.name not in ("row", "sampling", "key")
    }
    sampling = common.sampling
    if sampling is not None:
        found = {field.name: _plain(getattr(sampling, field.name)) for field in fields(Sampling)}
        options |= found
    key = common.key
    if isinstance(key, jax.Array) and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        options["key"] = [str(jax.random.key_impl(key)), _plain(jax.random.key_data(key))]
    else:
        options["key"] = _plain(key)
    drafter = engine.drafter
    return dict(
        form=_FORM,
        prompts=digest,
        model=f"{engine.model.info.name} {_identity(engine.model.target)}",
        # Drafts change sampled tokens, though not their distribution.
        drafter=f"{type(drafter).__name__} of {drafter.draft_tokens}, {_identity(drafter)}",
        context=engine.context,
        n=count,
        **options,
    )


def _plain(value: Any) -> Any:
    """Return a setting as JSON; an array of many numbers as its sha256."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Structure):
        return value.pattern
    if isinstance(value, TokenAutomaton):
        return [_plain(value.table), _plain(value.classes)]
    if isinstance(value, Mapping):
        return sorted([int(token), float(number)] for token, number in value.items())
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    array = np.asarray(jax.device_get(value))
    if array.size <= _LEADING:
        return array.tolist()
    return f"{array.dtype}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()}"


def _identity(part: Any) -> str:
    """Return a sha256 of the shapes and first numbers of the arrays of a target or a drafter."""
    arrays = [leaf for leaf in jax.tree.leaves(part) if hasattr(leaf, "dtype")]
    arrays = [a for a in arrays if not jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended)]
    found = hashlib.sha256()
    for leaf, first in zip(arrays, jax.device_get(_firsts(arrays)), strict=True):
        found.update(f"{leaf.dtype}{list(leaf.shape)}".encode())
        found.update(np.asarray(first).tobytes())
    return found.hexdigest()[:16]


@jax.jit
def _firsts(arrays: list[jax.Array]) -> list[jax.Array]:
    """Return the first numbers of each array."""
    return [a[(0,) * (a.ndim - 1)][:_LEADING] if a.ndim else a for a in arrays]
