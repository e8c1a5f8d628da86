"""Make the artifact in ``tests/first_family`` again, from its checkpoint.

The checkpoint is a Qwen3.5 target and a DFlash2 drafter in bfloat16, described in
``tests/first_family/MODEL_CARD.md``. Most of its numbers are in that folder too:
``trained_checkpoint.py`` puts the checkpoint together, and compares every tensor with the trained
one. This script exports it with the onnxruntime-genai model builder, paged and in float32, in a few
seconds, and compares the result with the committed files::

    ./run python -m pip install -e '.[full]'
    ./run python experiments/prepare_trained.py OUT
    ./run python experiments/prepare_trained.py OUT --checkpoint FOLDER_WITH_target_AND_dflash2

Two things to know:

* The weights are widened to float32 before the export. The builder adds 1 to the weights of the
  norms in the type in which they are stored, and 1 + w is no bfloat16 value for most w.
* The builder refuses a paged cache in float32; see ``prepare_hybrid.paged_float32``.
"""

import argparse
import filecmp
import json
import os
import runpy
import shutil
import tempfile
from pathlib import Path

from prepare_hybrid import export, paged_float32

HERE = Path(__file__).resolve().parent
COMMITTED = HERE.parent / "tests" / "first_family"
OTHERS = ("MODEL_CARD.md", "prompts.json", "twins.json", "rest.xz", ".gitignore")

PAGE_SIZE = 16
PAGES = 64
MAX_BATCH = 4


def widen(source: Path, destination: Path) -> None:
    """Copy a checkpoint with its tensors in float32."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, destination)
    weights = destination / "model.safetensors"
    tensors = {name: tensor.float() for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})


def prepare(checkpoint: Path, out: Path) -> None:
    """Export ``checkpoint/target`` with ``checkpoint/dflash2`` as its drafter to ``out``."""
    drafter = json.loads((checkpoint / "dflash2" / "config.json").read_text())["dflash_config"]
    with tempfile.TemporaryDirectory() as scratch:
        wide = Path(scratch, "checkpoint")
        for part in ("target", "dflash2"):
            widen(checkpoint / part, wide / part)
        options = {
            "use_paged_attention": "true",
            "paged_block_size": PAGE_SIZE,
            "num_blocks": PAGES,
            "max_batch_size": MAX_BATCH,
            "dflash2_path": wide / "dflash2",
            # The drafter names layers by their output, the builder by their input.
            "aux_hidden_state_layers": ",".join(str(i + 1) for i in drafter["target_layer_ids"]),
            # Delta net states of a whole block can be rolled back.
            "state_update_capacity": drafter["block_size"],
            "prune_lm_head": "true",
        }
        with paged_float32():
            export(wide / "target", Path(scratch, "export"), "cuda", options)
        shutil.copytree(Path(scratch, "export"), out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--checkpoint", type=Path, help="default: that of the artifact")
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} is there already")
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    import onnxruntime_genai.models  # noqa: F401  (puts the model builder's folder on the path)

    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = arguments.checkpoint
        if checkpoint is None:
            from trained_checkpoint import write  # needs JAX, and the rest of this script does not

            checkpoint = write(Path(scratch, "trained"))
        prepare(checkpoint, arguments.out)
    print(f"wrote {arguments.out}")
    runpy.run_path(str(HERE.parent / "tests" / "golden" / "twins.py"))["restore"](COMMITTED)
    names = sorted(p.name for p in COMMITTED.iterdir() if p.name not in OTHERS)
    _, different, missing = filecmp.cmpfiles(COMMITTED, arguments.out, names, shallow=False)
    for name in names:
        state = "missing" if name in missing else "differs" if name in different else "same"
        print(f"  {name}: {state}")


if __name__ == "__main__":
    main()
