"""NVIDIA's driver library through cuda.bindings: missing parts, versions, and errors in words.

Protocol: `bindings()` is the module of functions, structs and enums. `missing(ordinal)` says in words what a
device needs and is not here, "" when all is. `failure(status, doing)` is the error for a status that is not
CUDA_SUCCESS: a `KernelError` for those after which the context is lost, a `DriverError` otherwise.

A PTX version needs the driver of one CUDA release or later (PTX ISA, release notes); a cubin needs a driver
of the major release that its ptxas is of.
"""
from __future__ import annotations

import importlib.util
from typing import Any

from tinygrad_nv.errors import DriverError, KernelError, OutOfMemoryError

PTX_VERSION = (8, 7)        # the .version of the templates' kernels; the renderer's are older
LOWEST_CAPABILITY = (8, 0)
# statuses of kernels that went wrong: the context can do nothing more
LOST = {"CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel read or wrote memory that is not the device's",
        "CUDA_ERROR_MISALIGNED_ADDRESS": "a kernel's access was not aligned to its size",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION": "a kernel met an instruction that is not allowed where it stands",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE": "a kernel's access was in another state space than it named",
        "CUDA_ERROR_INVALID_PC": "a kernel's program counter left its code",
        "CUDA_ERROR_HARDWARE_STACK_ERROR": "a kernel's stack is corrupt or too small",
        "CUDA_ERROR_LAUNCH_FAILED": "a kernel failed",
        "CUDA_ERROR_LAUNCH_TIMEOUT": "a kernel ran longer than the display driver allows",
        "CUDA_ERROR_ASSERT": "a kernel trapped on an assertion",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED": "the context was destroyed",
        "CUDA_ERROR_ECC_UNCORRECTABLE": "memory of the device has an error that ECC cannot correct",
        "CUDA_ERROR_CONTAINED": "memory of the device has an error that was contained",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE": "NVLink has an error that cannot be corrected"}


def bindings() -> Any:
    """cuda.bindings.driver."""
    from cuda.bindings import driver
    return driver


# **** versions ****

def cuda_of_ptx(version: tuple[int, int]) -> tuple[int, int]:
    """The CUDA release that a PTX version came with, and whose driver compiles it."""
    major, minor = version
    if version == (8, 6): return 12, 7
    if version >= (9, 0): return 13 + major - 9, minor
    if version >= (8, 7): return 12, minor + 1
    return major + 4, minor


def ptx_of_cuda(version: tuple[int, int]) -> tuple[int, int]:
    """The newest PTX version that a driver of a CUDA release compiles."""
    known = [(major, minor) for major in (7, 8, 9, 10) for minor in range(9)]
    return max(ptx for ptx in known if _exists(ptx) and cuda_of_ptx(ptx) <= version)


def _exists(ptx: tuple[int, int]) -> bool:
    """PTX 7.9 to 7.x and 8.9 to 8.x were never made."""
    return ptx[1] <= 8


def format_version(version: tuple[int, int]) -> str: return f"{version[0]}.{version[1]}"


def too_old(driver: tuple[int, int], ptx: tuple[int, int]) -> str:
    """Words for a driver that cannot compile PTX of a version, "" when it can."""
    if driver >= (needed := cuda_of_ptx(ptx)): return ""
    return (f"the NVIDIA driver supports CUDA {format_version(driver)} "
            f"(PTX {format_version(ptx_of_cuda(driver))}); our kernels are PTX {format_version(ptx)}, "
            f"which needs a driver for CUDA {format_version(needed)} or later")


# **** what is here ****

def missing(ordinal: int = 0) -> str:
    """Returns what `CUDADriver(ordinal)` needs and is not here, in words; \"\" when all is. Never raises."""
    try:
        if importlib.util.find_spec("cuda.bindings") is None: return "cuda-python is not installed"
    except (ImportError, ValueError): return "cuda-python is not installed"
    try: return _missing(bindings(), ordinal)
    except Exception as error:  # any kind of library may be there
        words = " ".join(str(error).split())
        return f"cuda-python cannot be used: {type(error).__name__}: {words}"


def _missing(cu: Any, ordinal: int) -> str:
    try: status, = cu.cuInit(0)
    except (RuntimeError, OSError, ImportError): return "no NVIDIA driver library (libcuda.so.1)"
    if status.name == "CUDA_ERROR_NO_DEVICE": return "no NVIDIA GPU"
    if status.name == "CUDA_ERROR_NOT_INITIALIZED":
        return ("the NVIDIA driver does not start in a fork of a process that used it: start processes with "
                "multiprocessing.set_start_method('spawn')")
    if status: return f"the NVIDIA driver does not start: {describe_status(cu, status)}"
    version = driver_version(cu)
    if words := too_old(version, PTX_VERSION): return words
    status, count = cu.cuDeviceGetCount()
    if status or not count: return "no NVIDIA GPU"
    if not 0 <= ordinal < count:
        return f"no GPU {ordinal}: there {'is 1' if count == 1 else f'are {count}'}, counted from 0"
    status, device = cu.cuDeviceGet(ordinal)
    if status: return f"GPU {ordinal} cannot be used: {describe_status(cu, status)}"
    found = capability(cu, device)
    if found < LOWEST_CAPABILITY:
        return (f"GPU {ordinal} has compute capability {format_version(found)}; "
                "8.0 (Ampere) or later is needed")
    return ""


def driver_version(cu: Any) -> tuple[int, int]:
    """The CUDA release that the driver supports: (12, 8)."""
    status, number = cu.cuDriverGetVersion()
    if status: raise failure(cu, status, "reading the driver's version")
    return number // 1000, number % 1000 // 10


def capability(cu: Any, device: Any) -> tuple[int, int]:
    """Compute capability: (9, 0)."""
    names = cu.CUdevice_attribute
    major, minor = (names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                    names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    return attribute(cu, device, major), attribute(cu, device, minor)


def attribute(cu: Any, device: Any, which: Any) -> int:
    """A limit or property of a device."""
    status, value = cu.cuDeviceGetAttribute(which, device)
    if status: raise failure(cu, status, f"reading {which.name}")
    return int(value)


def architecture(found: tuple[int, int]) -> str:
    """The newest of our targets that a device runs."""
    return {(9, 0): "sm_90a", (8, 9): "sm_89"}.get(found, "sm_80")


# **** errors ****

def has_no_function(error: RuntimeError) -> bool:
    """Whether cuda.bindings say that the driver library lacks a function. 13.0 to 13.3 raise a RuntimeError,
    from 13.4 on a class of its own that derives from it and that no public module names."""
    return type(error) is RuntimeError or type(error).__name__ == "FunctionNotFoundError"


def describe_status(cu: Any, status: Any) -> str:
    """Returns a status by its name, with the driver's words."""
    answer, words = cu.cuGetErrorString(status)
    return f"{status.name} ({words.decode()})" if not answer and words else str(status.name)


def failure(cu: Any, status: Any, doing: str) -> DriverError:
    """The error for a status, to be raised. `doing` says what was asked for."""
    if (cause := LOST.get(status.name)) is not None:
        return KernelError(f"{describe_status(cu, status)}, found while {doing}: {cause}; the context is "
                           "lost, and every call after this one fails",
                           "kernels that stay within their memory",
                           "end this process; then run the same with DEV=EMU, which names the line, or under "
                           "compute-sanitizer")
    if status.name == "CUDA_ERROR_OUT_OF_MEMORY":
        return OutOfMemoryError(f"{doing}: {describe_status(cu, status)}")
    return DriverError(f"{doing}: {describe_status(cu, status)}")
