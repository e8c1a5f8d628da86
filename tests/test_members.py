"""The optional members of targets and drafters: declared in base.py, with their defaults."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import struct

import jaxdraft
from jaxdraft import AdaptiveDrafter, Engine, FallbackDrafter, Model, NgramDrafter, generate
from jaxdraft.base import (
    DrafterDefaults,
    Feed,
    TargetDefaults,
    TargetOutput,
    full_drafter,
    full_target,
)
from jaxdraft.testing import TableDrafter, TableTarget, propose_tokens, tiny_drafter, tiny_target

VOCAB, K = 12, 3
TARGET = TableTarget.random(jax.random.key(0), VOCAB)
MODEL = Model.of(TARGET)


@struct.dataclass
class Bare:
    """A drafter with the five members of the protocol and no other."""

    table: jax.Array  # [V, K] int32

    @property
    def draft_tokens(self) -> int:
        return self.table.shape[1]

    def init(self, batch: int, capacity: int) -> Any:
        return jnp.zeros((batch, 1), jnp.int32) + capacity

    def ingest(self, state: Any, feed: Feed) -> Any:
        return state + feed.count[:, None]

    def propose(self, state: Any, feed: Feed) -> Any:
        return state, *propose_tokens(self.table[feed.anchor], feed)

    def step(self, state: Any, feed: Feed) -> Any:
        return self.propose(self.ingest(state, feed), feed)


@struct.dataclass
class BareTarget:
    """A target with the members of the protocol and no other."""

    inside: TableTarget
    vocab_size: int = struct.field(pytree_node=False, default=VOCAB)
    context_length: int = struct.field(pytree_node=False, default=64)

    def init(self, batch: int, capacity: int) -> Any:
        assert capacity <= self.context_length
        return self.inside.init(batch, capacity)

    def forward(self, tokens: Any, count: Any, state: Any, **options: Any) -> TargetOutput:
        return self.inside.forward(tokens, count, state, **options)

    def commit(self, state: Any, count: jax.Array) -> Any:
        return self.inside.commit(state, count)


def bare() -> Bare:
    table = jax.random.randint(jax.random.key(1), (VOCAB, K), 0, VOCAB, jnp.int32)
    # Right after every second token, so that some drafts are accepted.
    return Bare(table.at[::2, 0].set(jnp.argmax(TARGET.table[:VOCAB:2], axis=-1).astype(jnp.int32)))


@pytest.mark.parametrize("inside", [lambda d: d, AdaptiveDrafter, "first", "second"])
def test_five_members_are_enough(inside: Any) -> None:
    lookup = NgramDrafter(1, 2, K)
    inside = {
        "first": lambda d: FallbackDrafter(d, lookup),
        "second": lambda d: FallbackDrafter(lookup, d),
    }.get(inside, inside)
    drafter, model = inside(bare()), Model.of(BareTarget(TARGET))
    prompts = [[1, 2, 1], [5], [3, 4]]
    plain = generate(model, prompts, max_new_tokens=9, drafter="none").ids()
    assert generate(model, prompts, max_new_tokens=9, drafter=drafter).ids() == plain
    with Engine(model, drafter=drafter, max_batch=2, page_size=24, context=50) as engine:
        assert [r.tokens for r in engine.map(prompts, max_new_tokens=9)] == plain
        engine.check()
        assert engine.summary().admission_misses == 0


def test_the_defaults() -> None:
    drafter = full_drafter(bare())
    state = drafter.init(2, 7)
    assert (drafter.declines, drafter.overlap, drafter.windowed) == (False, 0, False)
    assert drafter.skip(state, state, state[:, 0]) is None and drafter.skip((), state, state) == ()
    assert drafter.row_statistics(state) == () and drafter.with_row_statistics(state, ()) is state
    assert drafter.misses(state) == 0 and drafter.cost() is None and drafter.draft_tokens == K
    pooled = drafter.init_pool(2, pages=9, page_size=4, columns=3)
    assert pooled.tolist() == [[12], [12]], "the whole state in every row, for 12 positions"
    assert drafter.with_draft_tokens(K).draft_tokens == K
    with pytest.raises(ValueError, match="draft_tokens is 2; the K of this Bare is fixed at 3"):
        drafter.with_draft_tokens(2)
    target = full_target(BareTarget(TARGET))
    assert target.init_pool(1, pages=1, page_size=48, columns=2).length.tolist() == [0]
    assert target.skip(state, state, state) is None and target.skip((), state, state) == ()


def test_members_of_its_own_win() -> None:
    class Own(Bare):
        declines = True

        def skip(self, state: Any, tokens: Any, length: Any) -> Any:
            return "skipped"

    drafter = full_drafter(struct.dataclass(Own)(bare().table))
    assert drafter.declines and drafter.skip((), None, None) == "skipped" and drafter.overlap == 0
    inherits = TableDrafter(bare().table)
    assert full_drafter(inherits) is inherits


def test_step_is_ingest_then_propose() -> None:
    drafter = tiny_drafter(tiny_target())
    assert type(drafter).step is DrafterDefaults.step
    zeros, aux = jnp.zeros((2,), jnp.int32), jnp.ones((2, 4, drafter.config.aux_width))
    feed = Feed(aux, zeros + 4, zeros, zeros + 3, zeros == 0, zeros + 3)
    state = drafter.init(2, 32)
    expected = drafter.propose(drafter.ingest(state, feed), feed)
    found = drafter.step(state, feed)
    assert found[1].tokens.tolist() == expected[1].tokens.tolist()
    assert found[0].length.tolist() == expected[0].length.tolist() == [4, 4]


def test_drafters_around_drafters_pass_members_on() -> None:
    target = tiny_target()
    block = tiny_drafter(target)
    adaptive = AdaptiveDrafter(block)
    both = FallbackDrafter(NgramDrafter(), adaptive)
    assert block.windowed and adaptive.cost() == block.cost() is not None
    sizes = dict(pages=4, page_size=8, columns=2)
    state = both.init_pool(3, **sizes)
    statistics = jax.tree.map(lambda x: x + 1, both.row_statistics(state))
    assert [x.shape for x in jax.tree.leaves(statistics)] == [(3, 3), (3,), (3,)]
    again = both.with_row_statistics(state, statistics)
    assert again[1].cut.tolist() == [1, 1, 1] and both.misses(state) == 0


def test_optional_members_are_asked_for_in_base_alone() -> None:
    """No ``getattr`` or ``hasattr`` looks for them, or asks a target or drafter for anything."""
    names = {
        name
        for defaults in (DrafterDefaults, TargetDefaults)
        for name in vars(defaults)
        if not name.startswith("_")
    } | {"inner"}
    parts = {"drafter", "target", "inner", "inside", "chosen"}

    def asks(node: ast.AST) -> bool:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            return False
        if node.func.id not in ("getattr", "hasattr") or len(node.args) < 2:
            return False
        subject, name = node.args[:2]
        if isinstance(name, ast.Constant) and name.value in names:
            return True
        last = {ast.Name: "id", ast.Attribute: "attr"}.get(type(subject))
        return last is not None and getattr(subject, last) in parts

    assert asks(ast.parse("hasattr(x, 'skip')").body[0].value)  # type: ignore[attr-defined]
    assert asks(ast.parse("getattr(model.drafter, n)").body[0].value)  # type: ignore[attr-defined]
    root = Path(jaxdraft.__file__).parent
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sorted(root.rglob("*.py"))
        if path.name not in ("base.py", "guard.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and asks(node)
    ]
    assert found == []
