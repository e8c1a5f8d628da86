"""The rules of a round and the state between rounds."""

from __future__ import annotations

from typing import Any

import jax
from flax import struct

from jaxdraft.base import Proposal
from jaxdraft.sampling import SamplingRules
from jaxdraft.stop_strings import StopText
from jaxdraft.structure.automaton import Structures
from jaxdraft.telemetry import Stats


@struct.dataclass
class Rules:
    """Rules of a generation. All are dynamic: changing them compiles nothing.

    Only the presence of ``sampling``, ``stop_text`` and ``structures`` is part of the program.
    """

    stop_ids: jax.Array  # [B, S] int32; NO_TOKEN entries match nothing
    max_new_tokens: jax.Array  # [B] int32
    max_length: jax.Array  # [B] int32, of prompt and output together
    draft_limit: jax.Array  # [B] int32
    sampling: SamplingRules | None = None  # None: greedy
    stop_text: StopText | None = None
    structures: Structures | None = None


@struct.dataclass
class RoundState:
    """State between rounds."""

    target: Any
    drafter: Any
    proposal: Proposal  # drafts of the coming round, without their lattice
    anchor: jax.Array  # [B] int32, the last token: emitted, not yet in the target's cache
    tokens: jax.Array  # [B, S] int32, prompt and output
    length: jax.Array  # [B] int32, tokens so far, the anchor included
    emitted: jax.Array  # [B] int32, tokens of the output
    status: jax.Array  # [B] int32, a Status
    failures: jax.Array  # [B] int32, consecutive rounds in which the drafter failed
    stop_state: jax.Array  # [B] int32, the state of the row's stop-string automaton
    structure_state: jax.Array  # [B] int32, the state of the automaton of the row's structure
    stats: Stats
