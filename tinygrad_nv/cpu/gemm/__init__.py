"""Matmuls on a CPU: gemv, blocked GEMM, AMX.

  templates.py   the templates in their order
  schedules.py   their schedules, and the neighbours of one
  layout.py      how they look at a matmul
  defaults.py    what they choose by themselves
  choose.py      the schedule of a spec, or why there is none
  tune.py        the fastest of some schedules, measured on this CPU
  gemv/          matmuls of few rows
  blocked/       GEMM of packed operands
  amx.py         bfloat16 and 8-bit matmuls on AMX tiles
"""
