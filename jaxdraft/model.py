"""A loaded model: a target, perhaps a drafter, and what the artifact says about them."""

from __future__ import annotations

import dataclasses

from flax import struct

from jaxdraft import guard
from jaxdraft.base import Drafter, Target, full_drafter
from jaxdraft.draft.fallback import FallbackDrafter
from jaxdraft.draft.ngram import NgramDrafter
from jaxdraft.draft.none import NoDrafter
from jaxdraft.text import Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What is known about a model beside its arrays.

    Attributes:
      name: of the artifact's folder, for people.
      stop_ids: tokens that end a sequence.
      context_length: the longest sequence.
      drafter: kind of the drafter, or "none".
    """

    name: str = "model"
    stop_ids: tuple[int, ...] = ()
    context_length: int
    drafter: str = "none"


@struct.dataclass
class Model:
    """A target with its drafter. A pytree: pass it through ``jit`` like any array.

    ``jax.export`` takes it as an argument, too. It can serialize only programs whose arguments it
    knows, so for those pass the leaves:

        leaves, tree = jax.tree.flatten(model)
        run = jax.jit(lambda leaves, ids: jaxdraft.generate(tree.unflatten(leaves), ids).tokens)
        stored = jax.export.export(run)(leaves, ids).serialize()
    """

    target: Target
    drafter: Drafter
    info: ModelInfo = struct.field(pytree_node=False)
    text: Text | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def of(
        cls,
        target: Target,
        drafter: Drafter | None = None,
        *,
        stop_ids: tuple[int, ...] = (),
        text: Text | None = None,
        name: str = "model",
    ) -> Model:
        """A model from a target and a drafter of your own.

        Args:
          target: anything that is a :class:`jaxdraft.base.Target`.
          drafter: anything that is a :class:`jaxdraft.base.Drafter`; none: plain decoding.
          stop_ids: tokens that end a sequence.
          text: tokenizer and chat template, for prompts that are strings.
          name: for people.

        Raises:
          ValueError: a member of the target or the drafter is missing.
        """
        info = ModelInfo(
            name=name,
            stop_ids=tuple(stop_ids),
            context_length=guard.check_target(target).context_length,
            drafter="none" if drafter is None else type(drafter).__name__,
        )
        own = NoDrafter() if drafter is None else guard.check_drafter(drafter)
        return cls(target, own, info, text)

    def choose(self, drafter: str | Drafter, draft_tokens: int | None = None) -> Drafter:
        """The drafter that a name means.

        Args:
          drafter: "auto", the model's own; its kind, as in ``info.drafter``; "ngram" and "none",
            which need no weights and always work; two of these with a plus between, "ngram+auto",
            for the second where the first is silent; or a drafter, which is what it is.
          draft_tokens: K, of a drafter that can have any ("ngram", "mtp"), or up to as many as its
            block has (DFlash2, DSpark). Default: its own.

        Raises:
          ValueError: there is no such drafter, or its K is fixed.
        """
        chosen = self._named(drafter) if isinstance(drafter, str) else drafter
        guard.check_drafter(chosen)
        if draft_tokens is None or draft_tokens == chosen.draft_tokens:
            return chosen
        if draft_tokens < 1:
            raise ValueError(f"draft_tokens is {draft_tokens}; expected at least 1")
        return full_drafter(chosen).with_draft_tokens(draft_tokens)

    def _named(self, name: str) -> Drafter:
        own = self.info.drafter
        first, plus, second = name.partition("+")
        if plus:
            return FallbackDrafter(self._named(first), self._named(second))
        if name in ("auto", own):
            return self.drafter
        if name == "none":
            return NoDrafter()
        if name == "ngram":
            return NgramDrafter()
        raise ValueError(
            f"drafter {name!r} is not here: this model has "
            + (f"{own!r}" if own != "none" else "no drafter of its own")
            + "; 'auto', 'none' and 'ngram' always work, and two with a plus between"
        )
