"""The router of a mixture of experts: which experts a token gets, and in which order tokens are computed.

  spec.py       what is computed
  reference.py  the same in plain tinygrad
  program.py    the programs, of few tokens and of many, and their records
"""
