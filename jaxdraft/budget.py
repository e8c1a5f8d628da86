"""Exact memory budget: the number of pages that fit. Plain Python integers, no arrays.

Memory counted, for ``max_batch`` rows and pages of Z slots:

    weights      bytes of all parameters, shared arrays once
    recurrent    max_batch * sum over delta-net layers of
                   (Hv * Dk * Dv * 4 + (W - 1) * channels * itemsize)
    a page       2 * L * Z * G * H * itemsize          keys and values of the attention layers
                                                       without a window
    a window     R pages of the layers with a window, R = ceil((window + rows) / Z) + 1 where rows
                 are fed at once; fewer if the whole context needs fewer
    a ring       R pages of the drafter, R = ceil((window + 2 * block) / Z) + 1
    spill        ceil(block / Z) pages of the drafter per row, if its attention is not windowed

Windowed layers of the target and a windowed drafter are allotted before the target's pool:
``max_batch`` rings, whatever the context. A drafter without a window mirrors the target's
pages: every target page is counted with a page of the drafter. Its spill pages are allotted before.
A drafter with layers of both kinds has both. An MTP head mirrors too, without spill.
The remaining memory is divided:

    pages = floor((memory - weights - recurrent - windows - rings or spill)
                  / (target page + mirrored page))

Not counted: page tables and the stack of free pages (4 bytes per entry), and memory used only in a
step (activations, logits, capsules), which depends on the compiler.

Source: the memory model of onnxruntime-genai's dynamic batching (microsoft/onnxruntime-genai#2490,
#2497).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxdraft.checks import check_int, parse_memory
from jaxdraft.config import DeltaNetConfig, KvShape
from jaxdraft.sizes import check_slots, page_count, ring_pages, window_pages

# --------------------------------------------------------------------------- costs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sliding:
    """Layers of a target with a window: a bounded number of pages per row.

    Attributes:
      cache: their keys and values.
      window: positions a query sees, including its own.
      rows: rows that are fed at once.
    """

    cache: KvShape
    window: int
    rows: int

    def __post_init__(self) -> None:
        check_int("window", self.window)
        check_int("rows", self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windowed:
    """A drafter with a window: a ring per row, and nothing per target page.

    Attributes:
      cache: its keys and values.
      window: positions a query sees.
      block: query rows of its block, Q.
    """

    cache: KvShape
    window: int
    block: int

    def __post_init__(self) -> None:
        check_int("window", self.window)
        check_int("block", self.block)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mirrored:
    """A drafter without a window: one page per page of the target.

    Attributes:
      cache: its keys and values.
      block: query rows of its block, whose keys spill past the row's last page; 0: no block (MTP).
    """

    cache: KvShape
    block: int = 0

    def __post_init__(self) -> None:
        check_int("block", self.block, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beside(Mirrored):
    """A language model as the drafter: pages beside the target's, and state per row.

    Attributes:
      sliding: its attention layers with a window, if there are any.
      recurrent_row: bytes per row of its delta-net layers.
    """

    sliding: Sliding | None = None
    recurrent_row: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("recurrent_row", self.recurrent_row, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed:
    """Any other drafter: bytes of its whole state, allotted before the first page."""

    bytes: int

    def __post_init__(self) -> None:
        check_int("bytes", self.bytes, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed:
    """A drafter with layers of both kinds: a ring per row, and a page per page of the target."""

    windowed: Windowed
    mirrored: Mirrored


DrafterCost = Windowed | Mirrored | Mixed | Fixed


def on_device(cost: Any, parts: int) -> Any:
    """Return what one of ``parts`` devices holds of a cache, or of a cost with caches.

    Keys and values are divided by heads where these divide; recurrent states are the caller's.
    """
    if isinstance(cost, KvShape):
        if cost.kv_heads % parts:
            return cost
        return dataclasses.replace(cost, kv_heads=cost.kv_heads // parts)
    if not isinstance(cost, Sliding | Windowed | Mirrored | Mixed):
        return cost
    members = {f.name: getattr(cost, f.name) for f in dataclasses.fields(cost)}
    return dataclasses.replace(cost, **{n: on_device(m, parts) for n, m in members.items()})


def net_parts(config: DeltaNetConfig, parts: int) -> int:
    """Return the number of devices that delta-net layers are divided over: ``parts``, or one."""
    return 1 if config.key_heads % parts or config.value_heads % parts else parts


def recurrent_bytes(config: DeltaNetConfig, layers: int, dtype: Any) -> int:
    """Return the bytes per row of delta-net state: float32, with convolution rows in ``dtype``."""
    state = config.value_heads * config.key_dim * config.value_dim * 4
    conv = (config.conv_width - 1) * config.channels * jnp.dtype(dtype).itemsize
    return layers * (state + conv)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """All memory costs of a model.

    Attributes:
      weights: bytes of all parameters.
      target: the target's attention layers without a window. With none, memory does not limit its
        pages.
      sliding: the target's attention layers with a window, if there are any.
      recurrent_row: bytes per row of its delta-net layers.
      drafter: memory cost of the drafter, if there is one.
    """

    weights: int
    target: KvShape
    recurrent_row: int = 0
    drafter: DrafterCost | None = None
    sliding: Sliding | None = None

    def __post_init__(self) -> None:
        check_int("weights", self.weights, 0)
        check_int("recurrent_row", self.recurrent_row, 0)

    @property
    def windowed(self) -> Windowed | None:
        """Cost of the drafter's layers with a window, if there are any."""
        part = self.drafter.windowed if isinstance(self.drafter, Mixed) else self.drafter
        return part if isinstance(part, Windowed) else None

    @property
    def mirrored(self) -> Mirrored | None:
        """Cost of the drafter's layers that see everything, if there are any."""
        part = self.drafter.mirrored if isinstance(self.drafter, Mixed) else self.drafter
        return part if isinstance(part, Mirrored) else None


