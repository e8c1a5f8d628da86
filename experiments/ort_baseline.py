"""Greedy decoding with onnxruntime-genai, as a baseline to time other runtimes against.

The module needs ``pip install onnxruntime-genai==0.18.0`` and nothing else; in particular it does
not import torch. A model is loaded once and can then be run any number of times, so a comparison
can alternate between this baseline and another runtime in one process and expose both to the same
machine load::

    baseline = OrtBaseline("artifacts/ort_fp32", threads=2)
    baseline.generate(prompt_ids, 16)  # warm-up
    for _ in range(5):
        ours = ...
        theirs = baseline.generate(prompt_ids, 128)
        print(theirs.tokens_per_second)

Two details decide what the numbers mean:

* The first new token is sampled from the logits of the prompt, so it costs no decoding step. It is
  returned, but the decode time starts after it: N new tokens are N - 1 timed steps.
* onnxruntime's worker threads keep spinning for a while after a step. That makes its own next step
  start sooner and takes the cores away from whatever runs next. Leave ``spinning`` at its default
  to measure the engine at its best, but then pause between the engines (``settle``); switch it off
  if the alternation is finer than that.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og


@dataclass(frozen=True)
class NgramSpeculation:
    """Drafts copied from earlier text: where the last ``size`` tokens occurred before."""

    size: int = 3
    max_draft_tokens: int = 4


@dataclass(frozen=True)
class BaselineRun:
    """Outcome of one call of :meth:`OrtBaseline.generate`.

    ``tokens`` holds the new tokens only. ``decode_seconds`` covers all of them but the first,
    which belongs to ``prefill_seconds``.
    """

    tokens: list[int]
    prefill_seconds: float
    decode_seconds: float

    @property
    def decode_steps(self) -> int:
        """Number of tokens that ``decode_seconds`` paid for."""
        return len(self.tokens) - 1

    @property
    def tokens_per_second(self) -> float:
        """Decoding rate without the prefill; not a number if there was a single new token."""
        return self.decode_steps / self.decode_seconds if self.decode_steps else float("nan")


class OrtBaseline:
    """An onnxruntime-genai artifact, loaded once, for repeated greedy runs of one request.

    Args:
        folder: Output of the onnxruntime-genai model builder with a dense cache for the CPU.
        threads: Worker threads inside an operator; ``None`` leaves the choice to onnxruntime
            (one per physical core).
        spinning: Whether idle worker threads wait actively, onnxruntime's default.
        ignore_eos: Continue after an end-of-sequence token, so that every run has the same length.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        threads: int | None = None,
        spinning: bool = True,
        ignore_eos: bool = True,
    ) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        if not (Path(folder) / "genai_config.json").is_file():
            raise FileNotFoundError(f"{folder} holds no genai_config.json")

        session: dict[str, Any] = {}
        if threads is not None:
            session["intra_op_num_threads"] = threads
        if not spinning:
            session["session.intra_op.allow_spinning"] = "0"
        model: dict[str, Any] = {"decoder": {"session_options": session}}
        if ignore_eos:
            # Generation stops at the configured ids and cannot be resumed; an empty list is the
            # only value that never matches (ids outside the vocabulary are refused).
            model["eos_token_id"] = []

        config = og.Config(str(folder))
        config.overlay(json.dumps({"model": model}))
        self._model = og.Model(config)

    def generate(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        *,
        ngram: NgramSpeculation | None = None,
    ) -> BaselineRun:
        """Decode ``new_tokens`` tokens after ``prompt``, taking the best one each time.

        Fewer are returned only if the model ends the text and ``ignore_eos`` is off. Every call
        starts from an empty cache, allocated for exactly this length before the clock starts.
        """
        if not prompt:
            raise ValueError("the prompt is empty")
        if new_tokens < 1:
            raise ValueError(f"new_tokens must be at least 1, got {new_tokens}")

        params = og.GeneratorParams(self._model)
        params.set_search_options(
            max_length=len(prompt) + new_tokens, do_sample=False, batch_size=1, num_beams=1
        )
        if ngram is not None:
            params.set_speculative_options(
                ngram_size=ngram.size, max_draft_tokens=ngram.max_draft_tokens
            )
        generator = og.Generator(self._model, params)

        start = time.perf_counter()
        generator.append_tokens(np.asarray(prompt, dtype=np.int32))
        generator.generate_next_token()
        first = time.perf_counter()
        while not generator.is_done():  # done once max_length is reached
            generator.generate_next_token()
        end = time.perf_counter()

        tokens = [int(token) for token in generator.get_sequence(0)[len(prompt) :]]
        return BaselineRun(tokens, first - start, end - first)


def settle(limit: float = 1.0, slice_seconds: float = 0.02) -> float:
    """Wait until this process uses no processor time any more, and return the seconds waited.

    Call it between two runtimes in one process: it outlasts the active waiting of the worker
    threads of the one that ran last. ``limit`` bounds the wait.
    """
    start = time.perf_counter()
    while time.perf_counter() - start < limit:
        busy = time.process_time()
        time.sleep(slice_seconds)
        if time.process_time() - busy < 0.1 * slice_seconds:
            break
    return time.perf_counter() - start


def main() -> None:
    """Time one artifact on its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="artifact folder")
    parser.add_argument("--prompt", type=int, nargs="+", required=True, help="prompt token ids")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--no-spinning", action="store_true", help="let idle threads sleep")
    parser.add_argument("--ngram", action="store_true", help="with n-gram speculation")
    parser.add_argument("--runs", type=int, default=3, help="timed runs after one warm-up")
    args = parser.parse_args()

    baseline = OrtBaseline(args.folder, threads=args.threads, spinning=not args.no_spinning)
    ngram = NgramSpeculation() if args.ngram else None
    baseline.generate(args.prompt, args.new_tokens, ngram=ngram)
    runs = [baseline.generate(args.prompt, args.new_tokens, ngram=ngram) for _ in range(args.runs)]
    for run in runs:
        print(
            f"prefill {1e3 * run.prefill_seconds:.1f} ms, {run.decode_steps} steps in "
            f"{run.decode_seconds:.3f} s, {run.tokens_per_second:.1f} tokens/s"
        )
    print(f"median {np.median([run.tokens_per_second for run in runs]):.1f} tokens/s")


if __name__ == "__main__":
    main()
