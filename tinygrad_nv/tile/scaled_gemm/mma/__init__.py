"""FP8 matmuls with scales of groups by mma.sync: sm_89.

  plan.py       the numbers of a spec and a schedule: where scales lie in a stage
  template.py   which schedules there can be, those to try first, and their cost
  kernel.py     the template; scales to shared memory, and from there to registers
"""
