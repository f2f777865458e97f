"""Values that are used again only when a gradient is there.

Protocol: tinygrad holds equal nodes to be one, and runs a kernel as soon as its inputs are there: a region
that is written down twice is computed once, and early. `behind(value, gradient)` is a copy of a value that a
kernel makes after `gradient`: it reads one element of it, and would write that, were a flag in memory not 0.
What is computed from the copy is other nodes than the forward pass has, and comes after the gradient; the
value itself is free after the copy. A copy has the bits of its value.
"""
from __future__ import annotations

import functools

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp


@functools.cache
def _zero(device: str) -> Tensor:
    """0 in memory, int32 (1,), at once: `realize` would become part of a step that is being captured."""
    from tinygrad_nv.runtime.memory import write  # `import tinygrad_nv` loads this file, and no NumPy
    made = Tensor.empty(1, dtype=dtypes.int32, device=device)
    write(made, 0, memoryview(bytes(4)))
    return made


def behind(value: UOp, gradient: UOp) -> UOp:
    """A copy of `value`, of its shape and dtype, after `gradient`, of any. Both on one device."""
    flag = _zero(str(value.device)) != 0
    first = Tensor(gradient).flatten()[:1].cast(value.dtype)
    return flag.where(first, Tensor(value).flatten()).reshape(value.shape).contiguous().uop
