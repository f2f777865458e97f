"""Norms, softmax and argmax in a graph.

  match.py  reductions along rows, and what is computed with them, to one kernel
"""
