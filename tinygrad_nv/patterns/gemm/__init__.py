"""Matmuls in a graph.

  match.py  every contraction of a graph to a kernel, where a template takes it
"""
