"""Checks of file and folder names from other programs."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from convert.errors import ArtifactError
from jaxdraft.checkpoint.layout import TARGET

GENAI_CONFIG = "genai_config.json"
"""File that identifies an artifact."""

CONFIG = "config.json"
"""File that identifies a checkpoint."""

ADAPTER_CONFIG = "adapter_config.json"
"""The file that makes a folder a LoRA adapter."""

_DRIVE = re.compile(r"^[A-Za-z]:")

_MAX_NAME = 1024


def contained(folder: Path, location: str, file: str, where: str) -> Path:
    """Return the regular file that ``location`` names inside ``folder``, links followed.

    Nothing is opened. A location may name a subfolder; it may not be absolute, go up, use a drive
    or a backslash, hold a NUL, or reach outside through a link (onnx/onnx#3991, #7686).

    Args:
      folder: the artifact's folder.
      location: path in the artifact's spelling, with ``/``.
      file: file that names it, for messages.
      where: place in that file, for messages.

    Raises:
      ArtifactError: the location is not of that form, or no such regular file exists.
    """
    inside = "a path inside the artifact's folder"
    if not isinstance(location, str) or not location or len(location) > _MAX_NAME:
        raise ArtifactError(file, where, repr(location), inside)
    bad = (
        "\0" in location
        or not _encodable(location)
        or "\\" in location
        or location.startswith("/")
        or _DRIVE.match(location)
        or ".." in location.split("/")
    )
    if bad:
        raise ArtifactError(file, where, repr(location), inside)
    root = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(root, location))
    if os.path.commonpath([root, path]) != root:
        raise ArtifactError(file, where, f"{location!r}, a link to {path}", inside)
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise ArtifactError(file, where, f"{location!r}, which does not exist", "a file") from error
    if not stat.S_ISREG(mode):
        raise ArtifactError(file, where, f"{location!r}, which is not a regular file", "a file")
    return Path(path)


def _encodable(text: str) -> bool:
    """Return whether a file name can hold the text: JSON allows half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def locate(folder: Path, location: str, file: str, where: str) -> Path:
    """Return the regular file ``location`` of ``folder``; see :func:`convert.paths.contained`.

    One link out of the folder is followed: a snapshot of the Hugging Face cache,
    ``models--x/snapshots/revision``, and a folder in it consist of links into ``models--x/blobs``.
    """
    real = Path(os.path.realpath(folder))
    path = real / location
    plain = bool(location) and os.path.basename(location) == location and "\0" not in location
    snapshots = [each for each in list(real.parents)[:2] if each.name == "snapshots"]
    if plain and snapshots and path.is_symlink():
        blob = Path(os.path.realpath(path))
        if blob.parent == snapshots[0].parent / "blobs" and blob.is_file():
            return blob
    return contained(folder, location, file, where)


def is_gguf(path: str | Path) -> bool:
    """Return whether a path names a GGUF file."""
    path = Path(path)
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def is_checkpoint(folder: str | Path) -> bool:
    """Return whether ``folder`` holds a checkpoint and no ONNX artifact, or is a GGUF file."""
    folder = Path(folder)
    if is_gguf(folder):
        return True
    if (folder / GENAI_CONFIG).exists():
        return False
    return (folder / CONFIG).is_file() or (folder / TARGET / CONFIG).is_file()
