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
    """A tensor to be written; its numbers are computed when they are written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Size in the file, in bytes."""
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
        # The loaders of transformers require this entry; the numbers belong to no framework.
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
    """Write ``body`` with indentation."""
    path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def check_free(folder: Path, parts: Collection[str], *, overwrite: bool) -> None:
    """Check that ``folder`` does not exist, or may be replaced: it holds only ``parts``.

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
    """Yield an empty folder to fill, which becomes ``folder`` if nothing is raised.

    It lies next to ``folder``, so that renaming it is one step. A folder to be replaced stays until
    then, and is restored if the renaming fails.
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
    """Flush to disk before renaming, so that no name refers to an empty file after a crash."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
