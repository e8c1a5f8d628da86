"""Everything that can be known about an artifact without allocating an array.

``load`` turns a plan without problems into modules; ``inspect`` prints a plan with all of its
problems. Both therefore judge by the same rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from convert.artifact.block import DrafterPlan
from convert.artifact.contract import check_contract
from convert.artifact.dflash2 import plan_dflash2
from convert.artifact.dspark import plan_dspark
from convert.artifact.genai_config import ArtifactConfig, DrafterSection, read_config
from convert.artifact.graph import Graph
from convert.artifact.mtp import plan_mtp
from convert.artifact.pack import pack
from convert.artifact.target import TargetPlan, plan_target
from convert.build import Shell, abstract, check, split
from convert.errors import ArtifactError, Problems
from convert.recipes import Recipes
from convert.tensors import FLOATS, DataFiles
from jaxdraft.config import DrafterConfig, TargetConfig
from jaxdraft.kinds import KINDS
from jaxdraft.nn.decoder import Decoder

T = TypeVar("T")

_READERS: Mapping[str, Callable[..., DrafterPlan]] = {
    "dflash2": plan_dflash2,
    "dspark": plan_dspark,
    "mtp": plan_mtp,
}


@dataclasses.dataclass
class Plan:
    """The content of an artifact. A part that could not be read is None, with a problem for it."""

    folder: Path
    problems: Problems
    files: DataFiles
    config: ArtifactConfig | None = None
    target_graph: Graph | None = None
    target: TargetPlan | None = None
    drafter_graph: Graph | None = None
    drafter: DrafterPlan | None = None
    target_shell: Shell | None = None
    drafter_shell: Shell | None = None

    @property
    def section(self) -> DrafterSection | None:
        """The drafter's part of the configuration."""
        return self.config.drafter if self.config else None

    @property
    def context_length(self) -> int:
        """Maximum length of a sequence, allowed by the configuration and the target's tables."""
        assert self.config is not None
        lengths = [self.config.context_length]
        if self.target is not None:
            lengths.append(self.target.config.context_length)
        return min(lengths)


def plan_artifact(
    folder: Path,
    dtype: DTypeLike | None = None,
    *,
    packed: bool = False,
    drafter: str | Path | None = None,
) -> Plan:
    """Read and check an artifact.

    Args:
      folder: the artifact's folder.
      dtype: type of the modules. Default: the stored types of target and drafter.
      packed: whether to keep quantized matrices packed; see :func:`convert.artifact.pack.pack`.
      drafter: "none", or the kind of the artifact's drafter. Default: that drafter, if any.

    Raises:
      FileNotFoundError: no such folder. Errors in the files become problems of the plan.
      ValueError: there is no such drafter.
    """
    problems = Problems()
    plan = Plan(folder, problems, DataFiles(folder))

    def attempt(read: Callable[[], T]) -> T | None:
        try:
            return read()
        except ArtifactError as error:
            problems.extend(error.problems)
            return None

    alone = drafter == "none"
    plan.config = config = attempt(lambda: read_config(folder, problems, alone=alone))
    if config is None:
        return plan
    kind = config.drafter.kind if config.drafter else "none"
    if drafter not in (None, "none", kind):
        raise ValueError(
            f"drafter is {str(drafter)!r}; only a checkpoint offers a choice, and this "
            f"artifact has {kind!r}"
        )
    plan.target_graph = graph = attempt(lambda: Graph(config.decoder.path, plan.files))
    section = config.drafter
    if section is not None:
        plan.drafter_graph = attempt(lambda: Graph(section.path, plan.files))
    if graph is None:
        return plan
    plan.target = target = attempt(lambda: plan_target(graph, config, problems))
    if target is None:
        return plan
    plan.target_shell = attempt(
        lambda: _shell(
            graph, Decoder, target.config, target.recipes, _dtype(dtype, target.dtype), packed
        )
    )
    drafter_graph = plan.drafter_graph
    if section is None or drafter_graph is None:
        return plan
    read = _READERS[section.kind]
    plan.drafter = found = attempt(
        lambda: read(drafter_graph, config, section, target.dtype, problems)
    )
    if found is None:
        return plan
    check_contract(config, section, graph, target, drafter_graph, found, problems)
    module, compute = KINDS[section.kind].module, _dtype(dtype, found.dtype)
    plan.drafter_shell = attempt(
        lambda: _shell(drafter_graph, module, found.config, found.recipes, compute, packed)
    )
    return plan


def _shell(
    graph: Graph,
    module: Callable[..., nnx.Module],
    config: TargetConfig | DrafterConfig,
    recipes: Recipes,
    dtype: DTypeLike,
    packed: bool,
) -> Shell:
    """Return the module, checked against its recipes."""
    made = abstract(module, config, dtype)
    structure, wanted = split(made)
    check(graph.file, wanted, recipes)
    if packed:
        recipes = pack(made, recipes, dtype)
        structure, wanted = split(made)
        check(graph.file, wanted, recipes)
    return Shell(structure, wanted, recipes)


def _dtype(requested: DTypeLike | None, stored: int) -> jnp.dtype:
    return jnp.dtype(FLOATS[stored] if requested is None else requested)
