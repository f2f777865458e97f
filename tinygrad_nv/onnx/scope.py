"""The values of a graph while it runs.

Protocol. A `Scope` has the values of one graph's names; a name that it lacks is looked up in the scope
around it (a graph of If, Loop and Scan sees the names of its node's graph). Nodes are computed in order:
on the host where they are shape arithmetic (host.py), by a function of the table, by tinygrad's, or by the
graph that defines the op. Tensors are lazy: a node adds to the graph of UOps and runs
nothing, unless a value decides a shape or which graph runs.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, defs, helper
from tinygrad import Tensor

from tinygrad_nv.errors import NVError, OnnxError
from tinygrad_nv.onnx.elements import Narrow, Value, from_numpy, kind_of, to_numpy
from tinygrad_nv.onnx.host import on_host
from tinygrad_nv.onnx.limits import budget, shorten
from tinygrad_nv.onnx.model import Graph, Node, node_of, opsets
from tinygrad_nv.onnx.table import Operator, find

# what moves elements, whatever their type
MOVES = {"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Gather", "Concat", "Expand",
         "Flatten", "Split", "Tile", "DepthToSpace", "SpaceToDepth", "GatherElements", "GatherND"}


class Scope:
    """The values of a graph's names."""

    def __init__(self, graph: Graph, outer: Scope | None = None) -> None:
        self.graph, self.outer = graph, outer
        self.values: dict[str, Value] = dict(graph.constants)
        self._tensors: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Value:
        if not name: return None
        if name in self.values: return self.values[name]
        if self.outer is None:
            raise OnnxError(f"the graph reads {name!r}, which no node writes",
                            "nodes in the order of their use", "export the model again")
        return self.outer[name]

    def constant(self, name: str) -> bool:
        """Whether a name is a constant of this graph, or of one around it."""
        if name in self.values or self.outer is None: return name in self.graph.constants
        return self.outer.constant(name)

    def tensor(self, name: str) -> Value:
        """A value for a function on Tensors: an array that the host knows as a Tensor."""
        value = self[name]
        if not isinstance(value, np.ndarray) or value.dtype == object: return value
        if name not in self._tensors:
            made = from_numpy(value)
            assert isinstance(made, Tensor)
            self._tensors[name] = made
        return self._tensors[name]

    def array(self, name: str) -> np.ndarray | None:
        """A value as a numpy array; of a Tensor that is computed now, and once."""
        value = self[name]
        if value is None or isinstance(value, np.ndarray): return value
        if isinstance(value, list): raise OnnxError(f"{name!r} is a sequence", "a tensor")
        made = to_numpy(value)
        assert isinstance(made, np.ndarray)
        if isinstance(value, Tensor) and name in self.values: self.values[name] = made
        return made

    def run(self, inputs: Sequence[Value]) -> list[Value]:
        """The outputs of the graph."""
        self.values.update(zip(self.graph.inputs, inputs, strict=False))
        budget().spend(len(self.graph.nodes) + 1)
        for node in self.graph.nodes:
            made = _locate_errors(node, self._check_outputs)
            self.values.update(zip(node.outputs, made, strict=False))
        return [self[name] for name in self.graph.outputs]

    def _check_outputs(self, node: Node) -> Sequence[Value]:
        """The outputs of a node, of sizes that what is given explains."""
        made = self._outputs(node)
        budget().check(made)
        return [budget().kernels.output(each) for each in made]

    def _outputs(self, node: Node) -> Sequence[Value]:
        given = [self[name] for name in node.inputs]
        if (known := on_host(node, given)) is not None: return [known]
        found = find(node.domain, node.op, node.version)
        if found is None: return self._by_definition(node, given)
        made = self._call(found, node)
        return made if isinstance(made, tuple) else (made,)

    def _call(self, found: Operator, node: Node) -> Any:
        """Calls the function that the table has for a node."""
        context = [NodeCall(node, self)] if found.call else []
        if found.raw: return found.function(*context, *map(self.__getitem__, node.inputs), **node.attributes)
        given = [self.array(name) if i in found.host else self.tensor(name)
                 for i, name in enumerate(node.inputs)]
        narrow = [each.kind for each in given if isinstance(each, Narrow)]
        if narrow and node.op not in MOVES:
            raise OnnxError(f"elements of type {TensorProto.DataType.Name(narrow[0])}", "a Cast before it",
                            "dequantise first")
        plain = [each.tensor if isinstance(each, Narrow) else each for each in given]
        made = found.function(*context, *budget().kernels.inputs(plain), **_for(node))
        if not narrow: return made
        return tuple(Narrow(each, narrow[0]) for each in (made if isinstance(made, tuple) else (made,)))

    def _by_definition(self, node: Node, given: Sequence[Value]) -> list[Value]:
        """The outputs of the graph that defines the op."""
        graph = definition_of(node, [_type(each) for each in given])
        if graph is None:
            raise OnnxError("no function computes this op", "an op of ai.onnx, or one of com.microsoft that "
                            "docs/onnx.md lists", "export with another opset, or write it by other ops")
        inputs = [*given, *[None] * (len(graph.inputs) - len(given))]
        return Scope(graph).run(inputs)


