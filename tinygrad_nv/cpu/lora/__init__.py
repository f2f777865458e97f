"""What adapters add to a linear layer, on a CPU.

  shrink.py     x Aᵀ: dot products along k
  expand.py     … Bᵀ: rows of B times numbers, added up
  templates.py  their records
"""
