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
from jaxdraft.config import BlockDrafterConfig, BlockLayout, DrafterConfig, DrafterKind
from jaxdraft.draft import block, chain
from jaxdraft.draft.block import BlockDrafter
from jaxdraft.draft.eagle3 import Eagle3Drafter
from jaxdraft.draft.mtp import MtpDrafter
from jaxdraft.nn.block_drafter import BlockBackbone
from jaxdraft.nn.dflash import DFlash
from jaxdraft.nn.dflash2 import DFlash2
from jaxdraft.nn.dspark import DSpark
from jaxdraft.nn.eagle3 import Eagle3
from jaxdraft.nn.mtp import Mtp


def _always(config: BlockDrafterConfig) -> bool:
    del config
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairTensor:
    """A stored tensor of the pair scores, or of the confidence in them.

    Attributes:
      path: the path of its parameter in the module.
      name: its name in a checkpoint.
      shape: for every axis, a name of :func:`axes`.
      when: whether a drafter has it.
    """

    path: tuple[str, ...]
    name: str
    shape: tuple[str, ...]
    when: Callable[[BlockDrafterConfig], bool] = _always


def axes(config: BlockDrafterConfig) -> dict[str, int]:
    """Return the sizes of the axes of :attr:`PairTensor.shape`.

    They are D, R, V' or V of drafts ("vocab") and of the tokens before them ("previous"), and the
    inputs and outputs of the heads of :mod:`jaxdraft.nn.dspark`.
    """
    width, rank, drafts = config.width, config.rank, config.draftable
    return {
        "one": 1,
        "width": width,
        "rank": rank,
        "vocab": drafts,
        "previous": config.vocab_size if config.own_head else drafts,
        "pair": width + rank,
        "path": width + 2 * rank,
        "parts": 3 * rank,
        "trusted": width + (rank if config.confidence == "pair" else 0),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Specifics of a kind of block drafter.

    Attributes:
      module: its Flax module.
      architecture: ``architectures`` in ``config.json``.
      pairs: the tensors of its pair scores; none: its drafts do not depend on each other.
      flat_architecture: the same in a flat file, if it is another.
      convolves: whether its layers have convolutions.
      ropes: kinds of rotary embedding that it may have.
      scales_embedding: whether it may multiply the block's embeddings.
      caps: whether it may multiply logits and cap them.
      first_row: row of a block that predicts the first draft, unless a file states another.
      layouts: forms that its ``config.json`` may have.
      chains: whether its drafts may be chosen one after another.
      extra: tensors that not every drafter of the kind has.
    """

    module: type[BlockBackbone]
    architecture: str
    pairs: tuple[PairTensor, ...]
    convolves: bool
    ropes: tuple[str, ...]
    scales_embedding: bool
    first_row: int
    layouts: tuple[BlockLayout, ...] = ("nested", "flat")
    chains: bool = False
    caps: bool = False
    flat_architecture: str = ""
    extra: tuple[PairTensor, ...] = ()

    @property
    def head(self) -> str | None:
        """Prefix of the names of the tensors that only this kind has; None: it has none."""
        return self.pairs[0].name.partition(".")[0] + "." if self.pairs else None

    def draft_tokens(self, block_size: int) -> int:
        """Count the drafts of a block of ``block_size`` rows, from the first that predicts."""
        return block_size - self.first_row


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
      graph: whether artifacts may have one.
      block: specifics of a block drafter. None: the kind is not a block drafter.
      inside: whether the drafter lies in the target's files, not in a folder of its own.
    """

    module: type[nnx.Module]
    drafter: type
    make: Callable[..., Drafter]
    cost: Callable[[Any, Any], DrafterCost]
    reads: Literal["aux", "hidden"]
    graph: bool = True
    block: Block | None = None
    inside: bool = False


def _block(facts: Block, *, graph: bool = True) -> Kind:
    return Kind(
        module=facts.module,
        drafter=BlockDrafter,
        make=BlockDrafter.of,
        cost=block.cost,
        reads="aux",
        graph=graph,
        block=facts,
    )


def _projection(
    path: str, name: str, rows: str, columns: str, when: Callable[[BlockDrafterConfig], bool]
) -> tuple[PairTensor, PairTensor]:
    """Return a matrix and its bias."""
    return (
        PairTensor(
            path=(f"{path}_weight",), name=f"{name}.weight", shape=(rows, columns), when=when
        ),
        PairTensor(path=(f"{path}_bias",), name=f"{name}.bias", shape=(rows,), when=when),
    )


def _gated(config: BlockDrafterConfig) -> bool:
    return config.markov == "gated"


def _recurs(config: BlockDrafterConfig) -> bool:
    return config.markov == "rnn"


def _trusts(config: BlockDrafterConfig) -> bool:
    return config.confidence is not None


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
            first_row=1,
            caps=True,
        )
    ),
    "dspark": _block(
        Block(
            module=DSpark,
            architecture="DSparkDraftModel",
            flat_architecture="Qwen3DSparkModel",
            pairs=(
                PairTensor(
                    path=("markov_w1",),
                    name="markov_head.markov_w1.weight",
                    shape=("previous", "rank"),
                ),
                PairTensor(
                    path=("markov_w2",),
                    name="markov_head.markov_w2.weight",
                    shape=("vocab", "rank"),
                ),
            ),
            convolves=False,
            ropes=("default", "linear", "llama3", "yarn"),
            scales_embedding=False,
            first_row=0,
            layouts=("nested", "flat", "speculators"),
            chains=True,
            extra=(
                *_projection("gate", "markov_head.gate_proj", "rank", "pair", _gated),
                *_projection("joint", "markov_head.joint_proj", "parts", "path", _recurs),
                *_projection("trust", "confidence_head.proj", "one", "trusted", _trusts),
            ),
        )
    ),
    "dflash": _block(
        Block(
            module=DFlash,
            architecture="DFlashDraftModel",
            pairs=(),
            convolves=False,
            ropes=("default", "linear", "llama3", "yarn"),
            scales_embedding=False,
            first_row=1,
            caps=True,
            layouts=("nested", "flat", "speculators"),
        ),
        graph=False,
    ),
    "eagle3": Kind(
        module=Eagle3,
        drafter=Eagle3Drafter,
        make=Eagle3Drafter.of,
        cost=chain.cost,
        reads="aux",
        graph=False,
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
