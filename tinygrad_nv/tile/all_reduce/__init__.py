"""All-reduce of small messages between GPUs that address each other's memory.

  spec.py       what is summed, and what may follow: residual and RMSNorm
  workspace.py  the memory that peers share: flags, epochs, halves; the protocol and why it is right
  schedules.py  one-shot and two-shot; templates.py: which there can be, and the records
  cost.py       choice by size and number of GPUs
  kernel.py     the template, and what is done with sums
  reference.py  the same in plain tinygrad
"""
