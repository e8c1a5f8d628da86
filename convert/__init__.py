"""Artifacts of onnxruntime-genai's model builder, and checkpoints -> Flax modules.

The converter is strict: it accounts for every node, attribute and initializer of the graphs and for
every key of a drafter's configuration. What it does not implement is an :class:`ArtifactError` that
names the file and the place, and says what was found and what was expected.
"""

from convert.artifact.load import Loaded, load_artifact
from convert.errors import ArtifactError
from convert.report import Report, inspect_artifact, inspect_folder

__all__ = [
    "ArtifactError",
    "Loaded",
    "Report",
    "inspect_artifact",
    "inspect_folder",
    "load_artifact",
]
