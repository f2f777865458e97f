"""Time without a GPU: what a launch takes on one, from the instructions that it executes.

Read in this order:

  listing.py       the instructions that ptxas makes of PTX; instructions.py: their control bits and lines
  placement.py     which of them an execution of a block of PTX stands for
  units.py         what an instruction asks of an SM; gpu.py and gpus/: GPUs in figures
  job.py           recorded warps (emulator/tapes.py) as streams of SASS, copies and events
  simulator.py     csrc/sm.c, which runs them in cycles
  critical.py      the critical path of a run, and how uncertain that makes a prediction
  shape.py         a launch's extents, and which clusters are recorded
  recording.py     a launch that is recorded: chosen clusters whole, of the others what they read
  model.py         a launch: what the cycles of recorded clusters say of the whole grid
  sequence.py      launches in a row, as a stream, a graph, with PDL
  report.py        a prediction as a table, and as JSON; chrome.py: as a trace
"""
