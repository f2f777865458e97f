"""Memory shared with torch, numpy, jax and every other library that speaks DLPack, without copying it.

Protocol: importing tinygrad_nv calls `register`, which gives tinygrad's Tensor, while enabled:

    Tensor(x)                    x of another library; on the device that tinygrad puts numpy arrays on
    Tensor.from_dlpack(x)        the same, on the device where x is
    torch.from_dlpack(tensor)    and np.from_dlpack: `__dlpack__`, `__dlpack_device__` (exporting.py)
    np.asarray(tensor)           `__array__`

Both sides see what the other writes. The memory lives until both have let go of it, in either order; what
tinygrad has launched is done before another library gets the memory, or gets it back. Memory that cannot be
shared is copied, unless `copy=False`, or refused with a `DLPackError` (importing.py says which).

numpy is imported at the first use. Source: github.com/dmlc/dlpack, and the array API standard 2024.12.
"""
from __future__ import annotations

from typing import Any

from tinygrad import Tensor
from tinygrad.device import Device
from tinygrad.uop.ops import UOp

from tinygrad_nv import hooks


def register() -> None:
    """Gives Tensor what the protocol says."""
    hooks.add_creation("dlpack", _make_tensor)
    hooks.add_attribute("from_dlpack", staticmethod(from_dlpack))
    hooks.add_attribute("__dlpack__", _dlpack)
    hooks.add_attribute("__dlpack_device__", _dlpack_device)
    hooks.add_attribute("__array__", _array)


def from_dlpack(x: object, /, *, device: str | None = None, copy: bool | None = None) -> Tensor:
    """A Tensor over the memory of `x`, on the device where that is; `device` moves it. `copy`: True copies,
    False refuses what would have to be copied, None copies only that."""
    from tinygrad_nv.dlpack import importing
    made = Tensor(importing.import_tensor(x, copy))
    return made if device is None else made.to(device)


def _make_tensor(data: object, device: Any) -> tuple[UOp, Any] | None:
    """Tensor(data) of another library: on the CPU it goes to the default device, as a numpy array does."""
    if not hasattr(data, "__dlpack__") or not hasattr(data, "__dlpack_device__"): return None
    from tinygrad_nv.dlpack import importing
    found = importing.import_tensor(data, None)
    return found, device or (Device.DEFAULT if str(found.device).startswith("CPU") else None)


def _dlpack(self: Tensor, *, stream: object = None, max_version: tuple[int, int] | None = None,
            dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> object:
    """A capsule over this Tensor's memory. Work of tinygrad on it is done when this returns, so that every
    `stream` may use it."""
    from tinygrad_nv.dlpack import exporting
    return exporting.export(self, max_version, dl_device, copy)


def _dlpack_device(self: Tensor) -> tuple[int, int]:
    """DLPack's numbers for the kind of this Tensor's device, and which one."""
    from tinygrad_nv.dlpack import exporting
    return exporting.device_of(self)


def _array(self: Tensor, dtype: Any = None, copy: bool | None = None) -> Any:
    """np.asarray(tensor): this Tensor's memory where numpy has its dtype and the CPU its device."""
    from tinygrad_nv.dlpack import exporting
    return exporting.as_array(self, dtype, copy)
