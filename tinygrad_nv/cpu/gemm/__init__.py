"""Matmuls on a CPU: gemv, blocked GEMM, AMX.

  amx.py         Products of bfloat16 and of bytes by AMX tiles
  candidates.py  Which schedules a product can have on a CPU, and which are near to one
  choose.py      Which schedule a spec gets on a CPU, or why none
  database.py    Schedules for CPUs in the schedule database (tile/database.py)
  templates.py   The templates of products on a CPU, in their order, and what they choose by themselves
  tune.py        The best of some schedules on this CPU, by the clock
  blocked/       The blocked GEMM of packed operands
  gemv/          Matmuls of few rows on a CPU
"""
