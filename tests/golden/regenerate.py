"""Writes the trimmed set of exported models and reference outputs kept beside this script.

    python tests/golden/regenerate.py SOURCE [DESTINATION]

SOURCE holds one folder per artifact: everything that the onnxruntime-genai 0.18.0 model builder
wrote (`genai_config.json`, `*.onnx`, `*.onnx.data`, tokenizer files), plus `golden.npz` and
`golden.json`. DESTINATION defaults to this script's folder.

How such a SOURCE comes about:

1.  Tiny checkpoints with random weights are saved in the Hugging Face layout: Qwen3.5 hybrids
    (4 or 8 layers, tied or mixture-of-experts variants), a Qwen3 dense model, DFlash2 and DSpark
    drafters. Vocabulary 384, width 64, 4 query and 2 key/value heads of 32.
2.  `python -m onnxruntime_genai.models.builder` exports them. The exact command of a folder is
    `exported_by` in its `golden.json`, and the package versions are in `versions`. Folders named
    `patched_*` needed the builder's check against float32 paged attention lifted; `broken_*` are
    exports that ONNX Runtime refuses to load and that have no reference outputs.
3.  The exported graph itself is run, with every stored float16 and bfloat16 weight promoted to
    float32 and no rounding in between. `golden.json` says what each array means (`meaning`), its
    dtype and shape (`arrays`) and how far it is from independent implementations (`measured`).

What is trimmed, so that the set stays small in a repository:

*   Tokenizer files stay in two folders only, `TOKENIZER_IN`. They are the same for a model family.
*   The longest prompt keeps the last `LAST_ROWS` rows of its logits. `promptI/logits_from` names
    the first row kept, and is absent when all rows are. Other prompts keep every row.

*   Files that others hold for the most part are kept as recipes; see `twins.py`.

Graphs, weights and all other arrays are passed on unchanged. Running the script again on the same
SOURCE writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from twins import drop, restore

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TOKENIZER_IN = ("patched_fp32_paged_dflash2", "qwen3_fp32_cpu")
LAST_ROWS = 16

Arrays = dict[str, np.ndarray]


def trim_arrays(arrays: Arrays) -> Arrays:
    """Returns `arrays` with only the last rows of the longest prompt's logits."""
    prompts = sorted(k.split("/")[0] for k in arrays if k.startswith("prompt") and "/ids" in k)
    longest = max(prompts, key=lambda p: arrays[f"{p}/ids"].shape[0])
    length = arrays[f"{longest}/ids"].shape[0]
    start = int(arrays.get(f"{longest}/logits_from", 0))
    first = max(start, length - LAST_ROWS)
    out = dict(arrays)
    out[f"{longest}/logits"] = arrays[f"{longest}/logits"][first - start :].astype(np.float32)
    if first:
        out[f"{longest}/logits_from"] = np.array(first, np.int32)
    return out


def trim_description(description: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
    """Returns golden.json's content with shapes and `logits_from` as they are after trimming."""
    out = dict(description)
    out["arrays"] = {k: f"{v.dtype}{list(v.shape)}" for k, v in arrays.items()}
    starts = {
        k.split("/")[0].removeprefix("prompt"): int(v)
        for k, v in arrays.items()
        if k.endswith("/logits_from")
    }
    out["settings"] = dict(description["settings"], logits_from=starts)
    return out


def copy_export(source: Path, destination: Path) -> None:
    """Copies the builder's files, without the tokenizer unless this folder keeps it."""
    for file in sorted(source.iterdir()):
        dropped = file.name in TOKENIZER_FILES and source.name not in TOKENIZER_IN
        if file.name.startswith("golden.") or dropped or not file.is_file():
            continue
        # copyfile, not copy2: permissions and times of the source are of no interest.
        shutil.copyfile(file, destination / file.name)


def trim_artifact(source: Path, destination: Path) -> None:
    """Writes one artifact's folder."""
    destination.mkdir(parents=True, exist_ok=True)
    copy_export(source, destination)
    description = json.loads((source / "golden.json").read_text())
    if (source / "golden.npz").is_file():
        with np.load(source / "golden.npz") as stored:
            arrays = trim_arrays({k: stored[k] for k in stored.files})
        np.savez_compressed(destination / "golden.npz", **arrays)
        description = trim_description(description, arrays)
    (destination / "golden.json").write_text(json.dumps(description, indent=1) + "\n")


def main() -> None:
    """Trims every artifact of the source folder and prints the size of the result."""
    parser = argparse.ArgumentParser(description="Write the trimmed set of test artifacts.")
    parser.add_argument("source", type=Path, help="folder of untrimmed artifacts")
    parser.add_argument("destination", type=Path, nargs="?", default=Path(__file__).parent)
    options = parser.parse_args()
    if options.source.resolve() == options.destination.resolve():
        parser.error("source and destination are the same folder")
    restore(options.destination)
    total = 0
    for config in sorted(options.source.glob("*/genai_config.json")):
        target = options.destination / config.parent.name
        trim_artifact(config.parent, target)
        size = sum(f.stat().st_size for f in target.iterdir())
        print(f"{size / 1e6:7.3f} MB  {target.name}")
        total += size
    drop(options.destination)
    print(f"{total / 1e6:7.3f} MB  total, before twins were dropped")


if __name__ == "__main__":
    main()
