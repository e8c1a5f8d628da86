"""Reading of a graph by its data flow; every node, attribute and initializer must be matched.

A :class:`Walk` goes backwards, from the outputs: the reader of a value names the operators that may
compute it. :data:`~convert.artifact.operators.OPERATORS` lists the implemented part of every
operator: its inputs by role, the optional ones, and the attribute values. Names in the graph have
no meaning here, except those of inputs and outputs in the configuration. Nodes left over when all
outputs have been followed are an error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from convert.artifact.graph import Graph, Node
from convert.artifact.operators import OPERATORS, Operator
from convert.errors import ArtifactError, Problems
from convert.tensors import FLOATS, Tensor, type_name

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Call:
    """A matched node: its inputs by role and its attributes."""

    node: Node
    inputs: Mapping[str, str]
    attributes: Mapping[str, Any]

    def __getitem__(self, role: str) -> str:
        return self.inputs[role]

    def output(self, index: int) -> str:
        """Return the name of an output, empty if there is none."""
        return self.node.outputs[index] if index < len(self.node.outputs) else ""


class Walk:
    """A walk over one graph, with everything matched so far.

    Attributes:
      graph: the graph.
      file: its name, for messages.
      problems: destination of problems that do not stop the walk.
      dtype: ONNX type of the body's weights, once known.
    """

    def __init__(self, graph: Graph, problems: Problems):
        self.graph = graph
        self.file = graph.file
        self.problems = problems
        self.dtype: int | None = None
        self._nodes: set[int] = set()
        self._tensors: set[str] = set()
        self._inputs: set[str] = set()
        self._outputs: set[str] = set()

    # Asking for nodes.

    def op(self, value: str) -> str:
        """Return the operator that computes ``value``; empty for an input or an initializer."""
        produced = self.graph.producers.get(value)
        return produced[0].op if produced else ""

    def expect_op(self, value: str, *ops: str, output: int = 0) -> Call:
        """Return the call that computes ``value`` as its output ``output``.

        Args:
          value: a value name.
          ops: operators it may be, of the table.
          output: index of ``value`` among the node's outputs.

        Raises:
          ArtifactError: anything else computes it, or the node uses something not implemented.
        """
        wanted = " or ".join(ops)
        produced = self.graph.producers.get(value)
        if produced is None:
            kind = "a graph input" if value in self.graph.inputs else "an initializer"
            raise ArtifactError(self.file, f"value {value!r}", kind, f"the output of {wanted}")
        node, index = produced
        if node.op not in ops or node.domain != OPERATORS[node.op].domain:
            found = f"{node.domain or 'ai.onnx'}::{node.op}"
            if node.op not in OPERATORS and node.op != "Constant":
                found += ", an operator that is not implemented"
            raise ArtifactError(self.file, node.label, found, wanted)
        if index != output:
            raise ArtifactError(
                self.file, node.label, f"{value!r} as output {index}", f"as output {output}"
            )
        self._nodes.add(node.index)
        operator = OPERATORS[node.op]
        return Call(node, self._inputs_of(node, operator), self._attributes_of(node, operator))

    def _inputs_of(self, node: Node, operator: Operator) -> dict[str, str]:
        if operator.inputs == "*":
            if not node.inputs or not all(node.inputs):
                raise ArtifactError(self.file, node.label, "an absent input", "all inputs")
            return {str(i): name for i, name in enumerate(node.inputs)}
        roles = operator.roles
        if len(node.inputs) > len(roles):
            raise ArtifactError(
                self.file,
                node.label,
                f"{len(node.inputs)} inputs, the last {node.inputs[-1]!r}",
                f"{len(roles)}, all that the operator has",
            )
        inputs = {}
        for i, role in enumerate(roles):
            name = node.inputs[i] if i < len(node.inputs) else ""
            bare, mark = role.rstrip("?!"), role[-1]
            if name and mark == "!":
                raise ArtifactError(
                    self.file, f"{node.label}, input {bare}", repr(name), "none: not implemented"
                )
            if not name and mark not in "?!":
                raise ArtifactError(self.file, f"{node.label}, input {bare}", "none", "a tensor")
            inputs[bare] = name
        return inputs

    def _attributes_of(self, node: Node, operator: Operator) -> dict[str, Any]:
        values = {}
        for name, value in node.attributes.items():
            spec = operator.attributes.get(name)
            where = f"{node.label}, attribute {name}"
            if spec is None:
                raise ArtifactError(
                    self.file, where, repr(value), "no such attribute: not implemented"
                )
            if not isinstance(value, spec.type):
                raise ArtifactError(self.file, where, repr(value), f"a value of {spec.type}")
            if spec.allowed is not None and value not in spec.allowed:
                wanted = " or ".join(repr(v) for v in spec.allowed)
                raise ArtifactError(self.file, where, repr(value), f"{wanted}: not implemented")
            values[name] = value
        for name, spec in operator.attributes.items():
            if name not in values:
                if spec.default is None:
                    raise ArtifactError(
                        self.file, f"{node.label}, attribute {name}", "none", "a value"
                    )
                values[name] = spec.default
        return values

    def outputs(self, call: Call, names: Sequence[str]) -> None:
        """Check that the node has exactly these outputs; mark those of the graph as explained."""
        found = tuple(call.node.outputs)
        while found and not found[-1]:
            found = found[:-1]
        if found != tuple(names):
            raise ArtifactError(self.file, f"{call.node.label}, outputs", list(found), list(names))
        for name in names:
            if name in self.graph.outputs:
                self._outputs.add(name)

    def expect_same(self, where: str, found: str, expected: str) -> None:
        """Check that two values are the same."""
        if found != expected:
            raise ArtifactError(self.file, where, f"{found!r} as input", f"{expected!r}")

    # Asking for inputs, outputs, constants and weights.

    def input(
        self, name: str, where: str, data_type: int | None, shape: Sequence[Any] | None = None
    ) -> str:
        """Return ``name`` as a graph input of a type and a shape.

        In ``shape`` an integer must be that number, None any dimension, and a string a dimension
        that is not fixed.
        """
        self._inputs.add(name)
        self._declared(self.graph.inputs.get(name), "input", name, where, data_type, shape)
        return name

    def output(
        self, name: str, where: str, data_type: int | None, shape: Sequence[Any] | None = None
    ) -> str:
        """Return ``name`` as a graph output, as :meth:`input`."""
        self._outputs.add(name)
        self._declared(self.graph.outputs.get(name), "output", name, where, data_type, shape)
        return name

    def _declared(
        self,
        value: Any,
        kind: str,
        name: str,
        where: str,
        data_type: int | None,
        shape: Sequence[Any] | None,
    ) -> None:
        if value is None:
            raise ArtifactError(self.file, f"{kind} {name!r}", "none of that name", f"{where}")
        if data_type is not None and value.data_type != data_type:
            self.problems.report(
                self.file, f"{kind} {name!r}", type_name(value.data_type), type_name(data_type)
            )
        if shape is None:
            return
        fits = len(shape) == len(value.shape) and all(
            have == want if isinstance(want, int) else want is None or not isinstance(have, int)
            for have, want in zip(value.shape, shape, strict=True)
        )
        if not fits:
            wanted = ["any" if d is None else d for d in shape]
            self.problems.report(self.file, f"{kind} {name!r}", list(value.shape), wanted)

    def constant(self, value: str) -> Array:
        """Return a number or small array that is stored in the graph."""
        produced = self.graph.producers.get(value)
        if produced is not None and produced[0].op == "Constant" and produced[0].domain == "":
            node = produced[0]
            if set(node.attributes) != {"value"} or not isinstance(
                node.attributes["value"], np.ndarray
            ):
                raise ArtifactError(self.file, node.label, sorted(node.attributes), "one tensor")
            self._nodes.add(node.index)
            return node.attributes["value"]
        tensor = self.graph.initializers.get(value)
        if tensor is not None and math.prod(tensor.shape) <= 64:
            self._tensors.add(value)
            return tensor.read()
        raise ArtifactError(self.file, f"value {value!r}", "no constant", "a constant")

    def expect(self, call: Call, role: str, *values: Any) -> None:
        """Check that an input of ``call`` is an integer constant, one of ``values``."""
        found = self.constant(call[role])
        if found.dtype.kind not in "iu" or found.tolist() not in list(values):
            raise ArtifactError(
                self.file,
                f"{call.node.label}, input {role}",
                found.tolist(),
                " or ".join(str(v) for v in values),
            )

    def tensor(
        self, name: str, where: str, *, shape: Sequence[int | None], dtypes: Sequence[int]
    ) -> Tensor:
        """Return ``name`` as an initializer of a shape (None: any size) and one of some types."""
        found = self.graph.initializers.get(name)
        if found is None:
            what = f"{name!r}, which is not an initializer" if name else "none"
            raise ArtifactError(self.file, where, what, "an initializer")
        self._tensors.add(name)
        if len(found.shape) != len(shape):
            raise ArtifactError(
                self.file,
                f"initializer {name}",
                f"shape {list(found.shape)}",
                f"{len(shape)} dimensions",
            )
        fits = all(
            s > 0 if want is None else s == want for s, want in zip(found.shape, shape, strict=True)
        )
        if not fits:
            wanted = ["any" if d is None else d for d in shape]
            raise ArtifactError(
                self.file, f"initializer {name}", f"shape {list(found.shape)}", wanted
            )
        if found.data_type not in dtypes:
            wanted = " or ".join(type_name(t) for t in dtypes)
            raise ArtifactError(
                self.file, f"initializer {name}", type_name(found.data_type), wanted
            )
        return found

    def weight(self, name: str, where: str, shape: Sequence[int | None]) -> Tensor:
        """Return an initializer of the body's float type."""
        dtypes = FLOATS if self.dtype is None else (self.dtype,)
        return self.tensor(name, where, shape=shape, dtypes=tuple(dtypes))

    # At the end.

    def finish(self) -> None:
        """Report every node, initializer, input and output that was not matched."""
        for node in self.graph.nodes:
            if node.index not in self._nodes:
                found = f"{node.domain or 'ai.onnx'}::{node.op}"
                if node.op not in OPERATORS and node.op != "Constant":
                    found += ", an operator that is not implemented"
                self.problems.report(self.file, node.label, found, "no node outside the pattern")
        for kind, names, used in (
            ("initializer", self.graph.initializers, self._tensors),
            ("input", self.graph.inputs, self._inputs),
            ("output", self.graph.outputs, self._outputs),
        ):
            for name in names:
                if name not in used:
                    self.problems.report(
                        self.file, f"{kind} {name!r}", "one that nothing uses", f"no such {kind}"
                    )


def axis_of(call: Call, rank: int) -> int:
    """Return the axis attribute, counted from the front."""
    axis = call.attributes["axis"]
    return axis + rank if axis < 0 else axis
