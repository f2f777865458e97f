"""Norms, softmax and argmax in a graph.

  gated.py  gated activations and their gradients, by name
  match.py  reductions along rows, and what is computed with them, to one kernel
  shared.py values that are stored between rows, since several would compute them
"""
