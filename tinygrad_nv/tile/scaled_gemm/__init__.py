"""FP8 matmuls whose operands have scales of groups of K: 1 x 128 of activations, 128 x 128 of weights.

  spec.py        a matmul, and the blocks of its operands' scales
  reference.py   it in plain tinygrad
  schedules.py   the schedule of its template, and tiles to try first
  legality.py    what scales ask of a schedule
  plan.py        scales of a stage in shared memory
  kernel.py      wgmma's kernel with scales: sm_90a
  templates.py   the record of the template
"""
