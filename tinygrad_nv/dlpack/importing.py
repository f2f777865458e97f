"""A tensor of another library as a UOp over the same memory.

Protocol: `imported(x, copy)` is on x's device, the CPU or a GPU that tinygrad_nv drives, with x's strides as
movement ops. The UOp's buffer keeps x's memory; when the buffer goes, the device does what it holds before
x's library may have the memory back.

On the CPU these are copied (refused with `copy=False`): memory that is read-only, that begins where a vector
load of tinygrad's would fail, or whose strides are no view that tinygrad has: negative ones, those of
overlapping elements. On a GPU they are refused.
"""
from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from tinygrad import Tensor
from tinygrad.device import BufferSpec, Device
from tinygrad.dtype import DType
from tinygrad.helpers import suppress_finalizing
from tinygrad.runtime.support.hcq import HCQBuffer
from tinygrad.uop.ops import UOp

from tinygrad_nv.dlpack import capsule
from tinygrad_nv.dlpack.capsule import Described
from tinygrad_nv.errors import DLPackError, NVError

VECTOR = 4              # elements that tinygrad loads at once on the CPU
GPU_ALIGNMENT = 16      # bytes: a vector load, or a tensor map's address


class Held:
    """Keeps imported memory: lets go of it when the device has done what it holds."""

    def __init__(self, owner: object, device: str) -> None: self.owner, self.device = owner, device

    @suppress_finalizing
    def __del__(self) -> None: Device[self.device].synchronize()


class Address(int):
    """An address on a device whose buffers are addresses, with what keeps the memory there."""
    held: Held


def import_tensor(x: Any, copy: bool | None) -> UOp:
    """A tensor of another library as a UOp."""
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        raise DLPackError(f"a {type(x).__name__}", "an object with __dlpack__ and __dlpack_device__",
                          "Tensor(...) takes lists, numbers and bytes")
    kind, number = map(int, _ask(x, x.__dlpack_device__))
    device = _device(kind, number)
    found = capsule.describe(_capsule(x, device))
    if found.size == 0: return Tensor.empty(*found.shape, dtype=found.dtype, device=device).uop
    if why := _why_copied(found, device, copy):
        if copy is False:
            raise DLPackError(f"{why}, which cannot be shared", "copy=None, or memory as tinygrad needs it")
        found = _copy_dense(found, device, why)
    made = _view(_storage(found, device), found)
    return made.clone().realize().uop if copy and device != "CPU" else made.uop


# **** asking ****

