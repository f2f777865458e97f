"""Sums of outer products of the rows of groups with mma.sync, sm_80 and later, by the loop of gemm/mma.

  plan.py      the matmul of a group, legality, schedules to try first, cost
  kernel.py    the template: a group's rows are what is summed over, those that an order names by cp.async
"""
