"""Rows of a table by index, as a named function.

  named.py  lookup, and its gradient
"""
