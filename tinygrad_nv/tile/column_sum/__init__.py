"""Sums of columns: gradients of the weights of norms, and of biases.

  spec.py       what is added up
  program.py    the program, for every target; groups of rows, then their sums
  reference.py  the same in plain tinygrad
"""
