"""Parameters, optimizer and step, shared by all training runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from jax import lax
from optax.contrib import MuonDimensionNumbers, muon

from jaxdraft.meshes import traced_for
from jaxdraft.nn.linear import Frozen
from jaxdraft.sharding.placement import Placement
from jaxdraft.train import mesh

Metrics = dict[str, jax.Array]
Loss = Callable[[Any, Any], tuple[jax.Array, Metrics]]
"""(module, batch) -> loss [] and metrics. Differentiated with respect to the module's arrays."""

Labels = Any
_MIN_DECAY = 1e-3


@struct.dataclass
class TrainState:
    """Content of a checkpoint. The data of step n depend only on n, so no more is needed."""

    step: jax.Array  # [] int32, steps taken
    params: Any  # as in Frozen
    optimizer: Any


def labels(frozen: Frozen) -> Labels:
    """Return how each array of a module is trained: "matrix", "vector" or "fixed".

    Weights of linear maps are matrices, and orthogonalised momentum suits them. Embeddings, heads
    and codebooks are tables of vectors, where only a few rows have a gradient; with norms, biases
    and convolutions they are "vector". Tables of constants, and the bias of the delta net's
    convolution, which checkpoints of this family do not have, are "fixed".
    """
    kinds: dict[tuple[Any, ...], str] = {}
    for path, variable in nnx.to_flat_state(nnx.state(frozen())):
        name = path[-1]
        matrix = name == "weight" and variable[...].ndim == 2 and path[0] not in ("embed", "head")
        fixed = not isinstance(variable, nnx.Param) or name == "conv_bias"
        kinds[path] = "fixed" if fixed else "matrix" if matrix else "vector"
    return jax.tree.map_with_path(
        lambda path, _: kinds[tuple(getattr(part, "key", None) for part in path)], frozen.params
    )


def optimizer(
    kinds: Labels,
    *,
    matrix_rate: float = 0.02,
    vector_rate: float = 3e-3,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    clip: float = 1.0,
) -> optax.GradientTransformation:
    """Return Muon for matrices, Adam for the rest, after clipping the whole gradient's norm.

    Rates are the maxima of a schedule; a step scales its update by the schedule's current value.

    Args:
      kinds: from :func:`labels`.
      matrix_rate: of matrices (Jordan et al., "Muon", 2024; updates of unit spectral norm, times
        ``sqrt(max(1, out / in))``).
      vector_rate: of the rest.
      momentum: of Muon.
      weight_decay: of matrices, times their rate.
      clip: largest norm of the gradient.
    """

    def axes(params: Any) -> Any:  # our matrices are [out, in]
        return jax.tree.map(lambda _: MuonDimensionNumbers(reduction_axis=1, output_axis=0), params)

    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.partition(
            {
                "matrix": muon(
                    matrix_rate,
                    beta=momentum,
                    weight_decay=weight_decay,
                    muon_weight_dimension_numbers=axes,
                ),
                "vector": optax.adam(vector_rate, b1=0.9, b2=0.98),
                "fixed": optax.set_to_zero(),
            },
            kinds,
        ),
    )


def start(
    frozen: Frozen,
    transform: optax.GradientTransformation,
    *,
    placement: Placement | None = None,
) -> TrainState:
    """Return the state before the first step.

    Args:
      frozen: the module.
      transform: from :func:`optimizer`, or any other of optax.
      placement: mesh that parameters and optimizer state are divided over; see
        :mod:`jaxdraft.train.mesh`. The module may be on it already, divided by heads.

    Raises:
      ShardingError: a ``ValueError``; the module has copies of key/value heads.
    """
    params = jax.tree.map(jnp.array, frozen.params)  # copies: steps donate their state
    state = TrainState(jnp.zeros((), jnp.int32), params, transform.init(params))
    if placement is None:
        return state
    mesh.check_trainable(frozen)
    return mesh.divide_state(state, mesh.specs(frozen, placement), placement)


