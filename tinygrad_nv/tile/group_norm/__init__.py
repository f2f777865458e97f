"""Group norm of channels-last images.

  spec.py       what is normalised
  reference.py  the same in plain tinygrad
  program.py    the programs
"""
