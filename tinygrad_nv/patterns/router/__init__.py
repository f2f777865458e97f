"""The router of a mixture of experts, as named functions.

  named.py  `route`
  rows.py   `group_rows`: the order of slots whose experts are given
"""
