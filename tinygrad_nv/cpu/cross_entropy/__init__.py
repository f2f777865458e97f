"""Cross entropy of rows of logits, on a CPU: C over cpu/cross_entropy.h.

  kernel.py      cross entropy, distillation: two passes over each row
  templates.py   their records
"""
