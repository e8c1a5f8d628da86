"""How many drafts are accepted, by kind and length of prompt, for every drafter of a model?

    python experiments/acceptance.py                             # the embedded model
    python experiments/acceptance.py NAME=FOLDER                 # an artifact, or a checkpoint
    python experiments/acceptance.py NAME=FOLDER --prompts FILE  # and prompts of your own

Prompts are the first tokens of Python files that the families trained here were not trained on
(``train_family.HELD_OUT``), pieces from inside these files, pieces of other text (the pages of
Python's ``help()``, licences), and random tokens. Pieces of all lengths end at the same positions,
so longer ones only add context. ``FILE`` is JSON, or JSON lines, with one ``{"prompt": ...,
"kind": ...}`` per entry. Its prompts go through the model's chat template, if there is one, and
their answers end where the model stops. All other texts continue past stop tokens.

No number here depends on time. In float32, greedy tokens must be the same with every drafter as
without. In other types, the prompts with different tokens are counted.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import HERE, drafters_of, table, write_result
from scipy import stats  # pyrefly: ignore[untyped-import]
from train_family import HELD_OUT

import jaxdraft
from jaxdraft import EMBEDDED, Drafter, Model, Output, Sampling

CODE = ("beginnings of files", "inside of files")
TEMPERATURE = 0.8


# --------------------------------------------------------------------------- prompts


@dataclass(frozen=True)
class Group:
    """Prompts of one kind and length.

    Attributes:
      kind: name of the kind, for the tables.
      length: tokens per prompt; 0 if they differ.
      prompts: token ids.
      sources: file or topic of each prompt.
      ends: whether the model's own stop tokens end the text.
    """

    kind: str
    length: int
    prompts: tuple[list[int], ...]
    sources: tuple[str, ...]
    ends: bool = False


def held_out(model: Model, size: int) -> dict[str, list[int]]:
    """Return the tokens of the held-out files, as the running Python ships them.

    Raises:
      ValueError: a file has fewer than ``size`` tokens.
    """
    assert model.text is not None
    library = Path(sysconfig.get_paths()["stdlib"])
    files = {name: model.text.encode((library / name).read_text("utf-8")) for name in HELD_OUT}
    if short := [name for name, ids in files.items() if len(ids) < size]:
        raise ValueError(f"{', '.join(short)}: fewer than {size} tokens")
    return files


def prose(model: Model) -> dict[str, dict[str, list[int]]]:
    """Return text other than code, by kind and source."""
    from pydoc_data.topics import topics

    assert model.text is not None
    encode = model.text.encode
    library = Path(sysconfig.get_paths()["stdlib"])
    licences = [p for p in (library / "LICENSE.txt", HERE.parent / "LICENSE") if p.exists()]
    return {
        "pages of help": {name: encode(text) for name, text in sorted(topics.items())},
        "licences": {p.name: encode(p.read_text("utf-8")) for p in licences},
    }


def pieces(
    kind: str, texts: dict[str, list[int]], lengths: Sequence[int], count: int, seed: int
) -> Iterator[Group]:
    """Yield ``count`` pieces per length from texts in turn, ending at the same random positions.

    Raises:
      ValueError: no text is longer than the longest piece.
    """
    longest = max(lengths)
    long = {name: ids for name, ids in texts.items() if len(ids) > longest}
    if not long:
        raise ValueError(f"{kind}: no text of more than {longest} tokens")
    rng = np.random.default_rng(seed)
    names = [str(name) for name in rng.permutation(sorted(long))]
    chosen = [names[i % len(names)] for i in range(count)]
    ends = [int(rng.integers(longest, len(long[name]))) for name in chosen]
    for length in lengths:
        cuts = (long[name][end - length : end] for name, end in zip(chosen, ends, strict=True))
        yield Group(kind, length, tuple(cuts), tuple(chosen))


def own_prompts(model: Model, path: Path) -> Iterator[Group]:
    """Yield the prompts of a JSON or JSON lines file, by kind, as token ids.

    Raises:
      ValueError: an entry has no prompt.
    """
    text = path.read_text("utf-8")
    if text.lstrip().startswith("["):
        entries = json.loads(text)
    else:
        entries = [json.loads(line) for line in text.splitlines() if line.strip()]
    assert model.text is not None
    kinds: dict[str, list[list[int]]] = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise ValueError(f"{path}, entry {number}: {entry!r}; expected a 'prompt'")
        if model.text.chat_template is None:
            ids = model.text.encode(entry["prompt"])
        else:
            ids = model.text.chat([{"role": "user", "content": entry["prompt"]}])
        kinds.setdefault(entry.get("kind", "questions"), []).append(ids)
    for kind, prompts in kinds.items():
        prompts.sort(key=len)  # prompts of similar lengths run together
        yield Group(kind, 0, tuple(prompts), (path.name,) * len(prompts), ends=True)


def groups(model: Model, args: argparse.Namespace) -> list[Group]:
    """Return all prompts, kind by kind and length by length."""
    lengths, count = args.lengths, args.pieces
    files = held_out(model, max(lengths))
    found = [
        Group(CODE[0], length, tuple(ids[:length] for ids in files.values()), tuple(files))
        for length in lengths
    ]
    found += pieces(CODE[1], files, lengths, count, seed=1)
    for kind, texts in prose(model).items():
        found += pieces(kind, texts, lengths, count, seed=2)
    rng = np.random.default_rng(3)
    noise = rng.integers(0, model.target.vocab_size, (count, max(lengths))).tolist()
    found += [
        Group("random tokens", n, tuple(row[-n:] for row in noise), ("noise",) * count)
        for n in lengths
    ]
    if args.prompts:
        found += own_prompts(model, args.prompts)
    return found


# --------------------------------------------------------------------------- counting


def accepted_counts(out: Output, drafts: int, tokens: int) -> np.ndarray:
    """Count the rounds of each row that accepted 0, 1, ... ``drafts`` drafts: [B, 1 + drafts].

    A round counts if it starts before ``tokens`` tokens are emitted. The run must have a limit of
    some more tokens, so that each of these rounds could draft in full.
    """
    assert out.trace is not None
    accepted = np.asarray(out.trace.accepted)  # [B, rounds], -1 past a row's end
    emitted = np.where(accepted >= 0, accepted + 1, 0)
    before = 1 + np.cumsum(emitted, axis=1) - emitted
    counted = (accepted >= 0) & (before < tokens)
    reached = accepted[..., None] == np.arange(drafts + 1)
    return (reached & counted[..., None]).sum(axis=1)


@dataclass(frozen=True)
class Share:
    """A ratio of two sums over prompts, and half of its 95 % interval."""

    value: float
    half: float

    @classmethod
    def of(cls, above: np.ndarray, below: np.ndarray) -> Share:
        """Return ``sum(above) / sum(below)`` over prompts [n], which are independent of each other.

        Student's interval of the linearised ratio, from the residuals ``above - ratio * below`` of
        the prompts. If all have the same ``below``, it is the interval of a mean. Source: Cochran,
        Sampling Techniques, section 6.3.
        """
        n, whole = len(below), below.sum()
        if whole == 0:
            return cls(float("nan"), float("nan"))
        value = above.sum() / whole
        if n < 2:
            return cls(float(value), float("nan"))
        spread = np.sqrt(n * np.sum((above - value * below) ** 2) / (n - 1)) / whole
        return cls(float(value), float(stats.t.ppf(0.975, n - 1) * spread))

    def __str__(self) -> str:
        return "-" if np.isnan(self.value) else f"{self.value:.2f} ± {self.half:.2f}"

    @property
    def percent(self) -> str:
        """Value and half interval in percent."""
        return "-" if np.isnan(self.value) else f"{self.value:.0%} ± {100 * self.half:.0f}"


def rate(counts: np.ndarray) -> Share:
    """Return the tokens per round, the target's own included, for counts [n, 1 + K]."""
    return Share.of(counts @ np.arange(1, counts.shape[1] + 1), counts.sum(axis=1))


