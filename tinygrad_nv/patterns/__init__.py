"""Subgraphs to kernels of ours.

program.py puts a kernel into tinygrad's graph, with the facts that explain() tells of it; patterns use it in
the rewrites that hooks.py calls before kernels are split.
"""
