"""Matmuls with quantised matrices.

  spec.py       a matmul, and what its right operand is stored as
  reference.py  it in plain tinygrad
  schedules.py  the templates' numbers; templates.py has their table
  fragments.py  codes in registers to operands of tensor cores
  factors.py    scales, zero points and minima in registers
  stages.py     a stage of a matrix in shared memory, and its operands
  gemv/, wgmma/, mma/   the templates
"""
