"""Graphs of the CUDA driver.

Protocol: a node is added to the CUgraph at once, with the edges that the transitive reduction leaves of those
asked for (runtime/edges.py). A launch with `pdl` whose only edge comes from a launch gets it as a
programmatic one, from the port at which that kernel lets its dependents launch. Cluster and window are
attributes of a kernel node, which an instantiated graph cannot change: `update` refuses another cluster,
window or pdl.

A graph, and each executable of it, holds what its nodes use: images of modules and page-locked memory.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime import driver
from tinygrad_nv.runtime.cuda.code import OVERLAP, Launcher, describe_refused
from tinygrad_nv.runtime.cuda.context import CUDAContext
from tinygrad_nv.runtime.cuda.memory import CUDAHostMemory
from tinygrad_nv.runtime.driver import Copy, Download, Fill, Launch, Node, Upload, Work
from tinygrad_nv.runtime.edges import Reduction, early
from tinygrad_nv.runtime.library_call import LibraryCall

COPY_LIMIT = 2**31 - 1  # bytes of a copy's row: its pitch


class CUDAGraph(driver.Graph):
    """A CUgraph and its nodes in order of addition."""

    def __init__(self, gpu: CUDAContext, launcher: Launcher) -> None:
        self.gpu, self.launcher = gpu, launcher
        self.handle = gpu.call("cuGraphCreate", 0)
        gpu.own(self, "cuGraphDestroy", self.handle)
        self.works: list[Work] = []
        self.after: list[tuple[int, ...]] = []
        self.nodes: list[Any] = []
        self.kept: list[Any] = []   # what each node's work lives in
        self.reduction = Reduction()

    def add(self, work: Work, after: Sequence[Node] = ()) -> Node:
        for node in after:
            if not 0 <= node.number < len(self.works):
                raise DriverError(f"an edge from node {node.number}", f"a node of this graph: it has "
                                  f"{len(self.works)}", "add a node before those that follow it")
        given = tuple(sorted({node.number for node in after}))
        kept, handle = holds(self.launcher, work), self._node(work)
        before = self.reduction.add(given)
        try:
            self._edges(work, handle, before)
        except DriverError:
            self.reduction.before.pop()
            self.gpu.call("cuGraphDestroyNode", handle)
            raise
        self.nodes.append(handle)
        self.works.append(work)
        self.after.append(given)
        self.kept.append(kept)
        return Node(len(self.works) - 1)

    def _node(self, work: Work) -> Any:
        """A node without edges."""
        gpu = self.gpu
        if isinstance(work, Launch): return self._kernel_node(work)
        if isinstance(work, LibraryCall): return self._child_node(work)
        if isinstance(work, Fill):
            return gpu.call("cuGraphAddMemsetNode", self.handle, [], 0, fill_parameters(gpu, work),
                            gpu.context, doing=describe(work))
        return gpu.call("cuGraphAddMemcpyNode", self.handle, [], 0, copy_parameters(gpu, work), gpu.context,
                        doing=describe(work))

    def _child_node(self, work: LibraryCall) -> Any:
        """Adds what a library puts into a stream, as a graph in the graph."""
        child = capture_call(self.gpu, work)
        try: return self.gpu.call("cuGraphAddChildGraphNode", self.handle, [], 0, child, doing=work.what)
        finally: self.gpu.call("cuGraphDestroy", child)

    def _kernel_node(self, work: Launch) -> Any:
        gpu = self.gpu
        values = dict(self.launcher.values(work, gpu.cu.CUkernelNodeAttrValue))
        values.pop(OVERLAP, None)  # an edge's, in a graph
        node = gpu.call("cuGraphAddKernelNode", self.handle, [], 0,
                        kernel_parameters(gpu, self.launcher, work), doing=describe_refused(work))
        try:
            for name, value in values.items():
                which = getattr(gpu.cu.CUkernelNodeAttrID, f"CU_LAUNCH_ATTRIBUTE_{name}")
                gpu.call("cuGraphKernelNodeSetAttribute", node, which, value, doing=describe_refused(work))
        except DriverError:
            gpu.call("cuGraphDestroyNode", node)
            raise
        return node

    def _edges(self, work: Work, handle: Any, before: tuple[int, ...]) -> None:
        """Adds the edges that end at a new node."""
        if not before: return
        cu, gpu = self.gpu.cu, self.gpu
        data = cu.CUgraphEdgeData()
        if early(work, [self.works[number] for number in before]):
            data.from_port = cu.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
            data.type = cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
        # cuda.bindings 12 calls by this name what takes edge data
        add = "cuGraphAddDependencies_v2" if hasattr(cu, "cuGraphAddDependencies_v2") else \
            "cuGraphAddDependencies"
        gpu.call(add, self.handle, [self.nodes[number] for number in before], [handle] * len(before),
                 [data] * len(before), len(before))

    def ancestors(self, nodes: Sequence[Node]) -> set[int]:
        """Numbers of these nodes and of all that run before them."""
        seen: set[int] = set()
        for node in nodes:
            bits = self.reduction.before[node.number] | 1 << node.number
            seen |= {number for number in range(node.number + 1) if bits >> number & 1}
        return seen

    def instantiate(self) -> CUDAExecutable: return CUDAExecutable(self)


class CUDAExecutable(driver.Executable):
    """A CUgraphExec, and the graph whose nodes name its own."""

    def __init__(self, graph: CUDAGraph) -> None:
        self.gpu, self.launcher, self.graph = graph.gpu, graph.launcher, graph
        self.handle = self.gpu.call("cuGraphInstantiate", graph.handle, 0,
                                    doing=f"instantiating a graph of {len(graph.works)} nodes")
        self.gpu.own(self, "cuGraphExecDestroy", self.handle)
        self.works, self.nodes, self.kept = list(graph.works), list(graph.nodes), list(graph.kept)

    def update(self, node: Node, work: Work) -> None:
        if not 0 <= node.number < len(self.works):
            raise DriverError(f"no node {node.number} in the graph", f"one of 0 … {len(self.works) - 1}")
        gpu, at, before = self.gpu, self.nodes[node.number], self.works[node.number]
        changeable(node, before, work)
        kept, doing = holds(self.launcher, work), f"updating node {node.number}"
        if isinstance(work, Launch):
            self.launcher.check_cluster(work)
            gpu.call("cuGraphExecKernelNodeSetParams", self.handle, at,
                     kernel_parameters(gpu, self.launcher, work), doing=f"{doing}: {describe_refused(work)}")
        elif isinstance(work, LibraryCall):
            child = capture_call(gpu, work)
            try: gpu.call("cuGraphExecChildGraphNodeSetParams", self.handle, at, child, doing=doing)
            finally: gpu.call("cuGraphDestroy", child)
        elif isinstance(work, Fill):
            gpu.call("cuGraphExecMemsetNodeSetParams", self.handle, at, fill_parameters(gpu, work),
                     gpu.context, doing=doing)
        else:
            gpu.call("cuGraphExecMemcpyNodeSetParams", self.handle, at, copy_parameters(gpu, work),
                     gpu.context, doing=doing)
        self.works[node.number], self.kept[node.number] = work, kept

    def launch(self, stream: driver.Stream | None = None) -> None:
        into = self.gpu.into(stream)
        if into.capture is not None:
            raise DriverError("a graph is launched into a stream that is captured", "a stream that runs",
                              "capture the graph's work itself")
        self.gpu.launch_graph(self.handle, into)


def changeable(node: Node, before: Work, work: Work) -> None:
    """Raises unless a node that does `before` may do `work`."""
    if type(before) is not type(work):
        raise DriverError(f"node {node.number} is updated with a {type(work).__name__}",
                          f"a {type(before).__name__}, as it is", "instantiate another graph")
    if not isinstance(before, Launch) or not isinstance(work, Launch): return
    if before.function != work.function:
        raise DriverError(f"node {node.number} is updated with kernel {work.function.name}",
                          f"{before.function.name}, as it is", "instantiate another graph")
    for what in ("cluster", "window", "pdl"):
        if getattr(before, what) != getattr(work, what):
            raise DriverError(f"node {node.number} is updated with {what}={getattr(work, what)}",
                              f"{what}={getattr(before, what)}, as it is", "instantiate another graph")


def holds(launcher: Launcher, work: Work) -> object:
    """Returns what must live as long as a node that does `work`."""
    if isinstance(work, Launch): return launcher.prepare(work)[0].module.image
    if isinstance(work, LibraryCall): return work.holds()
    if isinstance(work, Upload): return work.source
    return work.target if isinstance(work, Download) else None


def capture_call(gpu: CUDAContext, work: LibraryCall) -> Any:
    """Returns a CUgraph of what a library puts into a stream; the caller destroys it. A capture in relaxed
    mode, as the library may allocate memory, and may do so in a thread of its own."""
    stream, mode = gpu.capture_stream, gpu.cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    gpu.call("cuStreamBeginCapture", stream, mode, doing=work.what)
    try:
        with gpu.inside(): work.enqueue(int(stream))
    except BaseException:
        _, *left = gpu.status("cuStreamEndCapture", stream)
        if left and int(left[0]): gpu.call("cuGraphDestroy", left[0])
        raise
    return gpu.call("cuStreamEndCapture", stream, doing=work.what)


# **** the driver's structs ****

def kernel_parameters(gpu: CUDAContext, launcher: Launcher, work: Launch) -> Any:
    """CUDA_KERNEL_NODE_PARAMS, with arguments in the thread's block."""
    made, (loaded, array) = gpu.cu.CUDA_KERNEL_NODE_PARAMS(), launcher.prepare(work)
    made.func = loaded.handle
    made.gridDimX, made.gridDimY, made.gridDimZ = work.grid
    made.blockDimX, made.blockDimY, made.blockDimZ = work.block
    made.sharedMemBytes = work.dynamic_smem
    made.kernelParams, made.extra = array, 0
    return made


