"""The driver interface for NVIDIA GPUs, on cuda.bindings.

Protocol: `CUDADriver(ordinal)` is a `driver.Driver` in the device's primary context, which torch and the
CUDA runtime use too, so that their addresses and streams are good here (`external_stream`) and ours there.
`missing(ordinal)` says what is not there. Parts: api.py (versions, errors), context.py (calls),
memory.py, code.py (modules and launches), streams.py (streams, events, capture), graph.py,
tensor_map.py.

Every call makes the context current in its thread if another is, and puts that one back: several devices in
one process, and torch beside them, do not notice each other. What is made here is destroyed when Python lets
go of it, and by `close()`. A failure of a kernel loses the context: after it nothing is destroyed or freed,
and every call fails. A fork of the process has no context: a call there is a `DriverError`, and nothing is
destroyed. Addresses are not looked at: a copy or a fill that leaves an allocation is found by the
hardware, as an error of a kernel is, or writes what lies beside it.

Stream 0 is a stream of ours, not CUDA's default stream. What torch puts into a stream of its own is ordered
with ours by events on `external_stream(handle)`; memory given back while such work still uses it must be
ordered so before `free`.
"""
from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any

from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime import capture, driver
from tinygrad_nv.runtime.cuda import api as cuda_api
from tinygrad_nv.runtime.cuda import tensor_map as cuda_map
from tinygrad_nv.runtime.cuda.code import CUDAModule, Launcher
from tinygrad_nv.runtime.cuda.context import CUDAContext
from tinygrad_nv.runtime.cuda.graph import CUDAGraph, describe, host_address
from tinygrad_nv.runtime.cuda.memory import CUDAHostMemory, Staging, StreamOrderedPool
from tinygrad_nv.runtime.cuda.streams import CUDAEvent, CUDAStream
from tinygrad_nv.runtime.driver import Copy, Download, Fill, Launch, Properties, TensorMapSpec, Upload, Work
from tinygrad_nv.runtime.library_call import LibraryCall

IPC_BYTES = 64      # of a CUipcMemHandle
NEEDED = "an NVIDIA GPU of compute capability 8.0 or later, its driver, and cuda-python"
INSTEAD = "DEV=EMU runs the same kernels on the CPU, DEV=CPU computes there"
missing = cuda_api.missing


