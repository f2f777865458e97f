"""FP8 matmuls whose operands have scales of groups of K: 1 x 128 of activations, 128 x 128 of weights.

  spec.py        a matmul, and the blocks of its operands' scales
  reference.py   it in plain tinygrad
  schedules.py   the schedules of its templates, and wgmma's tiles to try first
  copy.py        scales to shared memory
  plan.py        scales of a stage in shared memory, and what they ask of a schedule of wgmma
  kernel.py      wgmma's kernel with scales: sm_90a
  mma/           mma.sync's kernel with scales: sm_89
  templates.py   the records of the templates
"""
