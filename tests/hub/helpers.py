"""What the tests of published layouts share: folders, their numbers, and comparisons.

A folder of ``data`` is a checkpoint as it would be downloaded, tiny and with random weights. Beside
it lie the numbers of another program in float32 from the same weights: ``golden.npz``. Arrays of a
target, for some prompts i:

  ``prompt{i}_ids``     the prompt
  ``prompt{i}_logits``  float32 [length, V], logits of every position
  ``prompt{i}_greedy``  the greedy tokens after it
  ``prompt{i}_margin``  best logit less second best, for each of these

``regenerate.py`` computes them again.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxdraft
from jaxdraft import Model

DATA = Path(__file__).parent / "data"

WITHIN = 1e-3
"""Two correct float32 programs differ by less than 1e-4 here, and by more than 0.1 if one of them
overlooks a property."""

Golden = Mapping[str, np.ndarray]


def folders(array: str = "logits") -> list[str]:
    """Return the names of the folders whose golden arrays have a name that ends so."""
    return sorted(
        path.parent.name
        for path in DATA.glob("*/golden.npz")
        if any(name.endswith(f"_{array}") for name in golden(path.parent.name))
    )


@functools.cache
def golden(name: str) -> Golden:
    """Return the arrays of a folder."""
    return dict(np.load(DATA / name / "golden.npz"))


def prompts(arrays: Golden) -> list[str]:
    """Return the prompts that the arrays are about: ``["prompt1", "prompt2"]``."""
    return sorted({name.split("_")[0] for name in arrays if re.match(r"prompt\d+_ids", name)})


@functools.cache
def load(name: str, **options: object) -> Model:
    """Load a folder in float32, its remarks unheeded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jaxdraft.LoadWarning)
        return jaxdraft.load(DATA / name, dtype="float32", **options)  # type: ignore[arg-type]


def logits_of(model: Model, ids: np.ndarray) -> np.ndarray:
    """Return the logits [T, V] of every position of a text, in one pass over an empty state."""
    tokens = jnp.asarray(ids, jnp.int32)[None]
    count = jnp.full((1,), tokens.shape[1], jnp.int32)
    state = model.target.init(1, tokens.shape[1])
    return np.asarray(jax.jit(_logits)(model, tokens, count, state)[0])


def _logits(model: Model, tokens: jax.Array, count: jax.Array, state: object) -> jax.Array:
    return model.target.forward(tokens, count, state).logits


def assert_logits(model: Model, arrays: Golden, prompt: str) -> None:
    """Check the logits of a prompt, and that greedy tokens are the best after those before them."""
    ids, greedy = arrays[f"{prompt}_ids"], arrays[f"{prompt}_greedy"]
    found = logits_of(model, np.concatenate([ids, greedy]))
    np.testing.assert_allclose(found[: len(ids)], arrays[f"{prompt}_logits"], rtol=0, atol=WITHIN)
    sure = arrays[f"{prompt}_margin"] > WITHIN
    assert sure.any()
    best = found[len(ids) - 1 : -1].argmax(axis=-1)
    np.testing.assert_array_equal(best[sure], greedy[sure])


def assert_tokens(
    model: Model, arrays: Golden, prompt: str, count: int = 12, drafter: str = "none"
) -> None:
    """Check the first greedy tokens of a generation, as far as margins decide them."""
    unsure = np.flatnonzero(arrays[f"{prompt}_margin"][:count] <= WITHIN)
    known = int(unsure[0]) if unsure.size else count
    assert known
    ids = arrays[f"{prompt}_ids"].tolist()
    out = jaxdraft.generate(model, [ids], max_new_tokens=count, stop_ids=(), drafter=drafter)
    assert out.ids()[0][:known] == arrays[f"{prompt}_greedy"][:known].tolist()
