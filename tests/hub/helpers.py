"""Helpers of the tests of published layouts: folders, their numbers, and comparisons.

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

import dataclasses
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
from jaxdraft.checkpoint.families import LOGITS, SCORES, Family
from jaxdraft.config import AttentionConfig, DeltaNetConfig, LayerKind, MlpConfig, TargetConfig
from jaxdraft.rope import Rope

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


def small_config(family: Family) -> TargetConfig:
    """Return a target that has every property of an architecture without experts."""
    letters = family.bias + family.bias_key
    kinds = dict(family.kinds)
    heads = 2 if "qkv" in family.fused else 4  # Phi-3 has no head_dim: it is width / heads
    attention = AttentionConfig(
        heads=heads,
        kv_heads=heads // 2,
        head_dim=16,
        rotary_dim=int(16 * (0.75 if family.partial and family.rotary == 1 else family.rotary)),
        interleaved=family.interleaved,
        gated=family.gated,
        qk_norm=bool(family.qk_norm),
        norm_whole=family.qk_norm == "whole",
        bias="q" in letters,
        out_bias="o" in letters,
        scale=0.2 if family.query_scalar else 0.25,
        softcap=2.0 if SCORES in family.softcaps else 0.0,
    )
    layers: tuple[LayerKind, ...] = ("attention",) * 2
    if family.windows != "none":
        layers = ("sliding",) * 2 if family.windows == "number" else ("attention", "sliding")
    if "delta_net" in kinds:
        layers = ("delta_net", "attention")
    rope = Rope(theta=1e4)
    if "yarn" in family.ropes:
        rope = Rope(theta=1e4, kind="yarn", factor=4.0, original_length=32)
    elif "longrope" in family.ropes:
        factors = tuple(1.0 + i / 4 for i in range(attention.rotary_dim // 2))
        rope = Rope(
            theta=1e4,
            kind="longrope",
            factor=4.0,
            original_length=64,
            short_factors=factors,
            long_factors=tuple(2 * factor for factor in factors),
        )
    own = family.own_tables
    return TargetConfig(
        vocab_size=48,
        width=32,
        layers=layers,
        attention=attention if "attention" in layers else None,
        sliding=dataclasses.replace(attention, window=7) if "sliding" in layers else None,
        delta_net=DeltaNetConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=8, conv_width=4)
        if "delta_net" in layers
        else None,
        mlp=MlpConfig(hidden=40, activation=family.activation, bias=family.mlp_bias_key),
        norm_eps=1e-6,
        tied=bool(family.tied),
        context_length=64,
        norms=family.sides,
        embedding_scale=float(str(np.float32(32**0.5))) if family.embedding_scaled else 1.0,
        softcap=3.0 if LOGITS in family.softcaps else 0.0,
        own_tables=own,
        rope=rope,
        sliding_rope=Rope(theta=500.0) if own else None,
        architecture=family.model_type,
    )
