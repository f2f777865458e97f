"""The router of a mixture of experts, on a CPU.

  kernel.py     scores, choices, weights, and the order of slots
  templates.py  its record
"""
