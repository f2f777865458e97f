"""Matmuls with a quantised matrix by wgmma (sm_90a), with the matrix as the operand in registers.

  plan.py       the numbers of a spec and a schedule, which schedules there can be, those to try first
  kernel.py     the template: the producer's copies, and the consumers' main loop
"""
