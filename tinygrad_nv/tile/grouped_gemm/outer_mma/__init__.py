"""Sums of outer products of the rows of groups with mma.sync, sm_80 and later, by the loop of gemm/mma.

  plan.py      the matmul of a group, legality, schedules to try first, cost
  copies.py    rows that an order names, brought by cp.async
  kernel.py    the template: a group's rows are what is summed over
"""
