"""How many tokens does a round give when tokens are sampled? By proposal mode and temperature.

    python experiments/sampled_modes.py            # the first family, DFlash2
    python experiments/sampled_modes.py FOLDER     # another artifact with a drafter

Held-out prompts of the family, many samples of each, one batch per mode and temperature. The modes
are those of ``jaxdraft.Sampling``; plain decoding has 1.00. Intervals are 95 % over prompts and
samples, by bootstrap of whole rows (the rounds of a row are not independent).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np
from common import HERE, first_family, table, write_result
from figures import shrink

import jaxdraft
from jaxdraft import Model, Sampling
from jaxdraft.sampling import PROPOSALS, Proposals

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402 - after the choice of a backend without a window


def measure(
    model: Model, prompts: np.ndarray, tokens: int, temperature: float, mode: Proposals, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens emitted in rounds, and the number of rounds, of every row."""
    out = jaxdraft.generate(
        model,
        prompts,
        max_new_tokens=tokens,
        stop_ids=(),
        sampling=Sampling(temperature=temperature, proposals=mode),
        key=seed,
    )
    return np.asarray(out.stats.emitted) - 1, np.asarray(out.stats.rounds)


def interval(emitted: np.ndarray, rounds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the interval of 95 % of the resampled ratios."""
    picks = rng.integers(0, len(rounds), (1000, len(rounds)))
    return np.percentile(emitted[picks].sum(1) / rounds[picks].sum(1), [2.5, 97.5])


def main() -> None:
    """Measure, and write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", nargs="?", type=Path, help="default: the first family")
    parser.add_argument("--samples", type=int, default=32, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=65)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.2, 0.4, 0.6, 0.8, 1.0, 1.2]
    )
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    first, held_out = first_family()
    model = jaxdraft.load(args.folder or first)
    ids = [p["prompt_ids"][: args.prompt_tokens] for p in held_out]
    prompts = np.repeat(np.asarray(ids, np.int32), args.samples, axis=0)
    rng = np.random.default_rng(0)
    found: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode in PROPOSALS}
    rows = []
    for temperature in args.temperatures:
        cells: list[object] = [temperature]
        for mode in PROPOSALS:
            emitted, rounds = measure(model, prompts, args.tokens, temperature, mode, seed=1)
            rate = emitted.sum() / rounds.sum()
            low, high = interval(emitted, rounds, rng)
            found[mode].append((rate, low, high))
            cells.append(f"{rate:.2f} ({low:.2f}..{high:.2f})")
        rows.append(cells)
        print(cells, flush=True)
    body = table(["temperature", *PROPOSALS], rows)
    body += (
        f"\n\nTokens per round: {len(ids)} held-out prompts, {args.samples} samples of "
        f"{args.tokens - 1} tokens each; drafter {model.info.drafter}, "
        f"{model.drafter.draft_tokens} drafts per round. In brackets: 95 % intervals."
    )
    if args.dry:
        print(body)
        return
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for mode, values in found.items():
        rate, low, high = np.asarray(values).T
        axes.plot(args.temperatures, rate, "o-", label=mode)
        axes.fill_between(args.temperatures, low, high, alpha=0.15)
    axes.set_xlabel("temperature")
    axes.set_ylabel("tokens per round")
    axes.set_ylim(bottom=0.9)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "sampled_modes.png", dpi=120)
    shrink(HERE / "sampled_modes.png")
    body += "\n\n![tokens per round over temperature](sampled_modes.png)"
    write_result(__file__, "Tokens per round of sampled text", body)


if __name__ == "__main__":
    main()
