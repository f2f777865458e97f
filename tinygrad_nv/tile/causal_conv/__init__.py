"""Short causal convolutions over sequences whose newest columns lie in pages.

  spec.py       what is computed, and where operands lie
  program.py    the program, for every target
  reference.py  the same in plain tinygrad
"""
