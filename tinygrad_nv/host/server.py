"""Runs a program with the emulated GPU in place of a real one.

Protocol: `run_program(argv, ...)` starts it and serves its CUDA calls until it ends. Each of its processes
that calls CUDA has a GPU of its own.
"""
from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinygrad_nv import config
from tinygrad_nv.errors import NVError
from tinygrad_nv.host import (  # noqa: F401  (they register handlers)
    calls_copy,
    calls_device,
    calls_function,
    calls_graph,
    calls_launch,
    calls_memory,
    calls_module,
    calls_stream,
)
from tinygrad_nv.host.api import function_of
from tinygrad_nv.host.device import Device, Results
from tinygrad_nv.host.errors import CudaError, Status, runtime_name
from tinygrad_nv.host.gpus import HostGPU, gpu_named
from tinygrad_nv.host.launches import LaunchReport, Options
from tinygrad_nv.host.library import AUDITOR, build_library, names
from tinygrad_nv.host.memory import Memory, new_file
from tinygrad_nv.host.session import Session, Thread
from tinygrad_nv.host.wire import Call, ProcessExited, Wire
from tinygrad_nv.ptx.emulator import Emulator

# what works after a kernel has gone wrong; everything else returns the error
STILL = ("cudaGetError", "cuGetError", "cudaGetLastError", "cudaPeekAtLastError", "cudaDeviceReset", "__cuda")


GRACE_S = 5.0       # that calls may take which a program has not waited for at its end


@dataclass(frozen=True)
class Result:
    """Result of a program: its exit status (negative: the signal that ended it) and its launches in order.
    `refused`: calls and device code that are not emulated; `order`: work of streams and graphs that nothing
    orders, and touches the same bytes; `notes`: why calls returned errors."""
    status: int
    launches: tuple[LaunchReport, ...]
    refused: tuple[str, ...]
    order: tuple[str, ...]
    notes: tuple[str, ...]


def run_program(argv: Sequence[str], gpu: str = "h100", check: bool = False, time: bool = False,
                stdout: int | None = None) -> Result:
    """Runs a program to its end. Raises `NVError` for one that cannot be started, `ConfigError` for an
    unknown GPU, `ToolchainError` without a C compiler."""
    options, target, place = Options(check, time), gpu_named(gpu), build_library()
    if shutil.which(argv[0]) is None:
        raise NVError(f"no program {argv[0]!r}", "an executable file, by its path or in PATH")
    with tempfile.TemporaryDirectory(prefix="tinygrad-nv-") as folder:
        server = Server(Path(folder) / "gpu", target, options)
        environment = {**os.environ, "LD_AUDIT": str(place / AUDITOR), "TINYGRAD_NV_HOST": str(server.path),
                       "LD_LIBRARY_PATH": os.pathsep.join(
                           filter(None, (str(place), os.environ.get("LD_LIBRARY_PATH"))))}
        threading.Thread(target=server.serve, daemon=True).start()
        try: status = subprocess.run(list(argv), env=environment, stdout=stdout, check=False).returncode
        finally: server.close()
        server.finish()
    found = server.results
    return Result(status, tuple(found.launches), *(tuple(dict.fromkeys(each)) for each in (
        found.refused, found.order, found.notes)))


class Server:
    """Takes the connections of a program's processes."""

    def __init__(self, path: Path, gpu: HostGPU, options: Options) -> None:
        self.path, self.gpu, self.options = path, gpu, options
        self.results = Results()
        self.errors: list[BaseException] = []
        self.threads: list[threading.Thread] = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(str(path))
        self.socket.listen()

    def serve(self) -> None:
        """Until `close`."""
        while True:
            try: connection, _ = self.socket.accept()
            except OSError: return
            thread = threading.Thread(target=self._process, args=(connection,), daemon=True)
            self.threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Takes no connection any more."""
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def finish(self) -> None:
        """Waits for what still runs of a program that has ended, but not for processes that outlive it;
        raises what went wrong here."""
        for thread in self.threads: thread.join(GRACE_S)
        if self.errors: raise self.errors[0]

    def _process(self, connection: socket.socket) -> None:
        try:
            with connection: self._calls(connection)
        except ProcessExited: pass
        except BaseException as error: self.errors.append(error)

    def _calls(self, connection: socket.socket) -> None:
        file = new_file()
        try:
            wire = Wire(connection, file)
            emulator = Emulator(self.gpu.arch, self.options.check,
                                step_limit=int(config.get("EMU_STEP_LIMIT")))
            memory = Memory(file, wire, emulator, self.gpu.memory_bytes)
            session = Session(Device(wire, self.gpu, emulator, memory, self.options, self.results))
            while True:
                call = wire.call()
                wire.result(serve_call(session, names()[call.function], call))
        finally: os.close(file)


def serve_call(s: Session, name: str, call: Call) -> int:
    """The result of a call."""
    s.thread = s.threads.setdefault(call.thread, Thread(call.thread))
    s.name, s.per_thread = name, name.endswith(("_ptsz", "_ptds"))
    try:
        if (found := function_of(name)) is None: raise NVError("this function is not emulated")
        if s.device.sticky and not name.startswith(STILL): raise CudaError(s.device.sticky)
        return found.run(s, *found.arguments(call, s.wire)) or 0
    except CudaError as error:
        status = error.status
        told = s.device.results.refused if error.refused else s.device.results.notes
        if error.why: told.append(f"{name} returned {runtime_name(status)}: {error.why}")
    except NVError as error:
        s.device.results.refused.append(f"{name}: {error}")
        status = Status.NOT_SUPPORTED
    if name.startswith("cuda"): s.thread.error = status     # for cudaGetLastError
    return status
