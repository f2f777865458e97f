"""Norms, softmax, argmax.

  spec.py     statistics of a row, and elements computed with them; of gated activations and their gradients
  program.py  the program, for GPUs and CPUs
"""
