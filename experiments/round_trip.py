"""Does a checkpoint survive the way to ONNX and back?

    python experiments/round_trip.py [CHECKPOINT] --python PYTHON_WITH_THE_MODEL_BUILDER

For every drafter of CHECKPOINT (a folder with ``target``, ``dflash2``, ``dspark``; default: the one
of ``trained_checkpoint.py``), and for small random models of the other architectures: load, save
with ``jaxdraft.checkpoint.save``, export with onnxruntime-genai's model builder
(``export_onnx.py``), load the artifact, and compare every parameter bit for bit and every draft of
a greedy generation. The artifact is then saved and exported once more, after which the rotary
tables, which checkpoints do not store, have to be equal to the last bit too.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import trained_checkpoint
from common import table, write_result

import jaxdraft
from jaxdraft import Model
from jaxdraft.checkpoint import save
from jaxdraft.config import AttentionConfig, MlpConfig, MoeConfig
from jaxdraft.target import DecoderTarget
from jaxdraft.testing import tiny_drafter, tiny_mtp, tiny_target

HERE = Path(__file__).resolve().parent
TOKENIZER = trained_checkpoint.KEPT / "target"
ROTARY = "rotary"


NOTE = """
Float32. Rotary tables are not stored: the builder makes those of a target from float32 angles and
float32 cosines, a loaded checkpoint from the same angles and exact cosines (6e-8), a module made
here from exact angles (1e-6 and more, growing with the position). An artifact that is saved and
exported again has the same tables. Every draft is that of a greedy generation of 48 tokens from
three random prompts.
"""


@dataclasses.dataclass
class Difference:
    """Differences between two models of one structure.

    Attributes:
      parameters: number of parameters compared.
      moved: names of the parameters that are not equal bit for bit, without rotary tables.
      tables: largest difference in a rotary table.
      drafts: whether a greedy generation had the same tokens and, in every round, the same number
        of accepted drafts.
    """

    parameters: int
    moved: list[str]
    tables: float
    drafts: bool


def arrays_of(model: Model) -> dict[str, np.ndarray]:
    """Return every parameter of target and drafter, by name."""
    target, drafter = cast(Any, model.target), cast(Any, model.drafter)
    parts = {"target": target.decoder.params}
    for name in ("backbone", "mtp"):
        if hasattr(drafter, name):
            parts["drafter"] = getattr(drafter, name).params
    leaves = jax.tree_util.tree_leaves_with_path(parts)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def compare(before: Model, after: Model, prompts: list[list[int]]) -> Difference:
    """Compare two models, parameter by parameter and draft by draft.

    Raises:
      ValueError: the models differ in structure.
    """
    ours, theirs = arrays_of(before), arrays_of(after)
    if ours.keys() != theirs.keys():
        raise ValueError(f"only in one of the two: {sorted(ours.keys() ^ theirs.keys())}")
    moved, tables = [], 0.0
    for name, array in ours.items():
        other = theirs[name]
        if array.shape != other.shape or array.dtype != other.dtype:
            raise ValueError(
                f"{name} is {array.dtype} {array.shape}, then {other.dtype} {other.shape}"
            )
        if ROTARY in name:
            wide = array.astype(np.float64) - other.astype(np.float64)
            tables = max(tables, float(np.max(np.abs(wide))))
        elif array.tobytes() != other.tobytes():
            moved.append(name)
    runs = [
        jaxdraft.generate(model, prompts, max_new_tokens=48, stop_ids=(), trace=True)
        for model in (before, after)
    ]
    assert runs[0].trace is not None and runs[1].trace is not None
    drafts = runs[0].ids() == runs[1].ids() and np.array_equal(
        runs[0].trace.accepted, runs[1].trace.accepted
    )
    return Difference(len(ours), moved, tables, drafts)


def export(python: str, checkpoint: Path, out: Path, drafter: str) -> Model:
    """Export with an interpreter that has the model builder, and load the result."""
    script = HERE / "export_onnx.py"
    command = [python, str(script), str(checkpoint), str(out), "--drafter", drafter]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}")
    return jaxdraft.load(out)


def trip(
    model: Model, drafter: str, python: str, folder: Path
) -> tuple[Difference, Difference, dict[str, float]]:
    """Save, export and load a model, twice.

    Args:
      model: model in float32.
      drafter: kind of its drafter, or "none".
      python: interpreter with torch and onnxruntime-genai.
      folder: folder for the files.

    Returns:
      The differences of the first artifact from ``model`` and of the second from the first, and
      the tensors that saving ``model`` rounded.
    """
    vocab = model.target.vocab_size
    prompts = np.random.default_rng(0).integers(0, vocab, (3, 24)).tolist()
    saved = save(model, folder / "saved", tokenizer=TOKENIZER)
    first = export(python, saved.folder, folder / "onnx", drafter)
    again = save(first, folder / "again", tokenizer=TOKENIZER)
    if again.rounded:
        raise ValueError(f"saving an artifact rounded {dict(again.rounded)}")
    second = export(python, again.folder, folder / "onnx again", drafter)
    there = compare(model, first, prompts)
    return there, compare(first, second, prompts), dict(saved.rounded)


def stirred(target: DecoderTarget, seed: int) -> DecoderTarget:
    """Return a random target with random vectors too: norms around 1, decays around -1."""
    keys = iter(jax.random.split(jax.random.key(seed), 1000))

    def stir(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if leaf.ndim != 1 or "conv_bias" in name:
            return leaf
        noise = 0.3 * jax.random.normal(next(keys), leaf.shape, jnp.float32)
        return leaf * jnp.exp(noise) if "decay" in name else leaf + noise

    params = jax.tree_util.tree_map_with_path(stir, target.decoder.params)
    return dataclasses.replace(target, decoder=dataclasses.replace(target.decoder, params=params))


_PLAIN = AttentionConfig(heads=4, kv_heads=2, head_dim=16, rotary_dim=16, scale=0.25)
_NORMED = dataclasses.replace(_PLAIN, qk_norm=True)
_WINDOW = dataclasses.replace(_NORMED, window=12)
_MOE = MoeConfig(experts=4, active=2, hidden=24, shared_hidden=32)
_MLP = MlpConfig(hidden=40)  # the builder takes any matrix with V rows for the head

TARGETS: dict[str, dict[str, Any]] = {
    "Qwen3.5": dict(mlp=_MLP),
    "Qwen3.5 MoE": dict(mlp=_MOE, taps=()),
    "Qwen3": dict(attention=_NORMED, layers=("attention",) * 3),
    "Qwen3 with windows": dict(
        attention=_NORMED, sliding=_WINDOW, layers=("sliding", "attention", "sliding")
    ),
    "Llama, tied": dict(attention=_PLAIN, layers=("attention",) * 3, tied=True),
}
"""Small targets, by architecture, as changes of ``jaxdraft.testing.tiny_target_config``."""

SMALL = {
    **{f"Qwen3.5, {drafter}": ("Qwen3.5", drafter) for drafter in ("dflash2", "dspark", "mtp")},
    "Qwen3.5 MoE, mtp": ("Qwen3.5 MoE", "mtp"),
    **{name: (name, "none") for name in list(TARGETS)[2:]},
}
"""Architectures and drafters of the random models."""


def small_model(name: str) -> tuple[Model, str]:
    """Return a random model of :data:`SMALL`, and the drafter to export."""
    architecture, drafter = SMALL[name]
    changes: dict[str, Any] = TARGETS[architecture]
    if not architecture.startswith("Qwen3.5"):
        changes = {"delta_net": None, "taps": (), "mlp": _MLP, **changes}
    target = stirred(tiny_target(**changes), list(SMALL).index(name))
    if drafter == "none":
        return Model.of(target), drafter
    if drafter == "mtp":
        return Model.of(target, tiny_mtp(target, mlp=target.config.mlp)), drafter
    return Model.of(target, tiny_drafter(target, drafter)), drafter


def main() -> None:
    """Send every model through the builder and back, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args()
    cases: dict[str, tuple[Model, str]] = {}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = args.checkpoint or trained_checkpoint.write(Path(scratch, "trained"))
        whose = args.checkpoint.name if args.checkpoint else "first family"
        for drafter in ("dflash2", "dspark", "mtp"):
            if drafter == "mtp" or (checkpoint / drafter).is_dir():
                model = jaxdraft.load(checkpoint, drafter=drafter, dtype="float32")
                cases[f"{whose}, {drafter}"] = (model, drafter)
        cases |= {f"{name}, random": small_model(name) for name in SMALL}
        for i, (name, (model, drafter)) in enumerate(cases.items()):
            folder = Path(scratch, str(i))
            folder.mkdir()
            there, again, rounded = trip(model, drafter, args.python, folder)
            moved = f"{len(there.moved)} of {there.parameters}"
            worst = max(rounded.values(), default=0.0)
            rows.append(
                [
                    name,
                    moved,
                    f"{len(rounded)}, by {worst:.1e}" if rounded else "none",
                    f"{there.tables:.1e}",
                    "same" if there.drafts else "DIFFERENT",
                    f"{len(again.moved)} of {again.parameters}; {again.tables:.0e}",
                    "same" if again.drafts else "DIFFERENT",
                ]
            )
            print(" | ".join(rows[-1]), flush=True)
    head = [
        "model",
        "parameters that differ",
        "tensors rounded on saving",
        "rotary tables, largest difference",
        "tokens and accepted drafts",
        "second trip: parameters; tables",
        "drafts",
    ]
    write_result(__file__, "Checkpoints there and back", table(head, rows) + "\n" + NOTE.rstrip())


if __name__ == "__main__":
    main()
