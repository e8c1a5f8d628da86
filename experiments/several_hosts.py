"""Decode on the devices of several processes, as on several hosts.

Every process runs the same program and gets the same output. On a cluster its launcher starts them,
and ``jax.distributed.initialize()`` finds the others by itself; here they are processes of one
machine, with two CPU devices each, that meet on a local port:

    python experiments/several_hosts.py --processes 2

starts both and compares their tokens with those of one device.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PER_PROCESS = 2
PROMPTS = ["def main(argv):\n", "import os\n", "class Stack:\n", "for i in range("]


def tokens(mesh: dict[str, int] | None) -> list[Any]:
    """Return greedy tokens of one program, and sampled ones round by round."""
    import jaxdraft

    model = jaxdraft.load(jaxdraft.EMBEDDED, mesh=mesh)
    greedy = jaxdraft.generate(model, PROMPTS, max_new_tokens=24).ids()
    how = jaxdraft.Sampling(temperature=0.8, top_p=0.9)
    events = jaxdraft.stream(model, PROMPTS, max_new_tokens=16, sampling=how, key=1)
    return [greedy, [event.tokens for event in events]]


def member(number: int, count: int, port: int) -> None:
    """Run as one of ``count`` processes, and print the tokens."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, number)
    print(json.dumps(tokens({"data": count, "model": PER_PROCESS})))


def together(count: int) -> list[list[Any]]:
    """Start ``count`` processes and return the tokens of each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={PER_PROCESS}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--port", str(port)]
    started = [
        subprocess.Popen(
            [*command, "--processes", str(count), "--number", str(number)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for number in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for number, process in enumerate(started):
        if process.returncode:
            raise RuntimeError(f"process {number} ended with {process.returncode}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> None:
    """Run a process, or start all of them and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--number", type=int)
    parser.add_argument("--port", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.number is not None:
        member(chosen.number, chosen.processes, chosen.port)
        return
    found, alone = together(chosen.processes), tokens(None)
    for number, one in enumerate(found):
        print(f"process {number}: {'equal' if one == alone else 'DIFFERENT'}")
    if any(one != alone for one in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
