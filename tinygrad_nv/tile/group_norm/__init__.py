"""Group norm of channels-last images.

  spec.py       what is normalised
  reference.py  the same in plain tinygrad
  templates.py  the schedule of the template, and its record
  kernel.py     the template: statistics of slices, then results
"""
