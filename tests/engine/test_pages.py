"""Reference counts and remembered prefixes against plain Python models of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdraft.engine.pages import Pages, PrefixCache
from jaxdraft.engine.programs import Buckets, bucket


def test_a_page_is_released_once() -> None:
    pages = Pages(4, 8)
    held = pages.take(3)
    assert held == [0, 1, 2] and pages.free == 1
    pages.share([0, 1])
    pages.drop(held)
    assert pages.free == 2  # 0 and 1 have another holder
    with pytest.raises(ValueError, match="page 2 is free already"):
        pages.drop([2])
    with pytest.raises(ValueError, match="page 3 is free: there is nothing to share"):
        pages.share([3])
    with pytest.raises(ValueError, match="3 pages wanted, 2 of 4 are free"):
        pages.take(3)
    pages.check([[0, 1]])
    pages.drop([0, 1])
    assert sorted(pages.take(4)) == [0, 1, 2, 3]
    with pytest.raises(AssertionError, match=r"page: \(held, holders\)"):
        pages.check([[0, 1, 2]])


def test_content_is_compared_whole() -> None:
    """The same page under another parent is another content; so is one token more or less."""
    cache = PrefixCache(pages := Pages(8, 2))
    mine = pages.take(2)
    cache.insert([1, 2, 3, 4], mine)
    assert [n.page for n in cache.match([1, 2, 3, 4, 5], 9)] == mine
    assert [n.page for n in cache.match([1, 2, 3, 4], 1)] == mine[:1]
    assert [n.page for n in cache.match([1, 2, 3], 9)] == mine[:1]
    assert cache.match([3, 4], 9) == [] and cache.match([2, 1, 3, 4], 9) == []
    # Known already: the cache keeps the page it has, and the other one goes with its holder.
    other = pages.take(1)
    assert [n.page for n in cache.insert([1, 2], other)] == mine[:1]
    pages.drop(other)
    pages.drop(mine)
    assert pages.free == 6 and cache.evictable() == 2


class Collision(int):
    """Numbers that all have one hash."""

    def __hash__(self) -> int:
        return 7


def test_equal_hashes_share_nothing() -> None:
    cache = PrefixCache(pages := Pages(4, 1))
    first = pages.take(1)
    cache.insert([Collision(1)], first)
    assert cache.match([Collision(2)], 1) == []
    second = pages.take(1)
    cache.insert([Collision(2)], second)
    assert [n.page for n in cache.match([Collision(1)], 1)] == first
    assert [n.page for n in cache.match([Collision(2)], 1)] == second


def test_the_oldest_goes_first_leaves_before_parents() -> None:
    cache = PrefixCache(pages := Pages(8, 1))
    for ids in ([1, 2, 3], [1, 4], [5]):
        held = pages.take(len(ids))
        cache.insert(ids, held)
        pages.drop(held)
    cache.match([1, 2, 3], 3)  # used last
    assert cache.size == 5 and cache.evictable() == 5  # [1] of the second is the first's
    assert cache.evict(1) == 1 and cache.match([1, 4], 2)[1:] == []
    assert cache.evict(1) == 1 and cache.match([5], 1) == []
    held = [n.page for n in cache.match([1, 2], 2)]
    pages.share(held)  # somebody runs behind [1, 2]
    assert cache.evictable() == 1 and cache.evict(9) == 1
    pages.drop(held)
    assert cache.evict(9) == 2 and pages.free == 8


def test_checkpoints_are_few_and_go_with_their_page() -> None:
    cache = PrefixCache(pages := Pages(8, 1), checkpoints=2)
    held = pages.take(3)
    nodes = cache.insert([1, 2, 3], held)
    for number, node in enumerate(nodes):
        cache.keep(node, f"state {number}")
    assert [n.checkpoint for n in nodes] == [None, "state 1", "state 2"]
    cache.match([1, 2], 2)  # state 1 was used last
    cache.keep(nodes[0], "state 0")
    assert [n.checkpoint for n in nodes] == ["state 0", "state 1", None]
    pages.drop(held)
    cache.evict(3)
    cache.check()
    assert pages.free == 8 and nodes[0].checkpoint is None


def test_a_page_may_depend_on_the_token_behind_it() -> None:
    """An MTP head makes the last pair of a page with the token that follows."""
    cache = PrefixCache(pages := Pages(8, 2), overlap=1)
    assert [cache.full(n) for n in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    held = pages.take(2)
    cache.insert([1, 2, 3, 4, 5], held)
    assert [n.page for n in cache.match([1, 2, 3, 4, 5], 9)] == held
    assert [n.page for n in cache.match([1, 2, 3, 4, 6], 9)] == held[:1]
    assert [n.page for n in cache.match([1, 2, 3, 4], 9)] == held[:1]
    assert cache.match([1, 2, 9, 4, 5], 9) == []
    cache.check()


texts = st.lists(st.integers(0, 1), max_size=9)
moves = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), texts),
        st.tuples(st.just("drop"), st.integers(0, 9)),
        st.tuples(st.just("evict"), st.integers(0, 4)),
    ),
    max_size=30,
)


@given(moves=moves)
def test_any_history(moves: list[tuple[str, Any]]) -> None:
    """What is found is what was put there, every count is right, and in the end all is free."""
    cache = PrefixCache(pages := Pages(12, 2))
    holders: list[list[int]] = []
    content: dict[int, tuple[int, ...]] = {}
    for what, arg in moves:
        if what == "hold":
            path = cache.match(arg, 9)
            shared = [n.page for n in path]
            for depth, page in enumerate(shared, 1):
                assert content[page] == tuple(arg[: 2 * depth])
            need = len(arg) // 2 - len(shared)
            pages.share(shared)
            if need > pages.free:
                could = cache.evictable()
                assert cache.evict(need - pages.free) == min(could, need - pages.free)
            if need > pages.free:
                pages.drop(shared)
                continue
            mine = shared + pages.take(need)
            for depth in range(len(shared), len(mine)):
                content[mine[depth]] = tuple(arg[: 2 * depth + 2])
            cache.insert(arg, mine)
            holders.append(mine)
        elif what == "drop" and holders:
            pages.drop(holders.pop(arg % len(holders)))
        elif what == "evict":
            cache.evict(arg)
        pages.check([cache.held(), *holders])
        cache.check()
    for mine in holders:
        pages.drop(mine)
    assert cache.evictable() == cache.size
    cache.clear()
    assert pages.free == 12


def test_buckets() -> None:
    found = Buckets.of(max_batch=8, chunk=128, columns=128)
    assert found.rows == (1, 2, 4, 8) and found.chunks == (8, 32, 128)
    assert found.columns == (32, 128)
    assert Buckets.of(max_batch=6, chunk=16, columns=3) == Buckets(
        rows=(1, 2, 4, 6), chunks=(16,), columns=(3,), plain=True
    )
    assert [bucket(found.rows, n) for n in (1, 3, 8)] == [1, 4, 8]
    with pytest.raises(ValueError, match="rows is"):
        Buckets(rows=(4, 2), chunks=(8,), columns=(1,))
