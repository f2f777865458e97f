"""Matmuls with a 2:4 sparse matrix by wgmma.sp: sm_90a.

  plan.py        the numbers of a spec and a schedule
  template.py    which schedules there can be, and those to try first
  load.py        the producer's copies
  main_loop.py   the consumers' main loop
  kernel.py      the template
"""
