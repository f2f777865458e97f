"""Updates of many parameters in one launch, and the norm of their gradients.

  spec.py        AdamW of many tensors; sums of squares of many tensors
  reference.py   the same in plain tinygrad
  program.py     both as programs of the tile language
"""
