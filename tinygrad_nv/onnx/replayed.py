"""Inputs and results of a captured call as memory.

Protocol: a `Kind` is a shape and a type of elements. `allocate_aligned(kind)` is new memory for a result;
`Replayed` is the Tensor over it, whose UOp is made when something asks for it: `.numpy()`, and a captured
call that takes it, read the memory. `address_of(x, kind)` is where an input lies, and what keeps it there.
"""
from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import helper
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType, strong_dtype
from tinygrad.uop.ops import UOp

from tinygrad_nv.dlpack import from_dlpack
from tinygrad_nv.dlpack.importing import VECTOR
from tinygrad_nv.onnx.elements import PLAIN, TYPES
from tinygrad_nv.onnx.gradients import Call, register

ALIGNMENT = 64      # bytes: a cache line, more than any vector load asks for


class Kind:
    """Shape and type of elements of an array. `storage` is the type of numpy's that has the bits."""
    __slots__ = ("alignment", "dtype", "element", "exact", "nbytes", "shape", "size", "storage")

    def __init__(self, shape: tuple[int, ...], element: int) -> None:
        self.shape, self.element, self.dtype = shape, element, PLAIN[element]
        self.exact = self.dtype != dtypes.bfloat16
        self.storage = np.dtype(helper.tensor_dtype_to_np_dtype(element) if self.exact else np.uint16)
        self.size = math.prod(shape)
        self.nbytes, self.alignment = self.size * self.storage.itemsize, VECTOR * self.storage.itemsize

    @staticmethod
    def of(x: Tensor) -> Kind: return Kind(tuple(map(int, x.shape)), TYPES[strong_dtype(x.dtype)])


class _AsTensor(type(Tensor)):  # type: ignore[misc]
    """Lets `isinstance(x, type(self))`, by which tinygrad tells Tensors from numbers, hold for any Tensor."""

    def __instancecheck__(cls, x: Any) -> bool: return isinstance(x, Tensor)


class Replayed(Tensor, metaclass=_AsTensor):
    """A Tensor over memory that a captured call wrote. `source` is the capture, `name` the output's name,
    `computed_by` what its gradient is taken of. tinygrad, TinyJit too, takes it for a Tensor;
    `type(x) is Replayed` tells it from others."""
    __slots__ = ("array", "computed_by", "first", "kind", "made", "name", "source")
    __class__ = property(lambda self: Tensor)
    array: np.ndarray
    made: UOp | None
    first: UOp | None
    computed_by: Call | None

    @staticmethod
    def over(array: np.ndarray, kind: Kind, source: Any, name: str, call: Call | None) -> Replayed:
        """The result in an array of `kind`."""
        made = Replayed.__new__(Replayed)
        made.array, made.kind, made.source, made.name = array, kind, source, name
        made.made = made.first = None
        made.grad, made.is_param, made.computed_by = None, True, call
        return made

    @classmethod
    def _wrap_uop(cls, u: UOp) -> Tensor: return Tensor(u)     # what is computed of it is an ordinary Tensor

    def lazy(self) -> Tensor:
        """The same output of a call that is not computed, for explain()."""
        found: Tensor = self.source.lazy()[self.name]
        return found

    @property
    def uop(self) -> UOp:
        """The UOp over the memory."""
        if self.made is None:
            over = from_dlpack(self.array, copy=False)
            self.made = self.first = (over if self.kind.exact else over.bitcast(dtypes.bfloat16)).uop
            if self.computed_by is not None:
                register(self.made.base if self.kind.exact else self.made, self.computed_by, self.name)
            Tensor.__init__(self, self.made)    # tinygrad's table of Tensors has it from now on
        return self.made

    @uop.setter
    def uop(self, made: UOp) -> None:
        self.made = made

    @property
    def is_as_made(self) -> bool:
        """Whether the array has the elements."""
        return self.made is self.first

    def __reduce_ex__(self, protocol: Any) -> Any: return Tensor(self.uop).__reduce_ex__(protocol)

    @property
    def shape(self) -> tuple[int, ...]: return self.kind.shape if self.made is None else super().shape

    @property
    def dtype(self) -> DType: return self.kind.dtype if self.made is None else super().dtype

    def numpy(self) -> np.ndarray:
        """The elements, copied."""
        if not self.is_as_made or not self.kind.exact: return super().numpy()
        return self.array.copy()

    def item(self) -> Any:
        """The one element."""
        if not self.is_as_made or not self.kind.exact: return super().item()
        return self.array.item()

    def tolist(self) -> Any:
        """The elements as nested lists."""
        if not self.is_as_made or not self.kind.exact: return super().tolist()
        return self.array.tolist()


def allocate_aligned(kind: Kind) -> tuple[np.ndarray, int]:
    """New memory for elements, and its address."""
    whole = np.empty(kind.nbytes + ALIGNMENT, np.uint8)
    address: int = whole.__array_interface__["data"][0]
    skipped = -address % ALIGNMENT
    made = whole[skipped:skipped + kind.nbytes].view(kind.storage).reshape(kind.shape)
    return made, address + skipped


def address_of(x: Any, kind: Kind) -> tuple[int, Any]:
    """The address of an input's elements, in rows and where vector loads can read them, and what keeps them:
    x itself, or a copy."""
    if type(x) is Replayed and x.is_as_made: x = x.array
    if isinstance(x, Tensor):
        buffer: Any = x.cast(kind.dtype).to("CPU")._buffer()
        address = int(buffer.get_buf("CPU").va_addr)
        if address % kind.alignment == 0: return address, (x, buffer)
        x = x.numpy() if kind.exact else x.bitcast(dtypes.uint16).numpy()
    elif not isinstance(x, np.ndarray): x = np.asarray(x, kind.storage)
    if x.flags.c_contiguous:
        address = x.__array_interface__["data"][0]
        if address % kind.alignment == 0: return address, x
    array, address = allocate_aligned(kind)
    array[...] = x if kind.exact else x.view(np.uint16)
    return address, array
