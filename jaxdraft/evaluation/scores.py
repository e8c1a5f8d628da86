"""Log-likelihoods of given tokens, in batches of few shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdraft.checks import check_int
from jaxdraft.model import Model
from jaxdraft.prompts import bucket_of
from jaxdraft.scoring import token_log_probs

Pair = tuple[Sequence[int], Sequence[int]]
"""Ids of a context, at least one, and of its continuation, at least one."""


class Scorer:
    """Computes log-likelihoods of continuations.

    Rows are sorted by length and run ``batch`` at a time. Lengths are padded to powers of two, so a
    program is compiled per power of two and no other.

    Args:
      model: the model.
      batch: rows that run at once.
      max_length: largest number of tokens that the model reads. Default: its context.

    Raises:
      ValueError: ``max_length`` is larger than the model's context.
    """

    def __init__(self, model: Model, *, batch: int = 8, max_length: int | None = None) -> None:
        self.model, self.batch = model, check_int("batch", batch)
        context = model.info.context_length
        self.max_length = context if max_length is None else check_int("max_length", max_length)
        if self.max_length > context:
            raise ValueError(f"max_length is {max_length}; the model's context has {context}")

    def continuations(
        self, pairs: Sequence[Pair], after: Callable[[int], Any] = lambda count: None
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the greedy one.

        A context too long for the model loses its first tokens.

        Args:
          pairs: contexts and continuations.
          after: called after every batch with its number of rows.

        Raises:
          ValueError: a context or continuation is empty, or a continuation alone is too long, or an
            id is not in the vocabulary.
        """
        rows = [self._row(number, *pair) for number, pair in enumerate(pairs)]
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        found: list[tuple[float, bool]] = [(0.0, False)] * len(rows)
        for start in range(0, len(order), self.batch):
            part = order[start : start + self.batch]
            scores, greedy = self._run([rows[i] for i in part])
            for place, i in enumerate(part):
                # Row t scores token t + 1, so the last of n tokens is scored by row n - 2.
                end, size = len(rows[i]) - 1, len(pairs[i][1])
                own = scores[place, end - size : end].astype(np.float64)
                found[i] = (float(own.sum()), bool(greedy[place, end - size : end].all()))
            after(len(part))
        return found

    def windows(self, ids: Sequence[int], prefix: int) -> list[Pair]:
        """Split a text into windows that score each token once, with as much context as fits.

        Example, four tokens at once: ``0 .. 9`` after the prefix P gives P | 0 1 2 3, then
        3 | 4 5 6 7, and 5 6 7 | 8 9.

        Args:
          ids: tokens of the text; none gives no window.
          prefix: token before the first.
        """
        found: list[Pair] = []
        whole = [prefix, *ids]
        for start in range(0, len(ids), self.max_length):
            end = min(start + self.max_length, len(ids))
            # Inputs are the `max_length` tokens before the last one, or all there are.
            first = max(0, end - self.max_length)
            found.append((whole[first : start + 1], whole[start + 1 : end + 1]))
        return found

    def _row(self, number: int, context: Sequence[int], continuation: Sequence[int]) -> list[int]:
        """Return the last tokens of context and continuation that fit, checked."""
        if not len(context) or not 1 <= len(continuation) <= self.max_length:
            raise ValueError(
                f"request {number} has {len(context)} tokens of context and {len(continuation)} of "
                f"continuation; expected at least 1, and 1..{self.max_length}"
            )
        row = [*context, *continuation][-(self.max_length + 1) :]
        vocab = self.model.target.vocab_size
        if bad := [i for i in row if not 0 <= i < vocab]:
            raise ValueError(
                f"request {number} has id {bad[0]}; the vocabulary has ids 0..{vocab - 1}"
            )
        return row

    def _run(self, rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return log-probabilities [B, S] of the tokens after each, and whether they are best."""
        size = bucket_of(max(len(row) for row in rows) - 1)
        ids, lengths = np.zeros((self.batch, size + 1), np.int32), np.zeros(self.batch, np.int32)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = row
            lengths[place] = len(row) - 1
        given = jax.device_put((ids, lengths, np.ones(self.batch, np.float32)))
        scores, best = jax.device_get(token_log_probs(self.model.target, *given, best=True))
        return scores, best
