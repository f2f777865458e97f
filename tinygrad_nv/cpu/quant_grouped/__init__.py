"""Matmuls of rows with the quantised matrix of their group, on a CPU.

  layout.py     the schedule, and what follows from it and a spec
  kernel.py     dot products of few rows, panels of many, in one kernel, which asks the offsets
  templates.py  its record
"""
