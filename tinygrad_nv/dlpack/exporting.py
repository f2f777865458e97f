"""A Tensor's memory for another library.

Protocol: `export` is a DLPack capsule, `as_array` a numpy array. The Tensor is realized; a view of stored
memory (permuted, sliced, expanded) is shared as it is, with its strides, and what is no such view (flipped,
padded) is copied. The memory lives until the last of the Tensor and what was made of it is gone.

The capsule is one of numpy's, over the same address, in which dtype and device are stated anew: numpy's
frees are good in every thread, and while Python ends.
"""
from __future__ import annotations

from typing import Any

import numpy as np
from tinygrad import Tensor
from tinygrad.device import Buffer, Device
from tinygrad.dtype import dtypes, strong_dtype
from tinygrad.engine import realize
from tinygrad.helpers import all_int, suppress_finalizing

from tinygrad_nv.dlpack import capsule
from tinygrad_nv.dlpack.importing import array_over
from tinygrad_nv.errors import DLPackError, as_well
from tinygrad_nv.patterns.strides import lay_out


class Lent:
    """Keeps exported memory. Another library may have work on it when it lets go: that is waited for."""

    def __init__(self, buffer: Buffer, keep: object) -> None: self.buffer, self.keep = buffer, keep

    @suppress_finalizing
    def __del__(self) -> None: Device[self.buffer.device].synchronize()


def device_of(tensor: Tensor) -> tuple[int, int]:
    """DLPack's kind and number of a Tensor's device; a constant, which has none, is made on the CPU."""
    name, _, number = str(tensor.device or "CPU").partition(":")
    if isinstance(tensor.device, tuple):
        raise DLPackError(f"a Tensor on {len(tensor.device)} devices", "one device",
                          f"tensor.to({tensor.device[0]!r})")
    if name == "CPU": return capsule.CPU, 0
    if name == "CUDA": return capsule.CUDA, int(number or 0)
    raise DLPackError(f"a Tensor on {tensor.device}, whose memory no other library can address",
                      "CPU or CUDA", "tensor.to('CPU')")


def export(tensor: Tensor, max_version: tuple[int, int] | None, dl_device: tuple[int, int] | None,
             copy: bool | None) -> object:
    """A capsule over a Tensor's memory; over a copy where `copy` or another `dl_device` asks for one."""
    device = device_of(tensor)
    if dl_device is not None and tuple(map(int, dl_device)) != device:
        if copy is False: raise DLPackError(f"a Tensor on {tensor.device}, asked for elsewhere", "copy=None")
        if int(dl_device[0]) != capsule.CPU:
            raise DLPackError(f"a Tensor on {tensor.device}, asked for on DLPack device {dl_device}",
                              "its own device, or the CPU", "tensor.to(...) the device first")
        tensor, device = tensor.to("CPU"), (capsule.CPU, 0)
    elif copy: tensor = tensor.clone()
    tensor = _strong(tensor)
    array: Any = over(tensor)
    try: made: object = array.__dlpack__(max_version=max_version)
    except TypeError: made = array.__dlpack__()  # numpy before 2.1
    capsule.redescribe(made, tensor.dtype, device)
    return made


def as_array(tensor: Tensor, dtype: Any, copy: bool | None) -> np.ndarray:
    """np.asarray(tensor): shared on the CPU, else the copy that tensor.numpy() is."""
    tensor = _strong(tensor)
    if tensor.device in (None, "CPU") and tensor.dtype.fmt is not None and not copy: made = over(tensor)
    elif copy is False:
        raise as_well(DLPackError(f"a Tensor of {tensor.dtype} on {tensor.device}, which numpy cannot share",
                                  "copy=None"), ValueError())
    else: made = tensor.numpy()
    if dtype is None or made.dtype == dtype: return made
    if copy is False:
        raise as_well(DLPackError(f"elements of {made.dtype} asked for as {dtype}", "copy=None"),
                      ValueError())
    return made.astype(dtype)


def over(tensor: Tensor) -> np.ndarray:
    """A numpy array over a Tensor's memory, also where numpy has neither its dtype nor its device. What
    tinygrad has launched is done."""
    if not all_int(tensor.shape):
        raise DLPackError(f"a symbolic shape {tensor.shape}", "extents that are numbers", "shrink it first")
    if realize.capturing:
        raise DLPackError("memory is shared while a TinyJit is captured", "the jitted function's result")
    shape: Any = tensor.shape
    if 0 in shape: return np.empty(shape, np.dtype(tensor.dtype.fmt or f"u{tensor.dtype.itemsize}"))
    if tensor.device is None: tensor = tensor.clone("CPU")
    found = lay_out(tensor.realize().uop)
    stored = Tensor(found.storage).realize()
    buffer: Any = stored.uop.buffer.ensure_allocated()
    Device[buffer.device].synchronize()
    address = buffer._buf.va_addr if hasattr(buffer._buf, "va_addr") else int(buffer._buf)
    return array_over(address + found.offset * tensor.dtype.itemsize, tensor.dtype, shape, found.strides,
                      Lent(buffer, stored))


def _strong(tensor: Tensor) -> Tensor:
    """Without tinygrad's dtype of constants, which has no size."""
    return tensor.cast(strong_dtype(tensor.dtype)) if tensor.dtype in dtypes.weaks else tensor
