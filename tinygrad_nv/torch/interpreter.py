"""A graph of ATen as Tensors, operator by operator.

Protocol. `Interpreter(graph).run(given)` gives each placeholder a Tensor or a number, applies the table of
lowering/ to one node after the other, and returns the values of the output's nodes. Nothing is computed: the
Tensors are tinygrad's graph. A result is cast to torch's dtype and must have torch's shape.

`plan(graph, …)` is that function as captured.py takes it. `refusals(graph)` lowers a graph of empty Tensors
of the example's shapes, and notes why nodes cannot be.
"""
from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from tinygrad import Tensor
from torch.fx import GraphModule, Node

from tinygrad_nv.dlpack import from_dlpack
from tinygrad_nv.errors import NVError
from tinygrad_nv.torch.captured import Plan
from tinygrad_nv.torch.lowering import TABLE, Out, Unsupported, dtype_of
from tinygrad_nv.torch.memory import DEVICE, Layout

Value = Any     # a Tensor, a number, or a tuple or list of them


class Interpreter:
    """A graph's nodes by their values."""

    def __init__(self, module: GraphModule, constants: dict[str, Tensor]) -> None:
        self.module, self.constants = module, constants
        self.values: dict[Node, Value] = {}

    def run(self, given: Sequence[Value]) -> list[Value]:
        """The values of the output's nodes. Raises `Unsupported`."""
        rest = iter(given)
        for node in self.module.graph.nodes:
            if node.op == "placeholder": self.values[node] = next(rest)
            elif node.op == "output": return list(self.map_argument(node.args[0]))
            else: self.values[node] = self.value(node)
        raise AssertionError("a graph without an output")

    def map_argument(self, argument: Any) -> Any:
        """An argument with values in place of nodes."""
        if isinstance(argument, Node): return self.values[argument]
        if isinstance(argument, (tuple, list)): return type(argument)(map(self.map_argument, argument))
        return argument

    def value(self, node: Node) -> Value:
        """A node's value, of its arguments'."""
        if node.op == "get_attr": return self.constants[str(node.target)]
        args, kwargs = self.map_argument(tuple(node.args)), {k: self.map_argument(v) for k,
                                                             v in node.kwargs.items()}
        target: Any = node.target
        if target is operator.getitem or not _has_tensor(node.meta.get("val")):
            return _compute(target, args, kwargs)
        if (lower := TABLE.get(target)) is None: raise Unsupported("no function of tinygrad_nv computes it")
        val = node.meta["val"]
        first = next(each for each in (val if isinstance(val, (tuple, list)) else [val]) if each is not None)
        return _fit(lower(Out(dtype_of(first.dtype), DEVICE), *args, **kwargs), val)


def _has_tensor(val: Any) -> bool:
    return any(isinstance(each, torch.Tensor) for each in (val if isinstance(val, (tuple, list)) else [val]))


def _compute(target: Any, args: Any, kwargs: Any) -> Value:
    """Computes a call of no operator of tensors: extents, and results of an operator that has several."""
    if (known := TABLE.get(target)) is not None: return known(None, *args, **kwargs)
    if isinstance(target, torch._ops.OpOverload) and any(isinstance(each, Tensor) for each in args):
        raise Unsupported("no function of tinygrad_nv computes it")
    return target(*args, **kwargs)


def _fit(made: Value, val: Any) -> Value:
    """A result in torch's dtype. Raises `Unsupported` for another shape."""
    if isinstance(val, (tuple, list)):
        return tuple(None if its is None or each is None else _fit(each, its)
                     for each, its in zip(made, val, strict=True))
    wanted = sizes(val)
    if tuple(made.shape) != wanted and not _symbolic(val):
        raise Unsupported(f"its result has shape {tuple(made.shape)}, torch's {wanted}")
    return made.cast(dtype_of(val.dtype))


def _symbolic(val: torch.Tensor) -> bool: return any(not isinstance(n, int) for n in val.shape)


def hint(extent: Any) -> int:
    """The example's value of an extent."""
    return extent if isinstance(extent, int) else int(extent.node.hint)


def sizes(val: torch.Tensor) -> tuple[int, ...]:
    """The example's shape of a tensor."""
    return tuple(map(hint, val.shape))


def plan(module: GraphModule, writes: dict[int, int], in_place: frozenset[int],
         static: frozenset[int]) -> Plan:
    """A graph as a function of Tensors. Tensors that are its attributes are shared with torch."""
    held = [str(node.target) for node in module.graph.nodes if node.op == "get_attr"]
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    numbers = tuple(i for i, node in enumerate(places)
                    if node.users and not isinstance(node.meta["val"], torch.Tensor))
    results: Any = module.graph.output_node().args[0]

    def layout(k: int, shape: tuple[int, ...]) -> Layout:
        val = results[k].meta["val"]
        strides = tuple(map(hint, val.stride()))
        return Layout.in_order(shape, Layout(shape, strides, val.dtype).order, val.dtype)

    def lower(given: Sequence[Value]) -> list[Value]:
        # not before a call: while torch compiles, its tensors have no memory
        constants = {name: from_dlpack(getattr(module, name).detach()) for name in held}
        return Interpreter(module, constants).run(given)
    return Plan(lower, layout, numbers, writes, in_place, static)


# **** what can be lowered ****

def refusals(module: GraphModule) -> dict[Node, str]:
    """Why nodes cannot be lowered, by node; no entry for those that can."""
    refused: dict[Node, str] = {}
    walk = Interpreter(module, {})
    for node in module.graph.nodes:
        if node.op == "output": continue
        try:
            if node.op == "call_function":
                _check(node)
                walk.values[node] = walk.value(node)
            else: walk.values[node] = _example(node.meta.get("val"))
        except Exception as error:      # tinygrad raises all kinds: each of them means that torch computes it
            words = error.found if isinstance(error, NVError) else str(error) or type(error).__name__
            refused[node] = " ".join(words.split())
            walk.values[node] = _example(node.meta.get("val"))
    return refused


def _check(node: Node) -> None:
    """Raises `Unsupported` for tensors that are not ours to compute."""
    for each in (node, *node.all_input_nodes):
        val = each.meta.get("val")
        for tensor in (val if isinstance(val, (tuple, list)) else [val]):
            if not isinstance(tensor, torch.Tensor): continue
            if tensor.device.type != "cpu":
                raise Unsupported(f"a tensor on {tensor.device}: only the CPU's are taken")
            if tensor.layout is not torch.strided: raise Unsupported(f"a tensor of layout {tensor.layout}")
            dtype_of(tensor.dtype)


def _example(val: Any) -> Value:
    """An empty Tensor of a value's shape."""
    if isinstance(val, (tuple, list)): return tuple(map(_example, val))
    if isinstance(val, torch.Tensor):
        try: dtype = dtype_of(val.dtype)
        except Unsupported: return None     # whatever reads it is refused by `_check`
        return Tensor.empty(*sizes(val), dtype=dtype, device=DEVICE)
    return hint(val) if isinstance(val, torch.SymInt) else val
