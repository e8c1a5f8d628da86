"""What experiments say of acceptance and speed: how it is counted, and what a replay replays."""

from __future__ import annotations

import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from jaxdraft import Feed, Model, generate
from jaxdraft.generate import Trace
from jaxdraft.nn.decoder import Decoder
from jaxdraft.nn.linear import Frozen
from jaxdraft.target import DecoderTarget
from jaxdraft.testing import TableDrafter, TableTarget, tiny_drafter, tiny_target
from jaxdraft.text import Text

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
SIZE = 1024


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Any:
    sys.path.insert(0, str(EXPERIMENTS))
    yield
    sys.path.remove(str(EXPERIMENTS))


@pytest.fixture(scope="module")
def acceptance(_importable: None) -> Any:
    return importlib.import_module("acceptance")


@pytest.fixture(scope="module")
def speed_table(_importable: None) -> Any:
    return importlib.import_module("speed_table")


def run(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    module.main()


# --------------------------------------------------------------------------- acceptance


def test_rounds_that_could_not_draft_in_full_do_not_count(acceptance: Any) -> None:
    # With the token after the prompt, row 0 has 1, 4, 5, 8 tokens before its rounds.
    trace = Trace(jnp.asarray([[2, 0, 2, 1], [3, 3, -1, -1]]))
    out = type("Output", (), {"trace": trace})()
    counts = acceptance.accepted_counts(out, 3, 8)
    np.testing.assert_array_equal(counts, [[1, 0, 2, 0], [0, 0, 0, 2]])
    assert acceptance.accepted_counts(out, 3, 9)[0].sum() == 4
    assert acceptance.rate(counts).value == pytest.approx((3 + 1 + 3 + 4 + 4) / 5)
    assert acceptance.survival(counts) == pytest.approx([0.8, 0.8, 0.4])


def test_an_interval_over_equal_prompts_is_students(acceptance: Any) -> None:
    values = np.asarray([3.0, 5.0, 4.0, 7.0])
    found = acceptance.Share.of(values * 10, np.full(4, 10.0))
    low, high = stats.t.interval(0.95, 3, values.mean(), stats.sem(values))
    assert found.value - found.half == pytest.approx(low)
    assert found.value + found.half == pytest.approx(high)


def test_intervals_hold_the_truth_as_often_as_they_say(acceptance: Any) -> None:
    """Prompts differ in ease and in rounds; an interval over rounds would hold it far too rarely"""
    rng = np.random.default_rng(0)
    ease = rng.beta(4, 2, (4000, 15))
    rounds = rng.integers(5, 30, ease.shape)
    accepted = rng.binomial(rounds, ease)
    shares = [acceptance.Share.of(a, b) for a, b in zip(accepted, rounds, strict=True)]
    held = np.mean([abs(s.value - 2 / 3) <= s.half for s in shares])
    assert 0.93 < held < 0.965


def test_one_prompt_has_no_interval(acceptance: Any) -> None:
    assert np.isnan(acceptance.Share.of(np.ones(1), np.ones(1)).half)
    assert str(acceptance.Share.of(np.zeros(2), np.zeros(2))) == "-"


def test_pieces_of_all_lengths_end_at_the_same_places(acceptance: Any) -> None:
    texts = {"a": list(range(100)), "b": list(range(1000, 1050)), "short": [1, 2]}
    short, long = acceptance.pieces("kind", texts, [4, 20], 6, seed=0)
    assert short.sources == long.sources and set(short.sources) == {"a", "b"}
    for few, many in zip(short.prompts, long.prompts, strict=True):
        assert len(few) == 4 and len(many) == 20 and many[-4:] == few
    with pytest.raises(ValueError, match="no text of more than 200 tokens"):
        next(acceptance.pieces("kind", texts, [200], 1, seed=0))


@pytest.mark.parametrize("form", ["json", "lines"])
def test_prompts_of_a_file_are_chats_by_kind(acceptance: Any, tmp_path: Path, form: str) -> None:
    words = {word: number for number, word in enumerate(["?", "Why", "so", "long", "bot"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    text = Text(tokenizer=tokenizer, chat_template="{{ messages[0].content }} bot")
    model = Model.of(TableTarget.random(jax.random.key(0)), text=text)
    entries = [{"prompt": "Why so long?", "kind": "a"}, {"prompt": "Why?", "kind": "a"}]
    entries += [{"prompt": "No kind"}]
    written = [json.dumps(entry) for entry in entries]
    path = tmp_path / "prompts"
    path.write_text(f"[{','.join(written)}]" if form == "json" else "\n".join(written) + "\n")
    first, second = acceptance.own_prompts(model, path)
    chats = [text.chat([{"role": "user", "content": e["prompt"]}]) for e in entries]
    assert chats[0] == [1, 2, 3, 0, 4]
    assert first.kind == "a" and first.prompts == (chats[1], chats[0]) and first.ends
    assert second.kind == "questions" and second.prompts == (chats[2],)
    path.write_text('[{"text": "Why?"}]')
    with pytest.raises(ValueError, match="entry 0: .*expected a 'prompt'"):
        list(acceptance.own_prompts(model, path))


# --------------------------------------------------------------------------- results


def test_a_result_states_its_command_without_paths_of_this_machine(
    _importable: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    common = importlib.import_module("common")
    folder = tmp_path / "hf"
    arguments = [f"smollm2={folder}", str(folder), "--runs", "3", "--title", "two words"]
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "loading.py"), *arguments])
    monkeypatch.setattr(common, "HERE", tmp_path)
    common.write_result(str(tmp_path / "loading.py"), "Loading", "| a |")
    title, _, head, _, body = (tmp_path / "loading.md").read_text().splitlines()
    assert title == "# Loading" and body == "| a |"
    assert head.startswith("`loading.py smollm2=hf hf --runs 3 --title 'two words'` on ")
    assert re.search(r"; \d+\.\d minutes\.$", head)


# --------------------------------------------------------------------------- replay


def replay(speed_table: Any, rates: list[float]) -> tuple[Model, Any, np.ndarray]:
    """A table whose every token is scripted, and drafts that are right by the given rates."""
    vocab = 16
    target = TableTarget.random(jax.random.key(0), vocab)
    written = np.random.default_rng(1).integers(0, vocab, SIZE).astype(np.int32)
    script = jnp.asarray(written)
    inner = TableDrafter.random(jax.random.key(1), vocab, 4)
    drafter = speed_table.ReplayDrafter.of(inner, script, rates, vocab)
    return Model.of(speed_table.ScriptedTarget(target, script)), drafter, written


@pytest.mark.parametrize("rates", [[0.8], [0.9, 0.3, 1.0, 0.5], [0.0], [1.0]])
def test_a_replay_accepts_what_it_was_told(speed_table: Any, rates: list[float]) -> None:
    model, drafter, script = replay(speed_table, rates)
    new = 500
    out = generate(model, [script[:20].tolist()], max_new_tokens=new, drafter=drafter)
    assert out.ids()[0] == script[20 : 20 + new].tolist()
    rounds = int(out.stats.rounds[0])
    asked = np.cumprod(rates * 4 if len(rates) == 1 else rates)
    found = np.asarray(out.stats.accepted_at)[0] / rounds
    # A golden-ratio sequence is off by a few rounds, the last round drafts what may be emitted.
    np.testing.assert_allclose(found, asked, atol=4 / rounds)


def test_a_replay_leaves_out_no_work(speed_table: Any) -> None:
    """Compiled, it has the products of the drafter inside: none was found to be unused."""
    target = tiny_target()
    inner = tiny_drafter(target)
    script = jnp.zeros((64,), jnp.int32)
    drafter = speed_table.ReplayDrafter.of(inner, script, [0.5], target.vocab_size)
    feed = Feed(
        aux=None,
        count=jnp.zeros((1,), jnp.int32),
        first_position=jnp.ones((1,), jnp.int32),
        anchor=jnp.ones((1,), jnp.int32),
        wants_draft=jnp.ones((1,), bool),
        limit=jnp.full((1,), 3, jnp.int32),
    )

    def products(drafter: Any) -> float:
        def tokens(drafter: Any, state: Any) -> jax.Array:
            return drafter.propose(state, feed)[1].tokens

        state = drafter.init(1, 64)
        return jax.jit(tokens).lower(drafter, state).compile().cost_analysis()["flops"]

    assert products(drafter) >= products(inner) > 1e5


@pytest.mark.parametrize(
    ("rates", "message"), [([0.5, 0.5], "2 acceptance rates; expected 1 or 4"), ([1.5], "1.5")]
)
def test_rates_that_are_none_are_refused(
    speed_table: Any, rates: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replay(speed_table, rates)


def test_rates_are_read_as_people_write_them(speed_table: Any) -> None:
    assert speed_table.parse_rates(["mtp=0.5", "dflash2=1,0.5"]) == {
        "mtp": [0.5],
        "dflash2": [1.0, 0.5],
    }
    for entry in ("mtp", "mtp=", "mtp=a"):
        with pytest.raises(ValueError, match="expected KIND=RATE"):
            speed_table.parse_rates([entry])


def test_the_published_rows_stand_beside_ours(speed_table: Any) -> None:
    rows = speed_table.published([128, 384, 768])
    assert [row[0] for row in rows.values()] == [512, 2048, 8192] and list(rows) == [128, 384, 768]
    assert list(speed_table.published([8192, 64])) == [8192]
    assert speed_table.published([16]) == {}


def test_the_large_geometry_is_as_large_as_it_says(speed_table: Any) -> None:
    """Shapes alone: 27 billion weights, and drafters that can draft for them."""
    config = speed_table.target_27b()
    whole = shapes(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    weights = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(whole))
    assert weights == pytest.approx(26.9e9, rel=0.01)

    config = replace(config, layers=config.layers[:4], taps=(1, 3))
    target = DecoderTarget(
        shapes(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))),
        config,
        jnp.dtype(jnp.bfloat16),
    )
    feed = Feed(
        aux=jnp.zeros((1, 2, config.aux_width), jnp.bfloat16),
        hidden=jnp.zeros((1, 2, config.width), jnp.bfloat16),
        tokens=jnp.zeros((1, 2), jnp.int32),
        count=jnp.full((1,), 2, jnp.int32),
        first_position=jnp.zeros((1,), jnp.int32),
        anchor=jnp.ones((1,), jnp.int32),
        wants_draft=jnp.ones((1,), bool),
        limit=jnp.full((1,), 7, jnp.int32),
    )
    for kind in speed_table.KINDS:
        drafter = jax.eval_shape(lambda t, kind=kind: speed_table.drafter_27b(t, kind), target)
        step = jax.eval_shape(lambda d: d.propose(d.ingest(d.init(1, 256), feed), feed), drafter)
        assert step[1].tokens.shape == (1, 7)


def shapes(make: Any) -> Frozen:
    """A module without its numbers."""
    return Frozen.of(nnx.eval_shape(make))


def test_the_table_is_made_at_a_tiny_geometry(
    speed_table: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = ["--acceptance", "mtp=0.5", "dflash2=1,1,1,1,1,1,1"]
    sizes = ["--lengths", "12", "--tokens", "16", "--runs", "1", "--warmups", "1"]
    run(speed_table, monkeypatch, "--geometry", "tiny", "--dry", *sizes, *rates)
    printed = capsys.readouterr().out
    assert "acceptance replayed" in printed and "| geometric mean |" in printed
    (dflash2,) = {line for line in printed.splitlines() if line.startswith("| 12 | dflash2 | 7 |")}
    # 15 tokens after the first: a round of seven drafts and another one of six.
    assert "| 7.50 |" in dflash2


# --------------------------------------------------------------------------- a GPU


@pytest.fixture(scope="module")
def gpu_run(_importable: None) -> Any:
    return importlib.import_module("gpu_run")


def test_a_part_that_fails_on_a_gpu_costs_no_other(gpu_run: Any) -> None:
    def broken() -> tuple[str, bool]:
        raise RuntimeError("out of memory")

    written: list[str] = []
    parts = {
        "One": lambda: ("first", True),
        "Two": broken,
        "Three": lambda: ("third", False),
        "Four": lambda: ("fourth", True),
    }
    assert not gpu_run.run_parts(parts, written.append, "a card")
    heads = [text.splitlines()[0] for text in written]
    assert heads[0] == "Device: a card. Everything is right. Not yet run: Two, Three, Four."
    assert heads[3] == "Device: a card. **Not right: Two, Three.**"
    for text in ("## One\n\nfirst", "RuntimeError: out of memory", "## Four\n\nfourth"):
        assert text in written[3]


def test_all_parts_of_a_result_are_right(gpu_run: Any) -> None:
    written: list[str] = []
    assert gpu_run.run_parts({"One": lambda: ("first", True)}, written.append, "a card")
    assert written == ["Device: a card. Everything is right.\n\n## One\n\nfirst"]


def test_what_fails_in_a_process_of_its_own_is_reported(
    gpu_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "tests/a.py ..\nFAILED tests/a.py::b - no\nERROR tests/c.py\n1 failed, 1 error"
    done = SimpleNamespace(returncode=1, stdout=lines, stderr="")
    monkeypatch.setattr(gpu_run.subprocess, "run", lambda *args, **options: done)
    text, right = gpu_run.run_tests()
    assert not right
    assert text.splitlines()[1:-1] == lines.splitlines()[1:]
    small = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 2**34})
    done.stderr = "no kernel image"
    text, right = gpu_run.speed(small)
    assert not right and "failed: no kernel image" in text and "needs 70 GiB" in text
