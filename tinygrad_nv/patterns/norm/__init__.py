"""Norms, softmax and argmax in a graph.

  match.py  Norms, softmax, argmax: reductions of rows and what is computed with them, to one kernel of ours
"""
