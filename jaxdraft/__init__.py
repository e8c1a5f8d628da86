"""Speculative decoding with block drafters, as pure functions over explicit state, in JAX.

    import jaxdraft

    model = jaxdraft.load("artifact_dir")
    out = jaxdraft.generate(model, prompts, max_new_tokens=128)

``jaxdraft.base`` holds the contracts and the glossary; read it first.
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from jaxdraft.base import (
    Drafter,
    DrafterDefaults,
    DraftInfo,
    Feed,
    Lattice,
    NoDraft,
    Proposal,
    Status,
    Target,
    TargetOutput,
)
from jaxdraft.data import EMBEDDED, SMOLLM2_DRAFTER
from jaxdraft.draft import lattice
from jaxdraft.draft.adaptive import AdaptiveDrafter
from jaxdraft.draft.confident import ConfidentDrafter
from jaxdraft.draft.fallback import FallbackDrafter
from jaxdraft.draft.history import HistoryDrafter
from jaxdraft.draft.ngram import NgramDrafter
from jaxdraft.engine import Engine, EngineEvent, Request
from jaxdraft.generate import Event, Output, generate, stream
from jaxdraft.load import LoadWarning, inspect, load
from jaxdraft.mapping import MapSummary, map_file
from jaxdraft.model import Model, ModelInfo
from jaxdraft.nn.choice import with_kernels
from jaxdraft.overview import Overview, overview
from jaxdraft.plan import Plan, plan
from jaxdraft.rounds import Logprobs, Rules
from jaxdraft.sampling import Sampling
from jaxdraft.scoring import Scored, log_probs, score
from jaxdraft.sharding import Placement, ShardingError, shard, unshard
from jaxdraft.structure import Structure, TokenAutomaton
from jaxdraft.telemetry import Stats, Summary, summarize

if TYPE_CHECKING:
    from jaxdraft import checkpoint as checkpoint
    from jaxdraft import cli as cli
    from jaxdraft import cli_data as cli_data
    from jaxdraft import cli_options as cli_options
    from jaxdraft import compiling as compiling
    from jaxdraft import demo as demo
    from jaxdraft import evaluation as evaluation
    from jaxdraft import tables as tables
    from jaxdraft import testing as testing
    from jaxdraft import train as train

__version__ = version("jaxdraft")

__all__ = [
    "EMBEDDED",
    "SMOLLM2_DRAFTER",
    "AdaptiveDrafter",
    "ConfidentDrafter",
    "DraftInfo",
    "Drafter",
    "DrafterDefaults",
    "Engine",
    "EngineEvent",
    "Event",
    "FallbackDrafter",
    "Feed",
    "HistoryDrafter",
    "Lattice",
    "LoadWarning",
    "Logprobs",
    "MapSummary",
    "Model",
    "ModelInfo",
    "NgramDrafter",
    "NoDraft",
    "Output",
    "Overview",
    "Placement",
    "Plan",
    "Proposal",
    "Request",
    "Rules",
    "Sampling",
    "Scored",
    "ShardingError",
    "Stats",
    "Status",
    "Structure",
    "Summary",
    "Target",
    "TargetOutput",
    "TokenAutomaton",
    "generate",
    "inspect",
    "lattice",
    "load",
    "log_probs",
    "map_file",
    "overview",
    "plan",
    "score",
    "shard",
    "stream",
    "summarize",
    "unshard",
    "with_kernels",
]

_SUBMODULES = (
    "checkpoint",
    "cli",
    "cli_data",
    "cli_options",
    "compiling",
    "demo",
    "devices",
    "evaluation",
    "tables",
    "testing",
    "train",
)
"""Submodules that are imported when they are first used: they take time, and few programs need
them."""


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"jaxdraft.{name}")
    raise AttributeError(f"module 'jaxdraft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES})
