"""The plan of a model and of a folder: exact against what ``init`` really allocates."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import jaxdraft
from jaxdraft.budget import Fixed, Mirrored, Windowed
from jaxdraft.cli import app
from jaxdraft.draft.block import BlockDrafter
from jaxdraft.plan import check_batch, plan, weight_bytes
from jaxdraft.state.paged import PagedPool
from jaxdraft.state.recurrent import Recurrent
from jaxdraft.state.ring import Ring
from jaxdraft.target import DecoderTarget
from jaxdraft.testing import TableTarget, tiny_model, tiny_target, tiny_target_config
from tests.paths import ARTIFACTS


def nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


# ------------------------------------------------------------------ what is billed is what is there


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
@pytest.mark.parametrize("size", [4, 16])
def test_a_plan_is_what_the_pools_allocate(kind: str, size: int) -> None:
    """Bytes of keys, values and recurrent states of both pools, and of the weights."""
    model = tiny_model(kind)
    assert isinstance(model.target, DecoderTarget) and isinstance(model.drafter, BlockDrafter)
    rows = 3
    found = plan(model, pages=11, max_batch=rows, context=64, page_size=size)
    terms = {term.name: term.bytes for term in found.terms}
    a = model.target.config.attention
    assert a is not None
    pool = PagedPool.zeros(
        a.kv_shape(1, model.target.dtype),
        batch=rows,
        pages=found.pages,
        page_size=size,
        columns=found.row_pages,
    )
    assert terms["target pages"] == nbytes((pool.keys, pool.values))
    memory: tuple[Recurrent, ...] = model.target.init_recurrent(rows)
    assert terms["recurrent state"] == nbytes(memory)
    if kind == "dflash2":
        state = model.drafter.init_pool(rows, rings=rows, page_size=size)
        assert isinstance(state.cache, Ring) and isinstance(found.costs.drafter, Windowed)
        assert terms["drafter rings"] == nbytes((state.cache.keys, state.cache.values))
    else:
        state = model.drafter.init_pool(
            rows, pages=found.pages, page_size=size, columns=found.row_pages
        )
        assert isinstance(state.cache, PagedPool) and isinstance(found.costs.drafter, Mirrored)
        billed = terms["drafter pages"] + terms["drafter spill"]
        assert billed == nbytes((state.cache.keys, state.cache.values))
    assert state.cache.pages == found.drafter_pages
    # The drafter's embedding and head are the target's own arrays.
    own = nbytes(model.drafter.backbone)
    assert terms["weights"] == nbytes(model.target) + own


@pytest.mark.parametrize(("size", "context"), [(4, 256), (16, 256), (16, 20)])
def test_windowed_layers_are_billed_as_they_are_allocated(size: int, context: int) -> None:
    """Two layers of a window of 12 beside one that sees everything, and a context that is short."""
    shape = tiny_target_config().attention
    assert shape is not None
    layers: Any = ("sliding", "attention", "sliding")
    target = tiny_target(layers=layers, sliding=dataclasses.replace(shape, window=12), taps=())
    found = plan(jaxdraft.Model.of(target), pages=7, max_batch=3, context=context, page_size=size)
    state = target.init_pool(3, pages=found.pages, page_size=size, columns=found.row_pages)
    assert state.sliding is not None and state.sliding.table.shape == (3, found.window_pages)
    terms = {term.name: term.bytes for term in found.terms}
    assert terms["windowed layers"] == nbytes((state.sliding.keys, state.sliding.values))
    assert terms["target pages"] == nbytes((state.pool.keys, state.pool.values))


def test_the_same_memory_gives_the_same_pages() -> None:
    model = tiny_model("dspark")
    given = plan(model, pages=11, max_batch=2, context=64, page_size=8)
    found = plan(model, memory=given.bytes, max_batch=2, context=64, page_size=8)
    assert found.pages == 11 and found.left == 0 and found.bytes == given.bytes
    with pytest.raises(ValueError, match="less than a page of"):
        least = given.bytes - 10 * given.page_bytes
        plan(model, memory=least - 1, max_batch=2, context=64, page_size=8)


def test_an_mtp_head_mirrors_one_layer_without_spill() -> None:
    found = plan(tiny_model("mtp"), pages=5, max_batch=2, context=64, page_size=16)
    assert isinstance(found.costs.drafter, Mirrored)
    assert found.spill_pages == 0 and found.drafter_pages == 5
    assert found.mirror_page_bytes == 2 * 1 * 16 * 2 * 16 * 4  # layers, slots, heads, width, bytes


def test_defaults_and_limits() -> None:
    model = tiny_model("dflash2")
    found = plan(model, memory="16MiB")
    assert (found.max_batch, found.context, found.page_size) == (8, 256, 256)
    assert plan(model, memory=16 * 2**20) == found
    with pytest.raises(ValueError, match="context is 257; the model's has 256 positions"):
        plan(model, memory="16MiB", context=257)
    with pytest.raises(ValueError, match="max_batch is 0; expected at least 1"):
        plan(model, memory="16MiB", max_batch=0)
    with pytest.raises(ValueError, match="page_size is 0; expected at least 1"):
        plan(model, memory="16MiB", page_size=0)
    with pytest.raises(ValueError, match="the target is a TableTarget"):
        plan(jaxdraft.Model.of(TableTarget.random(jax.random.key(0))), memory="1GiB")


def test_a_drafter_of_your_own_is_billed_by_its_init() -> None:
    """A tiny target with a whole second decoder's state as its drafter's."""
    target = tiny_target()

    class Own:
        draft_tokens = 2

        def init(self, batch: int, capacity: int) -> Any:
            return np.zeros((batch, capacity, 10), np.float32)

    model = jaxdraft.Model(target, Own(), jaxdraft.ModelInfo(context_length=256))  # type: ignore
    found = plan(model, pages=4, max_batch=3, context=100, page_size=16)
    assert found.costs.drafter == Fixed(bytes=3 * 100 * 10 * 4)
    assert plan(tiny_model(None), pages=4).costs.drafter == Fixed(bytes=0)


# ------------------------------------------------------------------ folders


@pytest.mark.parametrize(
    "name",
    [
        "qwen35_paged_fp16_dflash2_sw",  # a bfloat16 ring of window 40 beside a float16 target
        "qwen35_paged_bf16_dspark",
        "qwen35_paged_fp16_mtp",
        "qwen3_fp32_cpu",  # dense, no drafter
        "sliding_qwen3_paged_fp16",
    ],
)
def test_a_folder_plans_like_the_model_in_it(name: str) -> None:
    """Without a weight being read: headers give what loading gives."""
    folder = ARTIFACTS / name
    options: dict[str, Any] = dict(memory="3MB", max_batch=2, context=128, page_size=16)
    assert plan(folder, **options).facts() == plan(jaxdraft.load(folder), **options).facts()


def test_a_folder_has_its_own_defaults() -> None:
    """page 16, 4 rows, a context of 640; R = ceil((40 + 16) / 16) + 1 = 5 pages of
    2 * 2 layers * 16 slots * 2 heads * 32 wide * 2 bytes = 8192, for 4 rows.
    """
    found = plan(str(ARTIFACTS / "qwen35_paged_fp16_dflash2_sw"), memory="4MiB")
    assert (found.max_batch, found.context, found.page_size) == (4, 640, 16)
    (rings,) = (t for t in found.terms if t.name == "drafter rings")
    assert (rings.count, rings.each) == (4 * 5, 8192)
    assert found.row_pages == 40
    default = plan(ARTIFACTS / "qwen35_paged_fp16_dflash2_sw", memory="4MiB", max_batch=8)
    assert default.pages < found.pages


def test_drafters_cost_at_their_own_width() -> None:
    """The full-attention DFlash2 of the same family mirrors instead of ringing."""
    found = plan(ARTIFACTS / "qwen35_paged_fp16_dflash2", memory="64MiB")
    assert isinstance(found.costs.drafter, Mirrored) and found.page_size == 256
    assert found.mirror_page_bytes == 2 * 2 * 256 * 2 * 32 * 2


def test_folders_that_do_not_load(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        plan(tmp_path / "nothing", memory="1GiB")
    with pytest.raises(
        ValueError, match="cannot be loaded, so nothing can be planned.*genai_config"
    ):
        plan(tmp_path, memory="1GiB")


# ------------------------------------------------------------------ a fixed batch


@pytest.mark.parametrize("kind", ["dflash2", "dspark", "mtp", None])
def test_check_batch_counts_what_init_allocates(kind: str | None) -> None:
    model = tiny_model(kind)
    options: dict[str, Any] = dict(batch=2, capacity=100)
    states = (model.target.init(2, 100), model.drafter.init(2, 100))
    needed = weight_bytes(model.target, model.drafter) + nbytes(states)
    assert check_batch(model.target, model.drafter, memory=needed, **options) == needed
    with pytest.raises(ValueError, match=rf"memory is {needed - 1} bytes.*2 rows of 100.*{needed}"):
        check_batch(model.target, model.drafter, memory=needed - 1, **options)


def test_check_batch_takes_any_target() -> None:
    model = jaxdraft.Model.of(TableTarget.random(jax.random.key(0), 16, rows=97))
    needed = 97 * 16 * 4 + 2 * 3 * 4  # the table; length and last token of three rows
    assert check_batch(model.target, model.drafter, batch=3, capacity=9, memory="7KB") == needed


# ------------------------------------------------------------------ the command


def test_inspect_prints_the_plan() -> None:
    folder = str(ARTIFACTS / "qwen35_paged_fp16_dflash2_sw")
    run = CliRunner().invoke
    shown = run(app, ["inspect", folder, "--memory", "4MiB"], env={"COLUMNS": "160"})
    assert shown.exit_code == 0
    found = plan(folder, memory="4MiB")
    for text in ("drafter rings", "what fits in 4.0 MiB", f"{found.pages:,}", f"{found.tokens:,}"):
        assert text in shown.output
    options = ["--memory", "4000000", "--max-batch", "2", "--context", "64", "--page-size", "32"]
    facts = json.loads(run(app, ["inspect", folder, "--json", *options]).output)
    expected = plan(folder, memory=4_000_000, max_batch=2, context=64, page_size=32)
    assert facts["plan"] == expected.facts()
    assert "plan" not in json.loads(run(app, ["inspect", folder, "--json"]).output)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "1KB"], "memory is 1000 bytes; weights"),
        (["--memory", "12gib"], "expected bytes, or a number with one of the units"),
        (["--memory", "4MiB", "--context", "641"], "context is 641"),
        (["--max-batch", "2"], "go with --memory"),
    ],
)
def test_inspect_refuses_in_words(options: list[str], message: str) -> None:
    shown = CliRunner().invoke(
        app, ["inspect", str(ARTIFACTS / "qwen35_paged_fp16_dflash2_sw"), *options]
    )
    assert shown.exit_code == 2
    assert message in " ".join(shown.output.split())
