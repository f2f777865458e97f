"""Marks of the numbers that a kernel wrote, in memory that had NaN or infinity before it ran.

Protocol: `Marked(buffer, dtype, nan_only, mark)` is made before a kernel writes a buffer, `first_written()`
is called after it. With `mark`, what is not finite is replaced by a NaN of bits that no arithmetic gives, and
what is still there afterwards is put back as it was: the kernel did not write it. Without, which is for
buffers that the kernel reads, elements with other bits than before count as written.
"""
from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from tinygrad.device import Buffer
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.numerics.verify.blame import values

MARKS = {dtypes.float64: 0x7ffc5a5a5a5a5a5a, dtypes.float32: 0x7fda5a5a, dtypes.bfloat16: 0x7fda,
         dtypes.float16: 0x7e5a, dtypes.fp8e5m2: 0xfe, dtypes.fp8e4m3: 0xff}
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Marked:
    """A buffer before a kernel writes it."""

    def __init__(self, buffer: Buffer, dtype: DType, nan_only: bool, mark: bool) -> None:
        self.buffer, self.dtype, self.nan_only, self.marked = buffer, dtype, nan_only, mark
        self.before = self._bits()
        if not mark: return
        changed = self.before.copy()
        changed[self._bad()] = MARKS[dtype]
        self._put(changed)

    def first_written(self) -> int:
        """The place of the first number that the kernel wrote and that is not finite, -1 for none."""
        now, bad = self._bits(), self._bad()
        kept = now == (MARKS[self.dtype] if self.marked else self.before)
        if self.marked and (bad & kept).any(): self._put(np.where(bad & kept, self.before, now))
        found = np.flatnonzero(bad & ~kept)
        return int(found[0]) if len(found) else -1

    def _bits(self) -> npt.NDArray[Any]:
        return np.frombuffer(self.buffer.as_memoryview(), BITS[self.dtype.itemsize]).copy()

    def _bad(self) -> npt.NDArray[np.bool_]:
        every = values(self.buffer, self.dtype)
        return np.isnan(every) if self.nan_only else ~np.isfinite(every)

    def _put(self, bits: npt.NDArray[Any]) -> None:
        raw = memoryview(bytearray(bits.tobytes()))
        self.buffer.copy_from(Buffer("PYTHON", self.buffer.size, self.buffer.dtype, opaque=raw))
