"""Sums of columns in a graph.

  match.py  gradients of the weights of norms, and of biases, to one kernel
"""
