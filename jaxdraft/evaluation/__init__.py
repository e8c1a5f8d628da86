"""An adapter for lm-eval-harness (extra ``eval``): benchmarks over the engine.

Importing this package registers the model ``jaxdraft`` if lm-eval is installed.
"""

from jaxdraft.evaluation.harness import LM, evaluate
from jaxdraft.evaluation.scores import Scorer

__all__ = ["LM", "Scorer", "evaluate"]
