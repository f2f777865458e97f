"""Graphs with one dimension more: what `vmap` makes of the graph of a function.

Reading order: `graph` (the rule of each of tinygrad's nodes), `functions` (function nodes, with their
gradients), `named` (functions known by name, which stay kernels).
"""
