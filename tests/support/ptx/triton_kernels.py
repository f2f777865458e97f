"""Every Triton kernel the emulator is held to, in one table.

Read in this order:
  triton_case.py        what a case is; compiling with Triton, launching on the emulator
  triton_pointwise.py   element-wise arithmetic, conversions, random numbers, gathers, quantisation
  triton_reductions.py  softmax, norms, sums, scans, sort, histogram
  triton_matmul.py      matmuls through pointers
  triton_tma.py         matmuls and copies through tensor descriptors; specialised warps
  triton_attention.py   flash attention, forward and backward
  triton_atomics.py     atomic operations, CTAs that wait for one another
"""
from __future__ import annotations

from tests.support.ptx import (
           triton_atomics,
           triton_attention,
           triton_matmul,
           triton_pointwise,
           triton_reductions,
           triton_tma,
)
from tests.support.ptx.triton_case import (
           Case,
           Compiled,
           Descriptor,
           Outcome,
           Problem,
           Wanted,
           compile,
           launch,
           run,
)

__all__ = ["CASES", "Case", "Compiled", "Descriptor", "Outcome", "Problem", "Wanted", "compile", "launch",
           "run"]

CASES: list[Case] = [
    *triton_pointwise.CASES,
    *triton_reductions.CASES,
    *triton_matmul.CASES,
    *triton_tma.CASES,
    *triton_attention.CASES,
    *triton_atomics.CASES,
]