class CUDADriver(CUDAContext):
    """GPU `ordinal`. Raises `DriverError` in the words of `missing`."""

    def __init__(self, ordinal: int = 0) -> None:
        if words := missing(ordinal): raise DriverError(words, NEEDED, INSTEAD)
        super().__init__(ordinal)
        self._externals: dict[int, CUDAStream] = {}
        self._peers: weakref.WeakKeyDictionary[CUDADriver, bool] = weakref.WeakKeyDictionary()
        self._shared: dict[int, int] = {}
        self._staging: Staging | None = None
        self._clusters: dict[int, int] = {}
        self._encoders: dict[str, Any] = {}
        self._lock = threading.Lock()
        try: self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self.properties = _properties(self)
        self.pool = StreamOrderedPool(self)
        self.launcher = Launcher(self)
        self.launch_kernel = self.cu.cuLaunchKernelEx
        self.stream()

    def close(self) -> None:
        """Destroys all that is left and lets go of the context. The driver cannot be used after."""
        if self.closed: return
        if self.is_forked:
            self.closed = True
            return
        if not self.lost:
            self.sync()
            if self._staging is not None: self._staging.close()
            if hasattr(self, "pool"): self.pool.empty()
            for key in sorted(self.live, reverse=True): self._destroy(key)
        status, before = self.cu.cuCtxGetCurrent()
        if not status and int(before) == self._context_number: self.cu.cuCtxSetCurrent(0)
        self.closed = True
        self.live.clear()
        self.cu.cuDevicePrimaryCtxRelease(self.device)

    # memory

    @property
    def used_bytes(self) -> int:
        """Bytes that were allocated and not freed."""
        return self.pool.used_bytes

    def alloc(self, nbytes: int) -> int: return self.pool.alloc(nbytes)

    def free(self, address: int) -> None: self.pool.free(address)

    def memory(self) -> tuple[int, int]:
        free, total = self.call("cuMemGetInfo")
        return free + self.pool.slack(), total

    def slack_bytes(self) -> int: return self.pool.slack()

    def trim(self) -> int:
        before = self.pool.slack()
        self.pool.make_room()
        return before - self.pool.slack()

    def host(self, nbytes: int) -> CUDAHostMemory: return CUDAHostMemory(self, nbytes)

    def copy_in(self, address: int, source: memoryview, stream: driver.Stream | None = None) -> None:
        into = self.into(stream)
        capture.not_captured(into, "a copy from the host")
        if not source.nbytes: return
        with self._lock:
            if self._staging is None: self._staging = Staging(self)
        self._staging.copy(address, source.cast("B"), into)
        into.busy = True

    def copy_out(self, target: memoryview, address: int, stream: driver.Stream | None = None) -> None:
        into = self.into(stream)
        self.synchronize(into)
        if target.nbytes:
            self.call("cuMemcpyDtoHAsync", target, address, target.nbytes, into.handle)
            self.call("cuStreamSynchronize", into.handle)

    def copy_peer(self, work: Copy, source: driver.Driver, stream: driver.Stream | None = None) -> None:
        if not isinstance(source, CUDADriver):
            raise DriverError(f"a copy from a {type(source).__name__}", "another CUDA device")
        into, behind = self.into(stream), source.streams[0]
        capture.not_captured(into, "a copy from another device")
        # whichever of the two does the copying: without, it goes through the host
        self.reach(source)
        source.reach(self)
        source.call("cuEventRecord", behind.mark, behind.handle)
        self.call("cuStreamWaitEvent", into.handle, behind.mark, 0)
        self.call("cuMemcpyPeerAsync", work.target, self.context, work.source, source.context, work.nbytes,
                  into.handle)
        into.busy = True
        self.call("cuEventRecord", into.mark, into.handle)
        source.call("cuStreamWaitEvent", behind.handle, into.mark, 0)
        behind.busy = True

    def reach(self, other: driver.Driver) -> bool:
        if not isinstance(other, CUDADriver): return False
        if other.ordinal == self.ordinal: return True
        if (known := self._peers.get(other)) is not None: return known
        if can := bool(self.call("cuDeviceCanAccessPeer", self.device, other.device)):
            status, = self.status("cuCtxEnablePeerAccess", other.context, 0)
            if status.name != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
                self.check(status, doing="giving access to another device")
            other.pool.share(self.ordinal)
        self._peers[other] = can
        return can

    def share(self, nbytes: int) -> tuple[int, bytes]:
        # memory of a pool has no such handle
        address = int(self.call("cuMemAlloc", nbytes, doing=f"allocating {nbytes} bytes"))
        self._shared[address] = self.keep("cuMemFree", address, after_work=True)
        try: handle = self.call("cuIpcGetMemHandle", address)
        except BaseException:
            self.close_shared(address)
            raise
        return address, ctypes.string_at(handle.getPtr(), IPC_BYTES)

    def open_shared(self, handle: bytes) -> int:
        given = self.cu.CUipcMemHandle()
        ctypes.memmove(given.getPtr(), handle, IPC_BYTES)
        flags = self.cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        doing = "opening memory of another process"
        address = int(self.call("cuIpcOpenMemHandle", given, flags, doing=doing))
        self._shared[address] = self.keep("cuIpcCloseMemHandle", address, after_work=True)
        return address

    def close_shared(self, address: int) -> None:
        if (key := self._shared.pop(address, None)) is None: super().close_shared(address)
        else: self._destroy(key)

    def set_persisting_l2(self, nbytes: int) -> None:
        limit = self.properties.persisting_l2_limit
        if not 0 <= nbytes <= limit:
            raise DriverError(f"{nbytes} bytes of L2 to set aside", f"0 to {limit} on this device")
        if not nbytes: self.call("cuCtxResetPersistingL2Cache")
        self.call("cuCtxSetLimit", self.cu.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE, nbytes)

    # code

    def most_clusters(self, size: int) -> int:
        driver.check_cluster(size, self.properties.arch)
        if size == 1: return self.properties.sm_count
        if (known := self._clusters.get(size)) is None:
            known = self._clusters[size] = self.launcher.most_clusters(size)
        return known

    def load(self, image: bytes) -> CUDAModule: return CUDAModule(self, image)

    def submit(self, work: Work, stream: driver.Stream | None = None) -> None:
        into = self.into(stream)
        if (recorded := into.capture) is not None:
            recorded.tails[into] = (recorded.graph.add(work, recorded.tails[into]),)
        elif isinstance(work, Launch):
            before = self.enter()
            try: self.launcher.launch(work, into)
            finally:
                if before is not None: self.cu.cuCtxSetCurrent(before)
            into.busy = True
        elif isinstance(work, LibraryCall):
            with self.inside(): work.enqueue(int(into.handle))
            into.busy = True
        else: self._move(work, into)

    def _move(self, work: Copy | Fill | Upload | Download, into: CUDAStream) -> None:
        if isinstance(work, Fill):
            status, = self.status("cuMemsetD8Async", work.target, work.value, work.nbytes, into.handle)
        elif isinstance(work, Copy):
            status, = self.status("cuMemcpyDtoDAsync", work.target, work.source, work.nbytes, into.handle)
        elif isinstance(work, Upload):
            status, = self.status("cuMemcpyHtoDAsync", work.target, host_address(work.source, work),
                                  work.nbytes, into.handle)
        else:
            status, = self.status("cuMemcpyDtoHAsync", host_address(work.target, work), work.source,
                                  work.nbytes, into.handle)
        if status: self.check(status, doing=describe(work))
        into.busy = True

    # order

    def stream(self) -> CUDAStream:
        """Lives as long as the driver."""
        return self._stream(self.new_stream(), False)

    def external_stream(self, handle: int) -> CUDAStream:
        """A stream that other code made in this device's primary context, such as torch's
        `torch.cuda.current_stream().cuda_stream`. It stays theirs, and lives as long as it is used here."""
        with self._lock:
            if (found := self._externals.get(handle)) is None:
                found = self._externals[handle] = self._stream(self.cu.CUstream(handle), True)
            return found

    def _stream(self, handle: Any, external: bool) -> CUDAStream:
        made = CUDAStream(self, len(self.streams), handle, self.new_event(timing=False), external)
        self.keep("cuEventDestroy", made.mark)
        self.streams.append(made)
        return made

    def event(self) -> CUDAEvent:
        made = CUDAEvent(self.new_event())
        self.own(made, "cuEventDestroy", made.handle)
        return made

    def record(self, event: driver.Event, stream: driver.Stream | None = None) -> None:
        assert isinstance(event, CUDAEvent)
        into = self.into(stream)
        if into.capture is None: self.call("cuEventRecord", event.handle, into.handle)
        event.stream, event.capture = into, into.capture
        event.nodes = into.capture.tails[into] if into.capture is not None else ()

    def wait(self, event: driver.Event, stream: driver.Stream | None = None) -> None:
        assert isinstance(event, CUDAEvent)
        into = self.into(stream)
        capture.check_recorded(event, "a stream waits for")
        if event.capture is not None or into.capture is not None: capture.join(event, into)
        else:
            self.call("cuStreamWaitEvent", into.handle, event.handle, 0)
            into.busy = True

    def wait_for(self, event: driver.Event) -> None:
        assert isinstance(event, CUDAEvent)
        capture.ran(event, "the host waits for")
        self.call("cuEventSynchronize", event.handle, doing="waiting for an event")

    def has_passed(self, event: driver.Event) -> bool:
        assert isinstance(event, CUDAEvent)
        status, = self.status("cuEventQuery", event.handle)
        if status.name == "CUDA_ERROR_NOT_READY": return False
        self.check(status, doing="asking for an event")
        return True

    def ms_between(self, start: driver.Event, end: driver.Event) -> float:
        assert isinstance(start, CUDAEvent)
        assert isinstance(end, CUDAEvent)
        for event in (start, end): capture.ran(event, "time is taken from")
        status, *found = self.status("cuEventElapsedTime", start.handle, end.handle)
        if status.name == "CUDA_ERROR_NOT_READY":
            raise DriverError("time is taken from an event that has not come to pass", "wait_for() before")
        return float(self.check(status, *found, doing="taking time"))

    def synchronize(self, stream: driver.Stream | None = None) -> None:
        streams = tuple(self.streams) if stream is None else (self.into(stream),)
        for each in streams: capture.not_captured(each, "synchronisation")
        if stream is None: self.call("cuCtxSynchronize", doing="waiting for the device")
        else: self.call("cuStreamSynchronize", streams[0].handle, doing="waiting for a stream")

    # graphs

    def graph(self) -> CUDAGraph: return CUDAGraph(self, self.launcher)

    def begin_capture(self, stream: driver.Stream) -> None: capture.begin(self.into(stream), self.graph())

    def end_capture(self, stream: driver.Stream) -> CUDAGraph: return capture.end(self.into(stream))

    # tensor maps

    def tensor_map(self, spec: TensorMapSpec) -> bytes: return cuda_map.encode_map(self, self.encoder, spec)

    def encoder(self, name: str) -> Any:
        """A function that makes tensor maps, looked up when it is first needed."""
        with self._lock:
            if name not in self._encoders: self._encoders[name] = cuda_map.encoder(self, name)
            return self._encoders[name]


def _properties(gpu: CUDADriver) -> Properties:
    names = gpu.cu.CUdevice_attribute

    def of(what: str) -> int:
        return cuda_api.attribute(gpu.cu, gpu.device, getattr(names, f"CU_DEVICE_ATTRIBUTE_{what}"))

    name = gpu.call("cuDeviceGetName", 256, gpu.device).split(b"\0", 1)[0].decode()
    return Properties(
        name, cuda_api.architecture(gpu.capability), of("MULTIPROCESSOR_COUNT"),
        of("MAX_SHARED_MEMORY_PER_BLOCK"), of("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        of("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"), of("L2_CACHE_SIZE"),
        int(gpu.call("cuDeviceTotalMem", gpu.device)), of("MAX_THREADS_PER_MULTIPROCESSOR"),
        of("MAX_THREADS_PER_BLOCK"), of("WARP_SIZE"), of("MAX_PERSISTING_L2_CACHE_SIZE"),
        of("MAX_ACCESS_POLICY_WINDOW_SIZE"))
