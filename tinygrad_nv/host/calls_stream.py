"""Streams, events and capture of the API."""
from __future__ import annotations

import struct

from tinygrad_nv.host.api import Int, Unsigned, Word, api
from tinygrad_nv.host.errors import CudaError, Status
from tinygrad_nv.host.graphs import Graph, Node
from tinygrad_nv.host.memory import Kind
from tinygrad_nv.host.session import Session
from tinygrad_nv.host.streams import Capture, Event, Stream, end_capture
from tinygrad_nv.host.works import HostCall

EXTERNAL = 1        # a flag: an event that is recorded or waited for when a graph runs


@api("cudaStreamCreate")
def stream_create(s: Session, into: Word) -> None: stream_create_with_priority(s, into, 0, 0)


@api("cudaStreamCreateWithFlags", "cuStreamCreate")
def stream_create_with_flags(s: Session, into: Word, flags: Unsigned) -> None:
    stream_create_with_priority(s, into, flags, 0)


@api("cudaStreamCreateWithPriority", "cuStreamCreateWithPriority")
def stream_create_with_priority(s: Session, into: Word, flags: Unsigned, priority: Int) -> None:
    stream = s.streams.make_stream(flags, priority)
    s.put(into, s.handle(stream))


@api("cudaStreamDestroy", "cuStreamDestroy_v2")
def stream_destroy(s: Session, handle: Word) -> None: s.drop(handle, Stream)


@api("cudaStreamSynchronize", "cuStreamSynchronize", "cudaStreamQuery", "cuStreamQuery")
def stream_synchronize(s: Session, stream: Word) -> None: s.streams.complete(s.stream(stream))


@api("cudaStreamWaitEvent", "cuStreamWaitEvent")
def stream_wait_event(s: Session, stream: Word, event: Word, flags: Unsigned) -> None:
    s.streams.wait(s.stream(stream), s.event(event))


@api("cudaStreamGetFlags", "cuStreamGetFlags")
def stream_flags(s: Session, stream: Word, into: Word) -> None: s.put(into, s.stream(stream).flags, size=4)


@api("cudaStreamGetPriority", "cuStreamGetPriority")
def stream_priority(s: Session, stream: Word, into: Word) -> None:
    s.put(into, s.stream(stream).priority, size=4)


@api("cudaStreamGetId", "cuStreamGetId")
def stream_id(s: Session, stream: Word, into: Word) -> None: s.put(into, s.stream(stream).history.number)


@api("cudaStreamGetDevice")
def stream_device(s: Session, stream: Word, into: Word) -> None:
    s.stream(stream)
    s.put(into, 0, size=4)


@api("cudaStreamSetAttribute", "cuStreamSetAttribute", "cudaStreamCopyAttributes", "cuStreamCopyAttributes",
     "cudaStreamAttachMemAsync", "cuStreamAttachMemAsync")
def stream_attribute(s: Session, stream: Word) -> None: s.stream(stream)


@api("cudaLaunchHostFunc", "cuLaunchHostFunc")
def launch_host_function(s: Session, stream: Word, function: Word, data: Word) -> None:
    s.streams.submit(HostCall(function, (data,)), s.stream(stream))


@api("cudaStreamAddCallback", "cuStreamAddCallback")
def add_callback(s: Session, stream: Word, function: Word, data: Word, flags: Unsigned) -> None:
    s.streams.submit(HostCall(function, (stream, int(s.device.sticky), data)), s.stream(stream))


# **** events ****

@api("cudaEventCreate")
def event_create(s: Session, into: Word) -> None: event_create_with_flags(s, into, 0)


@api("cudaEventCreateWithFlags", "cuEventCreate")
def event_create_with_flags(s: Session, into: Word, flags: Unsigned) -> None:
    s.put(into, s.handle(Event(flags)))


@api("cudaEventDestroy", "cuEventDestroy_v2")
def event_destroy(s: Session, handle: Word) -> None: s.drop(handle, Event)


@api("cudaEventRecord", "cuEventRecord")
def event_record(s: Session, event: Word, stream: Word) -> None:
    s.streams.record(s.event(event), s.stream(stream))


@api("cudaEventRecordWithFlags", "cuEventRecordWithFlags")
def event_record_with_flags(s: Session, event: Word, stream: Word, flags: Unsigned) -> None:
    if flags & EXTERNAL: raise CudaError(Status.NOT_SUPPORTED, "an event that a graph records")
    event_record(s, event, stream)


