"""Continuous batching: host code around the prefill and the round of :func:`jaxdraft.generate`.

``scheduler`` decides who runs on which row in which pages, ``pages`` knows whose they are and what
they hold, ``programs`` and ``runner`` do it on the device, ``rules`` brings the rules of all rows
there, ``engine`` puts them together.
"""

from jaxdraft.engine.engine import Engine
from jaxdraft.engine.programs import Buckets
from jaxdraft.engine.request import EngineEvent, Request

__all__ = ["Buckets", "Engine", "EngineEvent", "Request"]
