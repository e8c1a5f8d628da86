"""The table of what is divided over the devices of the model axis, for every module.

| module | divided by | rule |
|---|---|---|
| ``Attention``, ``BlockLayer`` | heads | the key/value heads divide by n, or n divides by them and the heads divide by n: then each of them is copied to n / G devices |
| ``DeltaNet`` | heads | key heads and value heads divide by n |
| ``Mlp`` and the experts of ``Moe`` | hidden channels | they divide by n; experts are divided inside, so that every device reads its share of just the chosen ones |
| ``Embedding``, heads, the tables of ``DFlash2`` and ``DSpark`` | vocabulary | it divides by n |
| ``fc`` of ``BlockBackbone``, ``Mtp`` and ``Eagle3`` | input channels | they divide by n |

Everything else is replicated: norms, routers, gates of DSpark, block convolutions, rotary tables,
and any module whose rule does not hold. A quantized matrix is divided along its inputs in whole
blocks of scales; where these do not divide, the matrix is replicated.
"""  # noqa: E501, a table

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from jaxdraft.config import AttentionConfig
from jaxdraft.nn.attention import Attention
from jaxdraft.nn.block_drafter import BlockBackbone, BlockLayer
from jaxdraft.nn.decoder import Decoder
from jaxdraft.nn.delta_net import DeltaNet
from jaxdraft.nn.dflash2 import DFlash2
from jaxdraft.nn.dspark import DSpark
from jaxdraft.nn.eagle3 import Eagle3
from jaxdraft.nn.experts import PackedExperts
from jaxdraft.nn.fused import order
from jaxdraft.nn.linear import BlockedLinear, Embedding, Linear
from jaxdraft.nn.mlp import Mlp, Moe
from jaxdraft.nn.mtp import Mtp
from jaxdraft.nn.packed import PackedLinear, PackedRows
from jaxdraft.sharding.placement import ShardingError

Path = tuple[Any, ...]


class Cut(NamedTuple):
    """The way an array is divided.

    Attributes:
      dim: the dimension that is divided.
      index: entries along ``dim`` of the array on one device, in the new order and perhaps
        repeated; None: as they are.
      spread: number of times that every entry along ``dim`` is repeated first.
    """

    dim: int
    index: np.ndarray | None = None
    spread: int = 1


Cuts = Mapping[str, Cut]


def kv_copies(config: AttentionConfig, parts: int) -> int:
    """Return the copies of every key/value head for ``parts`` devices; 0: not divided.

    Example, 24 heads, 4 key/value heads: 1 copy on 2 or 4 devices, 2 copies on 8, and 16 devices
    do not divide 24 heads.
    """
    if config.kv_heads % parts == 0:
        return 1
    if parts % config.kv_heads == 0 and config.heads % parts == 0:
        return parts // config.kv_heads
    return 0


def with_copies(config: Any, parts: int) -> Any:
    """Return a description with key/value heads copied for ``parts`` devices.

    Args:
      config: an :class:`AttentionConfig`, a description that holds such, or anything else.
      parts: number of devices.
    """
    if isinstance(config, AttentionConfig):
        copies = kv_copies(config, parts)
        if copies <= 1:
            return config
        return dataclasses.replace(config, kv_heads=config.kv_heads * copies)
    found = {}
    for name in ("attention", "sliding"):
        old = getattr(config, name, None)
        if isinstance(old, AttentionConfig):
            found[name] = with_copies(old, parts)
    changed = {name: new for name, new in found.items() if new != getattr(config, name)}
    return dataclasses.replace(config, **changed) if changed else config


def _heads(config: AttentionConfig, copies: int, start: int) -> np.ndarray:
    """Return the rows of key/value heads from ``start`` on, each head ``copies`` times."""
    rows = start + np.arange(config.kv_rows).reshape(config.kv_heads, 1, -1)
    return np.repeat(rows, copies, axis=1).reshape(-1)


def _in_order(*sizes: int) -> list[np.ndarray]:
    """Return the row numbers of parts of these sizes."""
    starts = np.cumsum([0, *sizes[:-1]])
    return [start + np.arange(size) for start, size in zip(starts, sizes, strict=True)]


