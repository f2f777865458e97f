"""Time without a GPU: what a launch takes on one, from the instructions that it executes.

Read in this order:

  listing.py       the instructions that ptxas makes of PTX; instructions.py: their control bits and lines
  placement.py     which of them an execution of a block of PTX stands for
  units.py         what an instruction asks of an SM; gpu.py and gpus/: GPUs in figures
  job.py           recorded warps (emulator/tapes.py) as streams of SASS, copies and events
  simulator.py     csrc/sm.c, which runs them in cycles
  chrome.py        a prediction as a trace
  model.py         a launch: which clusters are recorded, and what their cycles say of the whole grid
"""
