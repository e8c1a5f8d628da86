"""Speculative decoding with block drafters, as pure functions over explicit state, in JAX.

    import jaxdraft

    model = jaxdraft.load("artifact_dir")
    out = jaxdraft.generate(model, prompts, max_new_tokens=128)

``jaxdraft.base`` holds the contracts and the glossary; read it first.
"""

from jaxdraft.base import (
    Drafter,
    DraftInfo,
    Feed,
    Lattice,
    NoDraft,
    Proposal,
    Status,
    Target,
    TargetOutput,
)
from jaxdraft.generate import Event, Output, Scored, generate, score, stream
from jaxdraft.model import Model, ModelInfo, load
from jaxdraft.round import Rules, Stats

__version__ = "0.1.0"

__all__ = [
    "DraftInfo",
    "Drafter",
    "Event",
    "Feed",
    "Lattice",
    "Model",
    "ModelInfo",
    "NoDraft",
    "Output",
    "Proposal",
    "Rules",
    "Scored",
    "Stats",
    "Status",
    "Target",
    "TargetOutput",
    "generate",
    "load",
    "score",
    "stream",
]
