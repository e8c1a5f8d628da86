"""A plain-numpy interpreter of exported graphs, used as an independent reference in tests.

It shares no code with the library and imports neither jax nor onnxruntime. `Graph` runs a file;
`Target`, `MtpHead` and `Drafter` drive one the way a runtime would.
"""

from tests.oracle.graph import Graph
from tests.oracle.session import (
    Capsule,
    Drafter,
    MtpHead,
    State,
    Target,
    greedy_walk,
    split_capsule,
)

__all__ = [
    "Capsule",
    "Drafter",
    "Graph",
    "MtpHead",
    "State",
    "Target",
    "greedy_walk",
    "split_capsule",
]
