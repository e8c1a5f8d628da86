"""Export a checkpoint to ONNX with onnxruntime-genai's model builder, in float32.

The checkpoint is one that ``jaxdraft.checkpoint.save`` (or ``jaxdraft save``) writes: a folder
``target``, possibly with a multi-token-prediction head in its files and with folders ``dflash2``
and ``dspark`` beside it. ``jaxdraft.load`` reads the result::

    ./run python -m pip install -e '.[full]'
    ./run python experiments/export_onnx.py CHECKPOINT OUT --drafter dflash2

With a block drafter the export has a paged cache, without one a dense cache, or a
paged one with ``--paged``. Two things to know:

* The weights are widened to float32 before the export. The builder adds 1 to the weights of
  Qwen3.5's norms in the type in which they are stored, and 1 + w is no bfloat16 value for most w.
* The builder refuses a paged cache in float32, and drafters in anything but bfloat16, because
  onnxruntime has no such kernels. Those checks are lifted: the export is exact, and onnxruntime
  cannot run it. For an export that onnxruntime runs on a GPU call the builder itself with
  ``-p fp16`` or ``-p bf16``, on a checkpoint that was saved in float32.
"""

import argparse
import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any
from unittest import mock

from prepare_hybrid import export, paged_float32

BLOCKS = ("dflash2", "dspark")


def widen(source: Path, destination: Path) -> None:
    """Copy a checkpoint with its tensors in float32, however many files it has."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, destination)
    for weights in destination.glob("*.safetensors"):
        tensors = {name: tensor.float() for name, tensor in load_file(weights).items()}
        save_file(tensors, weights, metadata={"format": "pt"})
    path = destination / "config.json"
    config = json.loads(path.read_text())
    for section in (config, config.get("text_config", {})):
        for key in ("dtype", "torch_dtype"):
            if key in section:
                section[key] = "float32"
    path.write_text(json.dumps(config, indent=2) + "\n")


@contextlib.contextmanager
def float32_dspark() -> Generator[None]:
    """Let the builder write DSpark drafters in float32; its constructor allows bfloat16 only."""
    import onnx_ir
    from builders.dspark import DSparkBuilder

    init = DSparkBuilder.__init__

    @functools.wraps(init)
    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.io_dtype = onnx_ir.DataType.FLOAT

    with mock.patch.object(DSparkBuilder, "__init__", patched):
        yield


def options_of(checkpoint: Path, drafter: str, *, paged: bool, page_size: int) -> dict[str, Any]:
    """Return the options for the model builder.

    Args:
      checkpoint: folder of the widened checkpoint.
      drafter: "none", "mtp", "dflash2" or "dspark".
      paged: whether the cache has pages.
      page_size: slots per page, a power of two of at least 16.
    """
    options: dict[str, Any] = {}
    if drafter != "mtp":
        options["exclude_mtp"] = "true"
    config = json.loads((checkpoint / "target" / "config.json").read_text())
    text = config.get("text_config", config)
    if text.get("intermediate_size") == text["vocab_size"]:
        raise ValueError(
            "intermediate_size is vocab_size: the builder would take MLPs for the head"
        )
    if paged:
        options |= {
            "use_paged_attention": "true",
            "paged_block_size": page_size,
            "num_blocks": -(-text["max_position_embeddings"] // page_size),
            "max_batch_size": 4,
            "prune_lm_head": "true",
        }
    if drafter not in BLOCKS:
        return options
    settings = json.loads((checkpoint / drafter / "config.json").read_text())
    block = settings["dflash_config"]
    size = block["block_size"] if drafter == "dflash2" else settings["block_size"]
    options |= {
        f"{drafter}_path": checkpoint / drafter,
        # The drafter names layers by their output, the builder by their input.
        "aux_hidden_state_layers": ",".join(str(i + 1) for i in block["target_layer_ids"]),
        # Delta net states of a whole window can be rolled back.
        "state_update_capacity": size + (drafter == "dspark"),
    }
    if drafter == "dspark":
        options["dspark_top_k"] = block.get("selector_top_k", 16)
    return options


def export_checkpoint(
    checkpoint: Path, out: Path, drafter: str, *, paged: bool | None = None, page_size: int = 16
) -> None:
    """Export ``checkpoint/target`` with one of its drafters, or none, to ``out``.

    ``out`` appears when the export is complete.
    """
    import onnxruntime_genai.models  # noqa: F401  (puts the model builder's folder on the path)

    if paged is None:
        paged = drafter in BLOCKS
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        wide = Path(scratch, "checkpoint")
        for part in ("target", *(b for b in BLOCKS if b == drafter)):
            widen(checkpoint / part, wide / part)
        options = options_of(wide, drafter, paged=paged, page_size=page_size)
        with paged_float32(), float32_dspark():
            made = Path(scratch, "export")
            export(wide / "target", made, "cuda" if paged else "cpu", options)
        os.rename(made, out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="folder with target, dflash2, dspark")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--drafter", choices=["none", "mtp", *BLOCKS], default="none")
    parser.add_argument("--paged", action="store_true", default=None, help="a cache in pages")
    parser.add_argument("--page-size", type=int, default=16)
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} is there already")
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    export_checkpoint(
        arguments.checkpoint,
        arguments.out,
        arguments.drafter,
        paged=arguments.paged,
        page_size=arguments.page_size,
    )
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
