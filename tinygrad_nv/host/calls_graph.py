"""Graphs of the API: built node by node or captured, instantiated, updated, launched."""
from __future__ import annotations

import struct
from collections.abc import Sequence

from tinygrad_nv.host.api import Int, Unsigned, Word, api
from tinygrad_nv.host.calls_copy import box
from tinygrad_nv.host.calls_launch import ATTRIBUTE_BYTES, launch_of, with_attributes
from tinygrad_nv.host.calls_stream import nodes_of
from tinygrad_nv.host.errors import CudaError, Status
from tinygrad_nv.host.graphs import Executable, Graph, Node
from tinygrad_nv.host.session import Session
from tinygrad_nv.host.works import Copy, Fill, HostCall, Kernel, Lifetime, Nothing, Rows, Work
from tinygrad_nv.runtime.emulated.order import FREES

# cudaGraphNodeType; 11 for the end of a lifetime
TYPES: dict[type, int] = {Kernel: 0, Copy: 1, Fill: 2, HostCall: 3, Nothing: 5, Lifetime: 10}
SAME_TOPOLOGY, OTHER_TOPOLOGY = 0, 2


def add_node(s: Session, into: int, graph: int, after: int, count: int, work: Work) -> None:
    """Adds a node."""
    s.put(into, s.handle(s.object(graph, Graph).add(work, nodes_of(s, after, count))))


def kernel_of(s: Session, parameters: int) -> Kernel:
    """Returns the kernel that cudaKernelNodeParams describes; CUDA_KERNEL_NODE_PARAMS lies the same, and may
    have a kernel's handle behind it."""
    function, *extents, smem, arguments, extra = struct.unpack("<Q7I4xQQ", s.wire.read(parameters, 56))
    if not function and s.name.startswith("cu") and not s.name.startswith("cuda"):
        function, = struct.unpack("<Q", s.wire.read(parameters + 56, 8))
    return launch_of(s, function, extents[:3], extents[3:], smem, arguments, b"", extra)


def fill_of(s: Session, parameters: int) -> Fill:
    """Returns the fill that cudaMemsetParams describes."""
    target, pitch, value, size, width, height = struct.unpack("<QQIIQQ", s.wire.read(parameters, 40))
    if size not in (1, 2, 4):
        raise CudaError(Status.INVALID_VALUE, f"elements of {size} bytes; 1, 2 or 4 is allowed")
    return Fill(Rows(target, width * size, height, 1, pitch), (value & (1 << 8 * size) - 1).to_bytes(size,
                                                                                                     "little"))


@api("cudaGraphCreate", "cuGraphCreate")
def graph_create(s: Session, into: Word, flags: Unsigned) -> None: s.put(into, s.handle(Graph()))


@api("cudaGraphDestroy", "cuGraphDestroy")
def graph_destroy(s: Session, graph: Word) -> None: s.drop(graph, Graph)


@api("cudaGraphClone", "cuGraphClone")
def graph_clone(s: Session, into: Word, graph: Word) -> None:
    s.put(into, s.handle(s.object(graph, Graph).copy_graph()[0]))


# **** nodes ****

@api("cudaGraphAddKernelNode", "cuGraphAddKernelNode_v2")
def add_kernel(s: Session, into: Word, graph: Word, after: Word, count: Word, parameters: Word) -> None:
    add_node(s, into, graph, after, count, kernel_of(s, parameters))


@api("cudaGraphAddMemcpyNode")
def add_memcpy(s: Session, into: Word, graph: Word, after: Word, count: Word, parameters: Word) -> None:
    add_node(s, into, graph, after, count, box(s, parameters))


@api("cudaGraphAddMemcpyNode1D")
def add_memcpy_1d(s: Session, into: Word, graph: Word, after: Word, count: Word, target: Word, source: Word,
                  nbytes: Word, kind: Int) -> None:
    add_node(s, into, graph, after, count, Copy(Rows(target, nbytes), Rows(source, nbytes), kind))


