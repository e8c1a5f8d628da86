"""The front door: arguments, one program, no silent compilation, no hidden transfers."""

from __future__ import annotations

import functools
import importlib
import logging
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdraft
from jaxdraft import Model, generate, score, stream
from jaxdraft.requests import Options
from jaxdraft.telemetry import summarize
from jaxdraft.testing import TableDrafter, TableTarget, tiny_model

front = importlib.import_module("jaxdraft.generate")  # the package exports a function of that name


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model("dflash2")


@pytest.fixture(scope="module")
def table() -> Model:
    return Model.of(TableTarget.random(jax.random.key(0), 16), stop_ids=(3,))


def test_every_public_name_exists() -> None:
    for name in jaxdraft.__all__:
        assert getattr(jaxdraft, name) is not None


def test_prompts_in_every_form(table: Model) -> None:
    expected = generate(table, [[1, 2, 4], [5]], max_new_tokens=6).ids()
    padded = np.asarray([[1, 2, 4], [5, 9, 9]])
    for prompts, lengths in [
        ((np.asarray([1, 2, 4]), np.asarray([5])), None),
        (padded, [3, 1]),
        (jnp.asarray(padded), np.asarray([3, 1])),
        (padded.astype(np.uint8), jnp.asarray([3, 1])),
    ]:
        assert generate(table, prompts, lengths=lengths, max_new_tokens=6).ids() == expected
    assert generate(table, [1, 2, 4], max_new_tokens=6).ids() == expected[:1]


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ([[]], {}, "prompt 0 is empty"),
    ([], {}, "no prompts"),
    ([[1], []], {}, "prompt 1 is empty"),
    (np.zeros((2, 3), np.int32), {"lengths": [3, 0]}, "prompt 1 is empty"),
    ([[1, 16]], {}, r"id 16; the vocabulary has ids 0..15"),
    ([[-1]], {}, r"id -1"),
    ([[1.5]], {}, "integers"),
    (np.zeros((1, 3)), {}, "integers"),
    ("text", {}, "no tokenizer"),
    (["a", "b"], {}, "no tokenizer"),
    ([[1] * 1024], {}, "1024 tokens"),
    ([[1] * 10], {"max_length": 10}, "longest prompt"),
    ([[1]], {"max_length": 0}, "max_length"),
    ([[1]], {"max_length": 1025}, "1024 positions"),
    ([[1]], {"max_new_tokens": 0}, "max_new_tokens"),
    ([[1]], {"max_new_tokens": [1, 2]}, "max_new_tokens"),
    ([[1]], {"max_new_tokens": 1.5}, "max_new_tokens"),
    ([[1]], {"draft_limit": -1}, "draft_limit"),
    ([[1]], {"stop_ids": [16]}, "stop id 16"),
    ([[1]], {"drafter": "dflash3"}, "dflash3"),
    ([[1]], {"drafter": 3}, "drafter is 3"),
    ([[1]], {"lengths": [1]}, "lengths"),
    (np.zeros((2, 3), np.int32), {"lengths": [4, 1]}, "0..3"),
    (np.zeros((2, 3), np.int32), {"lengths": [4]}, "expected"),
]


@pytest.mark.parametrize(("prompts", "options", "words"), BAD)
def test_bad_input_is_a_value_error(table: Model, prompts: Any, options: dict, words: str) -> None:
    for call in (generate, stream):  # stream too says so at once, not at the first event
        with pytest.raises(ValueError, match=words):
            call(table, prompts, **options)


def test_longest_prompt_gives_one_token(table: Model) -> None:
    out = generate(table, [[1] * 15], max_length=16, max_new_tokens=9, stop_ids=())
    assert out.lengths.tolist() == [1] and out.finish_reasons == ["context"]


