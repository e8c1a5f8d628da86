"""The kinds of drafters with weights, each declared once.

A new kind of block drafter is a module in ``nn/`` (a subclass of
:class:`jaxdraft.nn.block_drafter.BlockBackbone`), its name in
:data:`jaxdraft.config.DrafterKind`, and an entry of :data:`KINDS`. All other code reads this table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from flax import nnx

from jaxdraft.base import Drafter
from jaxdraft.budget import DrafterCost
from jaxdraft.config import DrafterConfig, DrafterKind
from jaxdraft.draft import block, chain
from jaxdraft.draft.block import BlockDrafter
from jaxdraft.draft.eagle3 import Eagle3Drafter
from jaxdraft.draft.mtp import MtpDrafter
from jaxdraft.nn.block_drafter import BlockBackbone
from jaxdraft.nn.dflash2 import DFlash2
from jaxdraft.nn.dspark import DSpark
from jaxdraft.nn.eagle3 import Eagle3
from jaxdraft.nn.mtp import Mtp


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairTensor:
    """A stored tensor of the pair scores.

    Attributes:
      path: the path of its parameter in the module.
      name: its name in a checkpoint.
      shape: for every axis, "width" (D), "vocab" (V' or V) or "rank".
    """

    path: tuple[str, ...]
    name: str
    shape: tuple[Literal["width", "vocab", "rank"], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Specifics of a kind of block drafter.

    Attributes:
      module: its Flax module.
      architecture: ``architectures`` in ``config.json``.
      pairs: the tensors of its pair scores.
      convolves: whether its layers have convolutions.
      ropes: kinds of rotary embedding that it may have.
      scales_embedding: whether it may multiply the block's embeddings.
      unread: prefixes of the names of tensors that drafting does not need.
    """

    module: type[BlockBackbone]
    architecture: str
    pairs: tuple[PairTensor, ...]
    convolves: bool
    ropes: tuple[str, ...]
    scales_embedding: bool
    unread: tuple[str, ...] = ()

    @property
    def head(self) -> str:
        """Prefix of the names of the tensors that only this kind has."""
        return self.pairs[0].name.partition(".")[0] + "."

    def draft_tokens(self, block_size: int) -> int:
        """Count the drafts of a block of ``block_size`` rows, from the first that predicts."""
        return block_size - self.module.first_row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of drafter with weights.

    Attributes:
      module: its Flax module.
      drafter: the class that drafts with it.
      make: makes a drafter of a frozen module, the target's embedding and head, a configuration
        and a dtype.
      cost: function from its configuration and the type of its cache to its cost.
      reads: its input from the target, a member of :class:`jaxdraft.base.Feed`.
      block: specifics of a block drafter. None: the kind is not a block drafter.
      inside: whether the drafter lies in the target's files, not in a folder of its own.
    """

    module: type[nnx.Module]
    drafter: type
    make: Callable[..., Drafter]
    cost: Callable[[Any, Any], DrafterCost]
    reads: Literal["aux", "hidden"]
    block: Block | None = None
    inside: bool = False


def _block(facts: Block) -> Kind:
    return Kind(
        module=facts.module,
        drafter=BlockDrafter,
        make=BlockDrafter.of,
        cost=block.cost,
        reads="aux",
        block=facts,
    )


KINDS: dict[DrafterKind, Kind] = {
    "dflash2": _block(
        Block(
            module=DFlash2,
            architecture="DFlash2DraftModel",
            pairs=(
                PairTensor(
                    path=("hidden_projection", "weight"),
                    name="candidate_selector.hidden_projection.weight",
                    shape=("rank", "width"),
                ),
                PairTensor(
                    path=("predecessor",),
                    name="candidate_selector.predecessor_codebook",
                    shape=("vocab", "rank"),
                ),
                PairTensor(
                    path=("successor",),
                    name="candidate_selector.successor_codebook",
                    shape=("vocab", "rank"),
                ),
            ),
            convolves=True,
            ropes=("default",),
            scales_embedding=True,
        )
    ),
    "dspark": _block(
        Block(
            module=DSpark,
            architecture="DSparkDraftModel",
            pairs=tuple(
                PairTensor(path=(n,), name=f"markov_head.{n}.weight", shape=("vocab", "rank"))
                for n in ("markov_w1", "markov_w2")
            ),
            convolves=False,
            ropes=("default", "yarn"),
            scales_embedding=False,
            unread=("confidence_head.",),
        )
    ),
    "eagle3": Kind(
        module=Eagle3, drafter=Eagle3Drafter, make=Eagle3Drafter.of, cost=chain.cost, reads="aux"
    ),
    "mtp": Kind(
        module=Mtp,
        drafter=MtpDrafter,
        make=MtpDrafter,
        cost=chain.cost,
        reads="hidden",
        inside=True,
    ),
}
"""Every kind, in the order in which a checkpoint's drafters are preferred."""


def folders() -> tuple[DrafterKind, ...]:
    """Return the kinds whose checkpoints lie in folders of their own, named by the kind."""
    return tuple(name for name, kind in KINDS.items() if not kind.inside)


def inside() -> tuple[DrafterKind, ...]:
    """Return the kinds that lie in the target's files, described by the target's configuration."""
    return tuple(name for name, kind in KINDS.items() if kind.inside)


def blocks() -> dict[str, Block]:
    """Return the kinds of block drafters."""
    return {name: kind.block for name, kind in KINDS.items() if kind.block is not None}


def block_of(kind: str) -> Block:
    """Return the specifics of a kind of block drafter.

    Raises:
      ValueError: it is not a kind of block drafter.
    """
    found = blocks().get(kind)
    if found is None:
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(blocks())}")
    return found


def kind_of(drafter: Any) -> DrafterKind | None:
    """Return the kind of a drafter; None for other drafters, which have no weights to store."""
    for name, kind in KINDS.items():
        if isinstance(drafter, kind.drafter) and drafter.config.kind == name:
            return name
    return None


def drafter_cost(config: DrafterConfig, dtype: Any) -> DrafterCost:
    """Return the memory costs of a drafter: by rings if it has a window, else per target page.

    Args:
      config: the drafter.
      dtype: type of *its* keys and values: a bfloat16 drafter stays one beside
        any target.
    """
    return KINDS[config.kind].cost(config, dtype)