@api("cudaGraphAddMemsetNode")
def add_memset(s: Session, into: Word, graph: Word, after: Word, count: Word, parameters: Word) -> None:
    add_node(s, into, graph, after, count, fill_of(s, parameters))


@api("cuGraphAddMemsetNode")
def add_memset_driver(s: Session, into: Word, graph: Word, after: Word, count: Word, parameters: Word,
                      context: Word) -> None:
    add_memset(s, into, graph, after, count, parameters)


@api("cudaGraphAddHostNode", "cuGraphAddHostNode")
def add_host(s: Session, into: Word, graph: Word, after: Word, count: Word, parameters: Word) -> None:
    function, data = struct.unpack("<QQ", s.wire.read(parameters, 16))
    add_node(s, into, graph, after, count, HostCall(function, (data,)))


@api("cudaGraphAddEmptyNode", "cuGraphAddEmptyNode")
def add_empty(s: Session, into: Word, graph: Word, after: Word, count: Word) -> None:
    add_node(s, into, graph, after, count, Nothing())


@api("cudaGraphAddChildGraphNode", "cuGraphAddChildGraphNode")
def add_child(s: Session, into: Word, graph: Word, after: Word, count: Word, child: Word) -> None:
    """The nodes of the child as they are now, and one that is done when they are."""
    target, before = s.object(graph, Graph), nodes_of(s, after, count)
    made, _ = s.object(child, Graph).copy_graph()
    for node in made.nodes: node.after = node.after or list(before)
    target.nodes += made.nodes
    s.put(into, s.handle(target.add(Nothing(), made.nodes or before)))


@api("cudaGraphAddDependencies", "cuGraphAddDependencies_v2")
def add_dependencies(s: Session, graph: Word, before: Word, after: Word, edges: Word, count: Word) -> None:
    _edges(s, graph, before, after, count)


@api("cudaGraphAddDependencies_v2", "cuGraphAddDependencies")
def add_dependencies_2(s: Session, graph: Word, before: Word, after: Word, fourth: Word, fifth: Word) -> None:
    _edges(s, graph, before, after, fifth if s.name.endswith("_v2") else fourth)


def _edges(s: Session, graph: int, before: int, after: int, count: int) -> None:
    nodes = s.object(graph, Graph).nodes
    for first, then in zip(nodes_of(s, before, count), nodes_of(s, after, count), strict=True):
        if first not in nodes or then not in nodes:
            raise CudaError(Status.INVALID_VALUE, "a node of another graph")
        if first not in then.after: then.after.append(first)


@api("cudaGraphKernelNodeSetParams", "cuGraphKernelNodeSetParams_v2")
def set_kernel(s: Session, node: Word, parameters: Word) -> None:
    s.object(node, Node).work = kernel_of(s, parameters)


@api("cudaGraphMemsetNodeSetParams", "cuGraphMemsetNodeSetParams")
def set_memset(s: Session, node: Word, parameters: Word) -> None:
    s.object(node, Node).work = fill_of(s, parameters)


@api("cudaGraphKernelNodeSetAttribute", "cuGraphKernelNodeSetAttribute")
def set_node_attribute(s: Session, node: Word, attribute: Int, value: Word) -> None:
    """The launch as it would be with this attribute."""
    found = s.object(node, Node)
    if not isinstance(found.work, Kernel):
        raise CudaError(Status.INVALID_VALUE, "an attribute of no kernel node")
    data = struct.pack("<I4x", attribute) + s.wire.read(value, ATTRIBUTE_BYTES - 8)
    found.work = Kernel(with_attributes(found.work.launch, data, s.gpu.arch))


@api("cudaGraphNodeGetType", "cuGraphNodeGetType")
def node_type(s: Session, node: Word, into: Word) -> None:
    work = s.object(node, Node).work
    s.put(into, TYPES[type(work)] + (isinstance(work, Lifetime) and work.what == FREES), size=4)


