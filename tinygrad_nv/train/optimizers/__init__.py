"""Optimisers of training.

  rules.py         groups of parameters, and which decay; what an update rule is; AdamW, SGD, Lion
  matrix_rules.py  Muon, Adafactor
  state.py         slots (float32, of 8 bits, on the host), master weights, flat names
  gradients.py     global norm, clipping, sums over micro-batches; an average of weights
  optimizer.py     a step; stochastic rounding to bfloat16
  made.py          adamw(…), sgd(…), lion(…), muon(…), adafactor(…)
  schedules.py     learning rates by transformers' names
"""
from tinygrad_nv.train.optimizers.gradients import GradientSums, WeightAverage, clip_scale, global_norm
from tinygrad_nv.train.optimizers.made import OPTIMIZERS, adafactor, adamw, lion, muon, sgd
from tinygrad_nv.train.optimizers.optimizer import Optimizer, StateOptions
from tinygrad_nv.train.optimizers.rules import ParameterGroup, decay_groups, decays, is_hidden_matrix
from tinygrad_nv.train.optimizers.schedules import SCHEDULES, ScheduleOptions, schedule
from tinygrad_nv.train.optimizers.state import OptimizerState, ParameterState

__all__ = ["OPTIMIZERS", "SCHEDULES", "GradientSums", "Optimizer", "OptimizerState", "ParameterGroup",
           "ParameterState", "ScheduleOptions", "StateOptions", "WeightAverage", "adafactor", "adamw",
           "clip_scale", "decay_groups", "decays", "global_norm", "is_hidden_matrix", "lion", "muon",
           "schedule", "sgd"]
