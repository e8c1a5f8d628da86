"""Keeps once what several files have in common, and puts the files back.

    python tests/golden/twins.py [FOLDER]

The exports beside this script have the same weights in float32, float16 and bfloat16, graphs that
resemble each other, and reference outputs of the same target. A file that others hold for the most
part is therefore not in the repository. ``twins.json`` has its recipe instead, and `restore`, which
tests call before they look for a file, follows it. A recipe is::

    {"sha256": ..., "from": [names of files], "pieces": [piece, ...]}

and the file is its pieces, one after the other. A piece is either of

    n                             the next n bytes of ``rest.xz``, the recipes taken in order
    [i, offset, n]                n bytes of file i
    [i, offset, n, "bfloat16"]    n bytes of file i, float32 numbers, rounded to this dtype

Files appear after those they are made from.

Run as a script it puts everything back, takes all files of the folder, writes ``twins.json``,
``rest.xz`` and ``.gitignore``, and removes what can be put back. The same files give the same
bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import lzma
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

RECIPES, REST = "twins.json", "rest.xz"
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
LEAST = 20_000  # bytes; what saves less, or less than half, is kept as it is
SHORT = 256  # bytes; no piece of another file begins with a shorter part

Piece = Any  # int or list; see above
Recipe = dict[str, Any]


def restore(root: Path) -> None:
    """Puts back the files under `root` that are missing or not what their recipe gives.

    As copies: onnx refuses external data with several hard links.

    Raises:
      RuntimeError: a file made by its recipe is not the one that was dropped.
    """
    if not (root / RECIPES).exists():
        return
    recipes: dict[str, Recipe] = json.loads((root / RECIPES).read_text())
    wrong = {name for name, recipe in recipes.items() if not _is(root / name, recipe["sha256"])}
    if not wrong:
        return
    rest = lzma.decompress((root / REST).read_bytes())
    for name, recipe in recipes.items():
        own = sum(piece for piece in recipe["pieces"] if isinstance(piece, int))
        if name in wrong:
            data = make(recipe, rest[:own], [(root / s).read_bytes() for s in recipe["from"]])
            if hashlib.sha256(data).hexdigest() != recipe["sha256"]:
                raise RuntimeError(f"{root / name}: {RECIPES} and {REST} do not give its sha256")
            # Under another name first: test processes start at the same time.
            aside = root / f"{name}.{os.getpid()}"
            aside.write_bytes(data)
            aside.replace(root / name)
        rest = rest[own:]


def make(recipe: Recipe, rest: bytes, sources: list[bytes]) -> bytes:
    """Returns the file that a recipe describes."""
    out, taken = [], 0
    for piece in recipe["pieces"]:
        if isinstance(piece, int):
            out.append(rest[taken : taken + piece])
            taken += piece
        else:
            out.append(_cut(sources[piece[0]], *piece[1:]))
    return b"".join(out)


def _cut(source: bytes, offset: int, size: int, dtype: str | None = None) -> bytes:
    """Returns `size` bytes of `source`, or those float32 numbers as another dtype."""
    cut = source[offset : offset + size]
    if dtype is None:
        return cut
    with np.errstate(over="ignore"):
        return np.frombuffer(cut, np.float32).astype(DTYPES[dtype]).tobytes()


def _is(file: Path, digest: str) -> bool:
    return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == digest


# ------------------------------------------------------------------------------- how recipes arise


def drop(root: Path) -> None:
    """Writes the recipes of all files under `root` that need not be kept, and removes these files.

    The names are also written to ``.gitignore``, since tests put the files back.
    """
    recipes: dict[str, Recipe] = {}
    rest = b""
    known: dict[bytes, tuple[str, list[Any]]] = {}
    contents: dict[str, bytes] = {}

    def size(file: Path) -> int:
        return file.stat().st_size

    files = [f for f in root.rglob("*") if f.name.endswith((".onnx", ".onnx.data", ".npz"))]
    # Of the same weights float32 comes first.
    for file in sorted(files, key=lambda f: (f.parent.name.startswith("broken_"), -size(f), f)):
        name = file.relative_to(root).as_posix()
        contents[name] = file.read_bytes()
        recipe, own = _recipe(file, contents[name], known, contents)
        # Compressed, graphs all together.
        stays = size(file) // 50 if file.suffix == ".onnx" else len(lzma.compress(own))
        if stays + LEAST <= size(file) and 2 * stays <= size(file):
            recipes[name] = recipe
            rest += own
        for start, stop, floats in _parts(file):
            part = contents[name][start:stop]
            known.setdefault(hashlib.sha256(part).digest(), (name, [start, len(part)]))
            for dtype in DTYPES if floats else ():
                cast = hashlib.sha256(_cut(part, 0, len(part), dtype)).digest()
                known.setdefault(cast, (name, [start, len(part), dtype]))
    lines = (f" {json.dumps(name)}: {json.dumps(recipe)}" for name, recipe in recipes.items())
    (root / RECIPES).write_text("{\n" + ",\n".join(lines) + "\n}\n")
    (root / REST).write_bytes(lzma.compress(rest, preset=9 | lzma.PRESET_EXTREME))
    (root / ".gitignore").write_text("".join(f"/{name}\n" for name in sorted(recipes)))
    for name in recipes:
        (root / name).unlink()


def _recipe(
    file: Path,
    data: bytes,
    known: dict[bytes, tuple[str, list[Any]]],
    contents: dict[str, bytes],
) -> tuple[Recipe, bytes]:
    """Returns how `data` is made from what is known, and the bytes that are not.

    Args:
      file: where `data` stands, for its parts.
      known: by sha256, where a part of an earlier file, or its numbers in another dtype, are.
      contents: earlier files by name.
    """
    sources: list[str] = []
    pieces: list[Piece] = []
    rest, end = b"", 0

    def keep(part: bytes) -> None:
        nonlocal rest
        rest += part
        if pieces and isinstance(pieces[-1], int):
            pieces[-1] += len(part)
        elif part:
            pieces.append(len(part))

    for start, stop, _ in _parts(file):
        keep(data[end:start])
        part, end = data[start:stop], stop
        if pieces and not isinstance(pieces[-1], int):
            # What follows there follows here, more often than not.
            i, offset, size, *dtype = pieces[-1]
            more = len(part) * (4 // DTYPES[dtype[0]].itemsize if dtype else 1)
            following = contents[sources[i]][offset + size : offset + size + more]
            if len(following) == more and _cut(following, 0, more, *dtype) == part:
                pieces[-1][2] += more
                continue
        found = known.get(hashlib.sha256(part).digest()) if len(part) >= SHORT else None
        if found is None:
            keep(part)
            continue
        if found[0] not in sources:
            sources.append(found[0])
        pieces.append([sources.index(found[0]), *found[1]])
    keep(data[end:])
    digest = hashlib.sha256(data).hexdigest()
    return {"sha256": digest, "from": sources, "pieces": pieces}, rest


def _parts(file: Path) -> Iterator[tuple[int, int, bool]]:
    """Yields where the tensors of a file begin and end, in order, and whether they are float32."""
    if file.suffix == ".npz":
        with zipfile.ZipFile(file) as archive:
            # With its header: the same array has the same one.
            bounds = [m.header_offset for m in archive.infolist()] + [archive.start_dir]
            yield from ((start, stop, False) for start, stop in itertools.pairwise(bounds))
    elif file.suffix == ".data":
        yield from _tensors(file)


def _tensors(file: Path) -> list[tuple[int, int, bool]]:
    import onnx

    graph = onnx.load(file.with_suffix(""), load_external_data=False).graph
    found = set()
    for tensor in graph.initializer:
        where = {entry.key: entry.value for entry in tensor.external_data}
        if where.get("location") == file.name:
            start = int(where["offset"])
            floats = tensor.data_type == onnx.TensorProto.FLOAT
            found.add((start, start + int(where["length"]), floats))
    return sorted(found)


def main() -> None:
    """Drops what can be put back and prints what is left."""
    parser = argparse.ArgumentParser(description="Keep once what several files have in common.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent)
    root = parser.parse_args().folder
    restore(root)
    drop(root)
    kept = sum(f.stat().st_size for f in root.rglob("*") if f.is_file())
    print(f"{kept / 1e6:.3f} MB kept")


if __name__ == "__main__":
    main()