@api("cudaEventSynchronize", "cuEventSynchronize", "cudaEventQuery", "cuEventQuery")
def event_synchronize(s: Session, event: Word) -> None: s.streams.wait_for(s.event(event))


@api("cudaEventElapsedTime", "cuEventElapsedTime", "cudaEventElapsedTime_v2", "cuEventElapsedTime_v2")
def event_elapsed_time(s: Session, into: Word, begin: Word, end: Word) -> None:
    """Predicted time with --time; otherwise the time that the emulation took."""
    first, last = s.event(begin).at, s.event(end).at
    if first is None or last is None:
        raise CudaError(Status.INVALID_RESOURCE_HANDLE, "the time between events that were not recorded")
    s.wire.write(into, struct.pack("<f", (last - first) * 1e3))


# **** capture ****

@api("cudaStreamBeginCapture", "cuStreamBeginCapture_v2")
def begin_capture(s: Session, stream: Word, mode: Int) -> None: s.streams.begin_capture(s.stream(stream))


@api("cudaStreamBeginCaptureToGraph", "cuStreamBeginCaptureToGraph")
def begin_capture_to_graph(s: Session, stream: Word, graph: Word, nodes: Word, edges: Word, count: Word,
                           mode: Int) -> None:
    s.streams.begin_capture(s.stream(stream), s.object(graph, Graph), nodes_of(s, nodes, count))


@api("cudaStreamEndCapture", "cuStreamEndCapture")
def stream_end_capture(s: Session, stream: Word, into: Word) -> None:
    s.put(into, 0)
    s.put(into, s.handle(end_capture(s.stream(stream))))


@api("cudaStreamIsCapturing", "cuStreamIsCapturing")
def is_capturing(s: Session, stream: Word, into: Word) -> None:
    s.put(into, int(s.stream(stream).capture is not None), size=4)


@api("cudaThreadExchangeStreamCaptureMode", "cuThreadExchangeStreamCaptureMode")
def exchange_mode(s: Session, mode: Word) -> None: ...


@api("cudaStreamGetCaptureInfo", "cuStreamGetCaptureInfo_v3", "cudaStreamGetCaptureInfo_v3")
def capture_info(s: Session, stream: Word, status: Word, number: Word, graph: Word, nodes: Word, edges: Word,
                 count: Word) -> None:
    found, tails = put_capture(s, s.stream(stream), status, number, graph)
    if edges: s.put(edges, 0)
    tell_nodes(s, tails if found else (), nodes, count)


@api("cudaStreamGetCaptureInfo_v2", "cuStreamGetCaptureInfo_v2")
def capture_info_2(s: Session, stream: Word, status: Word, number: Word, graph: Word, nodes: Word,
                   count: Word) -> None:
    found, tails = put_capture(s, s.stream(stream), status, number, graph)
    tell_nodes(s, tails if found else (), nodes, count)


def put_capture(s: Session, stream: Stream, status: int, number: int, graph: int) -> tuple[Capture | None,
                                                                                    tuple[Node, ...]]:
    """Says whether a stream is captured, and to which graph."""
    found = stream.capture
    s.put(status, int(found is not None), size=4)
    if found is None: return None, ()
    s.fill_in(number, s.handle(found))
    s.fill_in(graph, s.handle(found.graph))
    return found, found.tails[stream]


def tell_nodes(s: Session, nodes: tuple[Node, ...], into: int, count: int) -> None:
    """A list of nodes that stays in the program's memory."""
    if into:
        place = s.memory.alloc(8 * max(len(nodes), 1), Kind.HOST).address
        if nodes: s.put(place, *map(s.handle, nodes))
        s.put(into, place)
    s.fill_in(count, len(nodes))


@api("cudaStreamUpdateCaptureDependencies", "cuStreamUpdateCaptureDependencies_v2")
def update_dependencies(s: Session, stream: Word, nodes: Word, edges: Word, count: Word,
                        flags: Unsigned) -> None:
    into = s.stream(stream)
    if into.capture is None: raise CudaError(Status.ILLEGAL_STATE, "the stream is not captured")
    before = () if flags else into.capture.tails[into]      # 1: set, 0: add
    into.capture.tails[into] = tuple(dict.fromkeys((*before, *nodes_of(s, nodes, count))))


def nodes_of(s: Session, pointer: int, count: int) -> tuple[Node, ...]:
    """An array of node handles."""
    return tuple(s.object(each, Node) for each in struct.unpack(f"<{count}Q", s.wire.read(pointer,
                                                                                          8 * count)))
