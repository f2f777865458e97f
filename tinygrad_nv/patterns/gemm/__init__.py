"""Matmuls in a graph.

  match.py  Matrix products: every contraction of a graph to a kernel of ours, where a template takes it
"""
