"""The table of operators: what an operator of ATen is in Tensors.

Protocol. `@lowers("add.Tensor", …)` registers a function for overloads of torch.ops.aten. It is called as
`function(out, *args, **kwargs)`: the operator's own arguments in the order and by the names of its schema,
with Tensors in place of torch's, and `out`, what torch says of the result. It returns a Tensor, or a tuple of
them. Functions are pure: none changes an argument. What they return is cast to torch's dtype by the caller,
which also compares shapes. For arguments that a function cannot take it raises `Unsupported`, in words.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType, least_upper_dtype, strong_dtype

Lowered = Any       # a Tensor, or a tuple of them
Number = bool | int | float

DTYPES: dict[torch.dtype, DType] = {
    torch.bool: dtypes.bool, torch.uint8: dtypes.uint8, torch.int8: dtypes.int8, torch.int16: dtypes.int16,
    torch.int32: dtypes.int32, torch.int64: dtypes.int64, torch.float16: dtypes.float16,
    torch.bfloat16: dtypes.bfloat16, torch.float32: dtypes.float32, torch.float64: dtypes.float64,
    torch.uint16: dtypes.uint16, torch.uint32: dtypes.uint32, torch.uint64: dtypes.uint64}

TORCH_DTYPES = {ours: theirs for theirs, ours in DTYPES.items()}


class Unsupported(Exception):
    """An operator that torch computes: why, in words."""


@dataclass(frozen=True)
class Out:
    """Torch's description of an operator's first result: its dtype, and tinygrad's name of its device."""
    dtype: DType
    device: str


TABLE: dict[Any, Callable[..., Lowered]] = {}


def lowers(*overloads: str) -> Callable[[Callable[..., Lowered]], Callable[..., Lowered]]:
    """Registers a function for overloads of torch.ops.aten, such as "add.Tensor"."""
    def put(function: Callable[..., Lowered]) -> Callable[..., Lowered]:
        for name in overloads: TABLE[overload(name)] = function
        return function
    return put


def overload(name: str) -> Any:
    """torch.ops.aten's overload of a name such as "add.Tensor"."""
    packet, _, kind = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), kind or "default")


def dtype_of(dtype: torch.dtype) -> DType:
    """tinygrad's dtype. Raises `Unsupported`."""
    if (found := DTYPES.get(dtype)) is None: raise Unsupported(f"tinygrad has no {dtype}")
    return found


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's dtype. Raises `Unsupported`."""
    if (found := TORCH_DTYPES.get(strong_dtype(dtype))) is None: raise Unsupported(f"torch has no {dtype}")
    return found


def category(dtype: DType) -> int: return 0 if dtype == dtypes.bool else 2 if dtypes.is_float(dtype) else 1


def promote(a: Tensor, b: Tensor | Number) -> DType:
    """The dtype in which torch compares or combines two operands: a number, or a tensor without dimensions
    beside one that has some, counts only if it is of a higher category (bool, integer, float)."""
    if not isinstance(b, Tensor):
        mine = category(a.dtype)
        its = 0 if isinstance(b, bool) else 1 if isinstance(b, int) else 2
        return a.dtype if its <= mine else dtypes.int64 if its == 1 else dtypes.float32
    if (a.ndim == 0) != (b.ndim == 0):
        strong, weak = (a, b) if a.ndim else (b, a)
        if category(weak.dtype) <= category(strong.dtype): return strong.dtype
    return least_upper_dtype(a.dtype, b.dtype)


def cast(x: Tensor | Number, dtype: DType) -> Tensor | Number:
    """A Tensor in a dtype; a number as it is."""
    return x.cast(dtype) if isinstance(x, Tensor) else x


def fill(value: Number, shape: tuple[int, ...], out: Out) -> Tensor:
    """A constant of a result's dtype on its device."""
    return Tensor.full(tuple(shape), value, dtype=out.dtype, device=out.device)
