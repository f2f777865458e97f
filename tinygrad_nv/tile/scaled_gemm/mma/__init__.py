"""FP8 matmuls with scales of groups by mma.sync: sm_89.

  plan.py       the numbers of a spec and a schedule: where scales lie in a stage
  legality.py   what the template requires of a schedule
  defaults.py   tiles to try first
  cost.py       what the cost model asks
  scales.py     scales to shared memory, and from there to registers
  kernel.py     the template
"""
