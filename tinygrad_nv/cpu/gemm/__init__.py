"""Matmuls on a CPU: gemv, blocked GEMM, AMX.

  templates.py   the templates in their order; default schedules
  choose.py      the schedule of a spec, or why there is none
  candidates.py  the schedules a spec can have, and the neighbours of one
  tune.py        the fastest of some schedules, measured on this CPU
  database.py    its entries in the schedule database
  gemv/          matmuls of few rows
  blocked/       GEMM of packed operands
  amx.py         bfloat16 and 8-bit matmuls on AMX tiles
"""
