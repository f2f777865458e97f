"""Runs that are recorded, and repeated bit for bit.

Read in this order:
  log.py        the file: what ran, and a line for each kernel
  recorder.py   what each kernel read and wrote, by hashes, while a run goes on
  compare.py    two runs: the first kernel at which they part
  run.py        `record(path, fn, *args)` and `replay(path)`
"""
from tinygrad_nv.numerics.replay.compare import Parted, Report
from tinygrad_nv.numerics.replay.run import record, recording, replay

__all__ = ["Parted", "Report", "record", "recording", "replay"]
