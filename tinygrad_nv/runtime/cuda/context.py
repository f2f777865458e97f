"""A GPU's primary context: driver calls in it, the handles they return, and its streams.

Protocol: what driver.py says of calls, of what is destroyed, and of a fork. The parts of that driver call
through this.
"""
from __future__ import annotations

import contextlib
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from tinygrad_nv.errors import DriverError, KernelError
from tinygrad_nv.runtime import driver
from tinygrad_nv.runtime.cuda import api as cuda_api
from tinygrad_nv.runtime.cuda.streams import CUDAStream


class CUDAContext(driver.Driver):
    """The context of GPU `ordinal`, which must be there."""
    launch_kernel: Any      # cuLaunchKernelEx

    def __init__(self, ordinal: int) -> None:
        self.cu, self.ordinal, self.lost, self.closed = cuda_api.bindings(), ordinal, False, False
        self.process = os.getpid()
        self.version = cuda_api.driver_version(self.cu)
        self.device = self.check(*self.cu.cuDeviceGet(ordinal))
        self.capability = cuda_api.capability(self.cu, self.device)
        self.context = self.check(*self.cu.cuDevicePrimaryCtxRetain(self.device), doing="opening a GPU")
        self._context_number = int(self.context)
        self.live: dict[int, tuple[str, Any, bool]] = {}
        self._keys = itertools.count()
        self.streams: list[CUDAStream] = []

    # calls

    def status(self, name: str, *args: Any) -> tuple[Any, ...]:
        """A function of the driver in this device's context: its status, and what else it returns."""
        before = self.enter()
        try:
            try: answer: tuple[Any, ...] = getattr(self.cu, name)(*args)
            except RuntimeError as error:
                if not cuda_api.has_no_function(error): raise
                raise DriverError(f"{name}: {error}", "a driver that has it: this one supports CUDA "
                                  f"{cuda_api.format_version(self.version)}",
                                  "update the NVIDIA driver") from error
        finally:
            if before is not None: self.cu.cuCtxSetCurrent(before)
        return answer

    def call(self, name: str, *args: Any, doing: str = "") -> Any:
        """Returns what a function of the driver returns. Raises `DriverError`, or `KernelError` when the
        context is lost."""
        return self.check(*self.status(name, *args), doing=doing or name)

    def check(self, status: Any, *results: Any, doing: str = "calling the driver") -> Any:
        """Returns the results, one or several, of a call that went well. Raises otherwise."""
        if not status: return results[0] if len(results) == 1 else results or None
        error = cuda_api.failure(self.cu, status, doing)
        if isinstance(error, KernelError): self.lost = True
        raise error

    def enter(self) -> Any:
        """Makes the context current: the one to put back, None when it was current."""
        if self.closed: raise DriverError(f"GPU {self.ordinal} is used after close()", "an open driver")
        status, before = self.cu.cuCtxGetCurrent()
        if status: raise self._no_context(status)
        if (number := int(before)) == self._context_number: return None
        self.check(*self.cu.cuCtxSetCurrent(self.context), doing="making the context current")
        # GPU 0 is what a thread without a context means
        return before if number or self.ordinal else None

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The context is the thread's."""
        before = self.enter()
        try: yield
        finally:
            if before is not None: self.cu.cuCtxSetCurrent(before)

    def _no_context(self, status: Any) -> DriverError:
        """The error where the driver does not say which context is current: after a fork, it never does."""
        doing = "asking for the current context"
        if not self.is_forked: return cuda_api.failure(self.cu, status, doing)
        return DriverError(f"{doing}: {cuda_api.describe_status(self.cu, status)}: GPU {self.ordinal} was "
                           f"opened in process {self.process}, of which this one, {os.getpid()}, is a fork",
                           "a process that opens the GPU itself: CUDA does not work on after a fork",
                           "start processes with multiprocessing.set_start_method('spawn'), or fork before "
                           "the GPU is used")

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that opened the GPU. Nothing here is its to destroy."""
        return os.getpid() != self.process

    # what is made is destroyed

    def own(self, thing: object, destroy: str, handle: Any, after_work: bool = False) -> Callable[[], Any]:
        """Destroys a handle when `thing` goes, at `close()`, or when the result is called; once. With
        `after_work`, when the streams have done what they hold."""
        key = self.keep(destroy, handle, after_work)
        finalizer = weakref.finalize(thing, self._destroy, key)
        finalizer.atexit = False
        return finalizer

    def keep(self, destroy: str, handle: Any, after_work: bool = False) -> int:
        """Destroys a handle at `close()`, in reverse order. Returns the key it has in `live`."""
        self.live[key := next(self._keys)] = (destroy, handle, after_work)
        return key

    def _destroy(self, key: int) -> None:
        destroy, handle, after_work = self.live.pop(key, ("", None, False))
        if not destroy or self.lost or self.is_forked: return
        with self._beside_captures():
            if after_work: self.sync()
            self.call(destroy, handle)

    @contextlib.contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """Calls that have nothing to do with a graph which another library captures in this thread, as a
        finalizer's. Waiting or freeing would end such a capture (CUDA's cudaStreamCaptureModeGlobal)."""
        exchange = "cuThreadExchangeStreamCaptureMode"
        before = self.call(exchange, self.cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try: yield
        finally: self.call(exchange, before)

    def sync(self) -> None:
        """Waits for our work in all streams."""
        for stream in tuple(self.streams):
            if stream.busy and not self.capturing(stream): self.call("cuStreamSynchronize", stream.handle)

    # streams

    def into(self, stream: driver.Stream | None) -> CUDAStream:
        """The stream that is meant."""
        if stream is None:
            if self.beside is not None: self.wait_beside()
            return self.streams[0]
        if not isinstance(stream, CUDAStream) or stream.owner is not self:
            raise DriverError("a stream of another device", f"one of the {self.properties.name} device")
        return stream

    def new_stream(self) -> Any:
        """A CUstream that lives as long as the driver."""
        handle = self.call("cuStreamCreate", self.cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.keep("cuStreamDestroy", handle)
        return handle

    @functools.cached_property
    def capture_stream(self) -> Any:
        """A CUstream in which calls of libraries are captured."""
        return self.new_stream()

    @property
    def stream_0(self) -> CUDAStream: return self.streams[0]

    def capturing(self, stream: CUDAStream) -> bool:
        """Whether CUDA captures a stream: one that is not ours, as we let it capture none."""
        if not stream.external: return False
        found = self.call("cuStreamIsCapturing", stream.handle)
        return bool(found != self.cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def new_event(self, timing: bool = True) -> Any:
        """A CUevent, which the caller destroys."""
        flags = self.cu.CUevent_flags
        return self.call("cuEventCreate", flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING)

    def launch_graph(self, executable: Any, into: CUDAStream) -> None:
        """Puts one run of a CUgraphExec into a stream."""
        before = self.enter()
        try: status, = self.cu.cuGraphLaunch(executable, into.handle)
        finally:
            if before is not None: self.cu.cuCtxSetCurrent(before)
        if status: self.check(status, doing="launching a graph")
        into.busy = True