def _ask(x: object, ask: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function of the other library; its refusal is raised in our words."""
    try: return ask(*args, **kwargs)
    except TypeError: raise
    except Exception as error:
        words = " ".join(str(error).split())
        detach = "share x.detach(): gradients do not pass from one library to the other"
        raise DLPackError(f"the {type(x).__name__} cannot be shared: {words}",
                          "a dense tensor of plain elements", detach if "grad" in words else "") from error


def _capsule(x: Any, device: str) -> object:
    """x's capsule, of version 1 where x can. A GPU's tensor is good for our first stream then."""
    stream = {} if device == "CPU" else {"stream": _stream(device)}
    try: return _ask(x, x.__dlpack__, max_version=(1, 1), **stream)
    except TypeError: return _ask(x, x.__dlpack__, **stream)


def _stream(device: str) -> int:
    """DLPack's number of the stream that tinygrad's work goes to: 1 is CUDA's legacy default stream."""
    driver: Any = getattr(Device[device], "driver", None)
    return 1 if driver is None else int(driver.streams[0].handle)


def _device(kind: int, number: int) -> str:
    """tinygrad's name of a device of DLPack."""
    if kind in (capsule.CPU, capsule.CUDA_HOST): return "CPU"
    if kind not in (capsule.CUDA, capsule.CUDA_MANAGED):
        raise DLPackError(f"a tensor on a device of DLPack kind {kind}", "the CPU, or an NVIDIA GPU",
                          "x.cpu() first")
    name = Device.canonicalize(f"CUDA:{number}")
    try: Device[name]
    except NVError as error:
        raise DLPackError(f"a tensor on GPU {number}: {error.found}", "", "x.cpu() first") from error
    return name


# **** what can be shared ****

def _why_copied(found: Described, device: str, copy: bool | None) -> str:
    """Why memory has to be copied, "" if it can be shared."""
    needed = VECTOR * found.dtype.itemsize if device == "CPU" else GPU_ALIGNMENT
    if found.read_only: return "memory that is read-only"
    if found.address % needed: return f"memory at {found.address:#x}, not a multiple of {needed} bytes"
    if _nest_strides(found) is None: return f"strides of {found.strides} for a shape of {found.shape}"
    return "a copy was asked for" if copy and device == "CPU" else ""


def _copy_dense(found: Described, device: str, why: str) -> Described:
    """A dense copy in memory of numpy's."""
    if device != "CPU":
        raise DLPackError(f"{why} on {device}", "dense memory", "x.clone() or x.contiguous() first")
    source = array_over(found.address, found.dtype, found.shape, found.strides, found)
    room = np.empty(source.nbytes + 64, np.uint8)
    first = -room.ctypes.data % 64
    made = room[first:first + source.nbytes].view(source.dtype).reshape(source.shape)
    made[...] = source
    strides = tuple(stride // found.dtype.itemsize for stride in made.strides)
    return Described(made.ctypes.data, found.device, found.dtype, found.shape, strides, False, room)


def array_over(address: int, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...],
               owner: object) -> np.ndarray:
    """A numpy array over memory, which `owner` keeps. Its elements are numbers of the dtype's size where
    numpy has no such dtype."""
    return np.asarray(_Interface(address, dtype, shape, strides, owner))


class _Interface:
    """Memory that numpy makes an array of; the array keeps it."""

    def __init__(self, address: int, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...],
                 owner: object) -> None:
        size = dtype.itemsize
        kind = np.dtype(dtype.fmt or f"u{size}")
        self.owner = owner
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": kind.str,
                                    "data": (address, False), "strides": tuple(s * size for s in strides)}


# **** as tinygrad's ****

def _nest_strides(found: Described) -> list[tuple[int, int, int]] | None:
    """(stride, extent, dimension) of the dimensions that have steps, the longest first, if each divides the
    one before and stays below it."""
    steps = sorted(((s, n, i) for i, (s, n) in enumerate(zip(found.strides, found.shape, strict=True))
                    if n > 1 and s != 0), reverse=True)
    if any(stride < 0 for stride, _, _ in steps): return None
    for (outer, _, _), (inner, extent, _) in pairwise(steps):
        if outer % inner or outer < inner * extent: return None
    return steps


def _storage(found: Described, device: str) -> UOp:
    """A buffer over the memory. It ends with a whole step of the longest stride, which may be beyond what was
    shared: no view of `_view` reaches there."""
    steps = _nest_strides(found)
    assert steps is not None
    made = UOp.new_buffer(device, steps[0][0] * steps[0][1] if steps else 1, found.dtype)
    buffer = made.buffer
    buffer.options = BufferSpec(external_ptr=found.address)
    held = Held(found.owner, device)
    opaque = Device[device].allocator.alloc(buffer.nbytes, buffer.options)
    if isinstance(opaque, HCQBuffer): opaque.meta = held
    else:
        opaque = Address(opaque)
        opaque.held = held
    buffer.allocate(opaque)
    return made


def _view(storage: UOp, found: Described) -> Tensor:
    """The tensor that `found` is, as movement ops on its storage."""
    steps, made = _nest_strides(found) or [], Tensor(storage)
    if steps:
        strides = [stride for stride, _, _ in steps]
        inner = [a // b for a, b in zip(strides, [*strides[1:], 1], strict=True)]
        made = made.reshape(steps[0][1], *inner)
        made = made.shrink((None, *((0, extent) for _, extent, _ in steps[1:]), (0, 1)))
    order = [i for _, _, i in steps]
    made = made.reshape(tuple(extent for _, extent, _ in steps))
    made = made.permute(*sorted(range(len(order)), key=order.__getitem__)) if order else made
    made = made.reshape(tuple(n if i in order else 1 for i, n in enumerate(found.shape)))
    return made.expand(found.shape)
