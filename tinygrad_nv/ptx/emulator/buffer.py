"""Memory of an emulated GPU."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tinygrad_nv.errors import PTXError


@dataclass(eq=False)
class Buffer:
    """Device memory: `ptr` its address, `nbytes` its size. `numpy()` gives a copy in the shape and dtype it
    was made with (uint8 when it was made by size). `copy_data()` gives its bytes for a run that leaves them
    as they are, by `copy` where there is a cheaper way than to copy them all."""
    ptr: int
    data: np.ndarray                # uint8, the memory itself
    valid: np.ndarray | None        # 1 for bytes that were written; None: all
    shape: tuple[int, ...]
    dtype: np.dtype
    copy: Callable[[], np.ndarray] | None = None
    outside: bool = False           # other processes write it, too

    @property
    def nbytes(self) -> int: return self.data.nbytes

    def copy_data(self) -> np.ndarray: return self.data.copy() if self.copy is None else self.copy()

    def numpy(self) -> np.ndarray: return self.data.copy().view(self.dtype).reshape(self.shape)

    def write(self, array: np.ndarray) -> None:
        """Copies an array of `nbytes` into it."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if raw.nbytes != self.nbytes:
            raise PTXError(f"{raw.nbytes} bytes written to a buffer of {self.nbytes}", 0,
                           "an array of the same size",
                           "allocate another buffer")
        self.data[:] = raw
        if self.valid is not None: self.valid[:] = 1


@dataclass(frozen=True)
class Multicast:
    """A multicast object: addresses from `ptr` on stand for the allocations at `members`, one of each GPU."""
    ptr: int
    nbytes: int
    members: tuple[int, ...]
