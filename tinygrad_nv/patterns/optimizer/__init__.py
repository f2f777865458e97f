"""Updates of many parameters in one launch, and the norm of their gradients.

  named.py  `adamw_update` and `squared_sums`, functions known by name
"""
