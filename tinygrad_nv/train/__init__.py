"""Training of transformers: `tinygrad-nv train`, and the parts that it is made of.

Read in this order:
  arguments.py   what a run is: options by transformers' and TRL's names
  data/          files to rows of token ids, in batches of fixed shapes
  network.py     a model to train: its parameters by name, from a directory or from a seed
  regions/       layers that are computed again for the backward pass, in place of being kept
  layout.py      which of several ranks is what
  step.py        a step: loss, gradients and optimiser in one captured program
  optimizers/    update rules and their state
  checkpoints/   the state of a run on disk
  export/        trained models and adapters as directories of transformers and PEFT
  trainer.py     the loop over steps
  log.py         lines, curves and progress
"""
from tinygrad_nv.train.regions import checkpoint

__all__ = ["checkpoint"]
