"""`DEV=CUDA`: a GPU as a device of tinygrad, through cuda-python.

Protocol: importing tinygrad_nv calls `register`, which puts `CUDADevice` under the name CUDA, where NV=0 does
not leave that to tinygrad. Nothing of CUDA is imported before a device opens. "CUDA:1" is the second GPU.

tinygrad's own device opens in its place, and a line on stderr says so, where cuda-python is not installed or
the GPU is older than our kernels; one that was open before stays. What else is missing is a `DriverError` of
one line that offers the devices every machine has.

Kernels that are tinygrad's are CUDA C compiled by NVRTC where that can be used (nvrtc.py), else PTX
(runtime/ptx_renderer.py); DEV=CUDA:CUDA and DEV=CUDA:PTX ask for one of them.
"""
from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
from typing import Any

from tinygrad.device import Device

from tinygrad_nv import hooks
from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime.device import NVDevice

LIBRARY = "libcuda.so.1" if sys.platform != "win32" else "nvcuda.dll"
INSTEAD = "DEV=EMU emulates a GPU, DEV=CPU needs none"
TINYGRADS = "tinygrad.runtime.ops_cuda"


def register() -> None:
    """Makes `CUDADevice` what the name CUDA means, unless a device of that name is open."""
    if _is_open(): _say("CUDA", "it was open before tinygrad_nv was imported")
    else: hooks.add_device("CUDA", CUDADevice, is_served)


class CUDADevice(NVDevice):
    """A GPU; or, made by the same call, tinygrad's own device for it."""

    def __new__(cls, device: str) -> Any:
        return super().__new__(cls) if not (reason := why_not(device)) else _tinygrads(device, reason)

    def __init__(self, device: str) -> None:
        from tinygrad_nv.runtime.cuda.driver import CUDADriver
        from tinygrad_nv.runtime.cuda.nvrtc import CUDARenderer
        from tinygrad_nv.runtime.ptx_renderer import PTXRenderer
        super().__init__(device, CUDADriver(_ordinal(device)), (CUDARenderer, PTXRenderer))


def _ordinal(device: str) -> int:
    """The number of the GPU that a name such as CUDA or CUDA:1 means."""
    number = device.partition(":")[2] or "0"
    if number.isdecimal(): return int(number)
    raise opening_error(device, "what follows the colon is the number of a GPU")


def opening_error(device: str, reason: str) -> DriverError:
    """Returns the error of a device that does not open: one line."""
    return DriverError(f"device {device} cannot be opened: {reason}; {INSTEAD}")


def why_not(device: str) -> str:
    """Why tinygrad's own device has to serve, "" where it need not. Raises `DriverError` where none can."""
    ordinal = _ordinal(device)
    if not has_bindings():
        if not has_library(): raise opening_error(device, f"no NVIDIA driver library ({LIBRARY})")
        return "cuda-python is not installed"
    from tinygrad_nv.runtime.cuda import api as cuda_api
    if not (reason := cuda_api.missing(ordinal)): return ""
    if (capability := _capability(ordinal)) and capability < cuda_api.LOWEST_CAPABILITY: return reason
    raise opening_error(device, reason)


def is_served() -> bool:
    """Whether this machine has what `CUDADevice` needs. A program that names no device uses it then: tinygrad
    would choose its NV device, on which no kernel of ours runs."""
    if not has_bindings() or not has_library(): return False
    from tinygrad_nv.runtime.cuda import api as cuda_api
    return not cuda_api.missing()


def _capability(ordinal: int) -> tuple[int, int] | None:
    """Compute capability of a GPU, None where there is none."""
    from tinygrad_nv.runtime.cuda import api as cuda_api
    cu = cuda_api.bindings()
    try: status, device = cu.cuDeviceGet(ordinal)
    except (RuntimeError, OSError): return None
    return None if status else cuda_api.capability(cu, device)


def has_bindings() -> bool:
    """Whether cuda-python is installed."""
    try: return importlib.util.find_spec("cuda.bindings") is not None
    except (ImportError, ValueError): return False


def has_library() -> bool:
    """Whether NVIDIA's driver library can be loaded."""
    try: ctypes.CDLL(LIBRARY)
    except OSError: return False
    return True


def _tinygrads(device: str, reason: str) -> Any:
    """tinygrad's own CUDA device, which the name means from now on."""
    if _is_open(): raise opening_error(device, reason)
    hooks.remove_device("CUDA")
    try: opened = _their_class()(device)
    except Exception as error:  # whatever its driver can think of
        hooks.add_device("CUDA", CUDADevice, is_served)
        words = " ".join(str(error).split())
        raise opening_error(device,
                            f"{reason}, and tinygrad's own CUDA device does not open ({words})") from error
    _say(device, reason)
    return opened


def _is_open() -> bool: return any(opened.split(":")[0] == "CUDA" for opened in Device._opened_devices)


def _say(device: str, reason: str) -> None:
    print(f"tinygrad_nv: {device} is tinygrad's own CUDA device: {reason}", file=sys.stderr)


def _their_class() -> Any: return importlib.import_module(TINYGRADS).CUDADevice
