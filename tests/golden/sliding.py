"""Writes the exported models with sliding-window layers kept beside this script.

    python tests/golden/sliding.py [DESTINATION]

Needs torch, transformers 5.24, onnx, onnxruntime 1.32 and onnxruntime-genai 0.18. DESTINATION
defaults to this script's folder; two folders are written there, and what can be made from other
files is dropped again (`twins.py`).

1.  A tiny Qwen3 checkpoint with random weights: three layers, of which the first and the last see a
    window of 12 keys.
2.  `python -m onnxruntime_genai.models.builder` exports it twice: dense in float32, where the
    windowed layers have `sliding_window_cache` buffers, and paged in float16, where they read their
    pages from `block_table_windowed`, the ring of the reference runtime.
3.  The reference outputs are those of transformers in float32, with the weights and rotary tables
    of the export. `measured` says how far ONNX Runtime's own windowed kernel is from them; there is
    no CPU kernel of the paged operator.

Running the script again writes the same arrays.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
import transformers
from onnx import numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers
from twins import drop, restore

Arrays = dict[str, np.ndarray]

WINDOW = 12
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
VOCAB, CONTEXT, LENGTHS, GREEDY, LAST_ROWS = 64, 256, (1, 7, 23, 97), 40, 16
PAGE = 16
PAGED = f"use_paged_attention=true num_blocks=64 max_batch_size=4 paged_block_size={PAGE}"
EXPORTS = {
    "sliding_qwen3_fp32_cpu": ("fp32", "cpu", ""),
    "sliding_qwen3_paged_fp16": ("fp16", "cuda", PAGED),
}
KEPT = ("genai_config.json", "model.onnx", "model.onnx.data")
MEANING = {
    "promptI/ids": "int32 [n]: token ids of prompt I",
    "promptI/logits": "[n, V]: logits at every position of the prompt, or from logits_from on",
    "greedyI/tokens": "int32 [40]: greedy continuation, stop tokens ignored",
    "greedyI/margins": "[40]: best minus second best logit at that step",
    "verify/prompt, window, accepted": "the true next token, 3 right drafts and 4 wrong ones, "
    "after that prompt; 3 drafts are accepted",
    "verify/logits": "[8, V]: logits of the window's rows",
    "next/token, logits": "logits [V] of the bonus token after the accepted rows",
}


def checkpoint(folder: Path) -> None:
    """Saves the model and a tokenizer of words, which the builder asks for."""
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="w1", pad_token="w0"
    )
    fast.save_pretrained(folder)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=len(LAYERS),
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=CONTEXT,
        tie_word_embeddings=False, rms_norm_eps=1e-6, eos_token_id=1, pad_token_id=0,
        use_sliding_window=True, sliding_window=WINDOW, layer_types=LAYERS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            r = torch.randn(p.shape, generator=generator)
            if p.dim() == 1:
                p.copy_(1.0 + 0.1 * r)
            elif "embed_tokens" in name:
                p.copy_(r)
            else:
                p.copy_(r * (3.0 if "lm_head" in name else 1.0) / p.shape[-1] ** 0.5)
    model.save_pretrained(folder)


def export(source: Path, folder: Path, precision: str, provider: str, options: str) -> str:
    """Runs the builder; returns its command line as it stands in golden.json."""
    command = ["-p", precision, "-e", provider, "-c", "cache"]
    command += ["--extra_options", *options.split()] if options else []
    program = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    done = subprocess.run(
        [*program, "-i", str(source), "-o", str(folder), *command],
        cwd=source.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    shown = ["python", "-m", "onnxruntime_genai.models.builder", "-i", "CKPT", "-o", "OUT"]
    return " ".join([*shown, *command])


def reference(source: Path, folder: Path, precision: str) -> Any:
    """The checkpoint in float32, with the weights and rotary tables of the export."""
    model = transformers.Qwen3ForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if precision == "fp16":
        model = model.half().float()
    stored = {t.name: t for t in onnx.load(folder / "model.onnx").graph.initializer}
    cos, sin = (
        torch.tensor(numpy_helper.to_array(stored[n]).astype(np.float32))
        for n in ("cos_cache", "sin_cache")
    )

    def tables(x: torch.Tensor, position_ids: torch.Tensor, *_: Any) -> tuple[Any, Any]:
        del x
        return tuple(torch.cat([t[position_ids]] * 2, dim=-1) for t in (cos, sin))

    model.model.rotary_emb.forward = tables
    return model


def goldens(model: Any) -> Arrays:
    """All reference arrays, each from one pass over a whole sequence."""

    def rows(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()

    def greedy(ids: list[int]) -> tuple[list[int], np.ndarray]:
        for _ in range(GREEDY):
            ids = [*ids, int(rows(ids)[-1].argmax())]
        best = np.sort(rows(ids)[-GREEDY - 1 : -1], axis=-1)
        return ids[-GREEDY:], best[:, -1] - best[:, -2]

    generator = torch.Generator().manual_seed(1007)
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    arrays: Arrays = {}
    for i, prompt in enumerate(prompts):
        first = max(0, len(prompt) - LAST_ROWS) if i == len(prompts) - 1 else 0
        tokens, margins = greedy(prompt)
        arrays[f"prompt{i}/ids"] = np.array(prompt, np.int32)
        arrays[f"prompt{i}/logits"] = rows(prompt)[first:]
        if first:
            arrays[f"prompt{i}/logits_from"] = np.array(first, np.int32)
        arrays[f"greedy{i}/tokens"] = np.array(tokens, np.int32)
        arrays[f"greedy{i}/margins"] = margins.astype(np.float32)
    right = arrays["greedy2/tokens"].tolist()
    wrong = [(token + 1 + 5 * j) % VOCAB for j, token in enumerate(right[4:8])]
    window = [*right[:4], *wrong]
    arrays["verify/prompt"] = np.array(2, np.int32)
    arrays["verify/window"] = np.array(window, np.int32)
    arrays["verify/accepted"] = np.array(3, np.int32)
    arrays["verify/logits"] = rows(prompts[2] + window)[-len(window) :]
    arrays["next/token"] = np.array(right[4], np.int32)
    arrays["next/logits"] = rows(prompts[2] + right[:5])[-1]
    return arrays


def kernel(folder: Path, arrays: Arrays) -> dict[str, float]:
    """How far ONNX Runtime is from the references: in one pass, and in its buffers step by step."""
    session = onnxruntime.InferenceSession(
        folder / "model.onnx", providers=["CPUExecutionProvider"]
    )
    names = [o.name for o in session.get_outputs()]

    def run(ids: list[int], past: int, state: Arrays) -> tuple[np.ndarray, Arrays]:
        feeds = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, past + len(ids)), np.int64),
            **state,
        }
        out = dict(zip(names, session.run(None, feeds), strict=True))
        logits = out.pop("logits")[0]
        return logits, {k.replace("present", "past_key_values"): v for k, v in out.items()}

    def start() -> Arrays:
        sizes = [WINDOW if kind == "sliding_attention" else 0 for kind in LAYERS]
        return {
            f"past_key_values.{i}.{what}": np.zeros((1, 1, size, 16), np.float32)
            for i, size in enumerate(sizes)
            for what in ("key", "value")
        }

    whole = steps = 0.0
    for i in range(len(LENGTHS)):
        prompt, tokens = arrays[f"prompt{i}/ids"].tolist(), arrays[f"greedy{i}/tokens"].tolist()
        expected = arrays[f"prompt{i}/logits"]
        logits, state = run(prompt, 0, start())
        whole = max(whole, float(np.abs(logits[-len(expected) :] - expected).max()))
        for j, token in enumerate(tokens):
            best = np.sort(logits[-1])
            margin = float(arrays[f"greedy{i}/margins"][j])
            steps = max(steps, abs(float(best[-1] - best[-2]) - margin))
            logits, state = run([token], len(prompt) + j, state)
    return {"ort_prompt_logits": whole, "ort_greedy_margins": steps}


def write(name: str, source: Path, destination: Path) -> None:
    """One folder: the builder's files, golden.npz and golden.json."""
    precision, provider, options = EXPORTS[name]
    made = source.parent / name
    command = export(source, made, precision, provider, options)
    arrays = goldens(reference(source, made, precision))
    measured = kernel(made, arrays) if provider == "cpu" else {}
    target = destination / name
    target.mkdir(parents=True, exist_ok=True)
    for file in KEPT:
        shutil.copyfile(made / file, target / file)
    np.savez_compressed(target / "golden.npz", **arrays)
    versions = {m.__name__: m.__version__ for m in (onnx, onnxruntime, torch, transformers, np)}
    description = {
        "name": name,
        "drafter": None,
        "exported_by": command,
        "shipping": True,
        "numerics": "transformers in float32 with the stored weights and rotary tables",
        "measured": measured,
        "quant_rows": {},
        "meaning": MEANING,
        "arrays": {k: f"{v.dtype}{list(v.shape)}" for k, v in arrays.items()},
        "settings": {"lengths": LENGTHS, "window": WINDOW, "layers": LAYERS, "greedy": GREEDY},
        "versions": versions | {"python": platform.python_version()},
    }
    (target / "golden.json").write_text(json.dumps(description, indent=1) + "\n")
    print(f"{sum(f.stat().st_size for f in target.iterdir()) / 1e3:.0f} KB  {name}  {measured}")


def main() -> None:
    """Makes the checkpoint, exports it twice and writes the references."""
    parser = argparse.ArgumentParser(description="Write the artifacts with sliding windows.")
    parser.add_argument("destination", type=Path, nargs="?", default=Path(__file__).parent)
    destination = parser.parse_args().destination
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "checkpoint"
        checkpoint(source)
        restore(destination)
        for name in EXPORTS:
            write(name, source, destination)
        drop(destination)


if __name__ == "__main__":
    main()
