"""Ops that ONNX itself defines by other ops.

Protocol: `definition_of(node, types)` is the graph of such an op for inputs of these types, or None. An op
that no function computes runs as its graph does; onnx's schemas have it, for some ops made for the types of
inputs.
Names of the graph's inputs and outputs are those of the definition, in the node's order.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import defs

from tinygrad_nv.onnx.model import Graph, Node, node_of, opsets


def definition_of(node: Node, types: Sequence[onnx.TypeProto]) -> Graph | None:
    """The graph that defines an op, with the node's attributes put in."""
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
