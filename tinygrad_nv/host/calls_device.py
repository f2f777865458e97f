"""The device, contexts, limits and errors of the API."""
from __future__ import annotations

from tinygrad_nv.host.api import Int, Text, Word, api
from tinygrad_nv.host.errors import CudaError, Status, describe, driver_name, runtime_name
from tinygrad_nv.host.gpus import UUID, VERSION, properties
from tinygrad_nv.host.session import Session

CONTEXT = 0x7700_0000_0800      # the one there is
BUS = "0000:01:00.0"
LIMITS = {0: 1024, 1: 1 << 20, 2: 8 << 20, 3: 2, 4: 2048, 5: 32, 6: 0}     # cudaLimit, as a device has them


def device(number: int) -> None:
    """Raises `CudaError` for a device that is not there."""
    if number: raise CudaError(Status.INVALID_DEVICE, f"device {number}; one GPU is emulated, device 0")


@api("cuInit", "cudaSetDeviceFlags", "cudaInitDevice", "cudaSetValidDevices", "cudaProfilerStart",
     "cudaProfilerStop", "cuProfilerStart", "cuProfilerStop", "cudaDeviceSetCacheConfig",
     "cuCtxSetCacheConfig",
     "cudaDeviceSetSharedMemConfig", "cuCtxSetSharedMemConfig", "cudaCtxResetPersistingL2Cache",
     "cuCtxResetPersistingL2Cache", "cuDevicePrimaryCtxSetFlags_v2", "cuDevicePrimaryCtxRelease_v2",
     "cuCtxSetFlags", "cuCtxDestroy_v2")
def nothing(s: Session) -> None: ...


@api("cudaGetDeviceCount", "cuDeviceGetCount")
def device_count(s: Session, count: Word) -> None: s.put(count, 1, size=4)


@api("cudaGetDevice", "cuCtxGetDevice", "cudaGetDeviceFlags", "cuCtxGetFlags", "cudaDeviceGetCacheConfig",
     "cuCtxGetCacheConfig", "cudaDeviceGetSharedMemConfig", "cuCtxGetSharedMemConfig")
def zero(s: Session, into: Word) -> None: s.put(into, 0, size=4)


@api("cuDeviceGet")
def device_get(s: Session, handle: Word, number: Int) -> None:
    device(number)
    s.put(handle, number, size=4)


@api("cudaSetDevice")
def set_device(s: Session, number: Int) -> None: device(number)


@api("cudaChooseDevice")
def choose_device(s: Session, into: Word, wanted: Word) -> None: s.put(into, 0, size=4)


@api("cudaDeviceGetAttribute", "cuDeviceGetAttribute")
def device_attribute(s: Session, value: Word, attribute: Int, number: Int) -> None:
    device(number)
    s.put(value, s.gpu.attributes().get(attribute, 0), size=4)


@api("cudaGetDeviceProperties")
def device_properties(s: Session, into: Word, number: Int) -> None:
    device(number)
    s.wire.write(into, properties(s.gpu))


@api("cudaGetDeviceProperties_v2")
def device_properties_12(s: Session, into: Word, number: Int) -> None:
    device(number)
    s.wire.write(into, properties(s.gpu, 12))


@api("cuDeviceGetName")
def device_name(s: Session, into: Word, size: Int, number: Int) -> None:
    device(number)
    s.wire.write(into, s.gpu.title.encode()[:size - 1] + b"\0")


@api("cuDeviceGetUuid", "cuDeviceGetUuid_v2")
def device_uuid(s: Session, into: Word, number: Int) -> None:
    device(number)
    s.wire.write(into, UUID)


@api("cuDeviceTotalMem_v2")
def total_memory(s: Session, into: Word, number: Int) -> None:
    device(number)
    s.put(into, s.gpu.memory_bytes)


@api("cuDeviceComputeCapability")
def capability(s: Session, major: Word, minor: Word, number: Int) -> None:
    device(number)
    s.put(major, s.gpu.capability[0], size=4)
    s.put(minor, s.gpu.capability[1], size=4)


@api("cudaDeviceGetPCIBusId", "cuDeviceGetPCIBusId")
def bus_id(s: Session, into: Word, size: Int, number: Int) -> None:
    device(number)
    s.wire.write(into, BUS.encode()[:size - 1] + b"\0")


