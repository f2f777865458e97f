"""Matmuls with a 2:4 sparse matrix by wgmma.sp: sm_90a.

  plan.py        the numbers of a spec and a schedule, which schedules there can be, those to try first
  kernel.py      the template: the producer's copies, and the consumers' main loop
"""
