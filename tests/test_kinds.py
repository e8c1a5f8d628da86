"""The table of drafter kinds, and a kind that is nowhere else."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import jaxdraft
from jaxdraft import Model, generate
from jaxdraft.budget import Mirrored, Windowed
from jaxdraft.checkpoint import save
from jaxdraft.checkpoint.layout import block_layout
from jaxdraft.config import DrafterKind
from jaxdraft.draft.block import BlockDrafter
from jaxdraft.kinds import KINDS, Kind, PairTensor, block_of, blocks, kind_of
from jaxdraft.nn.block_drafter import BlockBackbone
from jaxdraft.testing import tiny_drafter, tiny_model, tiny_mtp, tiny_target


def test_every_kind_is_declared() -> None:
    assert tuple(KINDS) == get_args(DrafterKind)
    assert len({block.head for block in blocks().values()}) == len(blocks())
    target = tiny_target()
    for kind in blocks():
        drafter = tiny_drafter(target, kind)
        assert kind_of(drafter) == kind and isinstance(drafter.backbone(), KINDS[kind].module)
        cost = KINDS[kind].cost(drafter.config, jnp.bfloat16)
        assert isinstance(cost, Windowed if drafter.windowed else Mirrored)
        assert drafter.cost() == KINDS[kind].cost(drafter.config, jnp.float32)
    assert kind_of(tiny_mtp(target)) == "mtp" and kind_of(jaxdraft.NgramDrafter()) is None
    with pytest.raises(ValueError, match="kind is 'mtp'; expected one of dflash2, dspark"):
        block_of("mtp")


@pytest.mark.parametrize("kind", blocks())
def test_the_layout_has_every_parameter_in_its_shape(kind: str) -> None:
    drafter = tiny_drafter(tiny_target(), kind)
    found = dict(nnx.traversals.flatten_mapping(drafter.backbone.params))
    layout = block_layout(drafter.config)
    rotary = {("rotary", "cos"), ("rotary", "sin")}
    assert {entry.path for entry in layout} == set(found) - rotary
    for entry in layout:
        assert sum(part.size for part in entry.tensors) == found[entry.path].size, entry.path
    names = {part.name for entry in layout for part in entry.tensors}
    own = block_of(kind)
    head = own.head or "no such tensor"
    assert {p.name for p in own.pairs} == {n for n in names if n.startswith(head)}


class Additive(BlockBackbone):
    """``pair(p, c) = before[p] + after[c]``: a kind that only this test knows."""

    def __init__(self, config: Any, *, dtype: Any, rngs: Any):
        super().__init__(config, dtype=dtype, rngs=rngs)
        shape = (config.draftable, config.rank)
        for name in ("before", "after"):
            value = jax.random.normal(rngs.params(), shape, jnp.float32).astype(dtype)
            setattr(self, name, nnx.Param(value))

    def pair_scores(self, features: jax.Array, previous: Any, candidates: Any) -> jax.Array:
        before = self.codes(self.before[...], previous).mean(axis=-1)
        after = self.codes(self.after[...], candidates).mean(axis=-1)
        return (before[..., :, None] + after[..., None, :]).astype(jnp.float32)


def test_a_new_kind_is_one_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is built, drafts, is billed and is saved; its name stands in no other module."""
    pairs = tuple(
        PairTensor(path=(name,), name=f"sums.{name}", shape=("vocab", "rank"))
        for name in ("before", "after")
    )
    own = replace(block_of("dflash2"), module=Additive, architecture="SumModel", pairs=pairs)
    own = replace(own, convolves=False, ropes=("default",), first_row=1)
    kind: Kind = replace(KINDS["dspark"], module=Additive, block=own)
    monkeypatch.setitem(KINDS, "additive", kind)  # type: ignore[arg-type]
    target = tiny_target(layers=("attention",) * 3, delta_net=None)
    drafter = tiny_drafter(target, "additive")
    assert drafter.draft_tokens == 3 and isinstance(drafter, BlockDrafter)
    model = Model.of(target, drafter)
    plain = generate(model, [[1, 2, 3]], max_new_tokens=12, drafter="none").ids()
    assert generate(model, [[1, 2, 3]], max_new_tokens=12).ids() == plain
    assert jaxdraft.plan(model, memory="1GiB", context=64, page_size=8).pages > 0
    save(model, tmp_path / "saved")
    home = tmp_path / "saved" / "additive"
    assert json.loads((home / "config.json").read_text())["architectures"] == ["SumModel"]
    stored = load_file(home / "model.safetensors")
    params = drafter.backbone.params
    for name in ("before", "after"):
        np.testing.assert_array_equal(stored[f"sums.{name}"], np.asarray(params[name]))


def test_no_other_module_compares_kinds() -> None:
    """No comparison with the name of a kind stands outside the table."""

    def names(node: ast.AST) -> bool:
        values = [node] if isinstance(node, ast.Constant) else []
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            values = [e for e in node.elts if isinstance(e, ast.Constant)]
        return any(value.value in blocks() for value in values)

    root = Path(jaxdraft.__file__).parent
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sorted(root.rglob("*.py"))
        if path.name != "testing.py"  # the tiny drafters show one kind with a window, one without
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare) and any(map(names, [node.left, *node.comparators]))
    ]
    assert found == []


def test_models_are_made_by_the_table() -> None:
    for kind in KINDS:
        assert kind_of(tiny_model(kind).drafter) == kind