class NodeCall:
    """A node that is being computed (table.Call)."""

    def __init__(self, node: Node, scope: Scope) -> None: self.node, self.scope = node, scope

    def evaluate(self, graph: Graph, inputs: Sequence[Value]) -> list[Value]:
        """The outputs of a graph among the attributes."""
        return Scope(graph, self.scope).run(inputs)

    def constant(self, *inputs: int) -> bool:
        """Whether inputs, those that there are, are constants of the model."""
        names = [self.node.inputs[i] for i in inputs if i < len(self.node.inputs)]
        return all(not name or self.scope.constant(name) for name in names)


def _for(node: Node) -> dict[str, Any]:
    """Attributes, with tensors among them as Tensors, and the number of a Split's outputs."""
    made = {name: from_numpy(each) if isinstance(each, np.ndarray) else each
            for name, each in node.attributes.items()}
    return made | {"num_outputs": len(node.outputs)} if node.op == "Split" else made


def _type(x: Value) -> onnx.TypeProto:
    """The type of a value, for a definition that depends on it."""
    if x is None: return onnx.TypeProto()
    if isinstance(x, list):
        return helper.make_sequence_type_proto(_type(x[0]) if x else onnx.TypeProto())
    shape = (x.tensor if isinstance(x, Narrow) else x).shape
    return helper.make_tensor_type_proto(kind_of(x), [int(n) for n in shape])


def _locate_errors(node: Node, compute: Callable[[Node], Sequence[Value]]) -> Sequence[Value]:
    """The outputs of a node; an error says which node it was."""
    try: return compute(node)
    except OnnxError as error:
        if error.found.startswith("node "): raise
        raise OnnxError(f"{node.place}: {error.found}", error.expected, error.fix) from error
    except NVError: raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError, RuntimeError,
            TypeError, ValueError, re.error) as error:
        raise OnnxError(f"{node.place}: {type(error).__name__}: {shorten(str(error))}",
                        "inputs and attributes that the op's definition allows",
                        "compare the node with https://onnx.ai/onnx/operators") from error


def definition_of(node: Node, types: Sequence[onnx.TypeProto]) -> Graph | None:
    """The graph that defines an op, for inputs of these types, with the node's attributes put in; None where
    ONNX defines it by no other ops. onnx's schemas have it, for some ops made for the types of inputs. Names
    of the graph's inputs and outputs are those of the definition, in the node's order."""
    if not defs.has(node.op, node.version, node.domain): return None
    schema: Any = defs.get_schema(node.op, node.version, node.domain)
    proto = onnx.FunctionProto()
    if schema.has_function: proto.CopyFrom(schema.function_body)
    elif schema.has_context_dependent_function:
        made = schema.get_context_dependent_function(node.proto.SerializeToString(),
                                                     [each.SerializeToString() for each in types])
        proto.ParseFromString(made)
    else: return None
    return _graph(proto, node, schema)


def _graph(proto: onnx.FunctionProto, node: Node, schema: Any) -> Graph:
    given = {each.name: each for each in node.proto.attribute}
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.name: given[name] = attribute.default_value
    for each in proto.node: _bind(each, given)
    versions = opsets(onnx.ModelProto(opset_import=proto.opset_import))
    nodes = tuple(node_of(each, versions, node.directory) for each in proto.node)
    return Graph(nodes, tuple(proto.input), tuple(proto.output), {}, {})


def _bind(node: onnx.NodeProto, given: dict[str, onnx.AttributeProto]) -> None:
    """Puts attributes of the op where its definition refers to them, in graphs of nodes too."""
    kept = []
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            if attribute.ref_attr_name not in given: continue
            made = onnx.AttributeProto()
            made.CopyFrom(given[attribute.ref_attr_name])
            made.name = attribute.name
            kept.append(made)
            continue
        if attribute.type == onnx.AttributeProto.GRAPH:
            for each in attribute.g.node: _bind(each, given)
        kept.append(attribute)
    copies = [onnx.AttributeProto.FromString(each.SerializeToString()) for each in kept]
    del node.attribute[:]
    node.attribute.extend(copies)
