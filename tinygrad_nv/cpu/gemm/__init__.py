"""Matmuls on a CPU: gemv, blocked GEMM, AMX.

  templates.py   the templates in their order; the schedule of a spec, or why there is none
  schedules.py   their schedules, by default and near to one
  layout.py      how they look at a matmul
  tune.py        the fastest of some schedules, measured on this CPU
  gemv/          matmuls of few rows
  blocked/       GEMM of packed operands
  amx.py         bfloat16 and 8-bit matmuls on AMX tiles
"""
