"""Answers to a file of prompts: what a line holds, interruptions at any byte, and refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxdraft import Engine, Model, Sampling, generate
from jaxdraft.mapping import map_file
from jaxdraft.testing import TableDrafter, TableTarget
from jaxdraft.text import Text
from tests.tiny_tokenizers import byte_level

VOCAB = 260
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}:"
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "one", "id": "first", "data": {"answer": 1.5}},
    {"prompt": [5, 6, 7], "id": 7},
    {"messages": [{"role": "user", "content": "é"}], "max_new_tokens": 3},
    {"prompt": "two", "temperature": 0.0},
    {"prompt": "x" * 70},  # longer than the context
    {"prompt": "two", "seed": 11, "top_k": 5},
    {"prompt": "two"},
    {"prompt": "two", "logprobs": 2, "max_new_tokens": 2},
]
RULES: dict[str, Any] = dict(max_new_tokens=6, key=3, sampling=Sampling(temperature=0.8))


@pytest.fixture(scope="module")
def engine() -> Engine:
    target = TableTarget.random(jax.random.key(0), VOCAB)
    drafter = TableDrafter(target.table.argmax(-1)[:, None].astype("int32"))
    text = Text(tokenizer=byte_level(), chat_template=TEMPLATE)
    model = Model.of(target, drafter, text=text)
    return Engine(model, max_batch=2, context=64, page_size=8)


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path) -> dict[int, Any]:
    """Return the answers by line; each line is answered once."""
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    answers = {answer["line"]: answer for answer in found}
    assert len(answers) == len(found)
    return answers


@pytest.fixture(scope="module")
def whole(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The files of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    prompts, out = write(folder / "prompts.jsonl", PROMPTS), folder / "answers.jsonl"
    done = map_file(engine, prompts, out, **RULES)
    assert (done.lines, done.answered, done.kept, done.failed) == (8, 8, 0, 1)
    return prompts, out


def test_answers_are_those_of_generate(engine: Engine, whole: tuple[Path, Path]) -> None:
    model, answers = engine.model, read(whole[1])
    assert set(answers) == set(range(1, 9))
    asked: list[Any] = [p.get("prompt", "é:") for p in PROMPTS]
    asked[4] = "x"  # in its place, so that the others have their rows
    ids = [model.text.encode(p) if isinstance(p, str) else p for p in asked]  # type: ignore
    out = generate(
        model, ids, **RULES | dict(sampling=Sampling(temperature=[0.8] * 3 + [0.0] + [0.8] * 4))
    )
    for number, expected in enumerate(out.ids(), 1):
        own = PROMPTS[number - 1]
        if number == 5:
            continue
        if number == 6:
            sampling = Sampling(temperature=0.8, top_k=5)
            expected = generate(model, ids[5], max_new_tokens=6, key=11, sampling=sampling).ids()[0]
        expected = expected[: own.get("max_new_tokens", 6)]
        assert answers[number]["tokens"] == expected, number
        assert answers[number]["text"] == model.text.decode(expected)  # type: ignore[union-attr]
        assert answers[number]["finish_reason"] == "length" and answers[number]["error"] is None
        assert answers[number]["prompt_tokens"] == len(ids[number - 1])
    assert answers[1]["id"] == "first" and answers[1]["data"] == {"answer": 1.5}
    assert answers[2]["id"] == 7 and "id" not in answers[3] and "logprobs" not in answers[1]
    assert answers[5]["finish_reason"] == "refused" and answers[5]["tokens"] == []
    assert "70 tokens" in answers[5]["error"]
    assert len(answers[8]["logprobs"]) == 2
    assert [len(others) for others in answers[8]["alternatives"]] == [2, 2]


def test_a_run_that_was_killed_at_any_byte_continues(
    engine: Engine, whole: tuple[Path, Path], tmp_path: Path
) -> None:
    prompts, finished = whole
    raw, out = finished.read_bytes(), tmp_path / "answers.jsonl"
    record = Path(f"{finished}.run.json").read_bytes()
    ends = [i + 1 for i, byte in enumerate(raw) if byte == 10]
    for cut in {0, 1, ends[0] - 1, ends[0], ends[2] + 9, ends[-2], ends[-1] - 1, ends[-1]}:
        out.write_bytes(raw[:cut])
        Path(f"{out}.run.json").write_bytes(record)
        done = map_file(engine, prompts, out, **RULES)
        assert done.kept == sum(end <= cut for end in ends) and done.answered == 8 - done.kept
        assert read(out) == read(finished), cut
        assert out.read_bytes().startswith(raw[: max([0, *(e for e in ends if e <= cut)])])


def test_an_interrupted_run_keeps_its_answers(
    engine: Engine, whole: tuple[Path, Path], tmp_path: Path
) -> None:
    prompts, out = whole[0], tmp_path / "answers.jsonl"

    def interrupt(done: int, total: int) -> None:
        assert total == 8
        if done in (3, 5):
            raise KeyboardInterrupt

    for kept in (0, 3):
        with pytest.raises(KeyboardInterrupt):
            map_file(engine, prompts, out, progress=interrupt, **RULES)
        assert len(read(out)) > kept and not engine.scheduler.busy
    done = map_file(engine, prompts, out, **RULES)
    assert done.kept == 5 and read(out) == read(whole[1])
    engine.check()


def test_samples_of_a_prompt_draw_for_themselves(engine: Engine, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", [{"prompt": "one"}, {"prompt": "two"}])
    map_file(engine, prompts, tmp_path / "a.jsonl", n=3, **RULES)
    answers = read(tmp_path / "a.jsonl")
    out = generate(engine.model, ["one"] * 3 + ["two"] * 3, **RULES).ids()
    for number in (1, 2):
        samples = [one["tokens"] for one in answers[number]["samples"]]
        assert samples == out[3 * (number - 1) : 3 * number] and "tokens" not in answers[number]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(max_new_tokens=7), "max_new_tokens was 6 and is 7"),
        (dict(sampling=Sampling(temperature=0.8, top_k=4)), "top_k was 0 and is 4"),
        (dict(key=4), "key was 3 and is 4"),
        (dict(key=jax.random.key(3)), "key was 3 and is"),
        (dict(n=2), "n was 1 and is 2"),
        (dict(stop="a"), "stop was"),
    ],
)
def test_other_settings_are_refused(
    engine: Engine, whole: tuple[Path, Path], change: dict[str, Any], words: str
) -> None:
    before = whole[1].read_bytes()
    with pytest.raises(ValueError, match="begun with other settings.*" + words):
        map_file(engine, *whole, **RULES | change)
    assert whole[1].read_bytes() == before


def test_other_prompts_and_other_weights_are_refused(
    engine: Engine, whole: tuple[Path, Path], tmp_path: Path
) -> None:
    other = write(tmp_path / "prompts.jsonl", PROMPTS[:-1])
    with pytest.raises(ValueError, match="prompts was .* and is"):
        map_file(engine, other, whole[1], **RULES)
    target = TableTarget.random(jax.random.key(1), VOCAB)
    model = Model.of(target, engine.drafter, text=engine.model.text)
    changed = Engine(model, max_batch=4, context=64, page_size=8)
    with pytest.raises(ValueError, match="model was .* and is"):
        map_file(changed, *whole, **RULES)
    # Sampled tokens depend on the drafter, too; the number of rows changes nothing.
    sizes: dict[str, Any] = dict(max_batch=3, context=64, page_size=8)
    drafter = TableDrafter(jax.numpy.ones((VOCAB, 1), "int32"))
    with pytest.raises(ValueError, match="drafter was .* and is"):
        map_file(Engine(engine.model, drafter=drafter, **sizes), *whole, **RULES)
    assert map_file(Engine(engine.model, **sizes), *whole, **RULES).kept == 8


def test_files_of_other_origin_are_left_alone(engine: Engine, tmp_path: Path) -> None:
    prompts, out = write(tmp_path / "p.jsonl", [{"prompt": "a"}]), tmp_path / "a.jsonl"
    out.write_text("notes\n")
    with pytest.raises(ValueError, match="its record a.jsonl.run.json does not"):
        map_file(engine, prompts, out)
    assert out.read_text() == "notes\n"
    with pytest.raises(ValueError, match="is the file of prompts"):
        map_file(engine, prompts, prompts, overwrite=True)
    map_file(engine, prompts, out, overwrite=True)
    good = out.read_bytes()
    for bad, words in [(b"notes\n", "is not an answer"), (good + good, "answers line 1")]:
        out.write_bytes(bad)
        with pytest.raises(ValueError, match=words):
            map_file(engine, prompts, out)
        assert out.read_bytes() == bad
    out.write_bytes(good)
    with out.open("ab") as held:
        fcntl = pytest.importorskip("fcntl")
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process writes"):
            map_file(engine, prompts, out)
    assert map_file(engine, prompts, out).kept == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is a list; expected a JSON object"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' occurs twice"),
        ('{"prompt": "a", "topk": 4}', "has 'topk'; expected keys from"),
        ('{"id": 1}', "has no prompt"),
        ('{"prompt": "a", "messages": []}', "expected one of prompt and messages"),
        ('{"prompt": [1, true]}', "expected a string or a list of ids"),
        ('{"messages": [{"content": "a"}]}', "expected a list of objects with a role"),
        ('{"prompt": "a", "id": [1]}', "expected a string or an integer"),
        ('{"prompt": "a", "data": NaN}', "not a finite number"),
        ('{"prompt": "a", "data": 1e999}', "not a finite number"),
        ('{"prompt": "a", "temperature": -1}', "temperature"),
        ('{"prompt": "a", "temperature": "1"}', "temperature is '1'; expected a number"),
        ('{"prompt": "a", "top_p": 0}', "top_p"),
        ('{"prompt": "a", "top_k": 1.5}', "top_k"),
        ('{"prompt": "a", "top_k": 99999999999999999999}', "top_k"),
        ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens"),
        ('{"prompt": "a", "stop_ids": [400]}', "stop id 400"),
        ('{"prompt": "a", "stop": [1]}', "expected a string, or a list of strings"),
        ('{"prompt": "a", "seed": 99999999999999999999}', "seed"),
        ("[" * 100_000, "is not JSON"),
        ('{"prompt": "\udcff"}', "is not JSON"),
    ],
)
def test_a_wrong_line_is_named_before_anything_runs(
    engine: Engine, tmp_path: Path, line: str, words: str
) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "a.jsonl"
    prompts.write_bytes(f'{{"prompt": "a"}}\n\n{line}'.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"p.jsonl, line 3") as error:
        map_file(engine, prompts, out, key=0)
    assert words in str(error.value) and len(str(error.value)) < 600
    assert os.listdir(tmp_path) == ["p.jsonl"]


def test_texts_that_utf_8_lacks_come_back(engine: Engine, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", [{"prompt": "a", "data": ["\ud800", " "]}])
    map_file(engine, prompts, tmp_path / "a.jsonl")
    raw = (tmp_path / "a.jsonl").read_bytes()
    assert raw.count(b"\n") == 1 and json.loads(raw)["data"] == ["\ud800", " "]
