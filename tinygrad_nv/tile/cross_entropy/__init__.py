"""Cross entropy of rows of logits, and their gradient.

  spec.py        the loss of a row; distillation, whose target is another row of logits
  reference.py   the same in plain tinygrad
  program.py     rows on GPUs and CPUs: two passes over each
"""
