"""The adapter for lm-eval gives the numbers of lm-eval's own model for transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdraft.evaluation import LM, Scorer, evaluate, harness, scores
from tests.evaluation.regenerate import (
    GENERATE,
    GOLDEN,
    WINDOW,
    answers,
    checkpoint,
    reference,
    requests,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LM:
    return LM(str(folder), dtype="float32", batch_size=3, max_length=WINDOW)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("loglikelihood", "rolling", "generate"):
        assert len(found[name]) == len(expected[name])
    numbers, greedy = zip(*found["loglikelihood"], strict=True)
    others, known = zip(*expected["loglikelihood"], strict=True)
    np.testing.assert_allclose(numbers, others, rtol=1e-5, atol=1e-4)
    assert greedy == known and any(known) and not all(known)
    np.testing.assert_allclose(found["rolling"], expected["rolling"], rtol=1e-5, atol=1e-4)
    assert found["generate"] == expected["generate"]


def test_the_numbers_of_transformers(model: LM) -> None:
    before = scores.token_log_probs._cache_size()
    assert_equal(answers(model), json.loads(GOLDEN.read_text()))
    assert scores.token_log_probs._cache_size() - before <= 3, "one program per power of two"
    whole = model.generate_until(requests(GENERATE), True)
    assert whole == json.loads(GOLDEN.read_text())["generate"], "together as one by one"


@pytest.mark.full
def test_the_numbers_of_transformers_now(folder: Path, model: LM) -> None:
    for module in ("lm_eval", "torch", "transformers"):
        pytest.importorskip(module)
    assert_equal(answers(model), reference(folder))


@pytest.mark.full
def test_lm_eval_runs_it(folder: Path, tmp_path: Path) -> None:
    """A task from a file, by the registered name, with every kind of request."""
    pytest.importorskip("lm_eval")
    import lm_eval
    from lm_eval.tasks import TaskManager

    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"q": f"What is {n}?", "a": str(n)}) + "\n" for n in range(5))
    )
    extra = {
        "generate_until": "generation_kwargs:\n  until: ['.']\n  max_gen_toks: 8\n",
        "loglikelihood": "",
        "loglikelihood_rolling": "metric_list:\n  - metric: word_perplexity\n",
    }
    for kind, lines in extra.items():
        (tmp_path / f"{kind}.yaml").write_text(
            f"task: tiny_{kind}\ndataset_path: json\ntest_split: test\noutput_type: {kind}\n"
            f"dataset_kwargs:\n  data_files:\n    test: {rows}\n"
            "doc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n" + lines
        )
    found = lm_eval.simple_evaluate(
        "jaxdraft", f"pretrained={folder},dtype=float32,batch_size=2",
        tasks=["tiny_generate_until", "tiny_loglikelihood", "tiny_loglikelihood_rolling"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )  # fmt: skip
    assert found is not None and len(found["results"]) == 3


def test_windows_score_each_token_once(model: LM) -> None:
    scorer = Scorer(model.model, max_length=4)
    assert scorer.windows(range(10), 77) == [
        ([77], [0, 1, 2, 3]),
        ([3], [4, 5, 6, 7]),
        ([5, 6, 7], [8, 9]),
    ]
    assert scorer.windows([], 77) == [] and scorer.windows([5], 77) == [([77], [5])]
    for size in range(1, 14):
        pairs = scorer.windows(list(range(size)), 77)
        assert [i for _, part in pairs for i in part] == list(range(size))
        assert all(len(a) + len(b) - 1 <= 4 and a for a, b in pairs)


def test_sampled_answers_depend_on_the_seed_alone(folder: Path, model: LM) -> None:
    rows = [["x", {"do_sample": True, "temperature": 0.9, "top_k": 9, "max_gen_toks": 8}]] * 3
    one = model.generate_until(requests(rows), True)
    assert one == model.generate_until(requests(rows), True) and len(set(one)) > 1
    other = LM(model.model, max_length=WINDOW, batch_size=3, seed=1)
    assert other.generate_until(requests(rows), True) != one


@pytest.mark.parametrize(
    ("kind", "rows", "words"),
    [
        ("loglikelihood", [["a", ""]], "request 0 has 2 tokens of context and 0 of"),
        (
            "loglikelihood",
            [["a", "b"], ["a", "c" * 60]],
            "request 1 has 2 tokens of context and 60",
        ),
        ("generate_until", [["a", {"num_beams": 4}]], r"request 0 has \['num_beams'\]"),
        ("generate_until", [["a", {"max_gen_toks": 48}]], "request 0 generates 48 tokens"),
        ("generate_until", [["a", {"max_gen_toks": 0}]], "max_gen_toks is 0"),
        ("generate_until", [["a", {"max_gen_toks": 4, "do_sample": True, "top_p": 2}]], "top_p"),
    ],
)
def test_wrong_requests(model: LM, kind: str, rows: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        getattr(model, kind)(requests(rows), True)


def test_wrong_models(model: LM) -> None:
    loaded = model.model
    with pytest.raises(ValueError, match="no tokenizer"):
        LM(replace(loaded, text=None))
    assert loaded.text is not None
    with pytest.raises(ValueError, match="names no eos_token"):
        LM(replace(loaded, text=replace(loaded.text, special_tokens={})))
    for options, words in [
        (dict(max_length=513), "max_length is 513; the model's context has 512"),
        (dict(max_batch_size=9), "max_batch_size is 9; expected None"),
        (dict(batch_size=0), "batch_size is 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            LM(loaded, **options)
    if not harness.INSTALLED:
        with pytest.raises(ValueError, match=r"pip install 'jaxdraft\[eval\]'"):
            evaluate(model, ["arc_easy"])
