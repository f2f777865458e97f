"""Checkpoints of a training run: a directory `checkpoint-<step>` each, written while steps run.

Read in this order:
  manifest.py   what is in a checkpoint: files, hashes, tensors, state
  folder.py     names, what a killed process left, which checkpoints are kept
  snapshot.py   tensors copied to host memory
  writer.py     `CheckpointWriter`: one checkpoint after the other, in a thread; `save`
  reader.py     `load_latest`, `load`: the newest checkpoint whose hashes are right; `restore` into tensors
"""
from tinygrad_nv.train.checkpoints.reader import Checkpoint, load, load_latest
from tinygrad_nv.train.checkpoints.writer import CheckpointWriter, save

__all__ = ["Checkpoint", "CheckpointWriter", "load", "load_latest", "save"]
