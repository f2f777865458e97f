"""Training: what `tinygrad-nv train` is made of.

  optimizers/  Update rules, their state, schedules, clipping
"""
