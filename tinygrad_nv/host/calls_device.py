"""The device, errors, streams and events of the API."""
from __future__ import annotations

import struct

from tinygrad_nv.host.api import Int, Unsigned, Word, api
from tinygrad_nv.host.calls_memory import put
from tinygrad_nv.host.errors import CudaError, Status, described, driver_name, runtime_name
from tinygrad_nv.host.gpus import VERSION, properties
from tinygrad_nv.host.session import Event, Session, Stream

CONTEXT = 0x7700_0000_0800     # the one there is


def device(number: int) -> None:
    """Raises `CudaError` for a device that is not there."""
    if number: raise CudaError(Status.INVALID_DEVICE)


@api("cuInit", "cudaSetDeviceFlags", "cudaProfilerStart", "cudaProfilerStop", "cuProfilerStart",
     "cuProfilerStop")
def nothing(s: Session) -> None: ...


@api("cudaGetDeviceCount", "cuDeviceGetCount")
def device_count(s: Session, count: Word) -> None: put(s, count, 1, size=4)


@api("cudaGetDevice", "cuCtxGetDevice")
def get_device(s: Session, number: Word) -> None: put(s, number, 0, size=4)


@api("cuDeviceGet")
def device_get(s: Session, handle: Word, number: Int) -> None:
    device(number)
    put(s, handle, number, size=4)


@api("cudaSetDevice")
def set_device(s: Session, number: Int) -> None: device(number)


@api("cudaDeviceGetAttribute", "cuDeviceGetAttribute")
def device_attribute(s: Session, value: Word, attribute: Int, number: Int) -> None:
    device(number)
    put(s, value, s.gpu.attributes().get(attribute, 0), size=4)


@api("cudaGetDeviceProperties")
def device_properties(s: Session, into: Word, number: Int) -> None:
    device(number)
    s.wire.write(into, properties(s.gpu))


@api("cudaDriverGetVersion", "cuDriverGetVersion", "cudaRuntimeGetVersion")
def version(s: Session, into: Word) -> None: put(s, into, VERSION, size=4)


@api("cudaDeviceSynchronize", "cuCtxSynchronize")
def synchronize(s: Session) -> None: ...


# **** errors ****

@api("cudaGetLastError")
def last_error(s: Session) -> int:
    found, s.thread.error = s.thread.error, Status.SUCCESS
    return s.sticky or found


@api("cudaPeekAtLastError")
def peek_error(s: Session) -> int: return s.sticky or s.thread.error


@api("cudaGetErrorName")
def error_name(s: Session, error: Int) -> int: return s.text(runtime_name(error))


@api("cudaGetErrorString")
def error_string(s: Session, error: Int) -> int: return s.text(described(error))


@api("cuGetErrorName")
def driver_error_name(s: Session, error: Int, into: Word) -> None: put(s, into, s.text(driver_name(error)))


@api("cuGetErrorString")
def driver_error_string(s: Session, error: Int, into: Word) -> None: put(s, into, s.text(described(error)))


# **** streams and events ****

@api("cudaStreamCreate")
def stream_create(s: Session, into: Word) -> None: stream_create_with_priority(s, into, 0, 0)


@api("cudaStreamCreateWithFlags", "cuStreamCreate")
def stream_create_with_flags(s: Session, into: Word, flags: Unsigned) -> None:
    stream_create_with_priority(s, into, flags, 0)


@api("cudaStreamCreateWithPriority", "cuStreamCreateWithPriority")
def stream_create_with_priority(s: Session, into: Word, flags: Unsigned, priority: Int) -> None:
    stream = Stream(0, flags, priority)
    stream.handle = s.handle(stream)
    put(s, into, stream.handle)


@api("cudaStreamDestroy", "cuStreamDestroy", "cuStreamDestroy_v2")
def stream_destroy(s: Session, handle: Word) -> None:
    s.object(handle, Stream)
    del s.objects[handle]


@api("cudaStreamSynchronize", "cuStreamSynchronize", "cudaStreamQuery", "cuStreamQuery")
def stream_synchronize(s: Session, stream: Word) -> None:
    s.stream(stream)


@api("cudaStreamWaitEvent", "cuStreamWaitEvent")
def stream_wait_event(s: Session, stream: Word, event: Word, flags: Unsigned) -> None:
    s.stream(stream)
    s.event(event)


@api("cudaEventCreate")
def event_create(s: Session, into: Word) -> None: event_create_with_flags(s, into, 0)


@api("cudaEventCreateWithFlags", "cuEventCreate")
def event_create_with_flags(s: Session, into: Word, flags: Unsigned) -> None:
    put(s, into, s.handle(Event(flags)))


@api("cudaEventDestroy", "cuEventDestroy", "cuEventDestroy_v2")
def event_destroy(s: Session, handle: Word) -> None:
    s.event(handle)
    del s.objects[handle]


@api("cudaEventRecord", "cuEventRecord")
def event_record(s: Session, event: Word, stream: Word) -> None: s.event(event).at = s.now(s.stream(stream))


@api("cudaEventSynchronize", "cuEventSynchronize", "cudaEventQuery", "cuEventQuery")
def event_synchronize(s: Session, event: Word) -> None:
    s.event(event)


@api("cudaEventElapsedTime", "cuEventElapsedTime", "cudaEventElapsedTime_v2", "cuEventElapsedTime_v2")
def event_elapsed_time(s: Session, into: Word, begin: Word, end: Word) -> None:
    first, last = s.event(begin).at, s.event(end).at
    if first is None or last is None: raise CudaError(Status.INVALID_RESOURCE_HANDLE)
    s.wire.write(into, struct.pack("<f", (last - first) * 1e3))