def share(counts: np.ndarray, accepted: int) -> Share:
    """Return the share of rounds that accepted exactly ``accepted`` drafts."""
    return Share.of(counts[:, accepted], counts.sum(axis=1))


def survival(counts: np.ndarray) -> list[float]:
    """Return the share of rounds that accepted draft k and all before it, for k = 1 .. K."""
    rounds = counts.sum(axis=0)
    return (np.cumsum(rounds[::-1])[::-1] / max(1, rounds.sum()))[1:].tolist()


# --------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Run:
    """Settings for continuing prompts.

    Attributes:
      tokens: new tokens whose rounds count.
      rows: prompts per batch; the same for all kinds, so that they share compiled programs.
      sampling: settings for sampling; None for greedy decoding.
      keys: seeds; each continues every prompt once.
    """

    tokens: int
    rows: int
    sampling: Sampling | None = None
    keys: tuple[int, ...] = (0,)

    def batches(self, group: Group) -> Iterator[tuple[slice, list[list[int]]]]:
        """Yield batches of ``rows`` prompts; copies of the last prompt fill up the last batch."""
        for first in range(0, len(group.prompts), self.rows):
            batch = list(group.prompts[first : first + self.rows])
            yield slice(0, len(batch)), batch + batch[-1:] * (self.rows - len(batch))

    def outputs(
        self, model: Model, drafter: Drafter, group: Group
    ) -> tuple[np.ndarray, list[list[int]]]:
        """Return counts [n, 1 + K], summed over keys, and the tokens of the last key."""
        drafts = drafter.draft_tokens
        sums = np.zeros((len(group.prompts), drafts + 1), np.int64)
        emitted: list[list[int]] = []
        for key in self.keys:
            emitted, counts = [], []
            for number, (real, batch) in enumerate(self.batches(group)):
                out = jaxdraft.generate(
                    model,
                    batch,
                    max_new_tokens=self.tokens + drafts + 1,
                    drafter=drafter,
                    sampling=self.sampling,
                    key=1000 * key + number,
                    stop_ids=None if group.ends else (),
                    trace=True,
                )
                counts.append(accepted_counts(out, drafts, self.tokens)[real])
                emitted += [ids[: self.tokens] for ids in out.ids()[real]]
            sums += np.concatenate(counts)
        return sums, emitted


