"""Matmuls of few rows, at memory bandwidth.

  plan.py       which thread reads which bytes of the weights, and the resources
  legality.py   what the template requires of a schedule
  kernel.py     the template: every byte of the weights is read once
  operands.py   weights and activations in registers
  main_loop.py  four ways to multiply, by layout and by instruction
  epilogue.py   the sums of lanes, warps and CTAs, and the store
"""