def _attention(module: Attention, parts: int) -> Cuts:
    config = module.config
    copies = kv_copies(config, parts)
    if not copies:
        return {}
    rows = [
        np.arange(config.query_rows),
        _heads(config, copies, config.query_rows),
        _heads(config, copies, config.query_rows + config.kv_rows),
    ]
    fused, one = order(rows, parts), Cut(0)
    cuts = {"qkv": Cut(0, fused), "qkv_bias": Cut(0, fused), "o": Cut(1), "sinks": one}
    if config.qk_norm and config.norm_whole:
        cuts["q_norm"], cuts["k_norm"] = one, Cut(0, _heads(config, copies, 0))
    return cuts


def _block_layer(module: BlockLayer, parts: int) -> Cuts:
    config = module.config.attention
    copies = kv_copies(config, parts)
    if not copies:
        return {}
    rows = [_heads(config, copies, 0), _heads(config, copies, config.kv_rows)]
    return {"q": Cut(0), "kv": Cut(0, order(rows, parts)), "o": Cut(1)}


def _delta_net(module: DeltaNet, parts: int) -> Cuts:
    c = module.config
    if c.key_heads % parts or c.value_heads % parts:
        return {}
    channels = order(_in_order(c.key_rows, c.key_rows, c.value_rows), parts)
    rows = order(_in_order(c.key_rows, c.key_rows, c.value_rows, c.value_rows), parts)
    one = Cut(0)
    return {
        "qkvz": Cut(0, rows),
        "ba": Cut(0, order(_in_order(c.value_heads, c.value_heads), parts)),
        "conv_weight": Cut(0, channels),
        "conv_bias": Cut(0, channels),
        "decay_scale": one,
        "dt_bias": one,
        "out": Cut(1),
    }


def _mlp(module: Mlp, parts: int) -> Cuts:
    hidden = _shape(module.gate_up)[0] // 2
    if hidden % parts:
        return {}
    fused = Cut(0, order(_in_order(hidden, hidden), parts))
    return {"gate_up": fused, "gate_up_bias": fused, "down": Cut(1)}


def _moe(module: Moe, parts: int) -> Cuts:
    hidden = module.config.hidden
    if hidden % parts:
        return {}
    fused = Cut(1, order(_in_order(hidden, hidden), parts))
    return {"gate_up": fused, "gate_up_bias": fused, "down": Cut(2)}


def _along(**dims: int) -> Callable[[Any, int], Cuts]:
    """Return a rule that divides members along one dimension each, where that divides."""

    def rule(module: Any, parts: int) -> Cuts:
        there = {name: dim for name, dim in dims.items() if name in vars(module)}
        shapes = {name: _shape(getattr(module, name)) for name in there}
        return {name: Cut(dim) for name, dim in there.items() if shapes[name][dim] % parts == 0}

    return rule


def _shape(member: Any) -> tuple[int, ...]:
    """Return the shape of a matrix or of a parameter."""
    if isinstance(member, PackedRows):
        return sum(_shape(part)[0] for part in member.below), _shape(member.below[0])[1]
    if isinstance(member, PackedLinear):
        return member.form.outputs, member.form.inputs
    if isinstance(member, Linear | Embedding):
        return member.weight.shape
    return member.shape


RULES: dict[type, tuple[Callable[[Any, int], Cuts], ...]] = {
    Attention: (_attention,),
    BlockLayer: (_block_layer,),
    DeltaNet: (_delta_net,),
    Mlp: (_mlp,),
    Moe: (_moe,),
    Decoder: (_along(embed=0, head=0),),
    BlockBackbone: (_along(fc=1, head=0),),
    DFlash2: (_along(predecessor=0, successor=0),),
    DSpark: (_along(markov_w1=0, markov_w2=0),),
    Mtp: (_along(fc=1),),
    Eagle3: (_along(fc=1, embed=0, head=0),),
}
"""The rules of each kind of module; those of its bases hold, too."""


