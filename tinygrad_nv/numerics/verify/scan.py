"""The first element of a buffer that is NaN, or infinite: in C, at the speed of memory.

Protocol: `first_bad(buffer, dtype, nan_only)` is its place, -1 where there is none; `finite(tensor)` says
whether a Tensor has none. A CPU's buffers are read where they lie, after what is queued for them; of another
device a copy is made. A code is bad where, without its sign, it is above the largest finite one; `nan_only`:
above infinity.
"""
from __future__ import annotations

import ctypes
import functools
from typing import Any

from tinygrad import Tensor
from tinygrad.device import Buffer, MultiBuffer
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.kernel import kernel
from tinygrad_nv.runtime.cpu.program import load

# what a code is without its sign, and the largest finite code; infinity is the next where there is one
CODES = {dtypes.float32: ("u32", 0x7fffffff, 0x7f7fffff), dtypes.bfloat16: ("u16", 0x7fff, 0x7f7f),
         dtypes.float16: ("u16", 0x7fff, 0x7bff), dtypes.fp8e5m2: ("u8", 0x7f, 0x7b),
         dtypes.fp8e4m3: ("u8", 0x7f, 0x7e), dtypes.float64: ("u64", 2 ** 63 - 1, 0x7fefffffffffffff)}
NO_INFINITY = (dtypes.fp8e4m3,)
AT_ONCE = 2 ** 30       # elements of a call
BLOCK = 4096            # elements, whose answers are looked at together
TEXT = """    case {number}: {{
      const {kind} *x = (const {kind} *)a;
      for (s64 at = 0; at < n; at += {block}) {{
        s64 end = at + {block} < n ? at + {block} : n;
        {kind} any = 0;
        for (s64 i = at; i < end; i++) any |= (x[i] & ({kind}){sign}ull) > ({kind}){most}ull;
        if (any) for (s64 i = at; i < end; i++)
          if ((x[i] & ({kind}){sign}ull) > ({kind}){most}ull) {{ *(s64 *)out = i; return; }}
      }}
      break;
    }}"""


@functools.cache
def _function() -> tuple[Any, Any]:
    """The function, and what keeps it in memory."""
    cases = [TEXT.format(number=2 * i + nan_only, kind=kind, sign=sign, block=BLOCK,
                         most=most + (nan_only and dtype not in NO_INFINITY))
             for i, (dtype, (kind, sign, most)) in enumerate(CODES.items()) for nan_only in (0, 1)]
    body = "  *(s64 *)out = -1;\n  switch (what) {\n" + "\n".join(cases) + "\n  }"
    made = load(kernel("find_not_finite", isa.detect(), body, [("u8", "out")], [("u8", "a")], ["what", "n"]))
    kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    return ctypes.CFUNCTYPE(None, *kinds)(made.program.addr), made


_places = {dtype: 2 * i for i, dtype in enumerate(CODES)}


def is_scanned(dtype: DType) -> bool:
    """Whether elements of a dtype can be NaN or infinite."""
    return dtype in _places


def first_bad(buffer: Buffer, dtype: DType, nan_only: bool = False) -> int:
    """The place of the first, -1 for none."""
    function, _ = _function()
    held = None
    if hasattr(buffer._buf, "va_addr") and buffer.device.partition(":")[0] == "CPU":
        buffer.allocator.dev.synchronize()
        address = buffer._buf.va_addr
    else:
        held = buffer.as_memoryview()
        address = ctypes.addressof(ctypes.c_char.from_buffer(held))
    out, what, count = ctypes.c_int64(), _places[dtype] + nan_only, buffer.nbytes // dtype.itemsize
    for start in range(0, count, AT_ONCE):
        function(ctypes.byref(out), address + start * dtype.itemsize, what, min(AT_ONCE, count - start))
        if out.value >= 0: return start + out.value
    return -1


def finite(x: Tensor) -> bool:
    """Whether all elements of a Tensor are numbers, on each of its devices; it is realized."""
    if not is_scanned(x.dtype): return True
    made = x.detach().contiguous().realize().uop.base.buffer
    buffers = made.bufs if isinstance(made, MultiBuffer) else [made]
    return all(first_bad(each.ensure_allocated(), x.dtype) < 0 for each in buffers)
