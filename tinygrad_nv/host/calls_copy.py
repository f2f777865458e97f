"""Copies and fills, of the runtime and of the driver."""
from __future__ import annotations

import struct

from tinygrad_nv.host.api import Extent, Int, Pitched, Unsigned, Word, api
from tinygrad_nv.host.errors import CudaError, Status
from tinygrad_nv.host.session import Session
from tinygrad_nv.host.works import (
    DEFAULT,
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    Copy,
    Fill,
    Rows,
    Work,
)


def submit_and_wait(s: Session, work: Work) -> None:
    """Submits work in the default stream, for which the host waits."""
    stream = s.stream(0)
    s.streams.submit(work, stream)
    s.streams.complete(stream)


# **** copies ****

@api("cudaMemcpy")
def memcpy(s: Session, target: Word, source: Word, nbytes: Word, kind: Int) -> None:
    submit_and_wait(s, Copy(Rows(target, nbytes), Rows(source, nbytes), kind))


@api("cudaMemcpyAsync")
def memcpy_async(s: Session, target: Word, source: Word, nbytes: Word, kind: Int, stream: Word) -> None:
    s.streams.submit(Copy(Rows(target, nbytes), Rows(source, nbytes), kind), s.stream(stream))


@api("cuMemcpy", "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2", "cuMemcpyDtoD_v2")
def memcpy_driver(s: Session, target: Word, source: Word, nbytes: Word) -> None:
    memcpy(s, target, source, nbytes, _kind(s.name))