def test_stop_ids_default_to_the_model_s(table: Model) -> None:
    free = generate(table, [[1, 2]], max_new_tokens=60, stop_ids=()).ids()[0]
    stop = free[5]
    model = Model.of(table.target, stop_ids=(stop,))
    stopped = generate(model, [[1, 2]], max_new_tokens=60)
    assert stopped.ids()[0] == free[: free.index(stop) + 1]
    assert stopped.finish_reasons == ["stop"]
    assert (np.asarray(stopped.tokens)[0, len(stopped.ids()[0]) :] == -1).all()


def test_under_the_users_own_jit(model: Model) -> None:
    """Arrays in, arrays out; the model is an argument, its weights are not in the program."""
    prompts = np.asarray([[1, 2, 3, 4], [5, 6, 0, 0]], np.int32)
    lengths = np.asarray([4, 2], np.int32)
    run = jax.jit(functools.partial(generate, max_new_tokens=12))
    out = run(model, jnp.asarray(prompts), lengths=jnp.asarray(lengths))
    assert out.ids() == generate(model, prompts, lengths=lengths, max_new_tokens=12).ids()
    text = run.lower(model, jnp.asarray(prompts), lengths=jnp.asarray(lengths)).as_text()
    blobs = [len(blob) // 2 for blob in re.findall(r'dense<"0x([0-9A-F]+)"', text)]
    assert max(blobs, default=0) < 4096, "bytes of a constant: a weight is in the program"


class _Compilations(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith("Compiling"):
            self.names.append(message.split(" with ")[0])


def compilations(call: Any) -> list[str]:
    """Names of everything XLA compiles, or takes from its cache, during ``call``."""
    handler, logger = _Compilations(), logging.getLogger("jax._src.interpreters.pxla")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        call()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return handler.names


def test_other_prompts_limits_and_stops_compile_nothing() -> None:
    model = tiny_model("dflash2", context_length=200)  # programs of its own
    options: dict[str, Any] = dict(max_new_tokens=30, trace=True)
    first = compilations(lambda: generate(model, [[1, 2, 3], [4]], **options))
    assert first, "the compilation log is empty: this test would pass whatever happens"
    changes: list[tuple[Any, dict[str, Any]]] = [
        ([[9, 8, 7, 6, 5], [1, 1]], {}),
        ([[5], [6]], {"max_new_tokens": 17}),
        ([[5], [6]], {"max_new_tokens": [20, 3]}),
        ([[5], [6]], {"stop_ids": (4, 9)}),
        ([[5], [6]], {"draft_limit": 1}),
        ([[5], [6]], {"draft_limit": [0, 3]}),
        ([[5], [6]], {"max_length": 25}),
    ]
    for prompts, change in changes:
        call = functools.partial(generate, model, prompts, **{**options, **change})
        assert compilations(call) == [], change


def test_streaming_compiles_the_round_once() -> None:
    model = tiny_model("dspark", context_length=199)
    list(stream(model, [[1, 2, 3]], max_new_tokens=20))
    again = compilations(lambda: list(stream(model, [[7]], max_new_tokens=25, draft_limit=2)))
    assert again == []


def _prepared(model: Model, prompts: list[list[int]]) -> Any:
    options = Options(max_new_tokens=12, stop_ids=())
    return front._prepare(model, prompts, None, options, "auto", None, None)


def test_no_transfer_between_the_first_token_and_the_last(model: Model) -> None:
    """The program takes device arrays and gives device arrays; nothing in it asks the host."""
    ready = _prepared(model, [[1, 2, 3], [4]])
    run = functools.partial(
        front._generate, model.target, ready.drafter, ready.tokens, ready.lengths, ready.rules,
        new_tokens=ready.new_tokens, chunk=ready.chunk, trace=False, logprobs=None,
    )  # fmt: skip
    run()
    with jax.transfer_guard("disallow"):
        out = run()
        out.tokens.block_until_ready()
    text = front._generate.lower(
        model.target, ready.drafter, ready.tokens, ready.lengths, ready.rules,
        new_tokens=ready.new_tokens, chunk=ready.chunk, trace=False, logprobs=None,
    ).compile().as_text()  # fmt: skip
    for word in ("infeed", "outfeed", "send(", "recv(", "xla_python_cpu_callback", "ffi_python"):
        assert word not in text


def test_the_round_donates_its_state(model: Model) -> None:
    ready = _prepared(model, [[1, 2, 3]])
    state, _ = front._start_program(
        model.target, ready.drafter, ready.tokens, ready.lengths, ready.rules,
        new_tokens=ready.new_tokens, chunk=ready.chunk,
    )  # fmt: skip
    before = state.target.pool.keys[0]
    front._round_program(model.target, ready.drafter, state, ready.rules)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(before)


def test_score_is_one_forward_pass(model: Model) -> None:
    """Logits, auxiliary and hidden rows of every position; chunks join without a seam."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 48, n).tolist() for n in (150, 40)]
    scored = score(model, rows)
    assert scored.logits.shape == (2, 150, 48)
    assert scored.aux_hidden.shape == (2, 150, 64) and scored.hidden.shape == (2, 150, 32)
    alone = score(model, rows[1:])
    np.testing.assert_allclose(scored.logits[1, :40], alone.logits[0], atol=5e-5)
    greedy = generate(model, [rows[1]], max_new_tokens=5, drafter="none").ids()[0]
    again = score(model, [rows[1] + greedy])
    assert np.asarray(again.logits)[0, 39:44].argmax(-1).tolist() == greedy
    head = model.target.decoder.params["head"]["weight"]
    np.testing.assert_allclose(scored.logits, scored.hidden @ head.T, atol=5e-5)


def test_counters_of_two_runs_merge(table: Model) -> None:
    drafter = TableDrafter.random(jax.random.key(1), 16, 3)
    outs = [
        generate(table, [[1, 2], [7]], max_new_tokens=n, drafter=drafter, stop_ids=())
        for n in (10, 20)
    ]
    total = summarize([out.stats for out in outs])
    parts = [summarize(out.stats) for out in outs]
    assert total.emitted == 60 == sum(p.emitted for p in parts)
    assert total.accepted == sum(p.accepted for p in parts) <= total.evaluated <= total.proposed
    assert total.rounds + total.accepted + total.prompts == total.emitted
    assert 1 <= total.tokens_per_round <= 4 and len(total.lines()) >= 4
    assert summarize(outs[0].stats, admission_misses=3).lines()[-1] == "admission misses: 3"
    empty = summarize(generate(table, [[1]], max_new_tokens=1, drafter=drafter).stats)
    assert empty.acceptance is None and empty.tokens_per_round is None and empty.lines()


def test_a_budget_is_checked_before_anything_runs(model: Model) -> None:
    free = generate(model, [[1, 2, 3]], max_new_tokens=8)
    assert generate(model, [[1, 2, 3]], max_new_tokens=8, memory="1GiB").ids() == free.ids()
    with pytest.raises(ValueError, match="KiB|MiB|bytes"):
        generate(model, [[1, 2, 3]] * 64, max_new_tokens=200, memory="1MiB")


def test_a_pooled_target_decodes_like_a_dense_one(model: Model) -> None:
    """Pages of 16 shared by three rows; a row that is released starts again from nothing."""
    target = model.target
    tokens = jax.random.randint(jax.random.key(0), (3, 20), 0, 48)
    count = jnp.asarray([20, 7, 13], jnp.int32)
    dense = target.forward(tokens, count, target.init(3, 32))
    pooled, granted = target.grow(target.init_pool(3, pages=5, page_size=16, columns=2), count)
    assert granted.tolist() == [True] * 3
    out = target.forward(tokens, count, pooled)
    for row, n in enumerate(count.tolist()):
        np.testing.assert_allclose(out.logits[row, :n], dense.logits[row, :n], atol=1e-5)
    state = target.release(target.commit(out.state, count), jnp.asarray([True, False, True]))
    assert state.length.tolist() == [0, 7, 0] and int(state.pool.free_count) == 4
    assert not any(np.asarray(m.state)[[0, 2]].any() for m in state.recurrent)
