"""Memory plan of a model: :mod:`jaxdraft.budget` for a model or a folder.

Host code. Nothing is allocated: a folder is read without its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxdraft.base import Drafter, Target, full_drafter, full_target
from jaxdraft.budget import (
    Costs,
    DrafterCost,
    Fixed,
    Plan,
    Sliding,
    divide,
    net_parts,
    on_device,
    recurrent_bytes,
)
from jaxdraft.checks import check_int, format_bytes, parse_memory
from jaxdraft.config import DrafterConfig, TargetConfig
from jaxdraft.draft import draft_model
from jaxdraft.draft.draft_model import DraftModel
from jaxdraft.draft.links import DRAFT_TOKENS
from jaxdraft.kinds import drafter_cost, kind_of
from jaxdraft.load import inspect
from jaxdraft.model import Model
from jaxdraft.sharding.place import device_bytes
from jaxdraft.sharding.placement import (
    DATA,
    MODEL,
    AnyMesh,
    Placement,
    ShardingError,
    check_sizes,
)
from jaxdraft.sharding.rules import with_copies
from jaxdraft.sizes import PREFILL_CHUNK
from jaxdraft.target import DecoderTarget

PAGE_SIZE = 256
"""Default number of slots of a page, as in the model builder."""

MAX_BATCH = 8
"""Default number of rows."""


def plan(
    model: Model | str | Path,
    *,
    memory: int | str | None = None,
    pages: int | None = None,
    max_batch: int | None = None,
    context: int | None = None,
    page_size: int | None = None,
    drafter: str | Path | None = None,
    revision: str | None = None,
    mesh: AnyMesh | None = None,
) -> Plan:
    """Compute what fits in a memory, with every term of the calculation.

    Example: ``jaxdraft.plan("folder", memory="12GiB", max_batch=4).pages``; ``.lines()`` describes
    it as text.

    Args:
      model: a loaded model; or the folder of an artifact or a checkpoint, or a repository of the
        hub, of which only headers are read.
      memory: bytes, or a string like ``"12GiB"``, for weights and state together.
      pages: P, instead of ``memory``.
      max_batch: rows that can be active. Default: the artifact's, else 8.
      context: positions of the longest sequence. Default: the model's context.
      page_size: Z. Default: the artifact's, else 256.
      drafter: drafter of a checkpoint, as in :func:`jaxdraft.load`.
      revision: revision of a repository, as in :func:`jaxdraft.load`.
      mesh: devices to divide the model over, or the sizes of their axes, like ``{"model": 8}``. The
        plan is then that of one device: ``memory`` is its memory, ``max_batch`` and ``pages`` are
        divided over the axis "data" first. Default: the mesh that the model is on, if it is on one.

    Returns:
      Every term, the pages, tokens, and rows at full context. The arithmetic is exact;
      :mod:`jaxdraft.budget` lists the items.

    Raises:
      ValueError: as for :func:`jaxdraft.budget.divide`; a context that the model does not
        have; a folder that would not load; a target that is not a decoder of this package; a
        drafter that is not there, or where there is none to choose.
      FileNotFoundError: there is no such folder.
    """
    rows_parts = _mesh_shape(model, mesh)
    if isinstance(model, Model):
        if drafter is not None:
            raise ValueError(
                f"drafter is {str(drafter)!r}; a loaded model has its drafter, and only "
                "the folder of a checkpoint offers a choice"
            )
        if revision is not None:
            raise ValueError(
                f"revision is {revision!r}; only a repository has revisions, not a loaded model"
            )
        rows = check_int("max_batch", MAX_BATCH if max_batch is None else max_batch)
        size = PAGE_SIZE if page_size is None else page_size
        longest = model.info.context_length
        length = longest if context is None else check_int("context", context)
        costs = model_costs(model, rows, length, rows_parts[1])
    else:
        costs, defaults = _folder_costs(model, drafter, revision, rows_parts[1])
        rows = (defaults["max_batch"] or MAX_BATCH) if max_batch is None else max_batch
        size = (defaults["page_size"] or PAGE_SIZE) if page_size is None else page_size
        longest = defaults["context"]
    if context is not None and check_int("context", context) > longest:
        raise ValueError(f"context is {context}; the model's has {longest} positions")
    count = rows_parts[0]
    for name, value in (("max_batch", rows), ("pages", pages)):
        if value is not None and check_int(name, value) % count:
            raise ShardingError(f"{name} is {value}; expected a multiple of {count}, as the mesh")
    return divide(
        costs,
        memory=memory,
        pages=None if pages is None else pages // count,
        max_batch=rows // count,
        mesh=rows_parts,
        context=longest if context is None else context,
        page_size=size,
    )


def check_batch(
    target: Target, drafter: Drafter, *, batch: int, capacity: int, memory: int | str
) -> int:
    """Refuse a fixed batch that does not fit: weights, and the states that ``init`` would allocate.

    It works for any target and drafter, since only the shapes of ``init`` are used.

    Args:
      target: the target.
      drafter: the drafter.
      batch: rows.
      capacity: positions per row, as given to ``init``.
      memory: bytes, or a string like ``"12GiB"``.

    Returns:
      The bytes needed.

    Raises:
      ValueError: more than ``memory``, with every number.
    """
    given = parse_memory(memory)
    weights = weight_bytes(target, drafter)
    parts = {
        "weights": weights,
        "the target's state": _state_bytes(target, batch, capacity),
        "the drafter's state": _state_bytes(drafter, batch, capacity),
    }
    needed = sum(parts.values())
    if needed > given:
        listed = ", ".join(f"{name} {size}" for name, size in parts.items())
        raise ValueError(
            f"memory is {given} bytes ({format_bytes(given)}); {batch} rows of {capacity} "
            f"positions need {needed} bytes ({format_bytes(needed)}): {listed}"
        )
    return needed


def weight_bytes(*parts: Any) -> int:
    """Return the bytes of all arrays in ``parts``, counting shared arrays once.

    Sharing is detected by identity, so under ``jit`` an array that was passed twice counts twice.
    """
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(parts)}
    arrays = (leaf for leaf in leaves.values() if hasattr(leaf, "dtype"))  # settings are numbers
    return sum(array.size * array.dtype.itemsize for array in arrays)


def _mesh_shape(model: Model | str | Path, mesh: AnyMesh | None) -> tuple[int, int]:
    """Return the devices along the axes of rows and of weights.

    Raises:
      ShardingError: unknown axes, or not the mesh that the model is on.
    """
    own = full_target(model.target).placement if isinstance(model, Model) else None
    if mesh is None:
        return (1, 1) if own is None else (own.rows, own.parts)
    if isinstance(mesh, Mapping | str):  # there need not be such devices
        sizes = check_sizes(mesh)
        found = (sizes[DATA], sizes[MODEL])
    else:
        placement = Placement.like(mesh)
        found = (placement.rows, placement.parts)
    if own is not None and found != (own.rows, own.parts):
        raise ShardingError(f"the model is on a mesh of {own.rows} x {own.parts}; found {found}")
    return found


def model_costs(model: Model, max_batch: int, context: int, parts: int = 1) -> Costs:
    """Return the memory costs of a loaded model, on each of ``parts`` devices that share it.

    Your own drafter costs the size of what its ``init(max_batch, context)`` would allocate.

    Raises:
      ValueError: the target has no :class:`jaxdraft.config.TargetConfig`.
    """
    target = model.target
    if not isinstance(target, DecoderTarget):
        raise ValueError(
            f"the target is a {type(target).__name__}; only a decoder with a TargetConfig can be "
            "planned in pages"
        )
    drafter: Any = model.drafter
    if isinstance(drafter, DraftModel):
        config = with_copies(drafter.config, parts)
        cost = draft_model.cost(config, drafter.model.dtype, drafter.draft_tokens, parts)
    elif parts > 1 and kind_of(drafter) is not None:
        cost = drafter_cost(with_copies(drafter.config, parts), drafter.dtype)
    else:
        cost = full_drafter(drafter).cost()
    if cost is None:
        cost = Fixed(bytes=_state_bytes(drafter, max_batch, context))
    if parts == 1:
        weights = weight_bytes(model.target, drafter)
    else:
        weights = device_bytes(model.target, drafter, parts=parts)
    return target_costs(target.config, target.dtype, weights=weights, drafter=cost, parts=parts)


def target_costs(
    config: TargetConfig,
    dtype: Any,
    *,
    weights: int,
    drafter: DrafterCost | None = None,
    parts: int = 1,
) -> Costs:
    """Return the memory costs of a decoder, on each of ``parts`` devices that share it.

    Args:
      config: the target.
      dtype: type of its activations, keys and values.
      weights: bytes of all parameters of a device, the drafter's included.
      drafter: cost from :func:`drafter_cost`.
      parts: number of devices.
    """
    config = with_copies(config, parts)
    d, s = config.delta_net, config.sliding

    sliding = None
    if s is not None and config.count("sliding"):
        sliding = Sliding(
            cache=config.kv_shape("sliding", dtype), window=s.window, rows=PREFILL_CHUNK
        )
    row = 0
    if d is not None:
        row = recurrent_bytes(d, config.count("delta_net"), dtype) // net_parts(d, parts)
    return Costs(
        weights=weights,
        target=on_device(config.kv_shape("attention", dtype), parts),
        recurrent_row=row,
        drafter=on_device(drafter, parts),
        sliding=on_device(sliding, parts),
    )


def _state_bytes(part: Target | Drafter, batch: int, capacity: int) -> int:
    """Return the bytes of ``part.init(batch, capacity)`` without running it."""
    state = jax.eval_shape(lambda: part.init(batch, capacity))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def part_cost(
    config: TargetConfig | DrafterConfig | None, dtype: Any, parts: int = 1
) -> DrafterCost:
    """Return the memory costs of the drafter in a report, which may be a language model.

    Args:
      config: description of the drafter; None is not expected, since a report without problems has
        one.
      dtype: type of its activations, keys and values.
      parts: devices that share it.
    """
    assert config is not None
    config = with_copies(config, parts)
    if isinstance(config, TargetConfig):
        return draft_model.cost(config, dtype, DRAFT_TOKENS, parts)
    return drafter_cost(config, dtype)


def _folder_costs(
    folder: str | Path, named: str | Path | None, revision: str | None, parts: int
) -> tuple[Costs, dict[str, Any]]:
    """Return the costs of an artifact or a checkpoint at its own dtypes, and its defaults."""
    report = inspect(folder, named, revision=revision)
    target, drafter = report.target, report.drafter
    if report.problems or target is None or not isinstance(target.config, TargetConfig):
        listed = "; ".join(str(problem) for problem in report.problems)
        raise ValueError(f"{folder} cannot be loaded, so nothing can be planned: {listed}")
    cost = None
    if drafter is not None:
        cost = part_cost(drafter.config, drafter.dtype, parts)
    there = [part for part in (target, drafter) if part is not None]
    weights = sum(_weights_of(part, parts) for part in there)
    costs = target_costs(target.config, target.dtype, weights=weights, drafter=cost, parts=parts)
    defaults = {
        "max_batch": report.max_batch,
        "page_size": report.page_size,
        "context": report.context_length,
    }
    return costs, defaults


def _weights_of(part: Any, parts: int) -> int:
    """Return the bytes of a reported part on each of ``parts`` devices."""
    if parts == 1:
        return part.weight_bytes
    from convert.build import device_bytes as bytes_of_shell

    return bytes_of_shell(part.shell, parts)


__all__ = [
    "Plan",
    "check_batch",
    "drafter_cost",
    "model_costs",
    "part_cost",
    "plan",
    "target_costs",
    "weight_bytes",
]
