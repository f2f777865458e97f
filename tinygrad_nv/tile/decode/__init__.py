"""Decode attention: few new queries over a paged or contiguous cache, split along the keys.

  spec.py      what is computed
  reference.py the same in plain tinygrad
  plan.py      the numbers of a kernel: who reads what, what lies where; what it requires of a schedule;
               values wider than registers (MLA), divided among CTAs
  schedules.py how: the template's type of schedule; templates.py: its record, and candidates
  kernel.py    the template: split-KV with a combine step, on mma.sync
  split.py     the first kernel: one split of a sequence's keys, as fragments of mma.m16n8k16
  copy.py      pages to shared memory by cp.async
  rows.py      positions of queries, their scores and softmax
  combine.py   sums over warps and over splits
"""