Counts = dict[tuple[str, int], np.ndarray]
"""Counts of a drafter, by kind and length: [prompts, 1 + K]."""


def measure(
    found: dict[str, tuple[Model, Drafter]],
    prompts: list[Group],
    runs: dict[str, Run],
    tell: Callable[[str], None],
) -> tuple[dict[str, dict[str, Counts]], dict[str, int]]:
    """Return counts by mode and drafter, and the number of prompts that each drafter changed."""
    counts: dict[str, dict[str, Counts]] = {mode: {k: {} for k in found} for mode in runs}
    changed = dict.fromkeys(found, 0)
    first = next(iter(found.values()))[0]
    for group in prompts:
        plain = runs["greedy"].outputs(first, first.choose("none"), group)[1]
        for kind, (model, drafter) in found.items():
            for mode, run in runs.items():
                sums, drafted = run.outputs(model, drafter, group)
                counts[mode][kind][group.kind, group.length] = sums
                if mode == "greedy":
                    pairs = zip(plain, drafted, strict=True)
                    changed[kind] += sum(a != b for a, b in pairs)
        rates = [f"{k} {rate(counts['greedy'][k][group.kind, group.length])}" for k in found]
        tell(f"{group.kind}, {group.length or 'own'}: {', '.join(rates)}")
    return counts, changed


# --------------------------------------------------------------------------- reporting


def pooled(counts: Counts, kinds: Sequence[str]) -> np.ndarray:
    """Sum the counts of these kinds over lengths: prompts of one position are one observation."""
    return np.concatenate([sum(c for (k, _), c in counts.items() if k == kind) for kind in kinds])