def fill_parameters(gpu: CUDAContext, work: Fill) -> Any:
    """CUDA_MEMSET_NODE_PARAMS: one row of bytes."""
    if work.nbytes <= 0: raise DriverError(f"a fill of {work.nbytes} bytes in a graph", "1 or more")
    made = gpu.cu.CUDA_MEMSET_NODE_PARAMS()
    made.dst, made.value, made.elementSize = work.target, work.value, 1
    made.width, made.height, made.pitch = work.nbytes, 1, work.nbytes
    return made


def copy_parameters(gpu: CUDAContext, work: Copy | Upload | Download) -> Any:
    """CUDA_MEMCPY3D: one row."""
    if not 0 < work.nbytes <= COPY_LIMIT:
        raise DriverError(f"a copy of {work.nbytes} bytes in a graph", f"1 to {COPY_LIMIT}",
                          "several copies")
    made, kinds = gpu.cu.CUDA_MEMCPY3D(), gpu.cu.CUmemorytype
    if isinstance(work, Upload):
        made.srcMemoryType, made.srcHost = kinds.CU_MEMORYTYPE_HOST, host_address(work.source, work)
    else: made.srcMemoryType, made.srcDevice = kinds.CU_MEMORYTYPE_DEVICE, work.source
    if isinstance(work, Download):
        made.dstMemoryType, made.dstHost = kinds.CU_MEMORYTYPE_HOST, host_address(work.target, work)
    else: made.dstMemoryType, made.dstDevice = kinds.CU_MEMORYTYPE_DEVICE, work.target
    made.srcPitch = made.dstPitch = made.WidthInBytes = work.nbytes
    made.srcHeight = made.dstHeight = made.Height = made.Depth = 1
    return made


def describe(work: Copy | Fill | Upload | Download) -> str:
    """Returns work in words, for the error of what the driver does not take."""
    target = work.target.address if isinstance(work.target, CUDAHostMemory) else work.target
    return f"a {type(work).__name__.lower()} of {work.nbytes} bytes at {target:#x}"


def host_address(memory: driver.HostMemory, work: Upload | Download) -> int:
    """Returns where the page-locked bytes of a copy lie."""
    name = type(work).__name__.lower()
    if not isinstance(memory, CUDAHostMemory):
        raise DriverError(f"an {name} with {type(memory).__name__}".replace("an down", "a down"),
                          "memory of this driver's host()")
    if not 0 <= work.offset <= work.offset + work.nbytes <= memory.view.nbytes:
        raise DriverError(f"{work.nbytes} bytes at {work.offset} of page-locked memory",
                          f"bytes inside its {memory.view.nbytes}")
    return memory.address + work.offset
