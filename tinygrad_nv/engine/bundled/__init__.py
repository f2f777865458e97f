"""Bundles of models and of functions (docs/bundles.md): made here, and run.

  sets.py       names of sets: what a bundle's kernels are made for, and which set a machine takes
  compile.py    a bundle of a model: a process for each set, then one file
  capture.py    that process: every step captured, weights as they lie in memory or in the checkpoint's files
  opened.py     a model in a bundle, as LLM loads it
  kept_steps.py the steps of a bundle, read as they are needed
  function.py   a function of Tensors as a bundle
"""
