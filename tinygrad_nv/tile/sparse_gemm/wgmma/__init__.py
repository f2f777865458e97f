"""Matmuls with a 2:4 sparse matrix by wgmma.sp: sm_90a.

  plan.py        the numbers of a spec and a schedule
  legality.py    what the template requires of a schedule
  defaults.py    schedules to try first
  load.py        the producer's copies
  main_loop.py   the consumers' main loop
  kernel.py      the template
"""