# --------------------------------------------------------------------------- the division


@dataclasses.dataclass(frozen=True, kw_only=True)
class Term:
    """One line of a plan.

    Attributes:
      name: name of the item.
      count: number of items.
      each: bytes per item.
      why: formula with its numbers.
    """

    name: str
    count: int
    each: int
    why: str

    @property
    def bytes(self) -> int:
        """``count * each``."""
        return self.count * self.each


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The exact memory plan, with its reasons.

    Attributes:
      costs: memory costs of the model.
      memory: bytes given; None when pages were.
      max_batch: rows that can be active.
      context: positions of the longest sequence.
      page_size: Z.
      pages: P, pages of the target's pool.
      mesh: rows and parts of the mesh. All numbers are those of one device and of the rows on it.
    """

    costs: Costs
    memory: int | None
    max_batch: int
    context: int
    page_size: int
    pages: int
    mesh: tuple[int, int] = (1, 1)

    @property
    def tokens(self) -> int:
        """Positions the target's pool holds."""
        return self.pages * self.page_size

    @property
    def row_pages(self) -> int:
        """Pages of a row at full context, and columns M of its table."""
        return page_count(self.context, self.page_size)

    @property
    def rows(self) -> int:
        """Rows that can be at full context at once, at most ``max_batch``; 0: not one."""
        return min(self.max_batch, self.pages // self.row_pages)

    @property
    def target_page_bytes(self) -> int:
        """Bytes of a target page alone."""
        return self.costs.target.page_bytes(self.page_size)

    @property
    def mirror_page_bytes(self) -> int:
        """Bytes of the drafter page beside every target page; 0 for a ring, or no drafter."""
        mirrored = self.costs.mirrored
        return 0 if mirrored is None else mirrored.cache.page_bytes(self.page_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of a target page and its mirrored page."""
        return self.target_page_bytes + self.mirror_page_bytes

    @property
    def window_pages(self) -> int:
        """R, pages of a row in the target's windowed layers; 0 if there are none."""
        sliding = self.costs.sliding
        if sliding is None:
            return 0
        longest = self.row_pages * self.page_size
        return window_pages(sliding.window, sliding.rows, self.page_size, longest)

    @property
    def ring_pages(self) -> int:
        """R, pages of a row's ring; 0 unless the drafter has layers with a window."""
        windowed = self.costs.windowed
        if windowed is None:
            return 0
        return ring_pages(windowed.window, windowed.block, self.page_size)

    @property
    def spill_pages(self) -> int:
        """Spill pages of a row; 0 unless the drafter mirrors and has a block."""
        mirrored = self.costs.mirrored
        return 0 if mirrored is None else page_count(mirrored.block, self.page_size)

    @property
    def drafter_pages(self) -> int:
        """Pages of the drafter's own pool: its rings, or the mirrored pages and the spill."""
        mirrored = 0 if self.costs.mirrored is None else self.pages
        return mirrored + self.max_batch * (self.ring_pages + self.spill_pages)

    @property
    def fixed(self) -> tuple[Term, ...]:
        """Items allotted before the first page."""
        costs, drafter, rows = self.costs, self.costs.drafter, self.max_batch
        terms = [Term(name="weights", count=1, each=costs.weights, why="all parameters")]
        terms += self._per_row("", costs.recurrent_row, costs.sliding)
        if isinstance(drafter, Beside):
            terms += self._per_row("drafter ", drafter.recurrent_row, drafter.sliding)
        windowed, mirrored = costs.windowed, costs.mirrored
        if windowed is not None:
            each = windowed.cache.page_bytes(self.page_size)
            why = (
                f"{rows} rows of ceil(({windowed.window} + 2 * {windowed.block}) / "
                f"{self.page_size}) + 1 = {self.ring_pages} pages"
            )
            terms.append(
                Term(name="drafter rings", count=rows * self.ring_pages, each=each, why=why)
            )
        if mirrored is not None and self.spill_pages:
            each = mirrored.cache.page_bytes(self.page_size)
            spill = f"ceil({mirrored.block} / {self.page_size}) = {self.spill_pages}"
            why = f"{rows} rows of {spill} pages"
            terms.append(
                Term(name="drafter spill", count=rows * self.spill_pages, each=each, why=why)
            )
        if isinstance(drafter, Fixed) and drafter.bytes:
            why = f"{rows} rows at full context"
            terms.append(Term(name="drafter state", count=1, each=drafter.bytes, why=why))
        return tuple(terms)

    def _per_row(self, owner: str, recurrent_row: int, sliding: Sliding | None) -> list[Term]:
        """Return the state of a decoder's rows beside their pages."""
        rows, terms = self.max_batch, []
        if recurrent_row:
            why = f"{rows} rows, float32 states and convolution rows"
            name = f"{owner}recurrent state"
            terms.append(Term(name=name, count=rows, each=recurrent_row, why=why))
        if sliding is not None:
            longest = self.row_pages * self.page_size
            pages = window_pages(sliding.window, sliding.rows, self.page_size, longest)
            full = window_pages(sliding.window, sliding.rows, self.page_size)
            span, top = (sliding.window, " + 1") if pages == full else (longest, "")
            rule = f"ceil(({span} + {sliding.rows}) / {self.page_size}){top}"
            each, why = sliding.cache.page_bytes(self.page_size), f"{rows} rows of {rule} = {pages}"
            name = f"{owner}windowed layers"
            terms.append(Term(name=name, count=rows * pages, each=each, why=f"{why} pages"))
        return terms

    @property
    def terms(self) -> tuple[Term, ...]:
        """All items."""
        costs = self.costs
        paid = [
            *self.fixed,
            Term(
                name="target pages",
                count=self.pages,
                each=self.target_page_bytes,
                why=_page_formula(costs.target, self.page_size),
            ),
        ]
        if costs.mirrored is not None:
            why = f"one per target page, {_page_formula(costs.mirrored.cache, self.page_size)}"
            paid.append(
                Term(name="drafter pages", count=self.pages, each=self.mirror_page_bytes, why=why)
            )
        return tuple(paid)

    @property
    def bytes(self) -> int:
        """Total bytes."""
        return sum(term.bytes for term in self.terms)

    @property
    def left(self) -> int:
        """Bytes left over, too few for a page; 0 when pages were given."""
        return 0 if self.memory is None else self.memory - self.bytes

    def facts(self) -> dict[str, Any]:
        """Return the plan as plain values, for JSON."""
        return {
            "memory": self.memory,
            "max_batch": self.max_batch,
            "context": self.context,
            "page_size": self.page_size,
            "mesh": list(self.mesh),
            "pages": self.pages,
            "tokens": self.tokens,
            "rows_at_full_context": self.rows,
            "target_page_bytes": self.target_page_bytes,
            "page_bytes": self.page_bytes,
            "bytes": self.bytes,
            "left": self.left,
            "terms": [dataclasses.asdict(t) | {"bytes": t.bytes} for t in self.terms],
        }

    def lines(self) -> list[str]:
        """Return the plan as text."""
        page = f"{self.target_page_bytes} bytes"
        if self.mirror_page_bytes:
            page += f" alone, {self.page_bytes} with the drafter's"
        where = "on each of {0} x {1} devices; requests are divided over {0} rows of them"
        return [
            *([where.format(*self.mesh)] if self.mesh != (1, 1) else []),
            *(f"{t.name}: {t.bytes} bytes = {t.count} * {t.each} ({t.why})" for t in self.terms),
            f"a page of {self.page_size} positions: {page}",
            f"{self.pages} pages, {self.tokens} tokens; "
            f"{self.rows} of {self.max_batch} rows at the full context of {self.context}",
        ]


def divide(
    costs: Costs,
    *,
    memory: int | str | None = None,
    pages: int | None = None,
    max_batch: int,
    context: int,
    page_size: int,
    mesh: tuple[int, int] = (1, 1),
) -> Plan:
    """Allot memory to the fixed parts, and divide the remainder into pages.

    Args:
      costs: memory costs of the model.
      memory: bytes, or a string like ``"12GiB"``.
      pages: P, instead of ``memory``, to compute the cost of that many pages.
      max_batch: rows that can be active.
      context: positions of the longest sequence.
      page_size: Z.
      mesh: rows and parts of the mesh, for which ``costs`` are those of one device.

    Raises:
      ValueError: a size that is not a positive integer, neither or both of ``memory`` and
        ``pages``, a memory too small for one page, or a pool that int32 cannot number.
    """
    if (memory is None) == (pages is None):
        raise ValueError(f"memory is {memory!r} and pages is {pages!r}; expected one of them")
    plan = Plan(
        costs=costs,
        memory=None if memory is None else parse_memory(memory),
        max_batch=check_int("max_batch", max_batch),
        context=check_int("context", context),
        page_size=check_int("page_size", page_size),
        pages=0 if pages is None else check_int("pages", pages),
        mesh=mesh,
    )
    if plan.memory is not None:
        plan = dataclasses.replace(plan, pages=_affordable(plan, plan.memory))
    check_slots("the target's pool", plan.pages, plan.page_size)
    check_slots("the windowed layers", plan.max_batch * plan.window_pages, plan.page_size)
    check_slots("the drafter's pool", plan.drafter_pages, plan.page_size)
    return plan


def _affordable(plan: Plan, memory: int) -> int:
    spent = 0
    for term in plan.fixed:
        if spent + term.bytes > memory:
            before = f", and {spent} bytes are allotted before" if spent else ""
            raise ValueError(
                f"memory is {memory} bytes; {term.name}: {term.bytes} bytes needed "
                f"({term.why}){before}"
            )
        spent += term.bytes
    if not plan.page_bytes:  # no attention layer: a page costs nothing
        return plan.max_batch * plan.row_pages
    pages = (memory - spent) // plan.page_bytes
    if not pages:
        raise ValueError(
            f"memory is {memory} bytes and {spent} are allotted before the first page; the "
            f"remaining {memory - spent} are less than a page of {plan.page_bytes} bytes "
            f"({plan.page_size} positions)"
        )
    return pages


def _page_formula(cache: KvShape, page_size: int) -> str:
    return (
        f"2 * {cache.layers} layers * {page_size} slots * {cache.kv_heads} heads * "
        f"{cache.head_dim} wide * {cache.itemsize} bytes"
    )