@api("cuMemcpyAsync", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoDAsync_v2")
def memcpy_driver_async(s: Session, target: Word, source: Word, nbytes: Word, stream: Word) -> None:
    memcpy_async(s, target, source, nbytes, _kind(s.name), stream)


def _kind(name: str) -> int:
    kinds = {"HtoD": HOST_TO_DEVICE, "DtoH": DEVICE_TO_HOST, "DtoD": DEVICE_TO_DEVICE}
    return next((kind for word, kind in kinds.items() if word in name), DEFAULT)


@api("cudaMemcpyPeer")
def memcpy_peer(s: Session, target: Word, to: Int, source: Word, of: Int, nbytes: Word) -> None:
    if to or of: raise CudaError(Status.INVALID_DEVICE, "one GPU is emulated")
    memcpy(s, target, source, nbytes, DEVICE_TO_DEVICE)


@api("cudaMemcpyPeerAsync")
def memcpy_peer_async(s: Session, target: Word, to: Int, source: Word, of: Int, nbytes: Word,
                      stream: Word) -> None:
    if to or of: raise CudaError(Status.INVALID_DEVICE, "one GPU is emulated")
    memcpy_async(s, target, source, nbytes, DEVICE_TO_DEVICE, stream)


def _plane(target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int,
           kind: int) -> Copy:
    if width > min(target_pitch, source_pitch):
        raise CudaError(Status.INVALID_VALUE,
                        f"rows of {width} bytes, {target_pitch} and {source_pitch} apart")
    return Copy(Rows(target, width, height, 1, target_pitch), Rows(source, width, height, 1, source_pitch),
                kind)


@api("cudaMemcpy2D")
def memcpy_2d(s: Session, target: Word, target_pitch: Word, source: Word, source_pitch: Word, width: Word,
              height: Word, kind: Int) -> None:
    submit_and_wait(s, _plane(target, target_pitch, source, source_pitch, width, height, kind))


@api("cudaMemcpy2DAsync")
def memcpy_2d_async(s: Session, target: Word, target_pitch: Word, source: Word, source_pitch: Word,
                    width: Word, height: Word, kind: Int, stream: Word) -> None:
    s.streams.submit(_plane(target, target_pitch, source, source_pitch, width, height, kind),
                     s.stream(stream))


def box(s: Session, parameters: int) -> Copy:
    """Returns the copy that cudaMemcpy3DParms describes. Raises `CudaError` for arrays."""
    values = struct.unpack("<19Qi4x", s.wire.read(parameters, 160))
    source_array, *source = values[:8]
    target_array, *target = values[8:16]
    if source_array or target_array: raise no_arrays()
    extent = values[16:19]
    return Copy(_box(target, extent), _box(source, extent), values[19])


def no_arrays() -> CudaError:
    """The error of memory with a layout of its own."""
    return CudaError(Status.NOT_SUPPORTED, "a copy from or to a CUDA array", refused=True)


def _box(side: list[int], extent: tuple[int, ...]) -> Rows:
    """A corner, cudaPitchedPtr and an extent."""
    x, y, z, address, pitch, _, rows = side
    width, height, depth = extent
    return Rows(address + x + y * pitch + z * pitch * rows, width, height, depth, pitch, pitch * rows)


@api("cudaMemcpy3D")
def memcpy_3d(s: Session, parameters: Word) -> None: submit_and_wait(s, box(s, parameters))


@api("cudaMemcpy3DAsync")
def memcpy_3d_async(s: Session, parameters: Word, stream: Word) -> None:
    s.streams.submit(box(s, parameters), s.stream(stream))


# of CUDA_MEMCPY2D: x, y, kind, host, device, array, pitch; of 3D: z, lod, height, too
SIDE = "QQ{}I4xQQQ{}Q{}"
HOST_SIDE, ARRAY_SIDE = 1, 3    # CUmemorytype


def driver_box(s: Session, parameters: int, deep: bool) -> Copy:
    """Returns the copy that CUDA_MEMCPY2D or 3D describes. Raises `CudaError` for arrays."""
    side = SIDE.format(*(("QQ", "Q", "Q") if deep else ("", "", "")))
    form = struct.Struct("<" + 2 * side + "QQ" + "Q" * deep)
    values = form.unpack(s.wire.read(parameters, form.size))
    count = len(values) // 2 - 1
    extent = (*values[2 * count:], 1)[:3]
    target, source = values[count:2 * count], values[:count]
    return Copy(_driver_side(target, extent, deep), _driver_side(source, extent, deep))


def _driver_side(side: tuple[int, ...], extent: tuple[int, ...], deep: bool) -> Rows:
    """One of the two sides."""
    x, y, *rest = side
    z = rest[0] if deep else 0
    kind, host, device, _, *rest = rest[2 if deep else 0:]
    pitch, rows = rest[-2:] if deep else (rest[0], 0)
    if kind == ARRAY_SIDE: raise no_arrays()
    address = (host if kind == HOST_SIDE else device) + x + (y + z * rows) * pitch
    width, height, depth = extent
    return Rows(address, width, height, depth, pitch, pitch * rows)


@api("cuMemcpy2D_v2", "cuMemcpy2DUnaligned_v2")
def memcpy_2d_driver(s: Session, parameters: Word) -> None: submit_and_wait(s,
                                                                            driver_box(s, parameters, False))


@api("cuMemcpy2DAsync_v2")
def memcpy_2d_driver_async(s: Session, parameters: Word, stream: Word) -> None:
    s.streams.submit(driver_box(s, parameters, False), s.stream(stream))


@api("cuMemcpy3D_v2")
def memcpy_3d_driver(s: Session, parameters: Word) -> None: submit_and_wait(s,
                                                                            driver_box(s, parameters, True))


@api("cuMemcpy3DAsync_v2")
def memcpy_3d_driver_async(s: Session, parameters: Word, stream: Word) -> None:
    s.streams.submit(driver_box(s, parameters, True), s.stream(stream))


# **** variables ****

@api("cudaMemcpyToSymbol")
def memcpy_to_symbol(s: Session, symbol: Word, source: Word, nbytes: Word, offset: Word, kind: Int) -> None:
    memcpy(s, s.symbol(symbol).address + offset, source, nbytes, kind)


@api("cudaMemcpyFromSymbol")
def memcpy_from_symbol(s: Session, target: Word, symbol: Word, nbytes: Word, offset: Word, kind: Int) -> None:
    memcpy(s, target, s.symbol(symbol).address + offset, nbytes, kind)


@api("cudaMemcpyToSymbolAsync")
def memcpy_to_symbol_async(s: Session, symbol: Word, source: Word, nbytes: Word, offset: Word, kind: Int,
                           stream: Word) -> None:
    memcpy_async(s, s.symbol(symbol).address + offset, source, nbytes, kind, stream)


@api("cudaMemcpyFromSymbolAsync")
def memcpy_from_symbol_async(s: Session, target: Word, symbol: Word, nbytes: Word, offset: Word, kind: Int,
                             stream: Word) -> None:
    memcpy_async(s, target, s.symbol(symbol).address + offset, nbytes, kind, stream)


@api("cudaGetSymbolAddress")
def symbol_address(s: Session, into: Word, symbol: Word) -> None: s.put(into, s.symbol(symbol).address)


@api("cudaGetSymbolSize")
def symbol_size(s: Session, into: Word, symbol: Word) -> None: s.put(into, s.symbol(symbol).nbytes)


# **** fills ****

def _fill(target: int, value: int, size: int, count: int, height: int = 1, pitch: int = 0) -> Fill:
    return Fill(Rows(target, count * size, height, 1, pitch), (value & (1 << 8 * size) - 1).to_bytes(size,
                                                                                                     "little"))


@api("cudaMemset")
def memset(s: Session, target: Word, value: Int, nbytes: Word) -> None:
    s.streams.submit(_fill(target, value, 1, nbytes), s.stream(0))


@api("cudaMemsetAsync")
def memset_async(s: Session, target: Word, value: Int, nbytes: Word, stream: Word) -> None:
    s.streams.submit(_fill(target, value, 1, nbytes), s.stream(stream))


@api("cuMemsetD8_v2", "cuMemsetD16_v2", "cuMemsetD32_v2")
def memset_driver(s: Session, target: Word, value: Unsigned, count: Word) -> None:
    s.streams.submit(_fill(target, value, _size(s.name), count), s.stream(0))


@api("cuMemsetD8Async", "cuMemsetD16Async", "cuMemsetD32Async")
def memset_driver_async(s: Session, target: Word, value: Unsigned, count: Word, stream: Word) -> None:
    s.streams.submit(_fill(target, value, _size(s.name), count), s.stream(stream))


def _size(name: str) -> int: return 4 if "32" in name else 2 if "16" in name else 1


@api("cudaMemset2D")
def memset_2d(s: Session, target: Word, pitch: Word, value: Int, width: Word, height: Word) -> None:
    s.streams.submit(_fill(target, value, 1, width, height, pitch), s.stream(0))


@api("cudaMemset2DAsync")
def memset_2d_async(s: Session, target: Word, pitch: Word, value: Int, width: Word, height: Word,
                    stream: Word) -> None:
    s.streams.submit(_fill(target, value, 1, width, height, pitch), s.stream(stream))


@api("cuMemsetD2D8_v2", "cuMemsetD2D16_v2", "cuMemsetD2D32_v2")
def memset_2d_driver(s: Session, target: Word, pitch: Word, value: Unsigned, width: Word,
                     height: Word) -> None:
    s.streams.submit(_fill(target, value, _size(s.name), width, height, pitch), s.stream(0))


@api("cudaMemset3D")
def memset_3d(s: Session, pitched: Pitched, value: Int, extent: Extent) -> None:
    memset_3d_async(s, pitched, value, extent, 0)


@api("cudaMemset3DAsync")
def memset_3d_async(s: Session, pitched: Pitched, value: Int, extent: Extent, stream: Word) -> None:
    address, pitch, _, rows = pitched
    width, height, depth = extent
    s.streams.submit(Fill(Rows(address, width, height, depth, pitch, pitch * rows), bytes([value & 255])),
                     s.stream(stream))
