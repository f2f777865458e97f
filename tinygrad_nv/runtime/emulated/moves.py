"""Copies, fills, uploads and downloads of an emulated device.

Protocol: `moved(work, stream)` does one, as steps of the device's work (peers.py). By itself it is done at
once. Among peers a kernel touches the bytes, beside the kernels of other GPUs, so that races with these are
found.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator
from typing import Any

import numpy as np

from tinygrad_nv.errors import DriverError
from tinygrad_nv.ptx.emulator import Buffer, Emulator
from tinygrad_nv.ptx.emulator.footprint import READ, WRITE, Footprint
from tinygrad_nv.ptx.emulator.peers import Asked, launching
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.runtime.driver import Copy, Download, Fill, Upload
from tinygrad_nv.runtime.emulated.graph import EmulatedStream
from tinygrad_nv.runtime.emulated.host import Owned, host_memory
from tinygrad_nv.runtime.emulated.order import Done, Part, footprint_of

Move = Copy | Fill | Upload | Download
THREADS, WIDE = 256, 16
MOVE = """.version 8.0
.target sm_80
.address_size 64
.visible .entry move(.param .u64 target, .param .u64 source, .param .u64 nbytes, .param .u32 value) {{
    .reg .u64 %target, %source, %nbytes, %at;
    .reg .u32 %thread, %d<4>;
    .reg .pred %done;
    ld.param.u64 %target, [target];
    ld.param.u64 %source, [source];
    ld.param.u64 %nbytes, [nbytes];
    ld.param.u32 %d0, [value];
    mov.u32 %thread, %tid.x;
    mul.wide.u32 %at, %thread, {width};
    add.u64 %target, %target, %at;
    add.u64 %source, %source, %at;
NEXT:
    setp.ge.u64 %done, %at, %nbytes;
    @%done bra END;
    {access}
    add.u64 %at, %at, {step};
    add.u64 %target, %target, {step};
    add.u64 %source, %source, {step};
    bra NEXT;
END:
    ret;
}}
"""


def kernel_of(fills: bool, wide: bool) -> str:
    """The kernel of a fill, or of a copy, of bytes or of 16 at a time."""
    width = WIDE if wide else 1
    kind, data = ("v4.u32", "{%d0, %d1, %d2, %d3}") if wide else ("u8", "%d0")
    load = "" if fills else f"ld.global.{kind} {data}, [%source];"
    access = f"{load}\n    st.global.{kind} [%target], {data};"
    return MOVE.format(width=width, step=THREADS * width, access=access)


class Moves:
    """The memory of a device, and what moves bytes of it."""
    emulator: Emulator
    buffers: dict[int, Buffer]
    addresses: list[int]
    check: bool
    peers: Any

    @property
    def among_peers(self) -> bool:
        """Whether other GPUs' work runs beside this one's."""
        raise NotImplementedError

    def move_bytes(self, work: Move, stream: EmulatedStream,
              source: Moves | None = None) -> Generator[Asked, Report | None, Done]:
        """Does it; `source` is the device that a copy is from."""
        if isinstance(work, Copy): what, footprint = "a copy", self._copy(work, source or self, "a copy")
        elif isinstance(work, Upload):
            what, footprint = "an upload", self._upload(work, stream, "an upload")
        elif isinstance(work, Download):
            what, footprint = "a download", self._download(work, stream, "a download")
        else:
            what = "a fill"
            footprint = self._footprint(what, self._write(work.target, work.value, 1, work.nbytes, what))
        # memory of a device that is no peer is none that a kernel here could read
        if source is None or source.peers is self.peers: yield from self.by_kernel(work, what, stream)
        return Done(footprint)

    def by_kernel(self, work: Move, what: str,
                  stream: EmulatedStream) -> Generator[Asked, Report | None, None]:
        """Among peers, the kernel that does it again. Bytes of the host are a buffer meanwhile."""
        if not self.among_peers or not self.check: return
        target = work.target if isinstance(work, Copy | Fill | Upload) else 0
        source = work.source if isinstance(work, Copy | Download) else 0
        host = None
        if isinstance(work, Upload):
            buffer, where = self._place(target, work.nbytes, what)
            source = (host := self.emulator.alloc(buffer.data[where])).ptr
        elif isinstance(work, Download): target = (host := self.emulator.alloc(work.nbytes)).ptr
        fills, value = isinstance(work, Fill), work.value if isinstance(work, Fill) else 0
        wide = not fills and not (target | source | work.nbytes) % WIDE
        report = yield launching(self.emulator, kernel_of(fills, wide), 1, THREADS,
                                 (target, source, work.nbytes, value), contents=False)
        if host is not None: self.emulator.free(host)
        assert report is not None
        stream.findings += [f"{what}: {finding}" for finding in report.findings]

    def _place(self, address: int, nbytes: int, what: str) -> tuple[Buffer, slice]:
        """The allocation that holds these bytes, and where in it."""
        at = bisect_right(self.addresses, address) - 1
        if at >= 0:
            buffer = self.buffers[self.addresses[at]]
            first = address - buffer.ptr
            if first + nbytes <= buffer.nbytes: return buffer, slice(first, first + nbytes)
        raise DriverError(f"{what} of {nbytes} bytes at {address:#x}", "bytes inside one allocation")

    def _write(self, address: int, data: np.ndarray | int, valid: np.ndarray | int, nbytes: int,
               what: str) -> Part:
        buffer, where = self._place(address, nbytes, what)
        buffer.data[where] = data
        if buffer.valid is not None: buffer.valid[where] = valid
        return buffer, where.start, where.stop, WRITE

    def _copy(self, work: Copy, source: Moves, what: str) -> Footprint:
        buffer, where = source._place(work.source, work.nbytes, what)
        valid = 1 if buffer.valid is None else buffer.valid[where]
        written = self._write(work.target, buffer.data[where], valid, work.nbytes, what)
        return self._footprint(what, (buffer, where.start, where.stop, READ), written)

    def _upload(self, work: Upload, stream: EmulatedStream, what: str) -> Footprint:
        memory, stop = host_memory(work.source), work.offset + work.nbytes
        data = memory.bytes(work.offset, stop)
        written = self._write(work.target, data, 1, work.nbytes, what)
        told = f"{what} of {work.nbytes} bytes in stream {stream.number}"
        if self.check: self._lend(stream, Owned(memory, stream.position, work.offset, data, False, told))
        return self._footprint(what, written, (memory, work.offset, stop, READ))

    def _download(self, work: Download, stream: EmulatedStream, what: str) -> Footprint:
        memory, stop = host_memory(work.target), work.offset + work.nbytes
        buffer, where = self._place(work.source, work.nbytes, what)
        data = buffer.data[where].copy()
        if self.check: self._lend(stream, Owned(memory, stream.position, work.offset, data, True, what))
        else: memory.array(work.offset, stop)[:] = data
        read = buffer, where.start, where.stop, READ
        return self._footprint(what, read, (memory, work.offset, stop, WRITE))

    def _lend(self, stream: EmulatedStream, owned: Owned) -> None:
        stream.findings += owned.memory.lend(owned)
        stream.owned.append(owned)

    def _footprint(self, what: str, *parts: Part) -> Footprint:
        return footprint_of(what, *parts) if self.check else Footprint(what)
