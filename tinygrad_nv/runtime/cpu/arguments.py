"""How many arguments a launch on the CPU has room for."""
from __future__ import annotations

from tinygrad_nv.errors import KernelError

MOST_ARGUMENTS = 63     # pointers and integers of a kernel: tinygrad's own limit, and pool.py's


def check_arguments(kernel: str, count: int) -> None:
    """Raises `KernelError` for more arguments than a launch has room for."""
    if count <= MOST_ARGUMENTS: return
    raise KernelError(f"kernel {kernel} with {count} arguments", f"at most {MOST_ARGUMENTS} on a CPU",
                      "store a value between with .contiguous(), so that two kernels compute it")
