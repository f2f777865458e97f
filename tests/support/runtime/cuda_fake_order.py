"""The fake driver's functions of streams, events and graphs."""
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import cuda.bindings.driver as cu

from tests.support.runtime.cuda_fake_parts import (
    CLUSTER,
    WINDOW,
    FakeEvent,
    FakeExec,
    FakeGraph,
    FakeNode,
    FakeStream,
    Function,
    window_of,
)
from tests.support.runtime.cuda_structs import EdgeData, KernelNode, LaunchValue, Memcpy3D, MemsetNode, read
from tinygrad_nv.errors import KernelError, NVError
from tinygrad_nv.runtime.driver import Copy, Download, Fill, Launch, Upload, Work

if TYPE_CHECKING:
    from tests.support.runtime.cuda_fake import Fake

S = cu.CUresult
OK = (S.CUDA_SUCCESS,)
HOST, DEVICE = 1, 2     # CUmemorytype


# **** streams and events ****

def stream_create(fake: Fake, flags: Any) -> Any:
    assert int(flags) == 1, "a stream that orders with the default stream"
    return (*OK, fake.make(cu.CUstream, FakeStream(fake.here())))


def stream_destroy(fake: Fake, stream: Any) -> Any:
    fake.queue(stream)
    fake.drop(stream, FakeStream)
    return OK


def stream_synchronize(fake: Fake, stream: Any) -> Any:
    assert not fake.ends_captures(), "waited for while a stream is captured"
    (queue := fake.queue(stream)).finish()
    return (S.CUDA_ERROR_ILLEGAL_ADDRESS,) if queue.device.lost else OK


def stream_is_capturing(fake: Fake, stream: Any) -> Any:
    return (*OK, cu.CUstreamCaptureStatus(int(int(stream) in fake.capturing)))


def stream_wait_event(fake: Fake, stream: Any, event: Any, flags: int) -> Any:
    queue, found = fake.queue(stream), fake.get(event, FakeEvent)
    assert flags == 0
    assert found.clock is not None, "a stream waits for an event that was never recorded"
    queue.merge(found.clock)
    if found.device is queue.device: queue.device.emu.wait(found.emu, queue.emu)
    else: found.device.emu.wait_for(found.emu)
    return OK


def event_create(fake: Fake, flags: Any) -> Any:
    assert int(flags) in (0, 2)
    return (*OK, fake.make(cu.CUevent, FakeEvent(device := fake.here(), device.emu.event(), not int(flags))))


def event_destroy(fake: Fake, event: Any) -> Any:
    fake.drop(event, FakeEvent)
    return OK


def event_record(fake: Fake, event: Any, stream: Any) -> Any:
    queue, found = fake.queue(stream), fake.get(event, FakeEvent)
    assert int(stream) not in fake.capturing, "an event is recorded in a stream that is being captured"
    if found.device is not queue.device: return (S.CUDA_ERROR_INVALID_HANDLE,)
    found.clock = queue.clock()
    queue.device.emu.record(found.emu, queue.emu)
    return OK


def event_synchronize(fake: Fake, event: Any) -> Any:
    found = fake.get(event, FakeEvent)
    assert found.clock is not None
    found.device.emu.wait_for(found.emu)
    for queue, count in found.clock.items(): queue.done = max(queue.done, count)
    return (S.CUDA_ERROR_ILLEGAL_ADDRESS,) if found.device.lost else OK


def event_elapsed_time(fake: Fake, start: Any, end: Any) -> Any:
    a, b = fake.get(start, FakeEvent), fake.get(end, FakeEvent)
    if not (a.timing and b.timing): return (S.CUDA_ERROR_INVALID_HANDLE,)
    return (*OK, a.device.emu.ms_between(a.emu, b.emu))


# **** graphs ****

def stream_begin_capture(fake: Fake, stream: Any, mode: Any) -> Any:
    fake.queue(stream)
    assert mode == cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED, "libraries allocate memory"
    assert int(stream) not in fake.captures
    fake.captures[int(stream)] = FakeGraph(fake.here())
    return OK


def stream_end_capture(fake: Fake, stream: Any) -> Any:
    return (*OK, fake.make(cu.CUgraph, fake.captures.pop(int(stream))))


def _child(fake: Fake, child: Any) -> Work:
    """The one work of a graph that goes into another."""
    node, = fake.get(child, FakeGraph).nodes
    return node.work


def graph_add_child_graph_node(fake: Fake, graph: Any, before: list[Any], count: int, child: Any) -> Any:
    return _added(fake, graph, before, count, _child(fake, child))


def graph_exec_child_graph_node_set_params(fake: Fake, executable: Any, node: Any, child: Any) -> Any:
    return _updated(fake, executable, node, _child(fake, child))


def graph_create(fake: Fake, flags: int) -> Any:
    assert flags == 0
    return (*OK, fake.make(cu.CUgraph, FakeGraph(fake.here())))


def graph_destroy(fake: Fake, graph: Any) -> Any:
    made = fake.drop(graph, FakeGraph)
    for number, each in fake.handles.copy().items():    # a collection of garbage may drop handles
        if isinstance(each, FakeNode) and each.graph is made: fake.drop(number, FakeNode)
    return OK


def _added(fake: Fake, graph: Any, before: list[Any], count: int, work: Work) -> Any:
    assert len(before) == count == 0
    made = fake.get(graph, FakeGraph)
    made.nodes.append(FakeNode(made, work))
    return (*OK, fake.make(cu.CUgraphNode, made.nodes[-1]))


