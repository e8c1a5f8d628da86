"""Put together the checkpoint from which the first family was exported.

    ./run python experiments/trained_checkpoint.py OUT

It holds a Qwen3.5 target with a multi-token-prediction head and a DFlash2 drafter, in bfloat16,
described in ``tests/first_family/MODEL_CARD.md``. Nearly all of its numbers are taken from the
artifact. ``checkpoints/trained`` has the rest: the settings and tokenizer files as transformers
wrote them, and in ``rest.safetensors`` the head, an unused vision tower, and a norm that lost a bit
in the artifact's ``1 + w``.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from common import first_family
from safetensors.numpy import load_file, save_file

import jaxdraft
from jaxdraft.checkpoint import save

KEPT = Path(__file__).resolve().parent / "checkpoints" / "trained"
DIGESTS = {
    "target": "8e4707bc7e517fc80810e26ce4826e875549c4f4c126cf8ef2aadff28fbc97cd",
    "dflash2": "2004bbb2f14fcdd03ede7710ba82313566aae2deb90fc2a997d6b9d6202e4643",
}
"""Digests of the trained tensors, by folder; see :func:`digest`."""


def digest(tensors: Mapping[str, np.ndarray]) -> str:
    """Return the sha256 of names, dtypes, shapes and numbers."""
    found = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        found.update(f"{name} {array.dtype} {array.shape}\n".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def write(out: Path) -> Path:
    """Write the checkpoint: folders ``target`` and ``dflash2`` in ``out``, which must not exist.

    Returns:
      The folder ``out``.

    Raises:
      ValueError: the tensors differ from the trained ones.
    """
    save(jaxdraft.load(first_family()[0]), out, dtype="bfloat16")
    rest = {"target": load_file(KEPT / "rest.safetensors"), "dflash2": {}}
    for part, expected in DIGESTS.items():
        weights = out / part / "model.safetensors"
        tensors = load_file(weights) | rest[part]
        found = digest(tensors)
        if found != expected:
            raise ValueError(f"{weights}: sha256 of the tensors is {found}; expected {expected}")
        save_file(tensors, weights, metadata={"format": "pt"})
        for file in (KEPT / part).iterdir():
            shutil.copyfile(file, out / part / file.name)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to make")
    print(f"wrote {write(parser.parse_args().out)}")


if __name__ == "__main__":
    main()
