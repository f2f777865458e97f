"""Matmuls with a quantised matrix by wgmma (sm_90a), with the matrix as the operand in registers.

  plan.py       the numbers of a spec and a schedule
  legality.py   what the template requires of a schedule
  defaults.py   tiles to try first
  kernel.py     the template
  load.py       the producer's copies
  main_loop.py  the consumers: codes to operands, while the stage before multiplies
"""