def divide(module: nnx.Module, parts: int) -> dict[Path, Cut]:
    """Return the cuts of all arrays of a module for ``parts`` devices.

    The module's arrays may be shapes alone, and are not changed; its static members are those of
    the divided module afterwards.

    Args:
      module: a module on one device.
      parts: number of devices.

    Returns:
      The cut of each array that is divided, by path.

    Raises:
      ShardingError: a matrix is also kept in blocks.
    """
    found: dict[Path, Cut] = {}
    for path, part in list(nnx.iter_modules(module)):
        if isinstance(part, BlockedLinear):
            raise ShardingError(
                f"{'.'.join(map(str, path))} is also kept in blocks for one CPU; load without "
                "blocked=True"
            )
        if isinstance(part, PackedLinear | PackedRows | PackedExperts):
            continue  # as a member of another
        cuts: dict[str, Cut] = {}
        for kind in type(part).__mro__:
            for rule in RULES.get(kind, ()):
                cuts.update(rule(part, parts))
        for name, cut in cuts.items():
            if name in vars(part):
                found.update(_of_member((*path, name), getattr(part, name), cut, parts))
        _mark(part, bool(cuts), parts)
    return found


def _mark(module: Any, divided: bool, parts: int) -> None:
    """Set the static members of a module, which is ``divided`` or not."""
    if isinstance(module, Moe):
        if divided:
            module.config = dataclasses.replace(module.config, shards=parts)
        return
    if divided and hasattr(type(module), "shards"):
        module.shards = parts
    if hasattr(type(module), "copies"):
        attention = getattr(module.config, "attention", module.config)
        copies = kv_copies(attention, parts)
        if copies > 1:
            module.copies = copies
    if hasattr(module, "config"):
        module.config = with_copies(module.config, parts)


def _of_member(path: Path, member: Any, cut: Cut, parts: int) -> dict[Path, Cut]:
    """Return the cuts of the arrays of a matrix or a parameter."""
    if isinstance(member, PackedRows):
        return _of_rows(path, member, cut, parts)
    if isinstance(member, PackedExperts):
        return _of_packed(path, member, cut, parts, first=1)
    if isinstance(member, PackedLinear):
        return _of_packed(path, member, cut, parts, first=0)
    if isinstance(member, nnx.Variable):
        return {path: cut}
    return {(*path, "weight"): cut}  # Linear, Embedding, RMSNorm


def _of_rows(path: Path, member: PackedRows, cut: Cut, parts: int) -> dict[Path, Cut]:
    """Return the cuts of matrices one below the other, each with its part of the order."""
    found: dict[Path, Cut] = {}
    start = 0
    for number, part in enumerate(member.below):
        below = cut
        if cut.dim == 0:
            rows = part.form.outputs
            index = np.arange(_shape(member)[0]) if cut.index is None else cut.index
            here = (index >= start) & (index < start + rows)
            if len(set(here.reshape(parts, -1).sum(axis=1).tolist())) != 1:
                raise ShardingError(
                    f"{'.'.join(map(str, path))} holds matrices in several formats whose rows do "
                    f"not divide over {parts} devices"
                )
            below = Cut(0, index[here] - start)
            start += rows
        found.update(_of_packed((*path, "below", number), part, below, parts, first=0))
    if cut.dim == 0:
        member.shards = parts
    return found


def _of_packed(
    path: Path, member: PackedLinear | PackedExperts, cut: Cut, parts: int, *, first: int
) -> dict[Path, Cut]:
    """Return the cuts of the arrays of a packed matrix.

    Args:
      path: path of the matrix.
      member: the matrix.
      cut: its cut as a dense matrix.
      parts: number of devices.
      first: dimensions before [out, in]: 1 for experts.
    """
    form = member.form
    if cut.dim == first:
        plain = cut.index is None and form.outputs // parts % form.rows == 0
        spread = 1 if plain else form.rows
        rows = form.outputs if cut.index is None else len(cut.index)
        member.form = dataclasses.replace(form, rows=form.rows if plain else 1, outputs=rows)
        names = [name for name in form.parts if name != "order"]
        each = {name: cut._replace(spread=1 if name == "weight_q" else spread) for name in names}
    else:
        each = _along_inputs(form, cut.dim, parts)
    return {(*path, name): one for name, one in each.items()}


def _along_inputs(form: Any, dim: int, parts: int) -> dict[str, Cut]:
    """Return the cuts of a packed matrix along its inputs, in whole blocks; none: replicated."""
    blocks, filled = -(-form.inputs // form.block), form.inputs % form.block == 0
    if "order" in form.parts or not filled:
        return {}
    if blocks == 1:  # one scale per output
        width = form.block * form.bits // 8
        return {} if width % parts else {"weight_q": Cut(dim + 1)}
    if blocks % parts or (form.fine and blocks // parts % form.fine):
        return {}
    return {name: Cut(dim) for name in form.parts}
