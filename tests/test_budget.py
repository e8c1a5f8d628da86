"""The budget against worked examples: every number here is written from the formulas, by hand."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdraft.budget import (
    Costs,
    Fixed,
    Mirrored,
    Plan,
    Sliding,
    Windowed,
    divide,
    recurrent_bytes,
)
from jaxdraft.checks import format_bytes, parse_memory
from jaxdraft.config import DeltaNetConfig, KvShape
from jaxdraft.sizes import check_slots, page_count, ring_pages

# 2 * 1 layer * 16 slots * 8 heads * 128 wide * 2 bytes = 65536 bytes a page, and a drafter of twice
# as many layers.
TARGET = KvShape(layers=1, kv_heads=8, head_dim=128, dtype=jnp.bfloat16)
DRAFTER = KvShape(layers=2, kv_heads=8, head_dim=128, dtype=jnp.bfloat16)
# The block drafter of a 27B model: 5 layers, 8 key heads of 128, bfloat16, window 2048, block 8.
LARGE = KvShape(layers=5, kv_heads=8, head_dim=128, dtype=jnp.bfloat16)


def cut(costs: Costs, **options: Any) -> Plan:
    return divide(costs, **{"max_batch": 1, "context": 64, "page_size": 16, **options})


# ------------------------------------------------------------------ worked examples


def test_a_page() -> None:
    assert TARGET.page_bytes(16) == 65536
    assert DRAFTER.page_bytes(16) == 131072
    assert LARGE.page_bytes(16) == 327_680  # 2 * 5 * 16 * 8 * 128 * 2
    assert LARGE.page_bytes(256) == 5_242_880


@pytest.mark.parametrize(
    ("page_size", "pages", "row_bytes"),
    [
        (16, 130, 42_598_400),  # ceil(2064 / 16) + 1 = 130, times 327680
        (256, 10, 52_428_800),  # ceil(2064 / 256) + 1 = 10, times 5242880
    ],
)
def test_rings_of_a_large_drafter(page_size: int, pages: int, row_bytes: int) -> None:
    """27B: four rings cost the same under a context of 4096 and of 262144."""
    drafter = Windowed(cache=LARGE, window=2048, block=8)
    assert ring_pages(2048, 8, page_size) == pages
    for context in (4096, 262_144):
        plan = divide(
            Costs(weights=0, target=TARGET, drafter=drafter),
            pages=1, max_batch=4, context=context, page_size=page_size,
        )  # fmt: skip
        (rings,) = (t for t in plan.terms if t.name == "drafter rings")
        assert rings.count == 4 * pages and rings.bytes == 4 * row_bytes
        assert plan.mirror_page_bytes == 0 and plan.page_bytes == plan.target_page_bytes
        assert plan.drafter_pages == 4 * pages


def test_a_large_model_in_48_gib() -> None:
    """27B: 16 attention and 48 delta-net layers, 27e9 bfloat16 parameters, four rows."""
    # 48 * (48 heads * 128 * 128 * 4 bytes + 3 rows * (2 * 16 * 128 + 48 * 128) channels * 2 bytes)
    delta = DeltaNetConfig(key_heads=16, value_heads=48, key_dim=128, value_dim=128, conv_width=4)
    row = recurrent_bytes(delta, 48, jnp.bfloat16)
    assert row == 48 * (3_145_728 + 61_440) == 153_944_064
    costs = Costs(
        weights=54_000_000_000,
        target=KvShape(layers=16, kv_heads=4, head_dim=256, dtype=jnp.bfloat16),
        recurrent_row=row,
        drafter=Windowed(cache=LARGE, window=2048, block=8),
    )
    options: dict[str, Any] = dict(max_batch=4, context=262_144, page_size=16)
    with pytest.raises(ValueError, match="51539607552 bytes; weights: 54000000000 bytes"):
        divide(costs, memory="48GiB", **options)
    plan = divide(costs, memory="64GiB", **options)
    # 68719476736 - 54000000000 - 4 * 153944064 - 4 * 42598400 = 13933306880 bytes for pages of
    # 2 * 16 * 16 * 4 * 256 * 2 = 1048576: 13287, and 319488 bytes are left.
    assert plan.page_bytes == 1_048_576
    assert plan.pages == 13_287 and plan.tokens == 212_592
    assert plan.left == 13_933_306_880 - 13_287 * 1_048_576
    assert plan.bytes + plan.left == 64 * 2**30
    assert plan.row_pages == 16_384 and plan.rows == 0  # not one row of 262144 fits
    half = divide(costs, memory="64GiB", **{**options, "context": 65_536})
    assert half.pages == 13_287 and half.row_pages == 4096 and half.rows == 3


def test_windowed_layers_cost_the_same_under_any_context() -> None:
    """24 layers of a window of 4096 beside 8 that see everything, two rows, 128 fed at once."""
    wide = KvShape(layers=24, kv_heads=8, head_dim=128, dtype=jnp.bfloat16)
    costs = Costs(
        weights=0,
        target=KvShape(layers=8, kv_heads=8, head_dim=128, dtype=jnp.bfloat16),
        sliding=Sliding(cache=wide, window=4096, rows=128),
    )
    for context in (8192, 131_072):
        plan = divide(costs, memory="4GiB", max_batch=2, context=context, page_size=256)
        (windows,) = (t for t in plan.terms if t.name == "windowed layers")
        # ceil((4096 + 128) / 256) + 1 = 18 pages a row of 2 * 24 * 256 * 8 * 128 * 2 bytes.
        assert (windows.count, windows.each) == (2 * 18, 25_165_824)
        assert windows.why == "2 rows of ceil((4096 + 128) / 256) + 1 = 18 pages"
        # What is left is for the eight layers alone: 2 * 8 * 256 * 8 * 128 * 2 bytes a page.
        assert plan.page_bytes == 8_388_608
        assert plan.pages == (4 * 2**30 - 36 * 25_165_824) // 8_388_608 == 404
    # A context shorter than the window: ceil((1024 + 128) / 256) pages hold it whole.
    short = divide(costs, memory="4GiB", max_batch=2, context=1000, page_size=256)
    (windows,) = (t for t in short.terms if t.name == "windowed layers")
    assert windows.count == 2 * 5 and windows.why == "2 rows of ceil((1024 + 128) / 256) = 5 pages"
    with pytest.raises(ValueError, match="windowed layers: 905969664 bytes needed"):
        divide(costs, memory="64MiB", max_batch=2, context=8192, page_size=256)


def test_a_target_of_windows_alone_needs_no_other_pages() -> None:
    """Memory limits its rows and never their length."""
    costs = Costs(
        weights=1000,
        target=KvShape(layers=0, kv_heads=1, head_dim=1, dtype=jnp.bfloat16),
        sliding=Sliding(cache=TARGET, window=32, rows=16),
    )
    plan = cut(costs, memory=1000 + 2 * 4 * 65536, max_batch=2, context=10**6)
    assert plan.left == 0 and plan.rows == 2 and plan.page_bytes == 0
    with pytest.raises(ValueError, match="windowed layers: 524288 bytes"):
        cut(costs, memory=999 + 2 * 4 * 65536, max_batch=2, context=10**6)


def test_a_full_attention_drafter_is_billed_per_target_page() -> None:
    """64 pages of 65536 bytes alone; with the drafter floor(4194304 / (65536 + 131072)) = 21."""
    memory = 64 * 65536
    assert cut(Costs(weights=0, target=TARGET), memory=memory).pages == 64
    mirrored = Costs(weights=0, target=TARGET, drafter=Mirrored(cache=DRAFTER))
    plan = cut(mirrored, memory=memory)
    assert plan.pages == 21 and plan.drafter_pages == 21
    assert plan.page_bytes == 196_608 and plan.target_page_bytes == 65_536
    assert plan.left == memory - 21 * 196_608 == 65_536


def test_spill_is_paid_before_the_pages() -> None:
    """A block of 20 over pages of 16 spills into two pages a row: six for three rows."""
    costs = Costs(weights=0, target=TARGET, drafter=Mirrored(cache=DRAFTER, block=20))
    plan = cut(costs, memory=64 * 65536, max_batch=3)
    assert plan.spill_pages == 2
    # floor((4194304 - 6 * 131072) / 196608) = floor(3407872 / 196608) = 17
    assert plan.pages == 17 and plan.drafter_pages == 17 + 6
    assert plan.bytes == 6 * 131_072 + 17 * 196_608
    # A block of one page: one spill page a row.
    one = Costs(weights=0, target=TARGET, drafter=Mirrored(cache=DRAFTER, block=16))
    assert cut(one, memory=64 * 65536).spill_pages == 1


def test_tokens_that_are_in_the_prompt_are_not_counted_twice() -> None:
    """4 pages of 8: a prompt of 16 and 16 new tokens need exactly 4."""
    assert page_count(16 + 16, 8) == 4
    plan = divide(Costs(weights=0, target=TARGET), pages=4, max_batch=1, context=32, page_size=8)
    assert plan.rows == 1 and plan.tokens == 32
    # 10 pages of 4 for two rows of 8 + 16 tokens: six pages each, one row at a time.
    plan = divide(Costs(weights=0, target=TARGET), pages=10, max_batch=2, context=24, page_size=4)
    assert plan.row_pages == 6 and plan.rows == 1


def test_products_past_int32_are_right_and_slots_past_it_are_refused() -> None:
    """4096 pages * 8 heads * 256 slots * 64 wide * 2 * 2 bytes = 2**31 exactly."""
    cache = KvShape(layers=1, kv_heads=8, head_dim=64, dtype=jnp.bfloat16)
    costs = Costs(weights=0, target=cache)
    plan = cut(costs, pages=4096, page_size=256)
    assert plan.bytes == 2**31 and plan.tokens == 2**20
    assert cut(costs, memory=2**31, page_size=256).pages == 4096
    with pytest.raises(ValueError, match=rf"{2**40} pages of 16 slots are {2**44} slots.*{2**31}"):
        cut(costs, pages=2**40)
    assert check_slots("pool", 2**27 - 1, 16) == 2**31 - 16
    with pytest.raises(ValueError, match="pool: 134217728 pages of 16 slots are 2147483648 slots"):
        check_slots("pool", 2**27, 16)
    # The drafter's pool has its spill beside the target's pages.
    mirrored = Costs(weights=0, target=cache, drafter=Mirrored(cache=cache, block=4))
    with pytest.raises(ValueError, match="the drafter's pool: 134217728 pages"):
        cut(mirrored, pages=2**27 - 1)
    rings = Costs(weights=0, target=cache, drafter=Windowed(cache=cache, window=2048, block=8))
    with pytest.raises(ValueError, match="the drafter's pool: 136314880 pages of 16 slots"):
        cut(rings, pages=1, max_batch=2**20)  # 130 pages a row


@pytest.mark.parametrize("name", ["max_batch", "context", "page_size", "pages"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "4"])
def test_sizes_are_positive_integers(name: str, value: Any) -> None:
    expected = "at least 1" if value in (0, -1) else "an integer"
    options = {"pages": 4, name: value}
    with pytest.raises(ValueError, match=f"{name} is {value!r}; expected {expected}"):
        cut(Costs(weights=0, target=TARGET), **options)


def test_impossible_budgets_say_why() -> None:
    costs = Costs(
        weights=1000,
        target=TARGET,
        recurrent_row=300,
        drafter=Windowed(cache=DRAFTER, window=40, block=8),
    )
    with pytest.raises(ValueError, match="memory is 999 bytes; weights: 1000 bytes needed"):
        cut(costs, memory=999)
    with pytest.raises(
        ValueError, match="recurrent state: 600 bytes needed.*1000 bytes are allotted before"
    ):
        cut(costs, memory=1599, max_batch=2)
    # A ring has ceil(56 / 16) + 1 = 5 pages of 131072 bytes.
    with pytest.raises(ValueError, match=r"drafter rings: 1310720 bytes needed.*\+ 1 = 5 pages"):
        cut(costs, memory=1600 + 1_310_719, max_batch=2)
    fixed = 1600 + 1_310_720
    with pytest.raises(ValueError, match="remaining 65535 are less than a page of 65536 bytes"):
        cut(costs, memory=fixed + 65_535, max_batch=2)
    assert cut(costs, memory=fixed + 65_536, max_batch=2).pages == 1
    for both in ({}, {"memory": 1, "pages": 1}):
        with pytest.raises(ValueError, match="expected one of them"):
            cut(costs, **both)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda: KvShape(layers=-1, kv_heads=1, head_dim=1, dtype=jnp.int8), "layers is -1"),
        (lambda: KvShape(layers=1, kv_heads=0, head_dim=1, dtype=jnp.int8), "kv_heads is 0"),
        (lambda: Windowed(cache=TARGET, window=-1, block=8), "window is -1"),
        (lambda: Mirrored(cache=TARGET, block=-8), "block is -8"),
        (lambda: Fixed(bytes=-1), "bytes is -1"),
        (lambda: Costs(weights=-5, target=TARGET), "weights is -5"),
    ],
)
def test_impossible_parts(part: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        part()


def test_a_model_without_attention_pays_no_pages() -> None:
    none = KvShape(layers=0, kv_heads=1, head_dim=1, dtype=jnp.bfloat16)
    plan = cut(Costs(weights=10, target=none, recurrent_row=5), memory=20, max_batch=2, context=40)
    assert plan.pages == 2 * 3 and plan.bytes == 20 and plan.left == 0


# ------------------------------------------------------------------ laws


@given(
    memory=st.integers(1, 2**42),
    weights=st.integers(0, 2**34),
    row=st.integers(0, 2**28),
    rows=st.integers(1, 16),
    size=st.sampled_from([1, 4, 16, 256]),
    block=st.integers(1, 40),
    kind=st.sampled_from(["none", "ring", "mirror"]),
)
def test_the_pages_are_the_most_that_fit(
    memory: int, weights: int, row: int, rows: int, size: int, block: int, kind: str
) -> None:
    """What is billed fits, one page more does not, and the terms are the whole."""
    drafter = {
        "none": None,
        "ring": Windowed(cache=DRAFTER, window=40, block=block),
        "mirror": Mirrored(cache=DRAFTER, block=block),
    }[kind]
    costs = Costs(weights=weights, target=TARGET, recurrent_row=row, drafter=drafter)
    page = 2 * size * 8 * 128 * 2
    before = weights + rows * row
    before += {
        "none": 0,
        "ring": rows * (math.ceil((40 + 2 * block) / size) + 1) * 2 * page,
        "mirror": rows * math.ceil(block / size) * 2 * page,
    }[kind]
    page *= 3 if kind == "mirror" else 1
    expected = (memory - before) // page
    try:
        plan = divide(costs, memory=memory, max_batch=rows, context=100, page_size=size)
    except ValueError:
        assert expected < 1 or expected * size >= 2**31 - rows * (block + size)
        return
    assert plan.pages == expected
    assert plan.bytes == sum(t.bytes for t in plan.terms) == before + expected * page
    assert 0 <= plan.left < page
    again = divide(costs, pages=plan.pages, max_batch=rows, context=100, page_size=size)
    assert again.bytes == plan.bytes and again.left == 0
    assert plan.facts()["bytes"] == plan.bytes and len(plan.lines()) == len(plan.terms) + 2


# ------------------------------------------------------------------ units


@pytest.mark.parametrize(
    ("given_", "size"),
    [
        (12, 12),
        ("12GiB", 12_884_901_888),
        ("12 GiB", 12_884_901_888),
        ("500MB", 500_000_000),
        ("500MiB", 524_288_000),
        ("1.5GiB", 1_610_612_736),
        ("1KB", 1000),
        ("1B", 1),
        ("2TB", 2 * 10**12),
        ("0.1KB", 100),
    ],
)
def test_memory(given_: int | str, size: int) -> None:
    assert parse_memory(given_) == size


@pytest.mark.parametrize(
    "bad",
    ["", "12", "GiB", "12gib", "12G", "12 GB ", " 1GB", "-1GB", "1e3MB", "1,5GB", "1.GB", "0.3B",
     "1.0001KB", "0GB", "٣GB", "12GiB\n", 0, -5, 1.5, True, None, "nanGB"],
)  # fmt: skip
def test_memory_is_strict(bad: Any) -> None:
    with pytest.raises(ValueError, match="memory is"):
        parse_memory(bad)


def test_format_bytes() -> None:
    sizes = (1023, 1024, 42_598_400, 12 * 2**30, 3 * 2**40, 2**60)
    words = ["1023 B", "1.0 KiB", "40.6 MiB", "12.0 GiB", "3.0 TiB", "1048576.0 TiB"]
    assert [format_bytes(size) for size in sizes] == words
