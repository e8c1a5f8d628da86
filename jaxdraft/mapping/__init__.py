"""Answers to a file of prompts, written to a file: resumable, in constant memory."""

from jaxdraft.mapping.run import MapSummary, map_file

__all__ = ["MapSummary", "map_file"]