def graph_destroy_node(fake: Fake, node: Any) -> Any:
    made = fake.drop(node, FakeNode)
    made.graph.nodes.remove(made)
    return OK


def graph_add_kernel_node(fake: Fake, graph: Any, before: list[Any], count: int, params: Any) -> Any:
    status, work = _kernel(fake, params)
    return (getattr(S, status),) if work is None else _added(fake, graph, before, count, work)


def _kernel(fake: Fake, params: Any) -> tuple[str, Launch | None]:
    given = read(KernelNode, params)
    assert not given.extra
    found = fake.get(given.func, Function)
    assert found.module.device is fake.here()
    return found.launch(given, given.kernelParams, 0, 0)


def graph_kernel_node_set_attribute(fake: Fake, node: Any, which: Any, value: Any) -> Any:
    assert isinstance(value, cu.CUkernelNodeAttrValue)
    made, given = fake.get(node, FakeNode), read(LaunchValue, value)
    assert isinstance(made.work, Launch)
    if int(which) == CLUSTER: made.work = replace(made.work, cluster=tuple(given.cluster))
    else:
        assert int(which) == WINDOW
        made.work = replace(made.work, window=window_of(given.window))
    return OK


def graph_add_memset_node(fake: Fake, graph: Any, before: list[Any], count: int, params: Any,
                          context: Any) -> Any:
    assert int(context) == fake.here().context
    return _added(fake, graph, before, count, _fill(params))


def _fill(params: Any) -> Fill:
    given = read(MemsetNode, params)
    assert (given.elementSize, given.height) == (1, 1)
    assert given.width > 0
    return Fill(given.dst, given.value, given.width)


def graph_add_memcpy_node(fake: Fake, graph: Any, before: list[Any], count: int, params: Any,
                          context: Any) -> Any:
    assert int(context) == fake.here().context
    return _added(fake, graph, before, count, _copy(fake, params))


def _copy(fake: Fake, params: Any) -> Work:
    given = read(Memcpy3D, params)
    nbytes = given.WidthInBytes
    assert (given.Height, given.Depth, given.srcHeight, given.dstHeight) == (1, 1, 1, 1)
    assert given.srcPitch == given.dstPitch == nbytes > 0
    kinds = given.srcMemoryType, given.dstMemoryType
    if kinds == (DEVICE, DEVICE): return Copy(given.dstDevice, given.srcDevice, nbytes)
    if kinds == (HOST, DEVICE): return Upload(given.dstDevice, *fake.here().at(given.srcHost, nbytes), nbytes)
    assert kinds == (DEVICE, HOST)
    memory, offset = fake.here().at(given.dstHost, nbytes)
    return Download(memory, offset, given.srcDevice, nbytes)


def graph_add_dependencies(fake: Fake, graph: Any, sources: list[Any], targets: list[Any], data: list[Any],
                           count: int) -> Any:
    made = fake.get(graph, FakeGraph)
    assert len(sources) == len(targets) == len(data) == count
    for source, target, each in zip(sources, targets, data, strict=True):
        a, b, edge = fake.get(source, FakeNode), fake.get(target, FakeNode), read(EdgeData, each)
        assert a.graph is b.graph is made
        assert edge.to_port == 0
        if a in b.before: return (S.CUDA_ERROR_INVALID_VALUE,)
        b.before[a] = edge.from_port, edge.type
    return OK


def graph_instantiate(fake: Fake, graph: Any, flags: int) -> Any:
    assert flags == 0
    return (*OK, fake.make(cu.CUgraphExec, FakeExec(fake.get(graph, FakeGraph))))


def graph_exec_destroy(fake: Fake, executable: Any) -> Any:
    fake.drop(executable, FakeExec)
    return OK


def _updated(fake: Fake, executable: Any, node: Any, work: Work) -> Any:
    made, at = fake.get(executable, FakeExec), fake.get(node, FakeNode)
    assert at in made.numbers, "a node of another graph"
    if isinstance(work, Launch) and isinstance(at.work, Launch):
        work = replace(work, cluster=at.work.cluster, window=at.work.window)
    made.update(at, work)
    return OK


def graph_exec_kernel_node_set_params(fake: Fake, executable: Any, node: Any, params: Any) -> Any:
    status, work = _kernel(fake, params)
    return (getattr(S, status),) if work is None else _updated(fake, executable, node, work)


def graph_exec_memset_node_set_params(fake: Fake, executable: Any, node: Any, params: Any,
                                      context: Any) -> Any:
    assert int(context) == fake.here().context
    return _updated(fake, executable, node, _fill(params))


def graph_exec_memcpy_node_set_params(fake: Fake, executable: Any, node: Any, params: Any,
                                      context: Any) -> Any:
    assert int(context) == fake.here().context
    return _updated(fake, executable, node, _copy(fake, params))


def graph_launch(fake: Fake, executable: Any, stream: Any) -> Any:
    queue, made = fake.queue(stream), fake.get(executable, FakeExec)
    assert made.device is queue.device
    assert not queue.device.pending, "memory is used before its allocation was waited for"
    if queue.device.lost: return (S.CUDA_ERROR_ILLEGAL_ADDRESS,)
    try: made.emu.launch(queue.emu)
    except KernelError: raise
    except NVError as error:
        fake.findings.append(str(error))
        return (S.CUDA_ERROR_INVALID_VALUE,)
    queue.issued += 1
    return OK
