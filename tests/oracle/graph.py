"""Loads an ONNX file and runs its nodes one after another in float32.

Numerics: stored float16 and bfloat16 tensors are promoted to float32, which is exact, and casts
to those types do nothing. A run therefore gives the float32 value of the graph with its stored
weights, without any rounding in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from tests.oracle.ops import OPERATORS, Array

LOW_PRECISION = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
# Sub-byte integers have no native numpy dtype; a byte each is enough to compute with.
NIBBLES = {TensorProto.INT4: np.int8, TensorProto.UINT4: np.uint8}

Shape = tuple[int | str, ...]


def promoted(tensor: TensorProto) -> Array:
    """Returns the tensor's values in a native numpy dtype, low precision floats as float32."""
    values = numpy_helper.to_array(tensor)
    if tensor.data_type in LOW_PRECISION:
        return values.astype(np.float32)
    if tensor.data_type in NIBBLES:
        return values.astype(NIBBLES[tensor.data_type])
    return values


def attribute_value(attribute: AttributeProto) -> Any:
    """Returns an attribute as int, float, str, list or promoted array."""
    if attribute.type == AttributeProto.TENSOR:
        return promoted(attribute.t)
    value = helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value


@dataclass(frozen=True)
class Node:
    """One operator call. An absent optional input or output has the name ""."""

    operator: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]


def read_node(node: onnx.NodeProto) -> Node:
    """Returns the plain form of a stored node."""
    attributes = {a.name: attribute_value(a) for a in node.attribute}
    return Node(node.op_type, node.name, tuple(node.input), tuple(node.output), attributes)


def declared_shapes(values: Iterable[onnx.ValueInfoProto]) -> dict[str, Shape]:
    """Returns name -> shape, where a free dimension is given by its name."""
    return {
        v.name: tuple(
            d.dim_value if d.HasField("dim_value") else d.dim_param
            for d in v.type.tensor_type.shape.dim
        )
        for v in values
    }


class Graph:
    """An ONNX file that can be run.

    Attributes:
        inputs: name -> declared shape of each graph input.
        outputs: name -> declared shape of each graph output.
        initializers: name -> stored tensor, promoted.
        nodes: the operator calls in the order in which they are stored, which is a valid one.
    """

    def __init__(self, path: Path | str) -> None:
        # onnx.load finds external data beside the file, also tensors that another graph shares.
        graph = onnx.load(str(path)).graph
        self.path = Path(path)
        self.inputs = declared_shapes(graph.input)
        self.outputs = declared_shapes(graph.output)
        self.initializers = {t.name: promoted(t) for t in graph.initializer}
        self.nodes = [read_node(n) for n in graph.node]

    def run(
        self, feeds: Mapping[str, Array], fetch: Iterable[str] | None = None
    ) -> dict[str, Array]:
        """Runs all nodes and returns name -> value.

        Args:
            feeds: exactly the graph's inputs. Floats may be of any precision.
            fetch: names to return, which may be intermediate values; the outputs by default.

        Returns:
            The fetched values, floats as float32.
        """
        missing, unknown = self.inputs.keys() - feeds.keys(), feeds.keys() - self.inputs.keys()
        if missing or unknown:
            raise ValueError(
                f"{self.path.name}: inputs missing {sorted(missing)}, unknown {sorted(unknown)}"
            )
        values: dict[str, Array] = dict(self.initializers)
        for name, value in feeds.items():
            array = np.asarray(value)
            is_integer = np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_
            values[name] = array if is_integer else array.astype(np.float32)
        for node in self.nodes:
            self._run_node(node, values)
        return {name: values[name] for name in (self.outputs if fetch is None else fetch)}

    def constant(self, name: str) -> Array:
        """Returns a tensor that depends on no input, such as a reshaped weight."""
        if name in self.initializers:
            return self.initializers[name]
        for node in self.nodes:
            if name in node.outputs:
                values = {x: self.constant(x) for x in node.inputs if x}
                self._run_node(node, values)
                return values[name]
        raise KeyError(f"{self.path.name}: {name} is an input or does not exist")

    def _run_node(self, node: Node, values: dict[str, Array]) -> None:
        """Adds the outputs of one node to `values`."""
        if node.operator not in OPERATORS:
            raise NotImplementedError(f"{self.path.name}: operator {node.operator} ({node.name})")
        inputs = [values[name] if name else None for name in node.inputs]
        try:
            result = OPERATORS[node.operator](node.attributes, *inputs)
        except Exception as error:
            error.add_note(f"while running {node.operator} ({node.name}) of {self.path}")
            raise
        results = result if isinstance(result, tuple) else (result,)
        for name, value in zip(node.outputs, results, strict=False):
            if name:
                values[name] = np.asarray(value)
