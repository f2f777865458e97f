"""Matmuls with 2:4 sparse matrices: `named.py`, a function known by name."""
