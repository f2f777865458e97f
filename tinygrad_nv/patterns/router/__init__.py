"""The router of a mixture of experts, as a named function.

  named.py  `route`
"""
