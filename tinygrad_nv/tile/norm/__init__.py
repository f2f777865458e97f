"""Norms, softmax, argmax.

  spec.py    statistics of a row, and elements computed with them; of gated activations and their gradients
  schedules.py  how threads share rows; templates.py: which rows, and the record
  kernel.py  the template: sm_80 and later; elements.py: what a thread has of a row
"""
