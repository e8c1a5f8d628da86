"""Structures inside the round: greedy output, statuses, and sampled distributions, drafts on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import jaxdraft
from jaxdraft import FallbackDrafter, Model, NgramDrafter, Sampling, Structure, TokenAutomaton
from jaxdraft.base import NO_TOKEN
from jaxdraft.cli import app
from jaxdraft.generate import _generate, _round_program, _start_program, generate, stream
from jaxdraft.sampling import probabilities
from jaxdraft.structure import automaton
from jaxdraft.testing import LatticeDrafter
from tests.examples import first
from tests.oracle.sampling import chi_square, sequences, truncated
from tests.paths import FIRST_FAMILY
from tests.properties.test_distribution import (
    DRAFTER,
    HISTORY,
    LIMIT,
    MODEL,
    NEW,
    PROMPT,
    ROWS,
    TARGET,
    VOCAB,
    Tapped,
    draft_model,
    eagle3,
    table,
)
from tests.structure.cases import SCHEMAS, index_of

SCHEMA, SATISFIES = SCHEMAS["person"]


@pytest.fixture(scope="module")
def model() -> Model:
    return jaxdraft.load(FIRST_FAMILY)


PROMPTS = ["def __init__(self", "import "]


def test_greedy_text_is_the_masked_model_s(model: Model) -> None:
    """Each token is the best of those that the library's matcher allows, with and without drafts.

    The logits are the target's own, over the whole text at once.
    """
    structure = Structure.json_schema(SCHEMA)
    out = generate(model, PROMPTS, structure=structure, max_new_tokens=90)
    assert out.finish_reasons == ["stop", "stop"]
    assert all(SATISFIES(json.loads(text)) for text in out.texts())
    assert jaxdraft.summarize(out.stats).accepted > 4
    assert model.text is not None
    index = index_of(structure.pattern, model.text)
    prompts = [model.text.encode(prompt) for prompt in PROMPTS]
    texts = [prompt + ids for prompt, ids in zip(prompts, out.ids(), strict=True)]
    scored = np.asarray(jaxdraft.score(model, texts).logits)
    for logits, prompt, ids in zip(scored, prompts, out.ids(), strict=True):
        state = index.get_initial_state()
        for row, token in zip(logits[len(prompt) - 1 :], ids, strict=False):
            masked = np.full(row.shape, -np.inf)
            known = [t for t in index.get_allowed_tokens(state) if t < len(model.text.token_bytes)]
            known += model.info.stop_ids if index.is_final_state(state) else ()
            masked[known] = row[known]
            assert int(masked.argmax()) == token
            if token not in model.info.stop_ids:
                state = index.get_next_state(state, token)
        assert index.is_final_state(state) and ids[-1] in model.info.stop_ids


def test_the_command_takes_structures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    taken: list[Any] = []

    def instead(*_: Any, structure: Any, **__: Any) -> Any:
        taken.append(structure)
        raise ValueError("enough")

    monkeypatch.setattr("jaxdraft.cli.stream", instead)
    command = ["generate", str(FIRST_FAMILY), "--prompt", "a"]
    for options in (["--json-schema", str(schema)], ["--regex", "[0-9]+"], []):
        assert "enough" in CliRunner().invoke(app, [*command, *options]).output
    assert taken == [Structure.json_schema(SCHEMA), Structure.regex("[0-9]+"), None]
    both = CliRunner().invoke(app, [*command, "--json-schema", str(schema), "--regex", "a"])
    assert both.exit_code == 2 and "expected one of them" in both.output


def test_samples_and_their_log_probabilities() -> None:
    """Those of the masked distribution, computed anew from the table; samples share a prompt."""
    out = generate(
        MODEL, [PROMPT], n=64, max_new_tokens=8, sampling=Sampling(**HOW), key=3, logprobs=0,
        structure=[LOOSE, None] * 32, stop_ids=[STOP],
    )  # fmt: skip
    assert out.logprobs is not None and jaxdraft.summarize(out.stats).accepted > 20
    chances = np.asarray(out.logprobs.sampled)
    for row, ids in enumerate(out.ids()):
        for place, token in enumerate(ids):
            before, last = (PROMPT + ids[:place])[-2:]
            logits = table()[(31 * before + last) % len(table())].copy()
            if row % 2 == 0:
                allowed = LOOSE.allowed(LOOSE.run(ids[:place], [STOP]), [STOP])
                logits[~allowed] = -np.inf
            np.testing.assert_allclose(
                chances[row, place], np.log(truncated(logits, **HOW)[token]), atol=1e-5
            )


def automaton_of(complete: list[int], **more: Any) -> TokenAutomaton:
    steps = {0: {0: 1, 1: 2, 5: 0, 3: 2}, 1: {2: 0, 3: 1}, 2: {0: 2, 1: 1, 5: 0}}
    return TokenAutomaton.of({**steps, **more}, start=0, complete=complete, vocab_size=VOCAB)


LOOSE = automaton_of([1])
"""Three states; after some tokens only two of six may follow. The text may end in state 1."""

STOP = 4


def test_ends_of_structures(model: Model) -> None:
    """Stop ids are forced, or the row is complete; what nothing may follow is a dead end."""
    strict = TokenAutomaton.of({0: {2: 1}, 1: {5: 2}}, start=0, complete=[2], vocab_size=VOCAB)
    prompts = [PROMPT] * 2

    def ends(**options: Any) -> Any:
        out = generate(MODEL, prompts, max_new_tokens=8, throw=False, **options)
        return out.ids(), out.finish_reasons

    assert ends(structure=strict, stop_ids=[STOP])[0] == [[2, 5, STOP]] * 2
    assert ends(structure=strict, stop_ids=())[1] == ["complete"] * 2
    free = ends(structure=[strict, None], stop_ids=())
    assert free[0][0] == [2, 5] and free[1] == ["complete", "length"]
    assert free[0][1] == generate(MODEL, prompts, max_new_tokens=8, stop_ids=()).ids()[1]
    late = ends(
        structure=strict, stop_ids=[STOP], sampling=Sampling(temperature=0, min_new_tokens=5)
    )
    assert late == ([[2, 5]] * 2, ["complete"] * 2)
    banned = np.arange(VOCAB) != 5
    stuck = ends(structure=strict, stop_ids=(), sampling=Sampling(temperature=0, allowed=banned))
    assert stuck == ([[2]] * 2, ["dead_end"] * 2)
    with pytest.raises(ValueError, match="expected 2, one per row"):
        ends(structure=[strict])
    with pytest.raises(ValueError, match="is over 6 tokens; the model has"):
        generate(model, ["a"], structure=strict)
    with pytest.raises(ValueError, match="the model has no tokenizer: a Structure needs one"):
        ends(structure=Structure.regex("a"))


def test_streams_are_the_same_and_other_structures_compile_nothing() -> None:
    """A program serves all structures of similar size, also beside rows of free text."""
    strict = TokenAutomaton.of({0: {2: 1}, 1: {5: 2}}, start=0, complete=[2], vocab_size=VOCAB)
    long = {n: {n % 4: n + 1} for n in range(40)}
    chain = TokenAutomaton.of(long, start=0, complete=[40], vocab_size=VOCAB)
    programs = (_generate, _start_program, _round_program)
    seen: list[int] = []
    for structure in (LOOSE, strict, chain, [None, LOOSE]):
        options: Any = dict(structure=structure, stop_ids=[STOP], max_new_tokens=8)
        ids = generate(MODEL, [PROMPT] * 2, **options).ids()
        events = list(stream(MODEL, [PROMPT] * 2, **options))
        assert [[t for e in events if e.row == row for t in e.tokens] for row in (0, 1)] == ids
        seen = seen or [program._cache_size() for program in programs]
        assert [program._cache_size() for program in programs] == seen


# ------------------------------------------------------------------------ distributions


def expected(structure: TokenAutomaton, **how: Any) -> dict[Any, float]:
    """The probability of every output of the masked model."""

    def step(output: list[int]) -> np.ndarray:
        before, last = (PROMPT + output)[-2:]
        logits = table()[(31 * before + last) % len(table())].copy()
        logits[~structure.allowed(structure.run(output, [STOP]), [STOP])] = -np.inf
        return truncated(logits, **how)

    found: dict[Any, float] = {}
    for path, mass in sequences(step, VOCAB, NEW).items():
        cut = path[: path.index(STOP) + 1] if STOP in path else path
        cut = cut + (NO_TOKEN,) * (NEW - len(cut))
        found[cut] = found.get(cut, 0.0) + mass
    return found


def outputs(drafter: Any, sampling: Sampling, model: Model = MODEL, rows: int = ROWS) -> Counter:
    out = generate(
        model,
        np.tile(np.asarray(PROMPT, np.int32), (rows, 1)),
        max_new_tokens=NEW + 4,
        drafter=drafter,
        sampling=sampling,
        structure=LOOSE,
        stop_ids=[STOP],
        key=0,
        throw=False,  # planted mistakes lead into dead ends
    )
    assert jaxdraft.summarize(out.stats).accepted > rows / 20
    return Counter(map(tuple, np.asarray(out.tokens)[:, :NEW].tolist()))


HOW = {"temperature": 1.2, "top_k": 3}

DRAFTERS: list[tuple[str, Any]] = [
    ("lattice", DRAFTER),
    ("eagle3", eagle3),
    ("two", FallbackDrafter(NgramDrafter(1, 2, 2), DRAFTER)),
    ("draft model", draft_model),
    ("ngram", "ngram"),
    ("history", HISTORY),
]


@pytest.mark.parametrize("name, drafter", first(2, DRAFTERS))
def test_the_distribution_is_the_masked_model_s(name: str, drafter: Any) -> None:
    model, rows = MODEL, ROWS
    if callable(drafter):
        model, rows = Model.of(Tapped(TARGET.table), drafter()), ROWS // 4
        drafter = model.drafter
    p, distance = chi_square(outputs(drafter, Sampling(**HOW), model, rows), expected(LOOSE, **HOW))
    assert p > LIMIT and distance < 1.25, (name, p, distance)


@jax.tree_util.register_pytree_node_class
class Fresh(LatticeDrafter):
    """Right; another type, so that what is patched below is traced anew."""

    def tree_flatten(self) -> Any:
        return (self.candidates, self.scores), None

    @classmethod
    def tree_unflatten(cls, _: Any, leaves: Any) -> Any:
        return cls(*leaves)


@jax.tree_util.register_pytree_node_class
class Unguided(Fresh):
    """Drafts that follow the structure, and the distributions of drafts that do not."""

    def propose(self, state: Any, feed: Any) -> Any:
        state, proposal, info = super().propose(state, feed)
        chosen = jnp.argmax(
            proposal.lattice.candidates[:, :-1] == proposal.tokens[:, :-1, None], axis=-1
        )
        before = jnp.pad(chosen, ((0, 0), (1, 0)))[..., None, None]
        every = probabilities(proposal.lattice.scores, feed.draw.truncation)
        rows = jnp.take_along_axis(every, before, axis=2)[:, :, 0]
        return state, replace(proposal, support=replace(proposal.support, probs=rows)), info

    tree_flatten = Fresh.tree_flatten


@contextmanager
def states_of_the_anchor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Masks of every row of a window as if no draft stood before it."""
    window = automaton.window

    def first_state(structures: Any, stops: Any, state: Any, tokens: Any) -> Any:
        states = window(structures, stops, state, tokens)
        drafts = tokens.shape[1] == DRAFTER.draft_tokens
        return jnp.broadcast_to(states[:, :1], states.shape) if drafts else states

    with monkeypatch.context() as patch:
        patch.setattr(automaton, "window", first_state)
        yield


def test_planted_mistakes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = expected(LOOSE, **HOW)
    with states_of_the_anchor(monkeypatch):
        drafter = Fresh(DRAFTER.candidates, DRAFTER.scores)
        p, _ = chi_square(outputs(drafter, Sampling(**HOW), rows=ROWS // 2), right)
    assert p < LIMIT
    p, _ = chi_square(outputs(Unguided(*drafter.tree_flatten()[0]), Sampling(**HOW)), right)
    assert p < LIMIT
