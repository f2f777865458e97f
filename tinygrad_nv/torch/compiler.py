"""A graph of ATen as programs of ours, with torch's own operators between them where there is no other way.

Protocol. `compiled(module, static)` is a function of the graph's arguments. Mutations are taken out of the
graph first: torch has put them at its end, as copies into arguments. If every operator can be lowered, the
graph is one `Program`. Else the operators that can be are gathered in as few subgraphs as their order allows,
a `Program` each, and torch runs the others; `Compiled.refused` says why, and so does a line of the log.
"""
from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from tinygrad_nv.torch.interpreter import plan, refusals
from tinygrad_nv.torch.lowering import cache
from tinygrad_nv.torch.lowering.table import overload
from tinygrad_nv.torch.program import Program, overwrite
from tinygrad_nv.torch.report import GraphReport, ran

log = logging.getLogger("tinygrad_nv.torch")


@dataclass(frozen=True)
class Returned:
    """A value that torch gets: a result by position, or argument ~position, and the views of it that are
    taken."""
    position: int
    views: tuple[Node, ...] = ()

    def of(self, args: Sequence[Any], made: Sequence[Any]) -> Any:
        value = args[~self.position] if self.position < 0 else made[self.position]
        for view in self.views: value = view.target(value, *view.args[1:], **view.kwargs)
        return value


@dataclass
class Compiled:
    """A graph to call."""
    name: str
    run: Any
    writes: dict[int, int]
    returned: list[Returned]
    operators: int
    programs: list[Program]
    refused: dict[str, str] = field(default_factory=dict)

    def __call__(self, *args: Any) -> list[Any]:
        made = self.run(*args)
        overwrite(args, made, self.writes)
        ran(self)
        return [each.of(args, made) for each in self.returned]

    def report(self) -> GraphReport:
        """Reports what was compiled, and what torch runs and why."""
        captures = sum(len(program.captures) for program in self.programs)
        reasons = [reason for program in self.programs for reason in program.reasons]
        return GraphReport(self.name, self.operators, len(self.programs), captures, dict(self.refused),
                           tuple(reasons))


def compile_module(module: GraphModule, static: frozenset[int], name: str) -> Compiled:
    """A graph of ATen, whose arguments by number in `static` keep their layout, to call."""
    operators = sum(node.op == "call_function" for node in module.graph.nodes)
    mutated = _copies(module.graph)
    refused = {node: why for node, why in refusals(module).items() if node not in mutated}
    if not refused: return _whole(module, mutated, static, name, operators)
    writes, returned = _pure(module, mutated)
    programs = _partition(module, refused)
    told = {f"{node.target} ({node.name})": why for node, why in refused.items()}
    for operator, why in told.items(): log.warning("%s: torch computes %s: %s", name, operator, why)
    return Compiled(name, module, writes, returned, operators, programs, told)


def _whole(module: GraphModule, mutated: dict[Node, Node], static: frozenset[int], name: str,
           operators: int) -> Compiled:
    """The graph as one program."""
    ours = _twin(module)
    in_place = cache.simplify(ours.graph)
    places = {node.name for node in in_place}
    writes, returned = _pure(ours, _copies(ours.graph))
    _pure(module, mutated)
    results: Any = ours.graph.output_node().args[0]
    held = frozenset(k for k in writes if results[k].name in places)
    ours.recompile()
    program = Program(plan(ours, writes, held, static), module)
    return Compiled(name, program, {}, returned, operators, [program])


def _twin(module: GraphModule) -> GraphModule:
    """A copy of the graph over the same tensors."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return GraphModule(module, graph)


def _copies(graph: Graph) -> dict[Node, Node]:
    """The copies into arguments, with these."""
    copies = [(node, node.args[0]) for node in graph.nodes if node.target is cache.COPY]
    return {node: into for node, into in copies if into.op == "placeholder"}


def _pure(module: GraphModule, mutated: dict[Node, Node]) -> tuple[dict[int, int], list[Returned]]:
    """Takes copies into arguments out of a graph, and views of arguments and results, which cost nothing in
    torch. Returns the results by position that arguments are overwritten with, and what the graph returns."""
    graph = module.graph
    places = {node: i for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    output = graph.output_node()
    wanted: Any = output.args[0]
    results: list[Any] = []
    writes = {}
    for node, argument in mutated.items():
        writes[len(results)] = places[argument]
        results.append(node.args[1])
    returned = []
    for each in wanted:
        root, views = _split_views(mutated.get(each, each)) if isinstance(each, Node) else (each, ())
        # a view of an argument that is overwritten later has its elements of before
        if each in mutated or root not in mutated.values(): each = root
        else: views = ()
        if each in places: returned.append(Returned(~places[each], views))
        else:
            # what overwrites an argument is no memory of its own
            known = results[len(writes):].index(each) + len(writes) if each in results[len(writes):] else None
            returned.append(Returned(len(results) if known is None else known, views))
            if known is None: results.append(each)
    output.args = (tuple(results),)
    for node, argument in mutated.items():
        node.replace_all_uses_with(argument)
        graph.erase_node(node)
    graph.lint()
    module.recompile()
    return writes, returned


VIEWS = frozenset(map(overload, (
    "view.default", "_unsafe_view.default", "t.default", "transpose.int", "permute.default",
    "unsqueeze.default", "squeeze.dim", "squeeze.dims", "expand.default", "slice.Tensor", "select.int",
    "alias.default", "detach.default")))


def _split_views(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """Returns the node that a result is a view of, and the views, the first first."""
    views: list[Node] = []
    while node.target in VIEWS and node.all_input_nodes == [node.args[0]]:
        views.insert(0, node)
        node = node.all_input_nodes[0]
    return node, tuple(views)


# **** parts of a graph ****

class _Ours(OperatorSupportBase):
    """Tells torch's partitioner which operators can be lowered."""

    def __init__(self, refused: dict[Node, str]) -> None: self.refused = refused

    def is_node_supported(self, submodules: Any, node: Node) -> bool:
        return node.op == "call_function" and node not in self.refused


def _partition(module: GraphModule, refused: dict[Node, str]) -> list[Program]:
    """Puts programs in the place of what can be lowered, in place."""
    partitioner = CapabilityBasedPartitioner(module, _Ours(refused), allows_single_node_partition=True)
    programs = []
    fused = partitioner.fuse_partitions(partitioner.propose_partitions(), prefix="tinygrad_nv_")
    for node in fused.graph.nodes:
        if node.op != "call_module" or not str(node.target).startswith("tinygrad_nv_"): continue
        part = getattr(module, node.target)
        single = not isinstance(part.graph.output_node().args[0], (tuple, list))
        if single: part.graph.output_node().args = ((part.graph.output_node().args[0],),)
        part.recompile()
        programs.append(Program(plan(part, {}, frozenset(), frozenset()), part))
        module.add_submodule(node.target, _Part(programs[-1], single))
    module.recompile()
    return programs


class _Part(torch.nn.Module):
    """A program as a module of a graph."""

    def __init__(self, program: Program, single: bool) -> None:
        super().__init__()
        self.program, self.single = program, single

    def forward(self, *args: Any) -> Any:
        made = self.program(*args)
        return made[0] if self.single else made
