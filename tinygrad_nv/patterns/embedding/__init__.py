"""Rows of a table by number, as a function known by name.

  named.py  Rows of a table by number, as a function known by name, whose gradient is one too
"""
