"""Loaded models: a target, optionally a drafter, and the metadata of the artifact."""

from __future__ import annotations

import dataclasses

from flax import struct

from jaxdraft import guard
from jaxdraft.base import Drafter, Target, full_drafter
from jaxdraft.config import DRAFT_MODEL
from jaxdraft.draft.draft_model import DraftModel
from jaxdraft.draft.fallback import FallbackDrafter
from jaxdraft.draft.ngram import NgramDrafter
from jaxdraft.draft.none import NoDrafter
from jaxdraft.target import DecoderTarget
from jaxdraft.text import Text, shared_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Facts about a model, apart from its arrays.

    Attributes:
      name: name of the artifact's folder, for display.
      stop_ids: tokens that end a sequence.
      context_length: maximum length of a sequence.
      drafter: kind of the drafter, or "none".
    """

    name: str = "model"
    stop_ids: tuple[int, ...] = ()
    context_length: int
    drafter: str = "none"


@struct.dataclass
class Model:
    """Target with its drafter. A pytree: pass it through ``jit`` like any array.

    ``jax.export`` takes it as an argument, too. It can serialize only programs with arguments of
    registered types, so pass the leaves to those:

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
        """Return a model made from your own target and drafter.

        Args:
          target: anything that is a :class:`jaxdraft.base.Target`.
          drafter: anything that is a :class:`jaxdraft.base.Drafter`. None: plain decoding.
          stop_ids: tokens that end a sequence.
          text: tokenizer and chat template, for prompts that are strings.
          name: name for display.

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

    def with_draft_model(self, small: Model) -> Model:
        """Return this model with a small language model as its drafter.

        Args:
          small: a model with the same tokens; its own drafter is not used.

        Raises:
          ValueError: the models have other tokens, or a state of ``small`` cannot be rolled back.
        """
        target = small.target
        if not isinstance(target, DecoderTarget):
            raise ValueError(
                f"the draft model's target is a {type(target).__name__}; expected a DecoderTarget, "
                "whose state can be rolled back to the accepted drafts"
            )
        draftable = shared_tokens(
            (self.target.vocab_size, self.text), (target.vocab_size, small.text)
        )
        info = dataclasses.replace(self.info, drafter=DRAFT_MODEL)
        drafter = DraftModel(target, draftable)
        return dataclasses.replace(self, drafter=drafter, info=info)

    def choose(self, drafter: str | Drafter | Model, draft_tokens: int | None = None) -> Drafter:
        """Return the drafter with the given name.

        Args:
          drafter: "auto", the model's own; its kind, as in ``info.drafter``; "ngram" and "none",
            which need no weights and always work; two of these joined by a plus, "ngram+auto",
            to use the second where the first proposes nothing; a small language model with the same
            tokens; or a drafter, returned as it is.
          draft_tokens: K of the drafter: any number for "ngram" and the drafters that are chains
            (a draft model has at most 128), at most the number of its block for others. Default:
            the drafter's own K.

        Raises:
          ValueError: there is no such drafter, or its K is fixed.
        """
        if isinstance(drafter, Model):
            drafter = self.with_draft_model(drafter).drafter
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
            f"drafter {name!r} is unknown; this model has "
            + (f"{own!r}" if own != "none" else "no drafter of its own")
            + "; 'auto', 'none', 'ngram' and two names joined by a plus always work"
        )
