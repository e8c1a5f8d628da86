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

*   A large file that another folder holds too is kept once. `twins.json` says whose twin it is, and
    in which few bytes it differs, if in any; `tests/paths.py` puts it back where it belongs before
    a test looks for it. The weights of broken artifacts are never read: any of their size will do.

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

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TOKENIZER_IN = ("patched_fp32_paged_dflash2", "qwen3_fp32_cpu")
LAST_ROWS = 16
TWIN_BYTES = 20_000  # smaller files are not worth an entry
DIFFERENT_BYTES = 200  # more of them make a file of its own

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


def drop_twins(root: Path) -> None:
    """Removes every large file that is nearly an earlier one, and lists them in twins.json.

    The names are also written to .gitignore, since tests put the files back.
    """
    kept: dict[tuple[str, int], list[Path]] = {}
    twins: dict[str, Any] = {}
    files = [f for f in root.glob("*/*") if f.stat().st_size > TWIN_BYTES]
    for file in sorted(files, key=lambda f: (f.parent.name.startswith("broken_"), f)):
        like = kept.setdefault((file.suffix, file.stat().st_size), [])
        name = file.relative_to(root).as_posix()
        for source in like:
            entry = twin(file, source)
            if entry is not None:
                of = source.relative_to(root).as_posix()
                twins[name] = of if not entry else {"of": of, "bytes": entry}
                file.unlink()
                break
        else:
            like.append(file)
    twins = dict(sorted(twins.items()))
    (root / "twins.json").write_text(json.dumps(twins, indent=1) + "\n")
    (root / ".gitignore").write_text("".join(f"/{name}\n" for name in twins))


def twin(file: Path, source: Path) -> dict[str, str] | None:
    """The bytes, by offset and in hexadecimal, in which `file` differs; None: it is no twin."""
    if file.parent.name.startswith("broken_") and file.name == source.name == "model.onnx.data":
        return {}
    a, b = (np.frombuffer(f.read_bytes(), np.uint8) for f in (file, source))
    where = np.flatnonzero(a != b)
    if len(where) > DIFFERENT_BYTES:
        return None
    return {str(i): f"{a[i]:02x}" for i in where.tolist()}


def main() -> None:
    """Trims every artifact of the source folder and prints the size of the result."""
    parser = argparse.ArgumentParser(description="Write the trimmed set of test artifacts.")
    parser.add_argument("source", type=Path, help="folder of untrimmed artifacts")
    parser.add_argument("destination", type=Path, nargs="?", default=Path(__file__).parent)
    options = parser.parse_args()
    if options.source.resolve() == options.destination.resolve():
        parser.error("source and destination are the same folder")
    total = 0
    for config in sorted(options.source.glob("*/genai_config.json")):
        target = options.destination / config.parent.name
        trim_artifact(config.parent, target)
        size = sum(f.stat().st_size for f in target.iterdir())
        print(f"{size / 1e6:7.3f} MB  {target.name}")
        total += size
    drop_twins(options.destination)
    print(f"{total / 1e6:7.3f} MB  total, before twins were dropped")


if __name__ == "__main__":
    main()
