"""Matmuls of few rows, at memory bandwidth.

  plan.py       which thread reads which bytes of the weights, and the resources
  template.py   which schedules there can be, those to try first, and their cost
  kernel.py     the template: every byte of the weights is read once
  operands.py   weights and activations in registers
  main_loop.py  four ways to multiply, by layout and by instruction
  epilogue.py   the sums of lanes, warps and CTAs, and the store
"""