def make_step(
    frozen: Frozen,
    loss: Loss,
    transform: optax.GradientTransformation,
    *,
    rounding: Callable[[Any], Any] | None = None,
    placement: Placement | None = None,
) -> Callable[[TrainState, Any, jax.Array], tuple[TrainState, Metrics]]:
    """Return a compiled training step. It donates the state.

    Args:
      frozen: the module's structure; its arrays come from the state.
      loss: function to minimise.
      transform: from :func:`optimizer`, or any other of optax.
      rounding: function from parameters to their values in the loss, such as
        :func:`jaxdraft.train.rounding.round_to_int4`. Gradients pass it as if it were not there
        (Bengio, Leonard, Courville, arXiv:1308.3432: the straight-through estimator); the state
        keeps the parameters as they are.
      placement: as for :func:`start`. The batch is divided by the first dimension of its arrays.

    Returns:
      ``(state, batch, rate) -> (state, metrics)``; ``rate`` [] float32 scales the update, 0..1.
    """

    known = None if placement is None else mesh.specs(frozen, placement)

    def step(state: TrainState, batch: Any, rate: jax.Array) -> tuple[TrainState, Metrics]:
        if placement is None or known is None:
            return one(state, batch, rate)
        with traced_for(placement.mesh):
            state, metrics = one(state, mesh.constrain_batch(batch, placement), rate)
            return mesh.constrain_state(state, known, placement), placement.everywhere(metrics)

    def one(state: TrainState, batch: Any, rate: jax.Array) -> tuple[TrainState, Metrics]:
        leaves, tree = jax.tree.flatten(state.params)
        floats = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

        def whole(found: list[jax.Array], rest: list[jax.Array]) -> Any:
            each = iter(found), iter(rest)
            return tree.unflatten([next(each[0] if is_float else each[1]) for is_float in floats])

        def of(params: list[jax.Array]) -> tuple[jax.Array, Metrics]:
            seen = whole(params, integers)
            if rounding is not None:
                seen = jax.tree.map(_straight_through, seen, rounding(seen))
            return loss(Frozen(seen, frozen.structure)(), batch)

        moving, integers = (
            [leaf for leaf, is_float in zip(leaves, floats, strict=True) if is_float == wanted]
            for wanted in (True, False)
        )
        (value, metrics), found = jax.value_and_grad(of, has_aux=True)(moving)
        gradient = whole(found, [jnp.zeros(leaf.shape, jnp.float32) for leaf in integers])
        # optax counts on Python's promotion of numbers, which strict settings refuse.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, moments = transform.update(gradient, state.optimizer, state.params)
        updates = jax.tree.map(
            lambda u, p: (u * rate.astype(u.dtype)).astype(p.dtype), updates, state.params
        )
        params = constrain(optax.apply_updates(state.params, updates))
        norm = optax.tree.norm(found)
        return TrainState(state.step + 1, params, moments), {
            "loss": value,
            "gradient": norm,
            **metrics,
        }

    return jax.jit(step, donate_argnums=0)


def _straight_through(value: jax.Array, rounded: jax.Array) -> jax.Array:
    """Return ``rounded`` with the gradient of ``value``. The sum is exact: one term is zero."""
    if value is rounded or not jnp.issubdtype(value.dtype, jnp.floating):
        return rounded
    return lax.stop_gradient(rounded) + (value - lax.stop_gradient(value))


def constrain(params: Any) -> Any:
    """Keep decays decaying: a delta net's ``decay_scale`` is ``-exp(A_log)``, below zero."""

    def one(path: tuple[Any, ...], value: jax.Array) -> jax.Array:
        if getattr(path[-1], "key", None) == "decay_scale":
            return jnp.minimum(value, jnp.asarray(-_MIN_DECAY, value.dtype))
        return value

    return jax.tree.map_with_path(one, params)


def trapezoid(step: int, *, steps: int, warmup: int = 20, decay: float = 0.4) -> float:
    """Return a schedule: up over ``warmup`` steps, constant, then linearly to zero.

    Example, 100 steps, warm-up 10, decay 0.4: 0.1 at step 0, 1 from step 9 to 60, 0.5 at 80.

    Args:
      step: steps taken before this one.
      steps: of the whole run.
      warmup: steps to the top.
      decay: share of the run that falls.
    """
    rise = min(1.0, (step + 1) / max(1, warmup))
    fall = min(1.0, (steps - step) / max(1.0, decay * steps))
    return max(0.0, min(rise, fall))
