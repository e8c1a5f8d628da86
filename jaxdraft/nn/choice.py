"""The choice between the XLA path and kernels, made for a model, a target or a drafter."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import jax
from flax import nnx

from jaxdraft.kernels import PALLAS, XLA, resolve
from jaxdraft.meshes import ShardingError
from jaxdraft.nn.linear import Frozen

T = TypeVar("T")

_OLDEST = (8, 0)
"""Compute capability of the oldest GPUs that Triton compiles for."""


def with_kernels(model: T, kernels: str | None = None) -> T:
    """Return the same model with its kernels chosen. Arrays are shared, and no other part changes.

    See :mod:`jaxdraft.kernels`. A program that is compiled for one choice does not serve another.

    Args:
      model: a model, a target or a drafter; any pytree of this package's modules.
      kernels: "xla", the default path; "pallas"; or None for the choice of the environment variable
        ``JAXDRAFT_KERNELS``, or else "xla".

    Returns:
      The same kind of pytree.

    Raises:
      ValueError: no such choice, or JAX's default device has no such kernels.
    """
    return apply(model, check(kernels))


def check(kernels: str | None) -> str:
    """Return the choice that :func:`with_kernels` makes, before there is a model.

    Raises:
      ValueError: no such choice, or JAX's default device has no such kernels.
    """
    kernels = resolve(kernels)
    if kernels == PALLAS:
        check_device(jax.devices()[0])
    return kernels


def apply(model: T, kernels: str) -> T:
    """Return the same model with a choice returned by :func:`check`."""

    def choose(part: Any) -> Any:
        return _choose(part, kernels) if isinstance(part, Frozen) else part

    return jax.tree.map(choose, model, is_leaf=lambda part: isinstance(part, Frozen))


def _choose(frozen: Frozen, kernels: str) -> Frozen:
    if frozen.structure.whole is not None:
        if kernels == XLA:  # it has no other
            return frozen
        raise ShardingError(
            f"kernels is {kernels!r} and the model is divided over several devices; expected a "
            "model on a single device, since only XLA's programs are divided"
        )
    module = frozen()
    for _, part in nnx.iter_modules(module):
        if not hasattr(type(part), "implementation"):
            continue
        if kernels != XLA:
            setattr(part, "implementation", kernels)  # noqa: B010, the type knows no such name
        elif "implementation" in vars(part):  # the default is stored nowhere: equal choices,
            delattr(part, "implementation")  # equal modules
    return Frozen.of(module)


def check_device(device: Any) -> None:
    """Reject devices without kernels, and warn where kernels are interpreted.

    Raises:
      ValueError: the device has no such kernels.
    """
    if device.platform == "cpu":
        warnings.warn(
            "kernels is 'pallas' and the device is a CPU, where kernels run interpreted: "
            "this is meant for tests, and slower than kernels='xla'",
            stacklevel=4,
        )
        return
    found = str(getattr(device, "compute_capability", "none"))
    parts = found.split(".")
    known = device.platform in ("gpu", "cuda") and all(part.isdigit() for part in parts)
    if not known or tuple(map(int, parts)) < _OLDEST:
        raise ValueError(
            f"kernels is 'pallas'; found {device.device_kind} ({device.platform}, compute "
            f"capability {found}), expected an NVIDIA GPU of compute capability "
            f"{_OLDEST[0]}.{_OLDEST[1]} or later: use kernels='xla'"
        )
