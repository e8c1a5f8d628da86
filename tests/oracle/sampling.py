"""What sampling means, in plain numpy and float64, one row and one step at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def truncated(
    logits: np.ndarray,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Probabilities [V] of logits [V], by sorting."""
    logits = np.asarray(logits, np.float64)
    if temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    logits = logits / temperature
    probs = np.exp(logits - logits.max())
    if top_k:
        kth = np.sort(logits)[::-1][min(top_k, len(logits)) - 1]
        probs = np.where(logits >= kth, probs, 0)
    probs /= probs.sum()
    if top_p < 1:
        order = np.argsort(-logits, kind="stable")
        number = int(np.argmax(np.cumsum(probs[order]) >= top_p))
        probs = np.where(logits >= logits[order[number]], probs, 0)
    if min_p:
        probs = np.where(probs >= min_p * probs.max(), probs, 0)
    return probs / probs.sum()


def adjusted(
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    min_new_tokens: int = 0,
    logit_bias: dict[int, float] | None = None,
    allowed: np.ndarray | None = None,
    stop_ids: Sequence[int] = (),
) -> np.ndarray:
    """Logits [V] after penalties, bias and bans."""
    logits = np.asarray(logits, np.float64).copy()
    for token in set(prompt) | set(output):
        r = repetition_penalty
        logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
    for token in set(output):
        logits[token] -= presence_penalty + frequency_penalty * list(output).count(token)
    for token, bias in (logit_bias or {}).items():
        logits[token] += bias
    if allowed is not None:
        logits[~allowed] = -np.inf
    if len(output) < min_new_tokens:
        logits[list(stop_ids)] = -np.inf
    return logits


def sequences(
    step: Callable[[list[int]], np.ndarray], vocab: int, length: int
) -> dict[tuple[int, ...], float]:
    """The probability of every output of ``length`` tokens, by enumeration.

    Args:
      step: the distribution of the next token after an output so far.
      vocab: V.
      length: tokens.
    """
    found: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(vocab), repeat=length):
        mass = 1.0
        for number, token in enumerate(path):
            mass *= step(list(path[:number]))[token]
            if mass == 0:
                break
        if mass > 0:
            found[path] = mass
    return found


def chi_square(counts: dict[Any, int], expected: dict[Any, float]) -> tuple[float, float]:
    """The p-value of Pearson's test, and the total variation distance in units of what is expected.

    Counts that do come from the distribution are off by ``sqrt(2 p (1 - p) / (pi n))`` a bin in the
    mean, so the second number is near one for them, whatever the number of bins.

    In the first test, bins that expect fewer than ten samples are one bin. A sample where none is
    possible: p = 0.
    """
    from scipy.stats import chi2

    total = sum(counts.values())
    if any(key not in expected for key in counts):
        return 0.0, 1.0
    big = [key for key, mass in expected.items() if mass * total >= 10]
    found = np.array([counts.get(key, 0) for key in big], np.float64)
    mass = np.array([expected[key] for key in big])
    rest = max(0.0, 1.0 - mass.sum())
    if rest * total >= 10:
        found, mass = np.append(found, total - found.sum()), np.append(mass, rest)
    statistic = float(((found - mass * total) ** 2 / (mass * total)).sum())
    every = {*counts, *expected}
    distance = sum(abs(counts.get(k, 0) / total - expected.get(k, 0.0)) for k in every) / 2
    chance = sum((2 * p * (1 - p) / (np.pi * total)) ** 0.5 for p in expected.values()) / 2
    return float(chi2.sf(statistic, max(1, len(mass) - 1))), float(distance / chance)


def same_source(left: dict[Any, int], right: dict[Any, int]) -> float:
    """The p-value of the chi-square test that two samples have one distribution."""
    from scipy.stats import chi2

    n, m = sum(left.values()), sum(right.values())
    keys = [k for k in {*left, *right} if left.get(k, 0) + right.get(k, 0) >= 20]
    a = np.array([left.get(k, 0) for k in keys], np.float64)
    b = np.array([right.get(k, 0) for k in keys], np.float64)
    if n + m - a.sum() - b.sum() >= 20:
        a, b = np.append(a, n - a.sum()), np.append(b, m - b.sum())
    statistic = float((((m / n) ** 0.5 * a - (n / m) ** 0.5 * b) ** 2 / (a + b)).sum())
    return float(chi2.sf(statistic, max(1, len(a) - 1)))