def report(prompts: list[Group], counts: dict[str, dict[str, Counts]]) -> str:
    """Return tables in Markdown: by kind and length, by position, by file."""
    parts: list[str] = []
    for mode, drafters in counts.items():
        rows, ends = [], []
        for group in prompts:
            at = group.kind, group.length
            head = [group.kind, group.length or "their own", len(group.prompts)]
            rows.append([*head, *(rate(c[at]) for c in drafters.values())])
            extremes = (share(c[at], n).percent for c in drafters.values() for n in (0, -1))
            ends.append([*head[:2], *extremes])
        width = max(c.shape[1] - 1 for d in drafters.values() for c in d.values())
        depths = [
            [kind, drafter, *cells, *[""] * (width - len(cells))]
            for kind in dict.fromkeys(group.kind for group in prompts)
            for drafter, of in drafters.items()
            for cells in [[f"{s:.0%}" for s in survival(pooled(of, [kind]))]]
        ]
        both = [f"{name}, {what}" for name in drafters for what in ("none", "all")]
        parts += [
            f"### {mode}",
            "Tokens per round:",
            table(["prompts", "length", "number", *drafters], rows),
            "Rounds that accept no draft, and rounds that accept all K:",
            table(["prompts", "length", *both], ends),
            "Rounds that accept a draft and all before it, by position, all lengths together:",
            table(["prompts", "drafter", *map(str, range(1, width + 1))], depths),
        ]
    files = []
    places = {group.kind: group.sources for group in prompts}  # the same at every length
    sources = np.concatenate([places[kind] for kind in CODE])
    for name in HELD_OUT:
        cells = [
            rate(pooled(of, CODE)[sources == name])
            for drafters in counts.values()
            for of in drafters.values()
        ]
        files.append([name, *cells])
    columns = [f"{name}, {mode}" for mode, drafters in counts.items() for name in drafters]
    parts += [
        "### File by file",
        "Tokens per round for the code prompts, all lengths together:",
        table(["held-out file", *columns], files),
    ]
    return "\n\n".join(parts)


def family(name: str, folder: Path, args: argparse.Namespace) -> str:
    """Measure one model, and return its section of the result.

    Raises:
      ValueError: there is no tokenizer, or the context is too short.
      AssertionError: a drafter changed greedy tokens in float32.
    """
    found = drafters_of(folder, args.draft_tokens, args.dtype)
    model = next(iter(found.values()))[0]
    if model.text is None:
        raise ValueError(f"{folder} has no tokenizer; expected one, to make prompts")
    prompts = groups(model, args)
    most = max(drafter.draft_tokens for _, drafter in found.values())
    longest = max(len(ids) for group in prompts for ids in group.prompts)
    if (whole := longest + args.tokens + most + 1) > model.info.context_length:
        raise ValueError(
            f"the longest prompt and its output have {whole} tokens; the context of {name} has "
            f"{model.info.context_length}"
        )
    drawn = Sampling(temperature=TEMPERATURE)
    runs = {
        "greedy": Run(args.tokens, args.rows),
        f"T = {TEMPERATURE}": Run(args.tokens, args.rows, drawn, tuple(range(args.keys))),
    }
    counts, changed = measure(found, prompts, runs, lambda line: print(line, flush=True))
    number = sum(len(group.prompts) for group in prompts)
    if args.dtype == "float32":
        assert not any(changed.values()), f"greedy tokens changed: {changed}"
        same = f"Greedy tokens with each drafter equal those without on all {number} prompts."
    else:
        tally = ", ".join(f"{n} with {kind}" for kind, n in changed.items())
        same = f"Of {number} prompts, greedy tokens differ from those without drafts on: {tally}."
    drafts = ", ".join(f"{kind} {d.draft_tokens}" for kind, (_, d) in found.items())
    closing = f"{args.dtype}. Drafts per round: {drafts}. {same}"
    return "\n\n".join([f"## {name}", report(prompts, counts), closing])


def main() -> None:
    """Measure every model, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--prompts", type=Path, help="JSON or JSON lines: prompt, kind")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 384])
    parser.add_argument("--pieces", type=int, default=20, help="of every kind and length")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens whose rounds count")
    parser.add_argument("--keys", type=int, default=2, help="samples of every prompt")
    parser.add_argument("--rows", type=int, default=20, help="prompts that run at once")
    parser.add_argument("--draft-tokens", type=int, default=7, help="K of n-gram and MTP")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--result", default="acceptance", help="name of the file to write")
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    named = [(n, Path(f)) for n, _, f in (entry.partition("=") for entry in args.models)]
    sections = [family(n, f, args) for n, f in named or [("The embedded family", EMBEDDED)]]
    sections.append(
        "Intervals are 95 %, over prompts. Tokens per round include the target's own, so 1 is no "
        f"gain; {args.tokens} new tokens per prompt, sampled with {args.keys} keys. All counted "
        "rounds could draft in full: the limit was some tokens higher. The n-gram lookup does not "
        "always have drafts, and often fewer than K. Pieces of the three lengths end at the same "
        "positions."
    )
    body = "\n\n".join(sections)
    if args.dry:
        print(body)
        return
    write_result(__file__, "Accepted drafts, by kind and length of prompt", body, args.result)


if __name__ == "__main__":
    main()
