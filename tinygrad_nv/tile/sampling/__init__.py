"""Kernels of the sampler: filters, choices, counts.

  spec.py       what is computed of rows of logits
  reference.py  the same in plain tinygrad
  top_k/        top-k filters: a program, for CPUs too
  top_p/        top-p filters: a program, for CPUs too
  program.py    noise and argmax in one pass, counts of chosen tokens: programs, for CPUs too
"""
