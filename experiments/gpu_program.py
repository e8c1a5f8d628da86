"""What do the programs do on a GPU? They are compiled without a GPU.

    JAX_PLATFORMS=cpu python experiments/gpu_program.py                      # writes the result
    JAX_PLATFORMS=cpu python experiments/gpu_program.py verify --lines 20    # prints one program

Weights are shapes alone, so 27B take no memory. Needs ``jax-cuda12-plugin`` and
``jax-cuda12-pjrt`` (no GPU, no driver, no CUDA library); ``./run test --gpu`` installs them. For
every program and length of the text: launches, CUDA graphs, waits for the host, bytes moved, the
least bytes possible, weights that are concatenated or rewritten, large copies, scratch memory, and
seconds to compile. All are facts of the compiled program; no time on a GPU is known.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import gpu_estimate
import jax.numpy as jnp
from common import table, write_result
from gpu_compile import CARDS, compile_for, unavailable
from gpu_count import Counts, Program
from gpu_models import PACKED, PROGRAMS, case

from jaxdraft.kernels import KERNELS, PALLAS, XLA

LENGTHS = (512, 2048, 8192)
CAPACITY = 9216

WHOLE = (
    "step",
    "verify",
    "round:mtp",
    "round:dflash2",
    "round:dspark",
    "sampled:dflash2",
    "prefill:dflash2",
)
"""Programs of which all 64 layers are compiled."""

WITH_KERNELS = ("step", "verify", "round:mtp", "round:dflash2", "sampled:dflash2")
"""The same, with kernels."""

NOT_OF_ROWS = ("programs", "card", "keep", "no_compiling")
"""Arguments of the command that :func:`rows_of` does not have by name."""

LONG = ("step", "verify", "round:dflash2")
"""Programs that are compiled for long texts, with four layers and room for 34,000 positions."""

HEAD = [
    "program",
    "positions",
    "launches",
    "graphs",
    "host waits",
    "GB moved",
    "least GB",
    "ratio",
    "GB of weights concatenated",
    "GB of weights rewritten",
    "GB copied",
    "scratch MB",
    "s to compile",
]

BEFORE = {
    ("step", 512): (2_479, 97, 96, 51.97, 0.0),
    ("step", 2048): (4_783, 289, 288, 52.30, 0.0),
    ("step", 8192): (13_999, 1_057, 1_056, 53.63, 0.0),
    ("verify", 512): (3_059, 97, 96, 70.20, 16.20),
    ("verify", 2048): (5_555, 289, 288, 70.96, 16.20),
    ("verify", 8192): (15_539, 1_057, 1_056, 73.99, 16.20),
    ("round:mtp", 512): (3_820, 146, 146, 94.30, 16.20),
    ("round:mtp", 2048): (7_324, 422, 422, 95.21, 16.20),
    ("round:mtp", 8192): (21_340, 1_526, 1_526, 98.82, 16.20),
    ("round:dflash2", 512): (3_316, 98, 96, 76.95, 16.41),
    ("round:dflash2", 2048): (5_812, 290, 288, 77.71, 16.41),
    ("round:dflash2", 8192): (15_796, 1_058, 1_056, 80.73, 16.41),
}
"""Commit badaa8f with 64 layers, by program and length: launches, CUDA graphs, waits for the host,
GB moved and GB of weights concatenated. Counted by the scripts from which these were made."""

CAUSES = """\
| what it cost at badaa8f | what was changed |
|---|---|
| 16.2 GB per round: weights that share their rows were concatenated in every call | the rows of every product are an array of its own (`nn.linear`) |
| 1,056 waits per pass at 8,192 positions: attention looped over 128 keys at a time | one pass that reads a part or everything, chosen on the device (`nn.attention`) |
| 15 launches per delta-net layer and window: products of 8 x 8 blocks in turn | one launch that substitutes row by row; longer runs join inverted blocks (`nn.delta_net`) |
| 7 passes of the greedy walk outside of the graph | lattice scans are written out (`draft.lattice`) |
| a loop of unknown length in the chain of an MTP head, 8 waits per round | K passes, written out (`draft.mtp`) |
| a sort of the vocabulary per row of a sampled window | the largest are found among the best lines of 32 (`ranking`) |
| two searches by bisection outside of the graph in sampled rounds: 64 passes over the scores | written out, four bits per pass: 16 (`sampling`) |
| truncation and noise step by step in a sampled proposal, 90 launches | for all predecessors of all steps at once (`draft.sampled`) |
| the head in every chunk of a prompt, 2.5 GB | once per prompt (`base.Head`) |
| all weights per 128 rows of a prompt | per 512 (`devices.prompt_chunk`) |
| a loop over the rows of a batch in every round of an engine with a block drafter, 2 graphs | written out (`state.paged.grow`) |
| packed matrices written as floats, 4 bytes per number of 4 bits | up to eight rows are sums, with which the decoding fuses (`nn.packed`) |
| all experts for every row | those that were chosen (`nn.mlp`) |"""  # noqa: E501


@dataclass(frozen=True)
class Row:
    """One program at one length."""

    program: str
    length: int
    counts: Counts
    least: int
    scratch: int  # bytes
    seconds: float

    def cells(self) -> list[str]:
        """Return the cells of a table with the head ``HEAD``."""
        counts = self.counts
        found = [self.program, f"{self.length:,}", f"{counts.launches:,}", f"{counts.graphs:,}"]
        found += [f"{counts.waits:,}", _giga(counts.moved), _giga(self.least)]
        found += [f"{counts.moved / self.least:.2f}", _giga(counts.joined)]
        found += [_giga(counts.rewritten), _giga(counts.copied), f"{self.scratch / 1e6:.0f}"]
        return [*found, f"{self.seconds:.0f}"]


def rows_of(
    name: str,
    card: str,
    *,
    layers: int,
    kernels: str = XLA,
    lengths: Sequence[int] = LENGTHS,
    capacity: int = CAPACITY,
    dtype: str | None = None,
    lines: int = 0,
) -> list[Row]:
    """Compile one program once, and count it at all lengths."""
    found = case(
        name,
        kernels=kernels,
        layers=layers,
        dtype=jnp.dtype(dtype or CARDS[card].dtype),
        capacity=capacity,
    )
    compiled = compile_for(CARDS[card], found.function, found.arguments)
    program = Program(compiled, found.weights)
    rows = []
    for length in lengths:
        trips = functools.partial(found.trips, length)
        branches = functools.partial(found.branches, length)
        counts = program.count(trips, found.part, branches)
        seconds, scratch = compiled.seconds, compiled.temporary
        rows.append(Row(name, length, counts, found.least(length), scratch, seconds))
        print(" | ".join(rows[-1].cells()), flush=True)
        for source, part in program.lines(trips, found.part, branches)[:lines]:
            print(f"{part.launches:8,} launches {part.moved / 1e6:12,.1f} MB  {source}")
    return rows


def _giga(count: int) -> str:
    return f"{count / 1e9:.2f}"


def _table(rows: Sequence[Row]) -> str:
    return table(HEAD, [row.cells() for row in rows])


def before() -> str:
    """Return the table of the commit before these changes."""
    head = ["program", "positions", "launches", "graphs", "host waits", "GB moved"]
    head += ["GB of weights concatenated"]
    rows = [
        [name, f"{at:,}", f"{n:,}", f"{graphs:,}", f"{waits:,}", f"{moved:.2f}", f"{joined:.2f}"]
        for (name, at), (n, graphs, waits, moved, joined) in BEFORE.items()
    ]
    return table(head, rows)


def estimates(rows: Sequence[Row], kernels: Sequence[Row]) -> str:
    """Return computed speeds of both commits beside what is published."""
    card = CARDS["h200"]
    lines = []
    for (name, length), (launches, graphs, waits, moved, _) in BEFORE.items():
        counts = Counts(launches, graphs, waits, read=int(moved * 1e9))
        lines.append(("badaa8f", name, length, counts))
    for name, found in (("this commit", rows), ("with kernels", kernels)):
        now = [row for row in found if (row.program, row.length) in BEFORE]
        lines += [(name, row.program, row.length, row.counts) for row in now]
    return f"{gpu_estimate.assumptions(card)}\n\n{gpu_estimate.comparison(lines, card)}"


def kept(
    folder: Path | None, missing: list[str] | None, name: str, card: str, **options: Any
) -> list[Row]:
    """Do the same as :func:`rows_of`, or read what an earlier call with ``folder`` wrote there.

    Args:
      folder: where counts are kept; None: nowhere.
      missing: gets the names of programs that are not there, which then have no rows; None: they
        are compiled.
      name: as for :func:`rows_of`.
      card: as there.
      options: as there.
    """
    if folder is None:
        return rows_of(name, card, **options)
    given = [name, card, *(f"{key}={value}" for key, value in sorted(options.items()))]
    path = folder / (re.sub(r"[^a-z0-9=]+", "-", " ".join(given).lower()) + ".json")
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        return [replace(Row(**row), counts=Counts(**row["counts"])) for row in found]
    if missing is not None:
        missing.append(f"{name} ({', '.join(given[1:])})")
        return []
    rows = rows_of(name, card, **options)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")
    return rows


def report(folder: Path | None, missing: list[str] | None) -> str:
    """Compile everything; return the result in Markdown. Args: see :func:`kept`."""
    rows_of = functools.partial(kept, folder, missing)
    whole = [row for name in WHOLE for row in rows_of(name, "h200", layers=64)]
    kernels = [
        row for name in WITH_KERNELS for row in rows_of(name, "h200", layers=64, kernels=PALLAS)
    ]
    long = functools.partial(rows_of, card="h200", layers=4, lengths=(512, 32_768), capacity=34_000)
    few = functools.partial(rows_of, card="h200", layers=4, lengths=(8192,))
    packed = [name for name in PROGRAMS if name.partition("@")[2] in PACKED]
    parts = [
        f"27B geometry, batch 1, K = 7, state with room for {CAPACITY:,} positions. Nothing was "
        "run on a GPU: these are counts of compiled programs.",
        "## 64 layers on an H200, bfloat16\n\n### Before, commit badaa8f",
        before(),
        "### Now\n\nA prefill program is one chunk of a prompt, of 512 rows, with its loop's wait "
        "for the host; at badaa8f the chunk of 128 rows had 24,537 launches and moved 109 GB at "
        "8,192 positions. Its least bytes are weights and states, without the bytes that the "
        "rows write.",
        _table(whole),
        "### Now, with the kernels of `jaxdraft.kernels`",
        _table(kernels),
        f"### Cause by cause\n\n{CAUSES}",
        "## Every program with four layers on an H200, bfloat16\n\nA generation is one pass of its "
        "loop over rounds, with the loop's wait for the host. The engine's programs have eight "
        "requests. Matrices of the layers are packed if a program's name shows it.",
        _table([row for name in PROGRAMS for row in few(name)]),
        "### With kernels",
        _table([row for name in packed for row in few(name, kernels=PALLAS)]),
        "### Long texts, in states with room for 34,000 positions, and short ones in such a state",
        _table([row for name in LONG for row in long(name)]),
        "With kernels:",
        _table([row for name in LONG for row in long(name, kernels=PALLAS)]),
        "## Other cards, four layers, 8,192 positions",
    ]
    for card in ("t4", "a100", "l4", "b200"):
        names = ("step", "verify", "round:dflash2")
        found = [row for name in names for row in rows_of(name, card, layers=4, lengths=(8192,))]
        if not found:
            continue
        parts.append(f"{card.upper()}, {jnp.dtype(CARDS[card].dtype).name}:\n\n{_table(found)}")
    parts.append(f"## Computed times\n\n{estimates(whole, kernels)}")
    if missing:
        parts.append(f"## Not counted\n\nThese programs were left out: {'; '.join(missing)}.")
    return "\n\n".join(parts)


def main() -> None:
    """Compile, count, and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="print these alone")
    parser.add_argument("--card", choices=tuple(CARDS), default="h200")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kernels", choices=KERNELS, default=XLA)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--capacity", type=int, default=CAPACITY)
    parser.add_argument("--dtype", help="of weights, keys and values; default: the card's own")
    parser.add_argument("--lines", type=int, default=0, help="also print so many source lines")
    parser.add_argument("--no-compiling", action="store_true", help="only what was kept")
    parser.add_argument("--keep", type=Path, help="keep counts in this folder, and use them again")
    args = parser.parse_args()
    if why := unavailable():
        raise SystemExit(why)
    if not args.programs:
        write_result(
            __file__,
            "What the programs do on a GPU",
            report(args.keep, [] if args.no_compiling else None),
        )
        return
    options = {
        key: value for key, value in vars(args).items() if key not in ("programs", "card", "keep")
    }
    rows = [row for name in args.programs for row in rows_of(name, args.card, **options)]
    print(_table(rows))


if __name__ == "__main__":
    main()
