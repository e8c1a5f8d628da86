"""Ownership of pages: reference counts, and prefixes cached by content.

Plain Python. Only the host allocates: programs receive the tables of a step as one array, and never
allocate or free a page themselves.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any


class Pages:
    """The pages of a pool, each free or with a count of its holders.

    Args:
      count: P, number of pages.
      size: Z, positions per page.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.held = [0] * count
        # Pages are taken from the end, so page 0 is allocated first.
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of pages without a holder."""
        return len(self._free)

    def needed(self, positions: int) -> int:
        """Return the number of pages needed for ``positions`` positions."""
        return -(-positions // self.size)

    def take(self, count: int) -> list[int]:
        """Take ``count`` free pages, each then held once.

        Raises:
          ValueError: if fewer pages are free; none is taken.
        """
        if count > self.free:
            raise ValueError(f"{count} pages wanted, {self.free} of {self.count} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self.held[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to pages that are already held."""
        for page in pages:
            if not self.held[page]:
                raise ValueError(f"page {page} is free: there is nothing to share")
            self.held[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Remove a holder from pages; a page without holders becomes free."""
        for page in pages:
            if not self.held[page]:
                raise ValueError(f"page {page} is free already")
            self.held[page] -= 1
            if not self.held[page]:
                self._free.append(page)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Check that every count equals the number of holders, and free + held = all pages.

        Raises:
          AssertionError: if the check fails.
        """
        counts = Counter(page for pages in holders for page in pages)
        wrong = {p: (n, counts[p]) for p, n in enumerate(self.held) if n != counts[p]}
        assert not wrong, f"page: (held, holders) {wrong}"
        assert sorted(self._free) == [p for p, n in enumerate(self.held) if not n], self._free


class Node:
    """A full page whose content is known: its tokens, after those of its parent."""

    __slots__ = ("checkpoint", "children", "key", "page", "parent", "used")

    def __init__(self, parent: Node | None, key: tuple[int, ...], page: int) -> None:
        self.parent, self.key, self.page = parent, key, page
        self.children: dict[tuple[int, ...], Node] = {}
        self.checkpoint: Any = None  # state of the rows after this page, if it was kept
        self.used = 0  # time of the last use


class PrefixCache:
    """Tree of full pages by content: a page is found by its parent and its own tokens.

    A node holds its page once. The tokens themselves are compared, not their hashes, so a hash
    collision cannot make two prompts share a page. When pages run out, the least recently used
    page is evicted, leaves first. Pages held by a request are never evicted.

    Args:
      pages: pool that the pages come from.
      checkpoints: maximum number of nodes with a checkpoint; the least recently used lose theirs.
      overlap: number of tokens after a page that its content also depends on: 1 for an MTP head,
        whose last pair in a page includes the token that follows.
    """

    def __init__(self, pages: Pages, *, checkpoints: int = 0, overlap: int = 0) -> None:
        self.pages, self.checkpoints, self.overlap = pages, checkpoints, overlap
        self._root = Node(None, (), -1)
        self._clock = 0
        self._kept: dict[int, Node] = {}  # nodes with a checkpoint, least used first
        self.size = 0

    def match(self, ids: Sequence[int], most: int) -> list[Node]:
        """Return the longest cached path of at most ``most`` full pages that begins ``ids``."""
        path, node = [], self._root
        for number in range(min(most, self.full(len(ids)))):
            child = node.children.get(self._key(ids, number))
            if child is None:
                break
            path.append(child)
            node = child
        self._touch(path)
        return path

    def common(self, ids: Sequence[int], others: Sequence[int], most: int) -> int:
        """Return the number of pages, at most ``most``, with which both texts begin."""
        for number in range(most):
            if self._key(ids, number) != self._key(others, number):
                return number
        return max(most, 0)

    def full(self, positions: int) -> int:
        """Return the number of pages whose content is final once ``positions`` are cached."""
        return max(0, positions - self.overlap) // self.pages.size

    def insert(self, ids: Sequence[int], pages: Sequence[int]) -> list[Node]:
        """Remember that ``pages`` hold the first ``len(pages) * Z`` of ``ids``; see :meth:`full`.

        Content that is already cached keeps its existing page.

        Returns:
          The nodes, one per page.
        """
        path, node = [], self._root
        for number, page in enumerate(pages):
            key = self._key(ids, number)
            child = node.children.get(key)
            if child is None:
                child = Node(node, key, page)
                node.children[key] = child
                self.pages.share([page])
                self.size += 1
            path.append(child)
            node = child
        self._touch(path)
        return path

    def keep(self, node: Node, checkpoint: Any) -> None:
        """Store the row state after this page as its checkpoint."""
        if self.checkpoints <= 0:
            return
        self._kept.pop(id(node), None)
        while len(self._kept) >= self.checkpoints:
            oldest = next(iter(self._kept))
            self._kept.pop(oldest).checkpoint = None
        node.checkpoint = checkpoint
        self._kept[id(node)] = node

    def evictable(self) -> int:
        """Return the number of pages that :meth:`evict` could free.

        These are the pages of nodes that no request holds, neither itself nor a descendant.
        """

        loose: dict[int, bool] = {}
        for node in reversed(list(self._nodes())):  # children before their parents
            below = all(loose[id(child)] for child in node.children.values())
            loose[id(node)] = below and self.pages.held[node.page] == 1
        return sum(loose.values())

    def evict(self, count: int) -> int:
        """Evict pages until ``count`` more are free, or none is left to evict.

        Returns:
          The number of pages freed.
        """
        freed = 0
        leaves = [
            (node.used, id(node), node)
            for node in self._nodes()
            if not node.children and self.pages.held[node.page] == 1
        ]
        heapq.heapify(leaves)
        while leaves and freed < count:
            node = heapq.heappop(leaves)[2]
            parent = node.parent
            self._forget(node)
            freed += 1
            if parent is not None and parent is not self._root and not parent.children:
                if self.pages.held[parent.page] == 1:
                    heapq.heappush(leaves, (parent.used, id(parent), parent))
        return freed

    def clear(self) -> None:
        """Remove all nodes."""
        for node in list(self._nodes()):
            self.pages.drop([node.page])
        self._root.children.clear()
        self._kept.clear()
        self.size = 0

    def held(self) -> list[int]:
        """Return the pages of all nodes."""
        return [node.page for node in self._nodes()]

    def check(self) -> None:
        """Check the tree's links, that its keys are full pages, and the number of checkpoints."""
        nodes = list(self._nodes())
        assert len(nodes) == self.size, (len(nodes), self.size)
        assert all(len(node.key) == self.pages.size + self.overlap for node in nodes)
        assert all(child.parent is n for n in nodes for child in n.children.values())
        assert len(self._kept) <= max(self.checkpoints, 0)
        kept = {id(node) for node in nodes if node.checkpoint is not None}
        assert kept == set(self._kept), "a checkpoint outlived its page"

    def _nodes(self) -> Iterable[Node]:
        """Yield all nodes, parents before their children."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _key(self, ids: Sequence[int], number: int) -> tuple[int, ...]:
        size = self.pages.size
        return tuple(ids[number * size : (number + 1) * size + self.overlap])

    def _touch(self, path: list[Node]) -> None:
        self._clock += 1
        for node in path:
            node.used = self._clock
            if id(node) in self._kept:  # to the end of the order
                self._kept[id(node)] = self._kept.pop(id(node))

    def _forget(self, node: Node) -> None:
        assert node.parent is not None and not node.children
        del node.parent.children[node.key]
        self._kept.pop(id(node), None)
        node.checkpoint = None
        self.pages.drop([node.page])
        self.size -= 1
