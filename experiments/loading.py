"""What do loading and compiling cost?

    python experiments/loading.py NAME=FOLDER [NAME=FOLDER ...]

Loading against reading the same bytes into memory, each in a fresh process so that the peak memory
is its own; then the time to compile `generate`, with an empty compilation cache and a full one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import table, write_result

READ = """
import json, resource, sys, time
from pathlib import Path
import numpy as np
import jaxdraft, convert
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
files = sorted(Path(sys.argv[1]).glob("*.onnx.data"))
start = time.perf_counter()
held = [np.fromfile(f, np.uint8) for f in files]
print(json.dumps([time.perf_counter() - start, sum(map(len, held)), base]))
"""

LOAD = """
import json, resource, sys, time
import jax, jax.numpy as jnp
import jaxdraft, convert
jnp.zeros(8).block_until_ready()
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
model = jaxdraft.load(sys.argv[1])
jax.block_until_ready(jax.tree.leaves(model))
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
arrays = {id(x): x.nbytes for x in jax.tree.leaves(model)}
print(json.dumps([seconds, sum(arrays.values()), (peak - base) * 1024]))
"""

COMPILE = """
import json, sys, time
import jax
jax.config.update("jax_compilation_cache_dir", sys.argv[2])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
import jaxdraft
model = jaxdraft.load(sys.argv[1])
times = []
for _ in range(2):
    start = time.perf_counter()
    jaxdraft.generate(model, [[1, 2, 3]], max_new_tokens=16, stop_ids=()).tokens.block_until_ready()
    times.append(time.perf_counter() - start)
print(json.dumps([times[0] - times[1]]))
"""


def run(program: str, *arguments: str) -> list[float]:
    """Return the last line that a fresh Python prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(name: str, folder: Path, repeats: int) -> list[object]:
    """Measure one artifact, and return its row of the table."""
    pairs = [(run(READ, str(folder)), run(LOAD, str(folder))) for _ in range(repeats)]
    reading = statistics.median(r[0] for r, _ in pairs)
    loading = statistics.median(load[0] for _, load in pairs)
    weights, peak = pairs[0][1][1], statistics.median(load[2] for _, load in pairs)
    with tempfile.TemporaryDirectory() as cache:
        cold = run(COMPILE, str(folder), cache)[0]
        cached = run(COMPILE, str(folder), cache)[0]
    ratio = statistics.median(load[0] / read[0] for read, load in pairs)
    return [
        name,
        f"{weights / 1e6:.0f}",
        f"{reading:.2f}",
        f"{loading:.2f}",
        f"{ratio:.2f}",
        f"{peak / weights:.2f}",
        f"{cold:.1f}",
        f"{cached:.1f}",
    ]


def main() -> None:
    """Measure every artifact named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifacts", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rows = [
        measure(name, Path(folder), args.repeats)
        for name, _, folder in (entry.partition("=") for entry in args.artifacts)
    ]
    head = ["artifact", "weights, MB", "read, s", "load, s", "load / read", "peak / weights"]
    head += ["compile, s", "cached, s"]
    body = table(head, rows) + (
        f"\n\nMedians of {args.repeats} fresh processes, files in the page cache. Peak: growth of "
        "the resident set over a process that has imported everything. Compile: the first call of "
        "`generate` less the second."
    )
    write_result(__file__, "Loading and compiling", body)


if __name__ == "__main__":
    main()