@api("cudaDeviceGetByPCIBusId", "cuDeviceGetByPCIBusId")
def by_bus_id(s: Session, into: Word, name: Text) -> None:
    if name.lower() not in (BUS, BUS[5:]): raise CudaError(Status.INVALID_DEVICE, f"no device at {name}")
    s.put(into, 0, size=4)


@api("cudaDeviceCanAccessPeer", "cuDeviceCanAccessPeer")
def can_access_peer(s: Session, into: Word, number: Int, peer: Int) -> None:
    device(number)
    device(peer)
    s.put(into, 0, size=4)


@api("cudaDeviceEnablePeerAccess", "cudaDeviceDisablePeerAccess")
def peer_access(s: Session, peer: Int) -> None:
    raise CudaError(Status.INVALID_DEVICE, f"access to device {peer}; one GPU is emulated")


@api("cudaDriverGetVersion", "cuDriverGetVersion", "cudaRuntimeGetVersion")
def version(s: Session, into: Word) -> None: s.put(into, VERSION, size=4)


@api("cudaDeviceSynchronize", "cuCtxSynchronize", "cudaThreadSynchronize")
def synchronize(s: Session) -> None: s.streams.complete(None)


@api("cudaDeviceReset", "cudaThreadExit")
def reset(s: Session) -> None:
    """Forgets the error of a kernel; memory and handles stay until the program ends."""
    s.device.sticky = s.thread.error = Status.SUCCESS


# **** contexts: one, current wherever it is asked for ****

@api("cuCtxGetCurrent", "cuCtxCreate_v2", "cuCtxCreate_v4", "cuDevicePrimaryCtxRetain", "cuCtxPopCurrent_v2")
def context(s: Session, into: Word) -> None: s.fill_in(into, CONTEXT)


@api("cuCtxSetCurrent", "cuCtxPushCurrent_v2")
def set_context(s: Session, handle: Word) -> None:
    if handle not in (0, CONTEXT): raise CudaError(Status.DEVICE_UNINITIALIZED)


@api("cuDevicePrimaryCtxGetState")
def context_state(s: Session, number: Int, flags: Word, active: Word) -> None:
    device(number)
    s.put(flags, 0, size=4)
    s.put(active, 1, size=4)


@api("cuDevicePrimaryCtxReset_v2")
def context_reset(s: Session, number: Int) -> None:
    device(number)
    reset(s)


@api("cuCtxGetApiVersion")
def context_version(s: Session, handle: Word, into: Word) -> None: s.put(into, VERSION, size=4)


# **** limits ****

@api("cudaDeviceGetLimit", "cuCtxGetLimit")
def get_limit(s: Session, into: Word, limit: Int) -> None:
    s.put(into, s.limits.get(limit, LIMITS.get(limit, 0)))


@api("cudaDeviceSetLimit", "cuCtxSetLimit")
def set_limit(s: Session, limit: Int, value: Word) -> None:
    if limit not in LIMITS: raise CudaError(Status.UNSUPPORTED_LIMIT, f"limit {limit}")
    s.limits[limit] = value


@api("cudaDeviceGetStreamPriorityRange", "cuCtxGetStreamPriorityRange")
def priority_range(s: Session, least: Word, greatest: Word) -> None:
    s.fill_in(least, 0, size=4)
    s.fill_in(greatest, -5, size=4)


# **** errors ****

@api("cudaGetLastError")
def last_error(s: Session) -> int:
    found, s.thread.error = s.thread.error, Status.SUCCESS
    return s.device.sticky or found


@api("cudaPeekAtLastError")
def peek_error(s: Session) -> int: return s.device.sticky or s.thread.error


@api("cudaGetErrorName")
def error_name(s: Session, error: Int) -> int: return s.text(runtime_name(error))


@api("cudaGetErrorString")
def error_string(s: Session, error: Int) -> int: return s.text(describe(error))


@api("cuGetErrorName")
def driver_error_name(s: Session, error: Int, into: Word) -> None: s.put(into, s.text(driver_name(error)))


@api("cuGetErrorString")
def driver_error_string(s: Session, error: Int, into: Word) -> None: s.put(into, s.text(describe(error)))


@api("cuGetExportTable", "cudaGetExportTable")
def export_table(s: Session, into: Word, table: Word) -> None:
    """Answers a runtime of NVIDIA's that asks for what could not be redirected."""
    raise CudaError(Status.NOT_SUPPORTED, "NVIDIA's CUDA runtime is in the program, and no symbols to "
                    "redirect it by: do not strip the program, or link it with nvcc -cudart shared",
                    refused=True)
