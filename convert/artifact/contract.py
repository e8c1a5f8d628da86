"""Agreement of a target with its drafter, checked on plans before any array exists.

Every violation is reported, not only the first: ``load`` raises them together, ``inspect`` lists
them.
"""

from __future__ import annotations

from convert.artifact.block import DrafterPlan
from convert.artifact.genai_config import CONFIG, ArtifactConfig, DrafterSection, SharedTensor
from convert.artifact.graph import Graph, Value
from convert.artifact.target import TargetPlan
from convert.errors import Problems
from convert.recipes import Matrix
from convert.tensors import Tensor, type_name
from jaxdraft.config import BlockDrafterConfig
from jaxdraft.kinds import KINDS


def check_contract(
    config: ArtifactConfig,
    section: DrafterSection,
    target_graph: Graph,
    target: TargetPlan,
    drafter_graph: Graph,
    drafter: DrafterPlan,
    problems: Problems,
) -> None:
    """Report every disagreement between the two.

    Args:
      config: the artifact's configuration.
      section: the drafter's part of it.
      target_graph, target: the target as it was read.
      drafter_graph, drafter: the drafter as it was read.
      problems: destination of the violations.
    """
    _check_conditioning(section, target_graph, target, drafter_graph, drafter, problems)
    for what, theirs, ours in (
        ("embedding", target.embedding, drafter.embedding),
        ("head", target.head, drafter.head),
    ):
        _check_shared(config, section, what, theirs, ours, drafter_graph.file, problems)


def _check_conditioning(
    section: DrafterSection,
    target_graph: Graph,
    target: TargetPlan,
    drafter_graph: Graph,
    drafter: DrafterPlan,
    problems: Problems,
) -> None:
    """Check the rows passed from target to drafter: name, rank, width, type, taps."""
    width = target.config.width
    output = target_graph.outputs.get(section.main_output)
    reads = KINDS[section.kind].reads
    role = "hidden_states" if reads == "hidden" else "aux_hidden_states"
    if output is None:
        problems.report(
            target_graph.file,
            f"output {section.main_output!r}",
            "none of that name",
            f"the rows that {drafter_graph.file} reads as {role}",
        )
        return
    entry = drafter_graph.inputs.get(section.inputs[role])
    if isinstance(drafter.config, BlockDrafterConfig):
        taps = target.config.taps
        if taps != section.taps:
            problems.report(
                CONFIG,
                f"{section.where}.aux_hidden_state_layers",
                list(section.taps),
                f"{list(taps)}, what {target_graph.file} concatenates, in that order",
            )
        last = len(target.config.layers) - 1
        for tap in taps:
            if not 1 <= tap <= last:
                problems.report(
                    target_graph.file, f"output {output.name!r}", f"layer {tap}", f"1..{last}"
                )
        width *= len(taps)
        if drafter.config.aux_width != width:
            problems.report(
                drafter_graph.file,
                f"input {section.inputs[role]!r}",
                f"{drafter.config.aux_width} channels",
                f"{width}, {len(taps)} taps of {target.config.width}",
            )
    dynamic = 1 if target.layout == "paged" else 2
    _check_rows(target_graph.file, "output", output, dynamic, width, problems)
    if entry is None:
        problems.report(
            drafter_graph.file, f"input {section.inputs[role]!r}", "none of that name", role
        )
        return
    if reads == "aux":
        dynamic = 1
    _check_rows(drafter_graph.file, "input", entry, dynamic, width, problems)
    if entry.data_type != output.data_type:
        problems.report(
            drafter_graph.file,
            f"input {entry.name!r}",
            type_name(entry.data_type),
            f"{type_name(output.data_type)}, as {output.name!r} of {target_graph.file}",
        )


def _check_rows(
    file: str, kind: str, value: Value, dynamic: int, width: int, problems: Problems
) -> None:
    """Check that rows are dynamic and channels are not."""
    rows, channels = value.shape[:-1], value.shape[-1:]
    if len(rows) != dynamic or any(isinstance(d, int) for d in rows) or channels != (width,):
        problems.report(
            file,
            f"{kind} {value.name!r}",
            f"shape {list(value.shape)}",
            f"{dynamic} dynamic row axes and {width} channels",
        )


def _check_shared(
    config: ArtifactConfig,
    section: DrafterSection,
    what: str,
    target: Matrix,
    drafter: Matrix,
    file: str,
    problems: Problems,
) -> None:
    """Check that the drafter's table or head is the target's: same name, bytes, type and shape."""
    theirs = {t.name: t for t in target.tensors}
    for tensor in drafter.tensors:
        where = f"initializer {tensor.name} (the {what})"
        other = theirs.get(tensor.name)
        if other is None:
            problems.report(
                file,
                where,
                f"{type_name(tensor.data_type)} {list(tensor.shape)} of its own",
                "the target's " + " and ".join(f"{n} {list(t.shape)}" for n, t in theirs.items()),
            )
            continue
        if _facts(tensor) != _facts(other):
            problems.report(file, where, _facts(tensor), f"{_facts(other)}, the target's")
            continue
        for path, listed in (
            ("model.decoder.shared_initializers", config.decoder.shared),
            (f"{section.where}.shared_initializers", section.shared),
        ):
            _check_listed(path, listed.get(tensor.name), tensor, problems)


def _facts(tensor: Tensor) -> str:
    place = tensor.place
    at = "in the graph" if place is None else f"at {place.location}+{place.offset}"
    return f"{type_name(tensor.data_type)} {list(tensor.shape)} {at}, {tensor.nbytes} bytes"


def _check_listed(
    path: str, entry: SharedTensor | None, tensor: Tensor, problems: Problems
) -> None:
    where = f"{path}, {tensor.name}"
    if entry is None or tensor.place is None:
        found = "no such entry" if entry is None else "a tensor inside the graph"
        problems.report(CONFIG, where, found, f"{_facts(tensor)}")
        return
    place = tensor.place
    listed = (entry.data_file, entry.offset, entry.length, entry.data_type, entry.shape)
    stored = (place.location, place.offset, place.length, tensor.data_type, tensor.shape)
    if listed != stored:
        problems.report(CONFIG, where, _entry(listed), f"{_entry(stored)}, of {tensor.file}")


def _entry(facts: tuple) -> str:
    data_file, offset, length, data_type, shape = facts
    return f"{type_name(data_type)} {list(shape)} at {data_file}+{offset}, {length} bytes"
