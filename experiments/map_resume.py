"""Does `jaxdraft map` lose or repeat a line when it is killed?

    python experiments/map_resume.py

One process answers 1,000 prompts without interruption. The same command, with another file of
answers, is killed (by SIGKILL, which no program can handle) three times, each time when a random
number of answers is there, and then runs to its end. The answers of both are compared line by line.
All prompts are sampled, with lengths and seeds of their own in some lines.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import first_family, table, write_result


def prompts(count: int, seed: int) -> list[dict[str, Any]]:
    """Return prompts of several lengths: pieces of held-out files, some with settings."""
    rng = random.Random(seed)
    ids = [i for prompt in first_family()[1] for i in prompt["prompt_ids"]]
    found: list[dict[str, Any]] = []
    for number in range(count):
        start, size = rng.randrange(len(ids) - 24), rng.randint(1, 24)
        line: dict[str, Any] = {"id": f"p{number}", "prompt": ids[start : start + size]}
        if number % 5 == 0:
            line["seed"] = number
        if number % 7 == 0:
            line["max_new_tokens"] = rng.randint(1, 12)
        found.append(line)
    return found


def command(folder: Path, file: Path, out: Path) -> list[str]:
    """Return the command line of a run."""
    words = ["map", str(file), "--out", str(out), "--model", str(folder), "--context", "64"]
    words += ["-n", "8", "-t", "0.8", "--max-batch", "8"]
    return [sys.executable, "-m", "jaxdraft.cli", *words]


def lines(out: Path) -> int:
    """Return the number of whole lines of a file."""
    return out.read_bytes().count(b"\n") if out.exists() else 0


def kill_at(words: list[str], out: Path, answers: int) -> tuple[int, int]:
    """Start a run and kill it when there are so many answers.

    Returns:
      Whole lines in the file, and bytes of a line without its end.
    """
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while lines(out) < answers and process.poll() is None:
            time.sleep(0.003)
        process.kill()
    raw = out.read_bytes()
    return raw.count(b"\n"), len(raw) - raw.rfind(b"\n") - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    folder = first_family()[0]
    with tempfile.TemporaryDirectory() as made:
        home = Path(made)
        file, whole, parts = home / "prompts.jsonl", home / "whole.jsonl", home / "parts.jsonl"
        asked = prompts(args.prompts, args.seed)
        file.write_text("".join(json.dumps(line) + "\n" for line in asked))
        subprocess.run(command(folder, file, whole), check=True, stderr=subprocess.DEVNULL)
        rows: list[list[object]] = []
        for number, at in enumerate(sorted(rng.sample(range(1, args.prompts), args.kills)), 1):
            found, torn = kill_at(command(folder, file, parts), parts, at)
            # A kill between two writes leaves whole lines; tear one, as a full disk may.
            extra = b"" if torn else b'{"line": 1, "prompt_tokens"'[: rng.randint(1, 27)]
            with parts.open("ab") as file_of_parts:
                file_of_parts.write(extra)
            rows.append([number, found, torn, len(extra)])
        subprocess.run(command(folder, file, parts), check=True, stderr=subprocess.DEVNULL)
        one, two = (
            sorted((json.loads(x) for x in out.read_text().splitlines()), key=lambda a: a["line"])
            for out in (whole, parts)
        )
    numbers = [answer["line"] for answer in two]
    lost, repeated = args.prompts - len(set(numbers)), len(numbers) - len(set(numbers))
    differing = sum(a != b for a, b in zip(one, two, strict=True)) if not lost + repeated else "?"
    head = ["kill", "whole answers", "bytes of a torn line", "bytes torn by this script"]
    found_text = (
        f"{len(one)} answers of the uninterrupted run, {len(two)} of the interrupted one. Lost: "
        f"{lost}; repeated: {repeated}; other than in the uninterrupted run: {differing}."
    )
    write_result(
        __file__, "A map that is killed and resumed", table(head, rows) + "\n\n" + found_text
    )
    assert one == two


if __name__ == "__main__":
    main()
