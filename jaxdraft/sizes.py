"""Sizes of buffers and pools that programs are compiled for."""

from __future__ import annotations

PREFILL_CHUNK = 128
"""Rows of a prompt that run at once. A fixed batch has room for as many scratch rows."""

GPU_CHUNK = 512
"""Rows of a prompt, of all requests together, that run at once on a GPU.

A matrix of 16 bits is read in the time of its products with so many rows: 153 on an A100, 203 on a
T4, 206 on an H200, 281 on a B200, 403 on an L4, by their makers' numbers. More rows would save
launches alone.
"""

SLOTS = 2**31
"""Page ids and slots are int32: a pool has fewer slots than this."""


def power_of_two(size: int, *, least: int = 1) -> int:
    """Return the smallest power of two that is at least ``size`` and ``least``."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def page_count(positions: int, page_size: int) -> int:
    """Return the number of pages that hold ``positions`` positions.

    Example, Z = 8: a prompt of 16 and 16 new tokens need ``ceil(32 / 8)`` = 4 pages. A verify
    window never passes the tokens a row may still emit, so nothing is added for drafts.
    """
    return -(-positions // page_size)


def window_pages(window: int, rows: int, page_size: int, capacity: int | None = None) -> int:
    """Return R, the pages of one row under a window, ``ceil((window + rows) / Z) + 1``.

    Up to ``rows`` rows are written past the committed ones before it is known which are accepted,
    and the first of them still reaches ``window - 1`` positions back: ``window + rows - 1`` slots
    keep both (ggml-org/llama.cpp#25691). The page on top is for a window that begins inside a page.

    Args:
      window: positions a query sees, including its own.
      rows: rows written at once.
      page_size: Z.
      capacity: positions of the longest row, if known; limits the result to the pages it fills.
    """
    pages = page_count(window + rows, page_size) + 1
    return pages if capacity is None else min(pages, page_count(capacity + rows, page_size))


def ring_pages(window: int, block: int, page_size: int) -> int:
    """Return R, the pages of one row's drafter ring, ``ceil((window + 2 * block) / Z) + 1``.

    A block's queries reach ``window - 1`` positions back; the rest of the reservation (the block's
    own rows, a block of ingested rows, a partly used page) is the reference runtime's.
    """
    return window_pages(window, 2 * block, page_size)


def check_slots(name: str, pages: int, page_size: int) -> int:
    """Return the number of slots of a pool.

    Raises:
      ValueError: more slots than int32 can number.
    """
    slots = pages * page_size
    if slots >= SLOTS:
        raise ValueError(
            f"{name}: {pages} pages of {page_size} slots are {slots} slots; "
            f"int32 numbers fewer than {SLOTS}"
        )
    return slots
