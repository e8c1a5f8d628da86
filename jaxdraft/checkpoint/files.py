"""Folders of ``config.json`` and safetensors. A folder appears complete, or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor to be written; its numbers are made when their turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes it takes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(folder: Path, tensors: Sequence[Tensor], max_shard_bytes: int) -> None:
    """Write ``model.safetensors``, or numbered shards and their index.

    Args:
      folder: an existing folder.
      tensors: tensors in the order in which shards are filled.
      max_shard_bytes: maximum bytes per file, and in memory at once. A single tensor may be
        larger.
    """
    from safetensors.numpy import save_file

    shards = list(_shards(tensors, max_shard_bytes))
    index: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = SINGLE if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        made = {tensor.name: tensor.make() for tensor in shard}
        # What the loaders of transformers ask for; the numbers belong to no framework.
        save_file(made, folder / file, {"format": "pt"})
        index |= dict.fromkeys(made, file)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors)
        body = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        write_json(folder / INDEX, body)


def _shards(tensors: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    shard: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.nbytes
    yield shard


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    """Write ``body`` for people to read."""
    path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def check_free(folder: Path, parts: Collection[str], *, overwrite: bool) -> None:
    """``folder`` does not exist, or may be replaced: nothing but ``parts`` is in it.

    Raises:
      FileExistsError: it exists, and ``overwrite`` is false or something else is in it.
    """
    if not folder.exists() and not folder.is_symlink():
        return
    if not overwrite:
        raise FileExistsError(f"{folder} exists; overwrite=True replaces a saved checkpoint")
    if folder.is_symlink() or not folder.is_dir():
        raise FileExistsError(f"{folder} is not a folder; only a saved checkpoint is replaced")
    names = sorted(path.name for path in folder.iterdir())
    if not names or not set(names) <= set(parts):
        raise FileExistsError(
            f"{folder} holds {', '.join(names[:5]) or 'nothing'}; only a saved checkpoint "
            f"({', '.join(parts)}) is replaced"
        )


@contextlib.contextmanager
def appearing(folder: Path) -> Generator[Path]:
    """An empty folder to fill, which becomes ``folder`` if nothing is raised.

    It lies beside ``folder``, so that renaming it is one step. What was at ``folder`` stays there
    until then, and comes back if the renaming fails.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    new, old = scratch / "new", scratch / "old"
    try:
        new.mkdir()
        yield new
        _sync(new)
        if folder.exists():
            os.rename(folder, old)
        try:
            os.rename(new, folder)
        except OSError:
            if old.exists():
                os.rename(old, folder)
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sync(folder: Path) -> None:
    """What is renamed is on disk: a name that survives a crash must not name an empty file."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
