"""Cross entropy with the gradient in the same pass, of logits, or of hidden states and an output layer.

  functions.py  what users call: shapes, reductions, gradients
  named.py      the functions known by name, and the same in plain tinygrad
  lower.py      their kernels; of an output layer, chunk after chunk of rows
"""
