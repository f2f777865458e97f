"""Norms, softmax, argmax.

  spec.py    statistics of a row, and elements computed with them
  gated.py   those of gated activations and their gradients
  schedules.py  how threads share rows; legality.py: which rows; templates.py: the record
  kernel.py  the template: sm_80 and later; elements.py: what a thread has of a row
"""
