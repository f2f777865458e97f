"""Matmuls of rows with the matrix of their group, on a CPU.

  layout.py     the schedule, and what follows from it and a spec
  epilogue.py   bias, activation, weight, and the place of a result
  few.py        groups of few rows: a matrix is read once, as it lies
  panels.py     groups of many rows: rows in units, blocks of the result in registers or AMX tiles
  kernel.py     both in one kernel, which asks the offsets
  outer.py      sums of outer products of the rows of groups: gradients of the matrices
  templates.py  their records
"""
