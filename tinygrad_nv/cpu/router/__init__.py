"""The router of a mixture of experts, on a CPU.

  kernel.py     scores, choices, weights, and the order of slots
  rows.py       the order of slots whose experts are given
  templates.py  their records
"""
