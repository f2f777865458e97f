"""Norms, softmax, argmax.

  spec.py    statistics of a row, and elements computed with them; of gated activations and their gradients
  templates.py  how threads share rows, which rows it takes, and the record
  kernel.py  the template: sm_80 and later; elements.py: what a thread has of a row
"""