@api("cudaGraphGetNodes", "cuGraphGetNodes")
def graph_nodes(s: Session, graph: Word, nodes: Word, count: Word) -> None:
    _put_nodes(s, s.object(graph, Graph).nodes, nodes, count)


@api("cudaGraphGetRootNodes", "cuGraphGetRootNodes")
def graph_roots(s: Session, graph: Word, nodes: Word, count: Word) -> None:
    _put_nodes(s, [node for node in s.object(graph, Graph).nodes if not node.after], nodes, count)


def _put_nodes(s: Session, found: Sequence[Node], nodes: int, count: int) -> None:
    """Writes a list of nodes, or, with a null pointer, how many there are."""
    if nodes:
        room, = struct.unpack("<Q", s.wire.read(count, 8))
        found = found[:room]
        if found: s.put(nodes, *map(s.handle, found))
    s.put(count, len(found))


# **** instantiated graphs ****

@api("cudaGraphInstantiate", "cudaGraphInstantiateWithFlags", "cuGraphInstantiateWithFlags",
     "cudaGraphInstantiateWithParams", "cuGraphInstantiateWithParams")
def instantiate(s: Session, into: Word, graph: Word) -> None:
    s.put(into, s.handle(Executable.of(s.object(graph, Graph))))


@api("cudaGraphExecDestroy", "cuGraphExecDestroy")
def executable_destroy(s: Session, executable: Word) -> None: s.drop(executable, Executable)


@api("cudaGraphUpload", "cuGraphUpload")
def graph_upload(s: Session, executable: Word, stream: Word) -> None: s.object(executable, Executable)


@api("cudaGraphLaunch", "cuGraphLaunch")
def graph_launch(s: Session, executable: Word, stream: Word) -> None:
    s.streams.launch(s.object(executable, Executable), s.stream(stream))


@api("cudaGraphExecUpdate", "cuGraphExecUpdate_v2")
def executable_update(s: Session, executable: Word, graph: Word, result: Word) -> None:
    same = s.object(executable, Executable).update(s.object(graph, Graph))
    s.fill_in(result, SAME_TOPOLOGY if same else OTHER_TOPOLOGY, 0, 0)
    if not same: raise CudaError(Status.GRAPH_EXEC_UPDATE_FAILURE, "the graph has other nodes or edges")


@api("cudaGraphExecKernelNodeSetParams", "cuGraphExecKernelNodeSetParams_v2")
def executable_set_kernel(s: Session, executable: Word, node: Word, parameters: Word) -> None:
    replace_work(s, executable, node, kernel_of(s, parameters))


@api("cudaGraphExecMemsetNodeSetParams")
def executable_set_memset(s: Session, executable: Word, node: Word, parameters: Word) -> None:
    replace_work(s, executable, node, fill_of(s, parameters))


@api("cudaGraphExecMemcpyNodeSetParams1D")
def executable_set_memcpy(s: Session, executable: Word, node: Word, target: Word, source: Word, nbytes: Word,
                          kind: Int) -> None:
    replace_work(s, executable, node, Copy(Rows(target, nbytes), Rows(source, nbytes), kind))


@api("cudaGraphExecHostNodeSetParams", "cuGraphExecHostNodeSetParams")
def executable_set_host(s: Session, executable: Word, node: Word, parameters: Word) -> None:
    function, data = struct.unpack("<QQ", s.wire.read(parameters, 16))
    replace_work(s, executable, node, HostCall(function, (data,)))


def replace_work(s: Session, executable: int, node: int, work: Work) -> None:
    """Sets other work of the same kind in an instantiated graph."""
    found, place = s.object(executable, Executable), s.object(node, Node)
    if place not in found.places: raise CudaError(Status.INVALID_VALUE, "a node of another graph")
    number = found.places[place]
    if type(found.works[number]) is not type(work):
        raise CudaError(Status.INVALID_VALUE, "a node of another kind")
    found.works[number] = work
