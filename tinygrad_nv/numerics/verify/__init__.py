"""Checks of numbers while a program runs, and before.

Read in this order:
  scan.py       the first element of a buffer that is NaN or infinite
  kernels.py    each kernel of a run by itself, for those that look at what it reads and writes
  sentinels.py  `with sentinels():` checks what each kernel writes, and stops at the first that is not finite
  blame.py      which operands made it, and what they were made of
  interval.py   bounds of a Tensor's elements, from its graph alone
  bounds.py     `@numerics(bounded=[-100, 100])`: results of a function stay within a range
"""
from tinygrad_nv.numerics.verify.blame import Finding, Operand
from tinygrad_nv.numerics.verify.bounds import numerics
from tinygrad_nv.numerics.verify.interval import Interval, interval
from tinygrad_nv.numerics.verify.sentinels import sentinels

__all__ = ["Finding", "Interval", "Operand", "interval", "numerics", "sentinels"]
