"""Matmuls with a 2:4 sparse matrix by mma.sp: sm_80 and later.

  plan.py       the numbers of a spec and a schedule, which schedules there can be, those to try first
  kernel.py     the template; metadata to shared memory, and operands to registers
"""
