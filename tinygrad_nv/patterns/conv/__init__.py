"""Convolutions, as a function known by name.

  named.py  the function, the Tensor method, and the call of a kernel
"""
