"""Linear attention over sequences whose states lie in pages: gated delta rule, Mamba-2, decayed attention.

  spec.py       what is computed, and where operands lie
  program.py    the programs, for every target
  reference.py  the same in plain tinygrad
"""
