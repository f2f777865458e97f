"""Memory that processes share, of the fake of cuda.bindings.driver: part of cuda_fake.py. Devices stand for
processes: a handle says whose memory it is, and where."""
from __future__ import annotations

import ctypes
from typing import Any

import cuda.bindings.driver as cu

S = cu.CUresult
_OK = (S.CUDA_SUCCESS,)
_BYTES = 64     # CU_IPC_HANDLE_SIZE


def mem_alloc(fake: Any, nbytes: int) -> Any:
    device = fake.here()
    try: address = device.emu.alloc(nbytes)
    except MemoryError: return (S.CUDA_ERROR_OUT_OF_MEMORY,)
    device.memory[address] = nbytes
    fake.shareable[address] = device
    return (*_OK, cu.CUdeviceptr(address))


def mem_free(fake: Any, address: Any) -> Any:
    device = fake.shareable.pop(int(address), None)
    assert device is fake.here(), "memory is freed that cuMemAlloc has not given"
    assert (device.ordinal, int(address)) not in fake.opened.values(), "memory is freed that another has open"
    del device.memory[int(address)]
    device.emu.free(int(address))
    return _OK


def ipc_get_mem_handle(fake: Any, address: Any) -> Any:
    assert fake.shareable.get(int(address)) is fake.here(), "a handle of memory that cuMemAlloc has not given"
    handle = cu.CUipcMemHandle()
    words = f"{fake.here().ordinal} {int(address)}".encode().ljust(_BYTES)
    ctypes.memmove(handle.getPtr(), words, _BYTES)
    return (*_OK, handle)


def ipc_open_mem_handle(fake: Any, handle: Any, flags: Any) -> Any:
    assert flags == cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    if not fake.peers: return (S.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,)
    ordinal, address = map(int, ctypes.string_at(handle.getPtr(), _BYTES).split())
    assert ordinal != fake.here().ordinal, "a process opens its own handle"
    assert address in fake.devices[ordinal].memory, "the handle is of memory that is gone"
    here = 0x5000_0000_0000 + 0x1000 * len(fake.opened)
    fake.opened[here] = ordinal, address
    return (*_OK, cu.CUdeviceptr(here))


def ipc_close_mem_handle(fake: Any, address: Any) -> Any:
    assert fake.opened.pop(int(address), None) is not None, "memory is closed that is not open"
    return _OK
