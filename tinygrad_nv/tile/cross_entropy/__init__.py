"""Cross entropy of rows of logits, and their gradient.

  spec.py        the loss of a row; distillation, whose target is another row of logits
  reference.py   the same in plain tinygrad
  rows.py        rows on a GPU: a CTA for each, two passes
  templates.py   their records
"""
