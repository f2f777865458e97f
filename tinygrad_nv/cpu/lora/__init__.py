"""LoRA on a CPU: the terms that adapters add to a linear layer.

  shrink.py     x Aᵀ: dot products along k
  expand.py     … Bᵀ: rows of B times numbers, added up
  templates.py  their records
"""
