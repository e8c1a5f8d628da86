"""Continuous batching: host code around the prefill and the round of :func:`jaxdraft.generate`.

``engine`` puts the other modules together. ``request`` is the caller's handle and ``sequence`` the
record behind it, which all others share. ``scheduler`` gives rows and ``pages`` pages to sequences.
``rules`` brings the rules of all rows to the device, and ``runner`` runs ``programs`` there.
``counters`` adds up what these report, ``faults`` finds what makes them fail, and ``threads`` makes
calls from several threads take turns. ``results`` gives tokens and events to the callers, and
``parallel`` has an engine for each row of devices of a mesh.
"""

from jaxdraft.engine.engine import Engine
from jaxdraft.engine.parallel import ParallelEngine
from jaxdraft.engine.programs import Buckets
from jaxdraft.engine.request import EngineEvent, Request

__all__ = ["Buckets", "Engine", "EngineEvent", "ParallelEngine", "Request"]
