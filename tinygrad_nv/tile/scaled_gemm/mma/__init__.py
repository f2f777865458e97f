"""FP8 matmuls with scales of groups by mma.sync: sm_89.

  plan.py       the numbers of a spec and a schedule, legality, schedules to try first, cost
  kernel.py     the template; scales to shared memory, and from there to registers
"""
