"""Training of targets and drafters: the modules that are trained are the modules that draft.

A run is four things: a module split once, a loss, an optimizer, and batches that are a function of
the step alone:

    frozen = initialize.drafter(Frozen.of(DFlash2(config, dtype=jnp.float32, rngs=nnx.Rngs(0))))
    transform = optimizer(labels(frozen))
    step = make_step(frozen, DraftLoss(embedding=embedding, head=head), transform)
    state = fit(step, start(frozen, transform), batches, steps=1000, folder="runs/dflash2")

``batches`` come from :class:`DraftBatches`, over a :class:`FeatureCache` of the frozen target's
states for its own continuations (:func:`continue_prompts`). A target itself is trained with
:func:`language_loss` and :class:`TokenWindows`. Checkpoints and progress bars need the ``train``
extra. ``experiments/train_family.py`` makes a whole family.
"""

from jaxdraft.train import initialize
from jaxdraft.train.blocks import block_features
from jaxdraft.train.data import DraftBatches, FeatureCache, TokenWindows, continue_prompts
from jaxdraft.train.loop import fit
from jaxdraft.train.losses import Continuations, DraftLoss, acceptance, language_loss
from jaxdraft.train.mesh import trained
from jaxdraft.train.optimize import TrainState, labels, make_step, optimizer, start, trapezoid
from jaxdraft.train.rounding import round_as_stored, round_to_bfloat16, round_to_int4
from jaxdraft.train.sequence import chain_rows, decoder_rows

__all__ = [
    "Continuations",
    "DraftBatches",
    "DraftLoss",
    "FeatureCache",
    "TokenWindows",
    "TrainState",
    "acceptance",
    "block_features",
    "continue_prompts",
    "decoder_rows",
    "fit",
    "initialize",
    "labels",
    "language_loss",
    "make_step",
    "chain_rows",
    "optimizer",
    "round_as_stored",
    "round_to_bfloat16",
    "round_to_int4",
    "start",
    "trained",
    "trapezoid",
]
